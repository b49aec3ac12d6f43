"""Starting the server: binds the port, loads the model, announces itself, and ends on a signal."""

import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import orjson
import uvicorn

from jax_paged.config.engine_args import EngineArgs, api_key_of_environment
from jax_paged.config.launch import launch_of_environment
from jax_paged.engine.distributed.multiprocess import follow
from jax_paged.engine.replicas.replicated_engine import ServingEngine, serving_engine
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.http.listening import allow_open_files, check_exposure, check_tls, uvicorn_config
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.observability.logs import configure, log_statistics

_LOGGER = logging.getLogger(__name__)
# After the last events of all streams: for clients that do not read.
_CLOSING_S = 2
_BACKLOG = 2048
_OBJECTS_PER_COLLECTION = 50_000


def serve(args: EngineArgs, options: ServerOptions) -> NoReturn:
    """Serves a model until SIGINT or SIGTERM, and ends the process: 0 says that all are answered.

    Args:
        args: Model and limits of the engine.
        options: How to listen, what clients may do, and what is logged.

    Raises:
        SystemExit: If the address can't be bound, or the model or a setting can't be used; or if a launcher
            has started this process to follow another, and that has ended.
        KeyboardInterrupt: If Ctrl-C is pressed before the server listens.
    """
    configure(options.log_level, options.log_format)
    with one_line_errors():
        options = with_all_keys(options, api_key_of_environment())
        check_tls(options)
    config = uvicorn_config("", options, log_level="warning", timeout_graceful_shutdown=_CLOSING_S)
    if args.distributed_executor_backend == "external_launcher":
        with one_line_errors():
            launch = launch_of_environment()
            if launch.rank > 0:
                follow(args, launch)
    # A port that is taken is found before the model is loaded.
    listener = _listener(options)
    with one_line_errors():
        check_exposure(listener, options)
        allow_open_files(options.max_connections)
    with one_line_errors():
        engine = load_engine(args, options)
        openai = OpenAIServer(engine, options.served_model_name or args.model, options)
    config.app = openai.app()
    Server(config, openai).run([listener])
    # Nothing is left to do, and what else runs can't be stopped: a compilation under way, a step that hangs.
    if "ray" in sys.modules:  # and then perhaps a cluster that was started here
        sys.modules["ray"].shutdown()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(openai.lifecycle.exit_code)


def _listener(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        sys.exit(
            f"jax-paged: can't listen on {options.host}, port {options.port}: {error.strerror}; allowed: an "
            "address of this machine for --host, and a port that nobody uses for --port (0 takes a free one)"
        )


def free_address(options: ServerOptions) -> tuple[str, int]:
    """Returns the host and the port for a server that binds them itself; a port where 0 stands for any.

    Raises:
        SystemExit: If the address can't be bound.
        ValueError: If it can be reached from elsewhere, which needs a key.
    """
    with _listener(options) as listener:
        check_exposure(listener, options)
        return options.host, listener.getsockname()[1]


def load_engine(args: EngineArgs, options: ServerOptions) -> ServingEngine:
    """Returns an engine that is ready for the first request.

    Raises:
        ValueError: If the model, the chat template or a setting can't be used.
    """
    # Loading makes hundreds of thousands of objects, nearly all of which stay: to look through them for
    # garbage again and again takes half a second.
    gc.disable()
    start = time.monotonic()
    _LOGGER.info("loading %s", args.model)
    try:
        template = None if options.chat_template is None else _template(options.chat_template)
        engine = serving_engine(args)
        if engine.engine.tokenizer is not None:
            if template is not None:
                engine.engine.tokenizer.replace_chat_template(template)
            engine.engine.tokenizer.prepare_chat()  # now, not by the first request
    finally:
        gc.enable()
    _LOGGER.info("loaded %s in %.1f s", args.model, time.monotonic() - start)
    return engine


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with the message of a ValueError."""
    try:
        yield
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")


def _template(value: str) -> str:
    """Returns the chat template that is given as text or as a file."""
    if any(character in value for character in "{}\n"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template is {value!r}; allowed: a template, or a file that holds one ({error})"
        ) from error


class Server(uvicorn.Server):
    """Announces itself once it listens, and ends as `Lifecycle` says."""

    def __init__(self, config: uvicorn.Config, openai: OpenAIServer) -> None:
        super().__init__(config)
        self._openai = openai

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Takes a signal."""
        self._openai.lifecycle.end(time.monotonic())

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to end; called ten times a second."""
        await super().on_tick(counter)
        return self._openai.lifecycle.tick(time.monotonic())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        # What is there by now stays: a collection that walks all of it would hold every stream up for 50 ms.
        gc.collect()
        gc.freeze()
        # Requests leave hardly any garbage of cycles: to look for it every 700 objects takes a tenth of the
        # time that they take.
        gc.set_threshold(_OBJECTS_PER_COLLECTION, *gc.get_threshold()[1:])
        self._statistics = asyncio.create_task(
            log_statistics(self._openai.engine, self._openai.metrics.num_waiting)
        )
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        key = ' -H "Authorization: Bearer $JAX_PAGED_API_KEY"' if self._openai.options.api_key else ""
        question = {"role": "user", "content": "What is a block table?"}
        body = {"model": self._openai.model_name, "messages": [question], "temperature": 0}
        page = f"\nor open {url}/ in a browser.\n" if self._openai.options.ui else ""
        print(
            f"{self._openai.engine!r}\n"
            f"Serving the OpenAI API at {url}/v1. Press Ctrl-C to stop. Try:\n\n"
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
            f"    -d '{orjson.dumps(body).decode()}'\n{page}",
            flush=True,
        )

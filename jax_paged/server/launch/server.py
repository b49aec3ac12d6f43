"""Server start-up and shutdown: binds the port, loads the model, and runs uvicorn until a signal."""

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
from jax_paged.errors import ArgumentError
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.http.listening import allow_open_files, check_exposure, check_tls, uvicorn_config
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.observability.logs import configure, log_statistics

_LOGGER = logging.getLogger(__name__)
# Time (seconds) that uvicorn waits for clients to read the end of their responses at shutdown.
_GRACEFUL_SHUTDOWN_S = 2
_BACKLOG = 2048
_OBJECTS_PER_COLLECTION = 50_000


def serve(args: EngineArgs, options: ServerOptions) -> NoReturn:
    """Serves a model until SIGINT or SIGTERM, then ends the process with the exit status of its `Lifecycle`.

    Status 0 means that all requests have been answered.

    Args:
        args: Model and limits of the engine.
        options: Options of the server.

    Raises:
        SystemExit: If the address cannot be bound, or the model or an option is invalid. With an external
            launcher, processes with a rank above 0 have no HTTP server. They exit when the process of rank 0
            has ended.
        KeyboardInterrupt: If Ctrl-C is pressed before the server listens.
    """
    configure(options.log_level, options.log_format)
    with exit_on_value_error():
        options = with_all_keys(options, api_key_of_environment())
        check_tls(options)
    config = uvicorn_config("", options, log_level="warning", timeout_graceful_shutdown=_GRACEFUL_SHUTDOWN_S)
    if args.distributed_executor_backend == "external_launcher":
        with exit_on_value_error():
            launch = launch_of_environment()
            if launch.rank > 0:
                follow(args, launch)
    # Binds the port first, so that a port in use is reported before the model is loaded.
    listener = _listener(options)
    with exit_on_value_error():
        check_exposure(listener, options)
        allow_open_files(options.max_connections)
    with exit_on_value_error():
        engine = load_engine(args, options)
        openai = OpenAIServer(engine, options.served_model_name or args.model, options)
    config.app = openai.app()
    Server(config, openai).run([listener])
    # No response is left to send. Threads that are still busy, such as with a compilation or a hung step,
    # cannot be stopped, so the process ends without waiting for them.
    if "ray" in sys.modules:  # A distributed executor may have started a Ray cluster in this process.
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
            f"jax-paged: cannot listen on {options.host}, port {options.port}: {error.strerror}; --host must "
            "be an address of this machine, and --port a free port (0 selects one)"
        )


def free_address(options: ServerOptions) -> tuple[str, int]:
    """Returns the host and port for a server that binds them itself; port 0 is replaced by a free port.

    Raises:
        SystemExit: If the address cannot be bound.
        ValueError: If other machines can reach the address, and the options have no API key (see
            `check_exposure`).
    """
    with _listener(options) as listener:
        check_exposure(listener, options)
        return options.host, listener.getsockname()[1]


def load_engine(args: EngineArgs, options: ServerOptions) -> ServingEngine:
    """Returns an engine that is ready for the first request.

    Raises:
        ValueError: If the model, the chat template or a setting cannot be used.
    """
    # Loading creates hundreds of thousands of objects, almost all of which are kept. Searching them for
    # garbage repeatedly takes about half a second.
    gc.disable()
    start = time.monotonic()
    _LOGGER.info("loading model %s", args.model)
    try:
        template = None if options.chat_template is None else _template(options.chat_template)
        engine = serving_engine(args)
        if engine.engine.tokenizer is not None:
            if template is not None:
                engine.engine.tokenizer.replace_chat_template(template)
            # Compiles the chat template now, so that the first request does not have to wait for it.
            engine.engine.tokenizer.prepare_chat()
    finally:
        gc.enable()
    _LOGGER.info("loaded model %s in %.1f s", args.model, time.monotonic() - start)
    return engine


@contextlib.contextmanager
def exit_on_value_error() -> Iterator[None]:
    """Ends the program with a one-line message if a ValueError is raised within the context."""
    try:
        yield
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")


def _template(value: str) -> str:
    """Returns the chat template that an option has as text or as the path of a file."""
    if any(character in value for character in "{}\n"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"a chat template or the path of a file with one ({error})"
        raise ArgumentError("chat_template", value, allowed) from error


class Server(uvicorn.Server):
    """A uvicorn server that prints its address when it listens, and stops when its `Lifecycle` ends."""

    def __init__(self, config: uvicorn.Config, openai: OpenAIServer) -> None:
        super().__init__(config)
        self._openai = openai

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the shutdown after a signal. A second signal aborts the running requests."""
        self._openai.lifecycle.end(time.monotonic())

    async def on_tick(self, counter: int) -> bool:
        """Returns True if the server should stop; called by uvicorn ten times per second."""
        await super().on_tick(counter)
        return self._openai.lifecycle.tick(time.monotonic())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening, tunes the garbage collector and prints the address."""
        await super().startup(sockets)
        # The objects that exist now are kept for good. A collection that visits all of them would stall every
        # stream for 50 ms.
        gc.collect()
        gc.freeze()
        # Requests create almost no reference cycles. With the default threshold of Python 3.12 (700 objects),
        # collections would take a tenth of the time spent on requests.
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

"""Starting the server: binds the port, loads the model, announces itself, and ends on a signal."""

import contextlib
import gc
import socket
import sys
from pathlib import Path

import orjson
import uvicorn

from jax_paged.config import EngineArgs
from jax_paged.engine.async_engine import AsyncLLMEngine
from jax_paged.server.app import OpenAIServer
from jax_paged.server.options import ServerOptions

_SHUTDOWN_S = 5


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serves a model until SIGINT or SIGTERM.

    Args:
        args: Model and limits of the engine.
        options: How to listen, and what clients may do.

    Raises:
        SystemExit: If the address can't be bound, or the model or a setting can't be used.
        KeyboardInterrupt: If Ctrl-C is pressed before the server listens.
    """
    config = uvicorn.Config(
        "",
        options.host,
        options.port,
        log_config=None,  # uvicorn's own would close the handlers that others have made
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    # A port that is taken is found before the model is loaded.
    with config.bind_socket() as listener, contextlib.closing(_load_engine(args, options)) as engine:
        model_name = options.served_model_name or args.model
        config.app = OpenAIServer(engine, model_name, options).app()
        server = _Server(config, engine, model_name)
        try:
            server.run([listener])
        except KeyboardInterrupt:
            if not server.started:
                raise


def _load_engine(args: EngineArgs, options: ServerOptions) -> AsyncLLMEngine:
    # Loading makes hundreds of thousands of objects, nearly all of which stay: to look through them for
    # garbage again and again takes half a second.
    gc.disable()
    try:
        engine = AsyncLLMEngine(args)
        if engine.engine.tokenizer is not None:
            if options.chat_template is not None:
                engine.engine.tokenizer.replace_chat_template(_template(options.chat_template))
            engine.engine.tokenizer.prepare_chat()  # now, not by the first request
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    finally:
        gc.enable()
    return engine


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


class _Server(uvicorn.Server):
    """Announces itself once it listens."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLMEngine, model_name: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._model_name = model_name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        # What is there by now stays: a collection that walks all of it would hold every stream up for 50 ms.
        gc.collect()
        gc.freeze()
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        question = {"role": "user", "content": "What is a block table?"}
        body = {"model": self._model_name, "messages": [question], "temperature": 0}
        print(
            f"{self._engine.engine!r}\n"
            f"Serving the OpenAI API at {url}/v1. Press Ctrl-C to stop. Try:\n\n"
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{orjson.dumps(body).decode()}'\n",
            flush=True,
        )

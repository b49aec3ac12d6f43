"""Starting the server: binds the port, loads the model, announces itself, and ends on a signal."""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time

import orjson
import uvicorn

from jax_paged.config import EngineArgs
from jax_paged.engine.async_engine import AsyncLLMEngine
from jax_paged.server.app import OpenAIServer
from jax_paged.server.logs import configure, log_statistics
from jax_paged.server.options import ServerOptions

_LOGGER = logging.getLogger(__name__)
_SHUTDOWN_S = 5


def serve(args: EngineArgs, options: ServerOptions) -> None:
    """Serves a model until SIGINT or SIGTERM.

    Args:
        args: Model and limits of the engine.
        options: How to listen, what clients may do, and what is logged.

    Raises:
        SystemExit: If the address can't be bound, or the model or a setting can't be used.
        KeyboardInterrupt: If Ctrl-C is pressed before the server listens.
    """
    configure(options.log_level, options.log_format)
    config = uvicorn.Config(
        "",
        options.host,
        options.port,
        log_config=None,  # uvicorn's own would close the handlers that others have made
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    # A port that is taken is found before the model is loaded.
    with config.bind_socket() as listener, contextlib.closing(_load_engine(args)) as engine:
        model_name = options.served_model_name or args.model
        config.app = OpenAIServer(engine, model_name, options).app()
        server = _Server(config, engine, model_name)
        try:
            server.run([listener])
        except KeyboardInterrupt:
            if not server.started:
                raise


def _load_engine(args: EngineArgs) -> AsyncLLMEngine:
    # Loading makes hundreds of thousands of objects, nearly all of which stay: to look through them for
    # garbage again and again takes half a second.
    gc.disable()
    start = time.monotonic()
    _LOGGER.info("loading %s", args.model)
    try:
        engine = AsyncLLMEngine(args)
        if engine.engine.tokenizer is not None:
            engine.engine.tokenizer.prepare_chat()  # now, not by the first request
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    finally:
        gc.enable()
    _LOGGER.info("loaded %s in %.1f s", args.model, time.monotonic() - start)
    return engine


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
        self._statistics = asyncio.create_task(log_statistics(self._engine))
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

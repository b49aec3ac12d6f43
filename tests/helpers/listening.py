"""A server on a free port, in a thread."""

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from jax_paged.server.app import OpenAIServer
from jax_paged.server.listening import uvicorn_config


@contextlib.contextmanager
def listening(server: OpenAIServer) -> Iterator[int]:
    """Runs a server's application on a port, which it yields; the engine is left as it is."""
    config = uvicorn_config(server.app(), server.options, timeout_graceful_shutdown=2)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield running.servers[0].sockets[0].getsockname()[1]
    running.should_exit = True
    thread.join()

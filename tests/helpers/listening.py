"""A server on a free port, in a thread."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import uvicorn

from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.listening import uvicorn_config


@contextlib.contextmanager
def listening(server: OpenAIServer, send_buffer_bytes: int | None = None) -> Iterator[int]:
    """Runs a server's application on a port, which it yields; the engine is left as it is.

    Args:
        server: Of the application.
        send_buffer_bytes: What the system holds for a client that does not read.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer_bytes is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    config = uvicorn_config(server.app(), server.options, timeout_graceful_shutdown=2)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, args=([listener],))
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield listener.getsockname()[1]
    running.should_exit = True
    thread.join()

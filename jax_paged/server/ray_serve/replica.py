"""One replica of the server, which is called without a network and can continue responses of others."""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from importlib.metadata import version

from starlette.types import Message

from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.paths import local_scope
from jax_paged.server.ray_serve.continuation import (
    Journal,
    ReplicaCall,
    ReplicaLostError,
    ResponsePart,
    ResponseStart,
)

_LOGGER = logging.getLogger(__name__)


class Replica:
    """A server without a port. It sends the output tokens of each event of a stream along with the event.

    Args:
        server: The server. The caller closes its engine.
    """

    def __init__(self, server: OpenAIServer) -> None:
        self._server = server
        self._app = server.app()
        settings = version("jax-paged"), server.engine.engine.args, server.options
        self._version = hashlib.sha256(repr(settings).encode()).hexdigest()

    def check(self) -> None:
        """Checks the engine. If it hangs, all of its requests fail, as in a server with a port.

        Raises:
            ReplicaLostError: If the engine has stopped.
        """
        self._server.lifecycle.tick(time.monotonic())
        if (stopped := self._server.engine.stopped_error) is not None:
            raise ReplicaLostError(str(stopped)) from stopped

    async def answer(self, call: ReplicaCall) -> AsyncGenerator[ResponseStart | ResponsePart]:
        """Yields the start and the parts of a response. Closing the generator aborts the request.

        Raises:
            ReplicaLostError: If the engine has stopped before the end of the response.
            RuntimeError: If the response ends early for another reason.
        """
        journal = Journal(call.progress)
        scope = local_scope(call.method, call.path, list(call.headers), call.query, journal=journal)
        parts: asyncio.Queue[ResponseStart | ResponsePart | None] = asyncio.Queue(maxsize=1)
        requests: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
        is_complete = False

        async def receive() -> Message:
            if not requests:
                await asyncio.Event().wait()  # waits until the task is cancelled
            return requests.pop()

        async def send(message: Message) -> None:
            nonlocal is_complete
            if message["type"] == "http.response.start":
                begin = ResponseStart(message["status"], tuple(message["headers"]), self._version)
                await parts.put(begin)
                return
            is_complete = not message.get("more_body", False)
            if message.get("body"):
                await parts.put(journal.take(message["body"]))

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            except Exception:  # Starlette raises the exception again after an error response, for logging.
                if self._server.engine.stopped_error is None:
                    _LOGGER.exception("%s %s", call.method, call.path)
            await parts.put(None)

        task = asyncio.create_task(run())
        try:
            while (part := await parts.get()) is not None:
                if isinstance(part, ResponseStart) and part.status == 503:
                    self.check()
                yield part
            if not is_complete:
                self.check()
                raise RuntimeError("the response has ended before it was complete")
        finally:
            task.cancel()
            await asyncio.wait([task])

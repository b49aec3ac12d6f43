"""Responses that wait for the engine: cancellation when the client disconnects, and server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Self

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jax_paged.server.http.http_protocol import BODY_WRITER, BodyWriter


async def response_unless_disconnected(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Awaits a response, and cancels it when the client disconnects."""
    # The response with status 499 is not read, because the client has disconnected.
    return await result_unless_disconnected(request.receive, answer) or Response(status_code=499)


async def result_unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns the result of a coroutine. Cancels it and returns None if the client disconnects first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class EventStream(StreamingResponse):
    """A response of server-sent events.

    Args:
        first: The first event.
        rest: Generator of the remaining events. It is closed after the last event, or when the client
            disconnects. Its `asend` receives the BodyWriter of the response, or None if the server has none.
            The generator may write to the BodyWriter directly.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, BodyWriter | None]) -> None:
        super().__init__(rest, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._first = first
        self._rest = rest

    @classmethod
    async def begin(cls, events: AsyncGenerator[bytes, BodyWriter | None]) -> Self:
        """Returns the response as soon as the first event is available.

        Raises:
            ApiError: If the generator fails before the first event.
        """
        return cls(await anext(events), events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events until they end or the client disconnects."""
        writer = scope.get("extensions", {}).get(BODY_WRITER)
        async with contextlib.aclosing(self._rest):
            await result_unless_disconnected(receive, self._send(send, writer))

    async def _send(self, send: Send, writer: BodyWriter | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        event = self._first
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                event = await self._rest.asend(writer)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

"""What the engine hands to asyncio: the outputs of a request, in parts or all so far; results of calls."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, NoReturn, Self

from jax_paged.outputs import RequestOutput


class RequestStream:
    """The outputs of one request as an asynchronous iterator.

    Each output holds only what has come since the one before: text, token ids and logprobs. What comes
    while the consumer is busy is joined into one output, and so may be what comes within 1.5 ms times the
    number of streams, 0.1 s at most. Beam searches, and requests with best_of > n, have
    their completions in the last output only. A stream must be iterated to the end or aborted, in the event
    loop that made it. Who does not iterate may call `take` whenever
    `on_ready` was called, which wakes no task.

    Args:
        request_id: Of its request.
        whole: Whether to give a single output, at the end.
        abort: Ends the request of a stream.
        replica: The place of its engine among several.

    Attributes:
        has_begun: Whether the first output is on its way; the engine's thread alone uses it.
        on_ready: Called when there is an output, or an error, to take.
    """

    def __init__(
        self, request_id: str, whole: bool, abort: Callable[["RequestStream"], None], replica: int = 0
    ) -> None:
        self.request_id = request_id
        self.whole = whole
        self.replica = replica
        self.loop = asyncio.get_running_loop()
        self.has_begun = False
        self.on_ready: Callable[[], None] | None = None
        self._abort = abort
        self._ready = asyncio.Event()
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if not await self.wait():
            raise StopAsyncIteration
        return self.take()

    @property
    def is_ready(self) -> bool:
        """Whether there is something to take."""
        return self._ready.is_set() and not self._ended

    async def wait(self) -> bool:
        """Waits until there is something to take; returns False if nothing is left."""
        if not self._ended:
            await self._ready.wait()
        return not self._ended

    def take(self) -> RequestOutput:
        """Returns what has come, or raises the error that has; only while `is_ready`."""
        output, self._output = self._output, None
        if output is None:
            self._ended = True
            assert self._error is not None, "ready without an output"
            raise self._error
        if self._error is None:
            self._ready.clear()
        self._ended = output.finished
        return output

    def abort(self) -> None:
        """Ends the request if it still runs; may be called at any time, and more than once."""
        if not self._ended:
            self._ended = True
            self._abort(self)

    def put(self, item: RequestOutput | Exception) -> None:
        """Hands over an output, or the error that ended the request; called in the event loop.

        Args:
            item: Owned by the stream from now on.
        """
        if isinstance(item, Exception):
            self._error = item
        elif self._output is None:
            self._output = item
        else:
            self._output.extend(item)
        self._ready.set()
        if self.on_ready is not None:
            self.on_ready()


class CumulativeOutputs:
    """Turns the parts of a request into outputs that each hold all of it so far.

    Apart from the text, which is copied, an output costs as much as its part is long: its lists are
    snapshots of lists that grow here, until the last output, whose lists are its own.
    """

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None

    def add(self, part: RequestOutput) -> RequestOutput:
        """Takes the next part, which belongs to this from now on; returns all so far."""
        if self._whole is None:
            self._whole = part
        else:
            self._whole.extend(part)
        return self._whole.snapshot()


class Done(Coroutine[Any, Any, None]):
    """A coroutine that is done; unlike one of an `async def`, it gives no warning if nobody awaits it."""

    def send(self, value: Any) -> NoReturn:
        raise StopIteration

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> NoReturn:
        raise typ if val is None else val

    def close(self) -> None:
        pass

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


def put_all(items: list[tuple[RequestStream, RequestOutput | Exception]]) -> None:
    """Gives streams what comes to them, in the event loop that they have in common."""
    for stream, item in items:
        stream.put(item)


def run_for[T](done: Future[T], function: Callable[[], T]) -> None:
    """Gives a future what a function returns or raises; does not run it if nobody waits any more."""
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)


def deliver(items: list[tuple[RequestStream, RequestOutput | Exception]]) -> None:
    """Hands over the outputs of a step in one call per event loop: waking a loop is what costs."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput | Exception]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, part in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a loop that is closed has no consumers
            loop.call_soon_threadsafe(put_all, part)

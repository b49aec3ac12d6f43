"""Delivery of outputs and of results of calls from the engine's thread to event loops of asyncio."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, NoReturn, Self

from jax_paged.outputs import RequestOutput


class RequestStream:
    """The outputs of one request as an asynchronous iterator.

    Each output is a delta: its text, token ids and logprobs contain only the part after the previous output.
    Deltas that arrive while the consumer is busy are merged into one. The engine also collects deltas before
    it delivers them: for 1.5 ms per stream with new tokens, at most 0.1 s. For beam searches and for requests
    with best_of > n, only the last output has completions.

    A stream must be iterated to the end or aborted, in the event loop in which it was made. Instead of
    iterating, a consumer may call `take` after each call of `on_ready`, which avoids waking a task.

    Args:
        request_id: The id of the request.
        final_only: Whether the stream has a single output, at the end.
        abort: Aborts the request of a stream.
        replica: Index of the engine among several.

    Attributes:
        has_begun: Whether the first output has been sent. Only the engine's thread uses it.
        on_ready: Called when an output or an error can be taken.
    """

    def __init__(
        self, request_id: str, final_only: bool, abort: Callable[["RequestStream"], None], replica: int = 0
    ) -> None:
        self.request_id = request_id
        self.final_only = final_only
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
        """Whether an output or an error can be taken."""
        return self._ready.is_set() and not self._ended

    async def wait(self) -> bool:
        """Waits until an output or an error can be taken. Returns False if the stream has ended."""
        if not self._ended:
            await self._ready.wait()
        return not self._ended

    def take(self) -> RequestOutput:
        """Returns the new output, or raises the error that ended the request. Requires `is_ready`."""
        output, self._output = self._output, None
        if output is None:
            self._ended = True
            assert self._error is not None, "the stream is ready but has neither an output nor an error"
            raise self._error
        if self._error is None:
            self._ready.clear()
        self._ended = output.finished
        return output

    def abort(self) -> None:
        """Aborts the request if it is unfinished. May be called at any time, and more than once."""
        if not self._ended:
            self._ended = True
            self._abort(self)

    def put(self, item: RequestOutput | Exception) -> None:
        """Adds an output, or the error that ended the request. Must be called in the stream's event loop.

        Args:
            item: The output or the error. The stream owns it from now on.
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
    """Converter of a request's deltas to outputs that each contain everything so far.

    The cost of an output is proportional to its delta, except for the text, which is copied. Lists in outputs
    are snapshots of lists that grow here. The last output has its own lists.
    """

    def __init__(self) -> None:
        self._whole: RequestOutput | None = None

    def add(self, part: RequestOutput) -> RequestOutput:
        """Adds the next delta, which this object owns from now on. Returns everything so far."""
        if self._whole is None:
            self._whole = part
        else:
            self._whole.extend(part)
        return self._whole.snapshot()


class NoOpCoroutine(Coroutine[Any, Any, None]):
    """Finished coroutine, which (unlike an `async def`) causes no warning if it is never awaited."""

    def send(self, value: Any) -> NoReturn:
        """Raises StopIteration, because the coroutine has finished."""
        raise StopIteration

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> NoReturn:
        """Raises the given error."""
        raise typ if val is None else val

    def close(self) -> None:
        """Does nothing, because the coroutine has finished."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


def put_all(items: list[tuple[RequestStream, RequestOutput | Exception]]) -> None:
    """Adds outputs and errors to streams, in the event loop of these streams."""
    for stream, item in items:
        stream.put(item)


def run_for_future[T](done: Future[T], function: Callable[[], T]) -> None:
    """Runs a function and gives its result or error to a future. Does nothing if the future is canceled."""
    if done.set_running_or_notify_cancel():
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)


def deliver(items: list[tuple[RequestStream, RequestOutput | Exception]]) -> None:
    """Adds outputs and errors to their streams. May be called in any thread.

    There is only one call per event loop, because waking a loop is expensive.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput | Exception]]] = {}
    for stream, item in items:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, part in by_loop.items():
        with contextlib.suppress(RuntimeError):  # a closed loop has no consumers
            loop.call_soon_threadsafe(put_all, part)

"""AsyncLLMEngine: an LLMEngine that one thread steps while any number of coroutines wait for its outputs."""

import asyncio
import functools
import logging
import math
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from jax_paged.config.engine_args import EngineArgs
from jax_paged.engine.async_engine.request_methods import RequestMethods
from jax_paged.engine.async_engine.request_stream import NoOpCoroutine, RequestStream, deliver, run_for_future
from jax_paged.engine.async_engine.statistics import EngineStatistics
from jax_paged.engine.errors import EngineAsleepError, EngineDeadError, stopped_by
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.engine.output_processor import RequestState

if TYPE_CHECKING:
    from jax_paged.engine.executors import MakeExecutor
    from jax_paged.engine.features.weights.sleeping import Mode
    from jax_paged.engine.features.weights.weight_updates import Running
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.worker.executor import Executor

_LOGGER = logging.getLogger(__name__)
# Outputs are delivered at intervals of this time (seconds) multiplied by the number of streams with new
# tokens, for example 96 ms for 64 streams. A delivery costs 30 us of CPU time per stream in the server and
# the client. At longer intervals, more CPU time is left for a model that runs on the CPU.
_SECONDS_PER_STREAM = 0.0015
_MAX_DELIVERY_INTERVAL_S = 0.1
# Interval (seconds) at which a coroutine that waits for a result checks whether the engine has stopped.
_POLL_INTERVAL_S = 0.5


class AsyncLLMEngine(RequestMethods):
    """An LLMEngine that runs in a thread of its own. The thread waits while there is nothing to do.

    Methods of this class put calls into a queue. Between two steps the thread takes all calls from the queue
    and executes them, so only this thread changes the state of requests. After a step it delivers the new
    outputs to the event loops of the streams. RequestMethods defines the methods that run requests.

    Args:
        args: Model and limits.
        executor: Runs the steps; see LLMEngine.
        replica: Index of this engine among several. It is part of the thread's name and an attribute of the
            streams.

    Raises:
        ValueError: If the model or a setting can't be used.
    """

    def __init__(
        self, args: EngineArgs, executor: "Executor | MakeExecutor | None" = None, replica: int = 0
    ) -> None:
        self.engine = LLMEngine(args, executor)
        self.replicas = (self,)
        self._replica = replica
        self.error: BaseException | None = None  # what has stopped the engine
        self.statistics = EngineStatistics()  # only the engine's thread changes it
        self.step_began: float | None = None  # time.monotonic() when the running step began
        self._streams: dict[str, RequestStream] = {}  # only the engine's thread changes it
        self._submitted: set[RequestStream] = set()  # not yet taken by the engine's thread
        self._undelivered: dict[RequestStream, RequestState] = {}  # streams with new tokens
        self._last_delivery = -math.inf
        # Level and mode of a sleep that waits for running requests, and the future that is done when the
        # engine sleeps.
        self._falling_asleep: tuple[int, Mode, Future[None]] | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The thread and the executor refer to this object only weakly, so that it can be garbage-collected.
        # That ends the thread.
        this: weakref.ref[AsyncLLMEngine] = weakref.ref(self)
        self._thread = threading.Thread(
            target=_run, args=(this, self._calls), name=f"engine {replica}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False
        self.engine.executor.on_failure(functools.partial(_fail, this))

    @property
    def stopped_error(self) -> EngineDeadError | None:
        """The error raised for requests after the engine has stopped; None while it is running."""
        return None if self.error is None else stopped_by(self.error)

    @property
    def asleep_error(self) -> EngineAsleepError | None:
        """The error raised for requests while the engine sleeps or is about to; None while it is awake."""
        if self._falling_asleep is None and not self.engine.is_sleeping():
            return None
        return EngineAsleepError("the engine is asleep or about to sleep; call wake_up() first")

    @property
    def load(self) -> tuple[int, int]:
        """The number of waiting requests and the number of running requests.

        Submitted requests that are still in the queue of the thread count as waiting, and requests that are
        swapped out count as running.
        """
        queues = self.engine.scheduler.queues
        num_waiting = len(self._submitted) + len(queues.waiting)
        return num_waiting, len(queues.running) + len(queues.swapped)

    def has(self, request_id: str) -> bool:
        """Returns whether an unfinished request has this id."""
        return request_id in self._streams or any(s.request_id == request_id for s in list(self._submitted))

    def start(self, request: CheckedRequest, request_id: str, *, final_only: bool) -> RequestStream:
        """Starts a request that has been checked; see `submit`."""
        stream = RequestStream(request_id, final_only, self._abort, self._replica)
        self._submitted.add(stream)
        self._calls.put(lambda: self._add(stream, request))
        # Checked after the put: the thread sets `error` before it empties the queue for the last time.
        if self.error is not None:
            raise stopped_by(self.error)
        return stream

    async def update_weights(
        self, weights: "NewWeights", *, running: "Running" = "error", weight_version: str | None = None
    ) -> None:
        """Replaces the weights between two steps; see LLMEngine.update_weights."""
        update = self.engine.update_weights
        await self._call(lambda: update(weights, running=running, weight_version=weight_version))

    async def sleep(self, level: int = 1, mode: "Mode" = "wait") -> None:
        """Frees the memory of the engine; see LLMEngine.sleep. New requests are rejected from now on."""
        await self._result(await self._call(lambda: self._begin_to_sleep(level, mode)))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Allocates memory again after `sleep`; see LLMEngine.wake_up."""
        await self._call(lambda: self.engine.wake_up(tags))

    def abort(self, request_id: str | Iterable[str]) -> NoOpCoroutine:
        """Aborts one or several requests. Their streams end with the outputs that exist so far.

        Returns:
            A coroutine that does nothing. vLLM's scripts await it or make a task of it. It may be awaited any
            number of times, or not at all.
        """
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self._calls.put(lambda one=one: self._end(one))
        return NoOpCoroutine()

    def close(self) -> None:
        """Stops the thread after its current step, ends all requests, and frees weights and KV cache."""
        self._calls.put(None)
        self._thread.join()
        self.engine.close()

    def fail(self, error: EngineDeadError) -> None:
        """Ends all requests with an error, at once and for good, even while the thread hangs in a step.

        Args:
            error: The value of the attribute `error` from now on, unless the engine has already stopped.
        """
        self.error = self.error or error
        self._calls.put(None)
        streams = [*list(self._streams.values()), *list(self._submitted)]
        deliver([(stream, stopped_by(self.error)) for stream in streams])

    def __repr__(self) -> str:
        return repr(self.engine)

    def stack(self) -> str:
        """Returns the current call stack of the engine's thread, formatted like a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "the engine's thread has ended\n"

    async def _call[T](self, function: Callable[[], T]) -> T:
        """Runs a function in the engine's thread, between two steps, and returns its result."""
        done: Future[T] = Future()
        self._calls.put(lambda: run_for_future(done, function))
        if self.error is not None:  # checked after the put, as in `start`
            raise stopped_by(self.error)
        return await self._result(done)

    async def _result[T](self, done: Future[T]) -> T:
        """Waits for a result of the engine's thread. Raises EngineDeadError if the engine stops first."""
        waiting = asyncio.wrap_future(done)
        try:
            while not (await asyncio.wait([waiting], timeout=_POLL_INTERVAL_S))[0] and self.error is None:
                pass
            if not waiting.done():
                raise stopped_by(self.error)
            return waiting.result()
        finally:
            waiting.cancel()

    def _abort(self, stream: RequestStream) -> None:
        self._calls.put(lambda: self._end(stream.request_id, stream))

    # The following methods run in the engine's thread.

    def _add(self, stream: RequestStream, request: CheckedRequest) -> None:
        if self.error is not None:
            self._submitted.discard(stream)
            deliver([(stream, stopped_by(self.error))])
            return
        try:
            if (asleep := self.asleep_error) is not None:
                raise asleep
            self.engine.add_request(stream.request_id, request)
        except ValueError as error:
            deliver([(stream, error)])
        else:
            self._streams[stream.request_id] = stream
        finally:
            self._submitted.discard(stream)

    def _end(self, request_id: str, stream: RequestStream | None = None) -> None:
        """Aborts a request. If a stream is passed, only a request that belongs to it is aborted."""
        current = self._streams.get(request_id)
        if current is not None and stream in (None, current):
            del self._streams[request_id]
            self._undelivered.pop(current, None)
            self.statistics.forget(request_id)
            state = self.engine.abort_request(request_id)
            deliver([(current, state.take_delta())] if state else [])  # no state: it has just ended

    def _run_once(self, waited: "list[Callable[[], None] | None]") -> bool:
        """Executes all calls in the queue, and runs a step if there is work to do.

        Args:
            waited: The call that the thread has waited for; empty if it has not waited.

        Returns:
            False if the engine has stopped.
        """
        try:
            if self._serve_calls(waited):
                if self._has_work():
                    self._step()
                self._fall_asleep()
                return True
            self.error = self.error or EngineDeadError("the engine is closed")
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self.error = error
            _LOGGER.exception("the engine has failed and runs no more requests; restart it")
        self._fall_asleep()  # raises the error in a waiting call of `sleep`
        deliver([(stream, stopped_by(self.error)) for stream in self._streams.values()])
        self._streams.clear()
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call()
        return False

    def _serve_calls(self, waited: "list[Callable[[], None] | None]") -> bool:
        """Executes the call that the thread has waited for and all calls in the queue.

        Returns:
            False if one of the calls ends the engine.
        """
        while waited or not self._calls.empty():
            call = waited.pop() if waited else self._calls.get()
            if call is None:
                return False
            call()
        return True

    def _has_work(self) -> bool:
        return self.engine.has_unfinished_requests() and not self.engine.is_sleeping()

    def _begin_to_sleep(self, level: int, mode: "Mode") -> Future[None]:
        if self.error is not None:
            raise stopped_by(self.error)
        self.engine.check_sleep(level, mode)
        if self._falling_asleep is not None:
            raise ValueError("a previous sleep() is still in progress; wait until it has returned")
        if mode == "abort":
            for request_id in list(self._streams):
                self._end(request_id)
        self._falling_asleep = level, mode, Future()
        return self._falling_asleep[2]

    def _fall_asleep(self) -> None:
        """Puts the engine to sleep if that was requested and no request has to end first."""
        if self._falling_asleep is not None:
            level, mode, done = self._falling_asleep
            is_over = self.error is not None or done.cancelled()
            if is_over or mode == "keep" or not self.engine.has_unfinished_requests():
                run_for_future(done, lambda: self._sleep(level, mode))
                self._falling_asleep = None

    def _sleep(self, level: int, mode: "Mode") -> None:
        if self.error is not None:
            raise stopped_by(self.error)
        self.engine.sleep(level, mode)
        self._hand_over(self.engine.take_changed(), flush=True)  # results of steps that were in flight

    def _step(self) -> None:
        self.step_began = time.monotonic()
        states = self.engine.advance()
        self.step_began, self.statistics.num_steps = None, self.statistics.num_steps + 1
        self._hand_over(states)

    def _hand_over(self, states: list[RequestState], *, flush: bool = False) -> None:
        now = time.monotonic()
        for state in states:
            request_id = state.group.request_id
            self.statistics.note(state.group, now)
            if state.is_finished:
                self.statistics.forget(request_id)
            stream = self._streams.get(request_id)
            if stream is not None and (state.is_finished or not stream.final_only):
                self._undelivered[stream] = state
        self._deliver_due(now, flush=flush)

    def _deliver_due(self, now: float, *, flush: bool = False) -> None:
        """Delivers the first and the last output of a stream at once, and others at intervals."""
        interval_s = min(_SECONDS_PER_STREAM * len(self._undelivered), _MAX_DELIVERY_INTERVAL_S)
        flush = flush or now - self._last_delivery >= interval_s
        outputs = []
        for stream, state in list(self._undelivered.items()):
            if flush or state.is_finished or not stream.has_begun:
                del self._undelivered[stream]
                stream.has_begun = True
                outputs.append((stream, state.take_delta()))
                if state.is_finished:
                    del self._streams[stream.request_id]
        if flush:
            self._last_delivery = now
        deliver(outputs)


def _run(this: "weakref.ref[AsyncLLMEngine]", calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Steps an engine until it is closed, or until nothing else refers to it.

    Args:
        this: Weak reference to the engine. The thread has no other reference to it between two calls of
            _run_once.
        calls: The queue of calls for the engine's thread. None ends the engine.
    """
    waited: list[Callable[[], None] | None] = []
    while (engine := this()) is not None and engine._run_once(waited):
        is_idle = not engine._has_work()
        del engine
        waited = [calls.get()] if is_idle else []


def _fail(this: "weakref.ref[AsyncLLMEngine]", reason: str) -> None:
    if (engine := this()) is not None:
        engine.fail(EngineDeadError(reason))

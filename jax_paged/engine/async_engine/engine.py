"""The engine for asyncio: one thread steps it, and any number of coroutines wait for their outputs."""

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
from jax_paged.engine.async_engine.request_stream import Done, RequestStream, deliver, run_for
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
# Tokens are handed over at most this often, times the number of streams: each takes server and client 30 us
# of cores that the model may need. For 64 streams it is every 96 ms.
_SECONDS_PER_STREAM = 0.0015
_LONGEST_TURN_S = 0.1
# Who waits for the engine's thread looks so often whether the engine has stopped.
_LOOK_S = 0.5


class AsyncLLMEngine(RequestMethods):
    """An LLMEngine that a thread of its own steps; it sleeps while there is nothing to do.

    Args:
        args: Model and limits.
        executor: As LLMEngine takes it.
        replica: Its place among several, which its streams and its thread are called by.

    Raises:
        ValueError: If the model or a setting can't be used.
    """

    def __init__(
        self, args: EngineArgs, executor: "Executor | MakeExecutor | None" = None, replica: int = 0
    ) -> None:
        self.engine = LLMEngine(args, executor)
        self.replicas = (self,)
        self._replica = replica
        self.error: BaseException | None = None  # what has stopped the engine, if anything
        self.statistics = EngineStatistics()  # changed by the engine's thread alone
        self.step_began: float | None = None  # time.monotonic when the running step began; None between steps
        self._streams: dict[str, RequestStream] = {}  # changed by the engine's thread alone
        self._submitted: set[RequestStream] = set()  # those that its thread has not taken yet
        self._held: dict[RequestStream, RequestState] = {}  # those whose newest tokens are not delivered yet
        self._last_delivery = -math.inf
        # Level, mode and what is told when it is done; it waits for running requests.
        self._falling_asleep: tuple[int, Mode, Future[None]] | None = None
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Thread and executor do not keep this object: an engine that nothing refers to any more ends.
        this: weakref.ref[AsyncLLMEngine] = weakref.ref(self)
        self._thread = threading.Thread(
            target=_run, args=(this, self._calls), name=f"engine {replica}", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, self._calls.put, None).atexit = False
        self.engine.executor.when_failed(functools.partial(_fail, this))

    @property
    def stopped(self) -> EngineDeadError | None:
        """What requests are told once the engine has stopped; None while it runs."""
        return None if self.error is None else self._stopped()

    @property
    def asleep(self) -> EngineAsleepError | None:
        """What requests are told while the engine sleeps, or is about to; None while it takes them."""
        if self._falling_asleep is None and not self.engine.is_sleeping():
            return None
        return EngineAsleepError("the engine sleeps, or is about to; it takes requests when it is woken")

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait, those included that its thread has not taken yet, and how many run."""
        queues = self.engine.scheduler.queues
        num_waiting = len(self._submitted) + len(queues.waiting)
        return num_waiting, len(queues.running) + len(queues.swapped)

    def has(self, request_id: str) -> bool:
        """Whether a request of this id is here, and has not ended."""
        return request_id in self._streams or any(s.request_id == request_id for s in list(self._submitted))

    def start(self, request: CheckedRequest, request_id: str, *, whole: bool) -> RequestStream:
        """Starts a request that was checked; see `submit`."""
        stream = RequestStream(request_id, whole, self._abort, self._replica)
        self._submitted.add(stream)
        self._calls.put(lambda: self._add(stream, request))
        if self.error is not None:  # checked after the put: the thread sets it before its last look
            raise self._stopped()
        return stream

    async def update_weights(
        self, weights: "NewWeights", *, running: "Running" = "error", weight_version: str | None = None
    ) -> None:
        """Serves other weights, between two steps, as LLMEngine.update_weights does."""
        update = self.engine.update_weights
        await self._call(lambda: update(weights, running=running, weight_version=weight_version))

    async def sleep(self, level: int = 1, mode: "Mode" = "wait") -> None:
        """Gives memory to others, as LLMEngine.sleep does; takes no new requests from now on."""
        await self._result(await self._call(lambda: self._begin_to_sleep(level, mode)))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory again, as LLMEngine.wake_up does."""
        await self._call(lambda: self.engine.wake_up(tags))

    def abort(self, request_id: str | Iterable[str]) -> Done:
        """Ends a request, or several; their streams end with what they have, as aborted.

        The call alone does it.

        Returns:
            A coroutine that does nothing, because vLLM's scripts await it or make a task of it. It need not
            be awaited, and may be more than once.
        """
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self._calls.put(lambda one=one: self._end(one))
        return Done()

    def close(self) -> None:
        """Ends the thread after its step, then all requests, and frees weights and pool."""
        self._calls.put(None)
        self._thread.join()
        self.engine.close()

    def fail(self, error: EngineDeadError) -> None:
        """Ends all requests with an error, at once and for good, even while the thread hangs in a step.

        Args:
            error: What `error` is from now on, unless the engine has stopped already.
        """
        self.error = self.error or error
        self._calls.put(None)
        streams = [*list(self._streams.values()), *list(self._submitted)]
        deliver([(stream, self._stopped()) for stream in streams])

    def __repr__(self) -> str:
        return repr(self.engine)

    def stack(self) -> str:
        """Returns where the engine's thread is, as a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "no thread\n"

    async def _call[T](self, function: Callable[[], T]) -> T:
        """Returns what a function does in the engine's thread, between two steps."""
        done: Future[T] = Future()
        self._calls.put(lambda: run_for(done, function))
        if self.error is not None:  # checked after the put, as in start
            raise self._stopped()
        return await self._result(done)

    async def _result[T](self, done: Future[T]) -> T:
        """Returns what the engine's thread answers; raises what has stopped the engine, if that hangs."""
        waiting = asyncio.wrap_future(done)
        try:
            while not (await asyncio.wait([waiting], timeout=_LOOK_S))[0] and self.error is None:
                pass
            if not waiting.done():
                raise self._stopped()
            return waiting.result()
        finally:
            waiting.cancel()

    def _abort(self, stream: RequestStream) -> None:
        self._calls.put(lambda: self._end(stream.request_id, stream))

    def _stopped(self) -> EngineDeadError:
        return stopped_by(self.error)

    # The rest runs in the engine's thread.

    def _add(self, stream: RequestStream, request: CheckedRequest) -> None:
        if self.error is not None:
            self._submitted.discard(stream)
            deliver([(stream, self._stopped())])
            return
        try:
            if (asleep := self.asleep) is not None:
                raise asleep
            self.engine.add_request(stream.request_id, request)
        except ValueError as error:
            deliver([(stream, error)])
        else:
            self._streams[stream.request_id] = stream
        finally:
            self._submitted.discard(stream)

    def _end(self, request_id: str, of: RequestStream | None = None) -> None:
        """Aborts a request, if it is the one of a certain stream."""
        stream = self._streams.get(request_id)
        if stream is not None and of in (None, stream):
            del self._streams[request_id]
            self._held.pop(stream, None)
            self.statistics.forget(request_id)
            state = self.engine.abort_request(request_id)
            deliver([(stream, state.take_delta())] if state else [])  # or it has just ended

    def _turn(self, waited: "list[Callable[[], None] | None]") -> bool:
        """Serves all calls, and runs a step if there is anything to do.

        Args:
            waited: The call that the thread has waited for, if it has.

        Returns:
            False once the engine has ended.
        """
        try:
            if self._serve_calls(waited):
                if self._has_work():
                    self._step()
                self._fall_asleep()
                return True
            self.error = self.error or EngineDeadError("the engine is closed")
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.error = error
            _LOGGER.exception("the engine has failed")
        self._fall_asleep()
        deliver([(stream, self._stopped()) for stream in self._streams.values()])
        self._streams.clear()
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call()
        return False

    def _serve_calls(self, waited: "list[Callable[[], None] | None]") -> bool:
        """Serves the call that was waited for, and all others at hand; False to end."""
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
            raise self._stopped()
        self.engine.check_sleep(level, mode)
        if self._falling_asleep is not None:
            raise ValueError("the engine is about to sleep already: wait until it does")
        if mode == "abort":
            for request_id in list(self._streams):
                self._end(request_id)
        self._falling_asleep = level, mode, Future()
        return self._falling_asleep[2]

    def _fall_asleep(self) -> None:
        """Goes to sleep once nothing is waited for."""
        if self._falling_asleep is not None:
            level, mode, done = self._falling_asleep
            is_over = self.error is not None or done.cancelled()
            if is_over or mode == "keep" or not self.engine.has_unfinished_requests():
                run_for(done, lambda: self._sleep(level, mode))
                self._falling_asleep = None

    def _sleep(self, level: int, mode: "Mode") -> None:
        if self.error is not None:
            raise self._stopped()
        self.engine.sleep(level, mode)
        self._hand_over(self.engine.take_changed(), is_turn=True)  # what was in flight

    def _step(self) -> None:
        self.step_began = time.monotonic()
        states = self.engine.advance()
        self.step_began, self.statistics.num_steps = None, self.statistics.num_steps + 1
        self._hand_over(states)

    def _hand_over(self, states: list[RequestState], *, is_turn: bool = False) -> None:
        now = time.monotonic()
        for state in states:
            request_id = state.group.request_id
            self.statistics.note(state.group, now)
            if state.is_finished:
                self.statistics.forget(request_id)
            stream = self._streams.get(request_id)
            if stream is not None and (state.is_finished or not stream.whole):
                self._held[stream] = state
        self._deliver_held(now, is_turn=is_turn)

    def _deliver_held(self, now: float, *, is_turn: bool = False) -> None:
        """Hands over outputs: the first and the last of a stream at once, others in turns."""
        turn_s = min(_SECONDS_PER_STREAM * len(self._held), _LONGEST_TURN_S)
        is_turn = is_turn or now - self._last_delivery >= turn_s
        outputs = []
        for stream, state in list(self._held.items()):
            if is_turn or state.is_finished or not stream.has_begun:
                del self._held[stream]
                stream.has_begun = True
                outputs.append((stream, state.take_delta()))
                if state.is_finished:
                    del self._streams[stream.request_id]
        if is_turn:
            self._last_delivery = now
        deliver(outputs)


def _run(this: "weakref.ref[AsyncLLMEngine]", calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """Steps an engine until it is closed, or nothing refers to it any more.

    Args:
        this: The engine; between two turns the thread does not refer to it.
        calls: What the engine's thread is to do. None wakes it up to end.
    """
    waited: list[Callable[[], None] | None] = []
    while (engine := this()) is not None and engine._turn(waited):
        is_idle = not engine._has_work()
        del engine
        waited = [calls.get()] if is_idle else []


def _fail(this: "weakref.ref[AsyncLLMEngine]", reason: str) -> None:
    if (engine := this()) is not None:
        engine.fail(EngineDeadError(reason))

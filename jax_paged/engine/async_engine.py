"""The engine for asyncio: one thread steps it, and any number of coroutines wait for their outputs."""

import asyncio
import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Self

from jax_paged.checks import check
from jax_paged.config import EngineArgs
from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.engine.statistics import EngineStatistics
from jax_paged.inputs import Prompt
from jax_paged.outputs import RequestOutput
from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

_LOGGER = logging.getLogger(__name__)


class RequestStream:
    """The outputs of one request as an asynchronous iterator.

    Each output holds only what has come since the one before: text, token ids and logprobs. What comes
    while the consumer is busy is joined into one output. Beam searches, and requests with best_of > n, have
    their completions in the last output only. A stream must be iterated to the end or aborted, in the event
    loop that made it. Who does not iterate may call `take` whenever
    `on_ready` was called, which wakes no task.

    Args:
        request_id: Of its request.
        whole: Whether to give a single output, at the end.
        abort: Ends the request of a stream.

    Attributes:
        on_ready: Called when there is an output, or an error, to take.
    """

    def __init__(self, request_id: str, whole: bool, abort: Callable[["RequestStream"], None]) -> None:
        self.request_id = request_id
        self.whole = whole
        self.loop = asyncio.get_running_loop()
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


class AsyncLLMEngine:
    """An LLMEngine that a thread of its own steps; it sleeps while there is nothing to do.

    Args:
        args: Model and limits.
        executor: As LLMEngine takes it.

    Raises:
        ValueError: If the model or a setting can't be used.
    """

    def __init__(self, args: EngineArgs, executor: "Executor | None" = None) -> None:
        self.engine = LLMEngine(args, executor)
        self.error: BaseException | None = None  # what has stopped the engine, if anything
        self.statistics = EngineStatistics()  # changed by the engine's thread alone
        self.step_began: float | None = None  # time.monotonic when the running step began; None between steps
        self._streams: dict[str, RequestStream] = {}  # changed by the engine's thread alone
        self._submitted: set[RequestStream] = set()  # those that its thread has not taken yet
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Makes an engine; the name that vLLM's scripts use."""
        return cls(engine_args)

    @property
    def stopped(self) -> EngineDeadError | None:
        """What requests are told once the engine has stopped; None while it runs."""
        return None if self.error is None else self._stopped()

    async def submit(
        self,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        cache_salt: str = "",
        priority: int = 0,
        whole: bool = False,
    ) -> RequestStream:
        """Starts a request.

        Args:
            prompt: As LLMEngine.check_request takes it, with sampling_params, cache_salt and priority; or
                what that has returned, which holds all of them.
            sampling_params: As LLMEngine.check_request takes it.
            request_id: No unfinished request may have the same.
            cache_salt: As LLMEngine.check_request takes it.
            priority: As LLMEngine.check_request takes it.
            whole: Whether to give a single output, at the end; tokens then cost nothing on their way.

        Returns:
            The stream of its outputs. If the id is taken, it raises ValueError when iterated.

        Raises:
            ValueError: If the engine can't run it.
            EngineDeadError: If the engine has failed or is closed.
        """
        if not isinstance(prompt, CheckedRequest):
            prompt = await asyncio.to_thread(
                self.engine.check_request, prompt, sampling_params, cache_salt=cache_salt, priority=priority
            )
        stream = RequestStream(request_id, whole, self._abort)
        self._submitted.add(stream)
        self._calls.put(lambda: self._add(stream, prompt))
        if self.error is not None:  # checked after the put: the thread sets it before its last look
            raise self._stopped()
        return stream

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        lora_request: None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Runs a request; what each output holds is output_kind's choice. Leaving the loop early aborts it.

        Args:
            prompt: As LLMEngine.check_request takes it.
            sampling_params: As LLMEngine.check_request takes it.
            request_id: No unfinished request may have the same.
            lora_request: None: adapters are not supported.
            cache_salt: As LLMEngine.check_request takes it.
            priority: As LLMEngine.check_request takes it.

        Raises:
            ValueError: If the engine can't run it.
            EngineDeadError: If the engine has failed or is closed.
        """
        check(lora_request is None, "lora_request", lora_request, "None, as adapters are not supported")
        kind = sampling_params.output_kind if isinstance(sampling_params, SamplingParams) else None
        stream = await self.submit(
            prompt,
            sampling_params,
            request_id,
            cache_salt=cache_salt,
            priority=priority,
            whole=kind is RequestOutputKind.FINAL_ONLY,
        )
        outputs = CumulativeOutputs()
        try:
            async for part in stream:
                yield part if kind is RequestOutputKind.DELTA else outputs.add(part)
        finally:
            stream.abort()

    def abort(self, request_id: str | Iterable[str]) -> "_Done":
        """Ends a request, or several; their streams end with what they have, as aborted.

        The call alone does it.

        Returns:
            A coroutine that does nothing, because vLLM's scripts await it or make a task of it. It need not
            be awaited, and may be more than once.
        """
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            self._calls.put(lambda one=one: self._end(one))
        return _Done()

    def shutdown(self) -> None:
        """Does what `close` does; the name that vLLM's scripts use."""
        self.close()

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
        if self.error is None:
            self.error = error
        self._calls.put(None)
        streams = [*list(self._streams.values()), *list(self._submitted)]
        self._deliver([(stream, self._stopped()) for stream in streams])

    def stack(self) -> str:
        """Returns where the engine's thread is, as a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "no thread\n"

    def _abort(self, stream: RequestStream) -> None:
        self._calls.put(lambda: self._end(stream.request_id, stream))

    def _stopped(self) -> EngineDeadError:
        if isinstance(self.error, EngineDeadError):
            return EngineDeadError(str(self.error))  # an exception of its own for each who raises it
        stopped = EngineDeadError(f"the engine has stopped: {str(self.error) or repr(self.error)}")
        stopped.__cause__ = self.error
        return stopped

    # The rest runs in the engine's thread.

    def _add(self, stream: RequestStream, request: CheckedRequest) -> None:
        if self.error is not None:
            self._submitted.discard(stream)
            self._deliver([(stream, self._stopped())])
            return
        try:
            self.engine.add_request(stream.request_id, request)
        except ValueError as error:
            self._deliver([(stream, error)])
        else:
            self._streams[stream.request_id] = stream
        finally:
            self._submitted.discard(stream)

    def _end(self, request_id: str, of: RequestStream | None = None) -> None:
        """Aborts a request, if it is the one of a certain stream."""
        stream = self._streams.get(request_id)
        if stream is not None and of in (None, stream):
            del self._streams[request_id]
            self.statistics.forget(request_id)
            state = self.engine.abort_request(request_id)
            assert state is not None, "a stream without a request"
            self._deliver([(stream, state.take_delta())])

    def _run(self) -> None:
        try:
            while self._serve_calls():
                if self.engine.has_unfinished_requests():
                    self._step()
            self.error = self.error or EngineDeadError("the engine is closed")
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.error = error
            _LOGGER.exception("the engine has failed")
        self._deliver([(stream, self._stopped()) for stream in self._streams.values()])
        self._streams.clear()
        while not self._calls.empty():
            call = self._calls.get()
            if call is not None:
                call()

    def _serve_calls(self) -> bool:
        """Serves all calls at hand, waiting for one if there is nothing else to do; False to end."""
        wait = not self.engine.has_unfinished_requests()
        while wait or not self._calls.empty():
            call = self._calls.get()
            if call is None:
                return False
            call()
            wait = False
        return True

    def _step(self) -> None:
        outputs: list[tuple[RequestStream, RequestOutput | Exception]] = []
        self.step_began = time.monotonic()
        states = self.engine.advance()
        self.step_began = None
        now = time.monotonic()
        self.statistics.num_steps += 1
        for state in states:
            request_id = state.group.request_id
            self.statistics.note(state.group, now)
            if state.is_finished:
                self.statistics.forget(request_id)
            stream = self._streams.get(request_id)
            if stream is None or (stream.whole and not state.is_finished):
                continue
            outputs.append((stream, state.take_delta()))
            if state.is_finished:
                del self._streams[request_id]
        self._deliver(outputs)

    def _deliver(self, items: list[tuple[RequestStream, RequestOutput | Exception]]) -> None:
        """Hands over the outputs of a step in one call per event loop: waking a loop is what costs."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestOutput | Exception]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, part in by_loop.items():
            with contextlib.suppress(RuntimeError):  # a loop that is closed has no consumers
                loop.call_soon_threadsafe(_put_all, part)


class _Done(Coroutine[Any, Any, None]):
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


def _put_all(items: list[tuple[RequestStream, RequestOutput | Exception]]) -> None:
    for stream, item in items:
        stream.put(item)

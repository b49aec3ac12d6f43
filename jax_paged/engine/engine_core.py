"""The core of an engine: schedules steps, dispatches them to the executor and processes their results."""

import collections
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.request import SequenceStatus
from jax_paged.core.result_updater import NewTokens
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.errors import EngineAsleepError, EngineDeadError
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.new_request import request_state
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import check

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

# The unfinished requests of an engine, by id.
Requests = Mapping[str, RequestState]


@dataclasses.dataclass(frozen=True)
class StepCallbacks:
    """Functions of features that the engine calls in its steps. Each is called only for steps that need it.

    Args:
        with_adapters: Adds the weights of the LoRA adapters that a step loads.
        with_token_masks: Adds the token masks of requests with structured output.
        forced_tokens: Yields the tokens that grammars force after new tokens, as (request id, index of the
            sequence, token ids).
    """

    with_adapters: Callable[[SchedulerOutput, Requests], SchedulerOutput]
    with_token_masks: Callable[[SchedulerOutput, Scheduler, Requests], SchedulerOutput]
    forced_tokens: Callable[[list[NewTokens], Requests], Iterator[tuple[str, int, list[int]]]]


class EngineCore:
    """Core of an engine, which runs its unfinished requests step by step.

    The requests have been checked by InputProcessor. `advance` schedules and dispatches steps until
    `max_in_flight` steps are in flight. It then waits for the result of the oldest one and processes it: the
    scheduler accepts the new tokens, the requests append them to their outputs, and sequences end at stop
    strings. With async scheduling two steps are in flight, so the device computes the second one while the
    host processes the result of the first.

    An error in the middle of a step may leave scheduler and requests inconsistent. It is stored in `failure`,
    and no step runs after it.

    Args:
        config: The settings of the engine.
        tokenizer: Decodes outputs; None leaves their texts empty.
        executor: Computes the steps.
        make_scheduler: Makes the scheduler.
        features: The functions through which features take part in a step.
        seed: Seed of the generator that gives seeds to requests without one.

    Attributes:
        max_in_flight: Maximum number of dispatched steps whose results have not been processed.
        requests: The unfinished requests, by id.
        observers: Functions that are called after each step with the scheduler and the step.
        planned: A step that `plan` has scheduled and that is not dispatched yet; None if there is none.
        changed: Requests that have changed since `advance` or `run_planned` last returned, in order.
        is_closed: True if the engine is closed or about to be closed.
        failure: The error that interrupted a step; no step may run after it. None if there was none.
        num_generated_tokens: Number of output tokens of all requests so far.
        num_saved_reads: Number of KV cache reads (tokens) saved so far; see LLMEngine.num_saved_reads.
        weight_version: Name of the current weights.
        num_weight_updates: Number of weight updates so far.
        pause_reason: Why no step may run now (see sleeping.py); None if steps may run.
        seeds: Generator of seeds for requests without a seed.
        num_names: Number of names of pinned prefixes and forks made so far.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        executor: "Executor",
        make_scheduler: Callable[[], Scheduler],
        features: StepCallbacks,
        *,
        seed: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.executor = executor
        self.make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self.max_in_flight = 2 if config.async_scheduling else 1
        self.requests: dict[str, RequestState] = {}
        self.observers: list[Callable[[Scheduler, SchedulerOutput], None]] = []
        self.planned: SchedulerOutput | None = None
        self.changed: dict[RequestState, None] = {}
        self.is_closed = False
        self.failure: BaseException | None = None
        self.num_generated_tokens = self.num_saved_reads = 0
        self.weight_version, self.num_weight_updates = "0", 0
        self.pause_reason: str | None = None
        self.seeds = random.Random(seed)
        self.num_names = 0
        self._features = features
        self._in_flight: collections.deque[SchedulerOutput] = collections.deque()

    @property
    def has_work(self) -> bool:
        """Whether a step has work to do: unfinished requests, steps in flight or requests to return."""
        return self.scheduler.has_unfinished or self._is_busy or bool(self.changed)

    @property
    def _is_busy(self) -> bool:
        return bool(self._in_flight or self.planned)

    def check_can_run(self) -> None:
        """Checks that the engine can run requests.

        Raises:
            EngineDeadError: If the engine is closed or has failed.
            EngineAsleepError: If the engine sleeps.
            RuntimeError: If the engine serves the caller's model, and the caller has replaced its weights.
        """
        self.check_alive()
        if self.pause_reason is not None:
            raise EngineAsleepError(self.pause_reason)
        self.executor.check_weights()

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine is closed or has failed."""
        self.check_not_closed()
        if self.failure is not None:
            message = f"the engine has failed: {self.failure!r}; create a new engine"
            raise EngineDeadError(message) from self.failure

    def check_not_closed(self) -> None:
        """Raises EngineDeadError if the engine is closed."""
        if self.is_closed:
            raise EngineDeadError("this engine is closed; create a new engine")

    def check_not_recurrent(self, method: str, why: str) -> None:
        """Checks that the model has no recurrent layers, which keep a state of each sequence.

        Args:
            method: The method of LLMEngine that does not support recurrent layers.
            why: The reason, as a clause for the error message.

        Raises:
            ValueError: If the model has recurrent layers.
        """
        allowed = f"a model without recurrent layers for {method} because {why}"
        check(not self.config.num_state_slots, "model", self.config.architecture, allowed)

    def new_seed(self) -> int:
        """Returns the seed of the next request without a seed."""
        return self.seeds.getrandbits(63)

    def new_name(self, prefix: str) -> str:
        """Returns a name that no pinned prefix or fork has had."""
        self.num_names += 1
        return f"{prefix}-{self.num_names - 1}"

    def add(self, request_id: str, request: CheckedRequest, arrival_time: float | None = None) -> None:
        """Adds a request to the waiting queue.

        The request is not added if a custom scheduler or its key function raises an error.

        Args:
            request_id: The id of the request. Must differ from the ids of all unfinished requests.
            request: The checked request.
            arrival_time: Time of arrival, in the engine's clock (seconds); None means now.
        """
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        state = request_state(request_id, request, arrival_time, self.new_seed, self.tokenizer)
        if request.prior_outputs:
            state.take_delta()  # the caller already has the prior outputs
        with deferred_interrupt():
            try:
                self.scheduler.add(state.group)
            except BaseException:
                self.scheduler.abort(request_id)
                raise
            self.requests[request_id] = state

    def run_to_end(self, requests: Mapping[str, CheckedRequest]) -> list[RequestState]:
        """Runs requests to their end and returns their states. The engine must have no other requests.

        None of the requests is left in the engine afterwards, even if an error is raised.
        """
        states: list[RequestState] = []
        try:
            for request_id, request in requests.items():
                self.add(request_id, request)
                states.append(self.requests[request_id])
            while self.has_work:
                self.check_can_run()
                self.advance()
        finally:
            self.end(requests)
        return states

    def end(self, request_ids: Iterable[str]) -> None:
        """Aborts the given requests that are unfinished, and waits for steps in flight if no others remain.

        If the engine has failed, requests are aborted without waiting. If it is closed, this does nothing.
        """
        if self.is_closed:
            return
        with deferred_interrupt(), contextlib.ExitStack() as stack:
            stack.callback(lambda: self.failure is not None or self.wait_if_idle())
            # The stack calls abort for each request, even if abort raises an error for another one. It calls
            # the function above last.
            for request_id in request_ids:
                stack.callback(self.abort, request_id)

    def abort(self, request_id: str) -> RequestState | None:
        """Aborts a request, even after a failure. Returns its state; None if there is no such request."""
        with deferred_interrupt():
            return self._abort(request_id)

    def _abort(self, request_id: str) -> RequestState | None:
        state = self.requests.get(request_id)
        if state is None:
            return None
        now = time.monotonic()
        try:
            self.scheduler.abort(request_id)
            if self.failure is None:
                self._finish_ended(state, now)
        except Exception as error:
            if self.failure is None:
                self.failure = error
                raise
            # The scheduler may be inconsistent after an incomplete step, so its errors are ignored here.
            for seq in state.group.unfinished:
                seq.status = SequenceStatus.FINISHED_ABORTED
        finally:
            state.group.metrics.finished_time = now
            state.mark_finished()
            self.requests.pop(request_id, None)
            self.changed.pop(state, None)
        return state

    def advance(self) -> list[RequestState]:
        """Runs one step: the planned one if there is one. Returns the requests that got tokens or ended.

        If no request is unfinished, no step is planned and some requests have changed earlier, it runs no
        step and only returns these requests.
        """
        with self._uninterrupted_step():
            in_flight, most = self._in_flight, self.max_in_flight
            if self.planned is not None:
                self._dispatch(self.planned)
            elif self.changed and not self.scheduler.has_unfinished:
                return self.take_changed()
            while not in_flight or (len(in_flight) < most and self.scheduler.can_run_ahead):
                self._dispatch(self._schedule())
            self._process_result(in_flight.popleft(), self.executor.result())
            return self.take_changed()

    def plan(self) -> SchedulerOutput:
        """Schedules the next step without running it. Replaces a planned step that has not run.

        A replaced step is still dispatched, but without its sequences: the executor needs its other contents,
        such as copies of blocks.
        """
        self.wait_for_steps()
        with self._uninterrupted_step():
            if self.planned is not None:
                self._run_planned([] if self.planned.scheduled else None)
            self.planned = self._schedule()
            return self.planned

    def run_planned(self, rows: list[int] | None) -> list[RequestState]:
        """Runs the planned step. Returns the requests that got tokens or ended.

        Args:
            rows: Indices of the scheduled sequences to run, in this order (see Scheduler.edit); None runs the
                step unchanged.
        """
        with self._uninterrupted_step():
            self._run_planned(rows)
            return self.take_changed()

    def run_draft(self, request_id: str, token_ids: list[int]) -> ModelRunnerOutput | None:
        """Runs one step that verifies draft tokens for a request. The next step returns the changed requests.

        Args:
            request_id: The request.
            token_ids: The draft tokens.

        Returns:
            The result of the step; None if there are not enough free blocks.
        """
        self.wait_for_steps()
        with self._uninterrupted_step():
            output = self.scheduler.schedule_draft(request_id, token_ids)
            if output is None:
                return None
            self.executor.dispatch(self._masked(output))
            result = self.executor.result()
            self._process_result(output, result)
            return result

    def wait_for_steps(self) -> None:
        """Waits for all steps in flight and processes their results.

        The next step returns the changed requests.
        """
        with self._uninterrupted_step():
            while self._in_flight:
                self._process_result(self._in_flight.popleft(), self.executor.result())

    def wait_if_idle(self) -> bool:
        """Waits for all steps in flight if no request is unfinished; does not wait otherwise.

        Returns:
            True if the engine has nothing left to do.
        """
        while self._is_busy and not self.scheduler.has_unfinished:
            if self.planned is not None:
                self._dispatch(self.planned)
            self.wait_for_steps()
        return not self.has_work

    def run_all_to_end(self) -> None:
        """Runs all requests to their end. The next step returns the changed requests."""
        changed: dict[RequestState, None] = {}
        while self.has_work:
            changed |= dict.fromkeys(self.advance())
        self.changed |= changed

    @contextlib.contextmanager
    def _uninterrupted_step(self) -> Iterator[None]:
        """Delays Ctrl-C until the end of the block, and stores an error that interrupts the step."""
        with deferred_interrupt():
            try:
                yield
            except BaseException as error:
                self.failure = error
                raise

    def _schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule(time.monotonic())
        return self._features.with_adapters(output, self.requests) if output.adapter_loads else output

    def _dispatch(self, output: SchedulerOutput) -> None:
        self.planned = None
        self._in_flight.append(output)
        self.executor.dispatch(self._masked(output))

    def _masked(self, output: SchedulerOutput) -> SchedulerOutput:
        if not any(state.is_constrained for state in self.requests.values()):
            return output
        return self._features.with_token_masks(output, self.scheduler, self.requests)

    def _run_planned(self, rows: list[int] | None) -> None:
        output = self.planned
        assert output is not None, "no step is planned"
        self._dispatch(output if rows is None else self.scheduler.edit(output, rows))
        self._process_result(self._in_flight.popleft(), self.executor.result())

    def take_changed(self) -> list[RequestState]:
        """Returns the requests that have changed since the last call."""
        changed = list(self.changed)
        self.changed.clear()
        return changed

    def _process_result(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Processes the result of a step.

        The scheduler accepts the tokens first. The requests then append them to their outputs, which may end
        sequences at a stop string or at the end of a grammar. Requests whose sequences have all ended are
        removed.
        """
        now = time.monotonic()
        self.num_saved_reads += result.num_saved_reads
        update = self.scheduler.update(output, result, now)
        for group, start, logprobs in update.prompt_logprobs:
            self.requests[group.request_id].add_prompt_logprobs(start, logprobs)
        ended = dict.fromkeys([*output.ended, *(group.request_id for group in update.ended)])
        for group, seq, start, arrays in update.captured:
            self.requests[group.request_id].add_captured(seq, start, arrays)
        for group, seq, token_ids, logprobs in update.new_tokens:
            self.num_generated_tokens += len(token_ids)
            end = self.requests[group.request_id].add_tokens(seq, token_ids, logprobs)
            if end is not None:
                stop, num_output_tokens = end
                status = SequenceStatus.FINISHED_STOPPED
                self.scheduler.finish(group, seq, status, now, stop, num_output_tokens=num_output_tokens)
                ended[group.request_id] = None
        if self.scheduler.drafts is not None and self.scheduler.drafts.accepts_forced_tokens:
            for request_id, index, token_ids in self._features.forced_tokens(
                update.new_tokens, self.requests
            ):
                self.scheduler.propose_forced(request_id, index, token_ids)
        request_ids = [*output.ended, *(group.request_id for group in update.changed)]
        self.changed |= dict.fromkeys(self.requests[request_id] for request_id in request_ids)
        for group in update.changed:
            self.requests[group.request_id].record_weight_version(self.weight_version)
        for request_id in ended:
            self._finish_ended(self.requests[request_id], now)
        for observe in self.observers:
            observe(self.scheduler, output)

    def _finish_ended(self, state: RequestState, now: float) -> None:
        """Completes the outputs of ended sequences. Removes the request if all sequences have ended."""
        for seq, stop in state.finish():
            if seq.status is not SequenceStatus.FINISHED_ABORTED:
                self.scheduler.finish(state.group, seq, SequenceStatus.FINISHED_STOPPED, now, stop)
        if state.is_finished:
            del self.requests[state.group.request_id]

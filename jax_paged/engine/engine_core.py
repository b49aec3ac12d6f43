"""The loop of an engine: schedules steps, keeps the executor busy, and gives requests their tokens."""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.result_updater import NewTokens
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import SequenceStatus
from jax_paged.engine.features.interactive.step_plan import StepPlan
from jax_paged.engine.features.structured_output.grammars import Matcher, token_masks
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.output_processor import RequestState

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor


class StepLoop:
    """Steps the unfinished requests of an engine; the requests themselves are checked before.

    Args:
        make_scheduler: Makes what decides what each step computes.
        executor: Computes the steps.
        max_in_flight: Steps that the executor works on at a time. A second one keeps it busy while the host
            takes in the first.

    Attributes:
        requests: The unfinished requests, by id.
        observers: Called after each step, with the scheduler and the step that it has taken in.
        failure: What has stopped a step half-way; nothing may be stepped any more then.
        num_shared_tokens: Those of all ModelRunnerOutputs.
        weight_version: A name of the weights that draw tokens now.
        num_weight_updates: How often they were exchanged.
        asleep: Tags of the memory that is given away, see sleeping.py; nothing may be stepped meanwhile.
        sleep_level: How deep it sleeps; 0 while it is awake.
    """

    def __init__(
        self, make_scheduler: Callable[[], Scheduler], executor: "Executor", max_in_flight: int
    ) -> None:
        self.make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self.executor = executor
        self.max_in_flight = max_in_flight
        self.requests: dict[str, RequestState] = {}
        self.observers: list[Callable[[Scheduler, SchedulerOutput], None]] = []
        self.failure: BaseException | None = None
        self.num_shared_tokens = 0
        self.weight_version, self.num_weight_updates = "0", 0
        self.asleep: tuple[str, ...] = ()
        self.sleep_level = 0
        self._in_flight: collections.deque[SchedulerOutput] = collections.deque()
        self._plan: StepPlan | None = None  # scheduled, and not dispatched
        # What has changed since advance() or run() last returned.
        self.changed: dict[RequestState, None] = {}

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do, if only to wait for what the device still works on."""
        return self.scheduler.has_unfinished or self._is_busy or bool(self.changed)

    @property
    def is_planned(self) -> bool:
        """Whether a plan has not run."""
        return self._plan is not None

    @property
    def _is_busy(self) -> bool:
        return bool(self._in_flight or self._plan)

    def add(self, state: RequestState) -> None:
        """Puts a request into the queue; its id is that of no unfinished one.

        If a custom scheduler or its key function raises an error, the request is not in the queue.
        """
        request_id = state.group.request_id
        with deferred_interrupt():
            try:
                self.scheduler.add(state.group)
            except BaseException:
                self.scheduler.abort(request_id)
                raise
            self.requests[request_id] = state

    def abort(self, request_id: str) -> RequestState | None:
        """Ends a request now, also after a failure; returns its state, None if there is none."""
        with deferred_interrupt():
            return self._abort(request_id)

    def _abort(self, request_id: str) -> RequestState | None:
        state = self.requests.get(request_id)
        if state is None:
            return None
        state.group.metrics.finished_time = now = time.monotonic()
        try:
            self.scheduler.abort(request_id)
            if self.failure is None:
                self._finish_ended(state, now)
        except Exception as error:
            if self.failure is None:
                self.failure = error
                raise
            # Nothing can be expected of a scheduler whose step was left half done.
            for seq in state.group.unfinished:
                seq.status = SequenceStatus.FINISHED_ABORTED
        finally:
            state.give_up()
            self.requests.pop(request_id, None)
            self.changed.pop(state, None)
        return state

    def advance(self) -> list[RequestState]:
        """Runs one step, as planned if it is; returns the requests that got a token or ended."""
        with self._unfinished_step():
            in_flight, most = self._in_flight, self.max_in_flight
            if self._plan is not None:
                self._dispatch(self._plan.output)
            elif self.changed and not self.scheduler.has_unfinished:
                return self.take_changed()
            while not in_flight or (len(in_flight) < most and self.scheduler.can_run_ahead):
                self._dispatch(self._schedule())
            self._take_in(in_flight.popleft(), self.executor.result())
            return self.take_changed()

    def plan(self) -> StepPlan:
        """Schedules a step and does not run it; a plan before it that has not run is dropped."""
        self.settle()
        with self._unfinished_step():
            if self._plan is not None:
                self._run(self._plan.only([]))
            self._plan = StepPlan.of(self._schedule(), self.scheduler.find)
            return self._plan

    def run(self, plan: StepPlan) -> list[RequestState]:
        """Runs a plan, perhaps with fewer rows or in another order; returns what `advance` does.

        Raises:
            ValueError: If it is not what `plan` returned last, or was edited in another way.
        """
        plan.check(self._plan)
        with self._unfinished_step():
            self._run(plan)
            return self.take_changed()

    def run_draft(self, request_id: str, token_ids: list[int]) -> ModelRunnerOutput | None:
        """Runs a step of Scheduler.schedule_draft; what it changes is returned with the next step.

        Returns:
            Its result; None if there are no blocks for it.
        """
        self.settle()
        with self._unfinished_step():
            output = self.scheduler.schedule_draft(request_id, token_ids)
            if output is None:
                return None
            self.executor.dispatch(self._with_masks(output))
            result = self.executor.result()
            self._take_in(output, result)
            return result

    def settle(self) -> None:
        """Takes in the results of all steps in flight; what they change is returned with the next step."""
        with self._unfinished_step():
            while self._in_flight:
                self._take_in(self._in_flight.popleft(), self.executor.result())

    def drain(self) -> bool:
        """Waits for what the device still computes for requests that have ended; returns if no others run."""
        while self._is_busy and not self.scheduler.has_unfinished:
            if self._plan is not None:
                self._dispatch(self._plan.output)
            self.settle()
        return not self.has_unfinished

    def finish_all(self) -> None:
        """Runs all requests to their ends; what that changes is returned with the next step."""
        changed: dict[RequestState, None] = {}
        while self.has_unfinished:
            changed |= dict.fromkeys(self.advance())
        self.changed |= changed

    @contextlib.contextmanager
    def _unfinished_step(self) -> Iterator[None]:
        """Keeps Ctrl-C until the end of the step, and notes what stops one half-way."""
        with deferred_interrupt():
            try:
                yield
            except BaseException as error:
                self.failure = error
                raise

    def _schedule(self) -> SchedulerOutput:
        """Returns the next step, with what the adapters are that take a slot in it."""
        output = self.scheduler.schedule(time.monotonic())
        if not output.adapter_loads:
            return output
        known = {s.adapter.key: s.adapter for s in self.requests.values() if s.adapter is not None}
        loads = [load._replace(weights=known[load.adapter]) for load in output.adapter_loads]
        return dataclasses.replace(output, adapter_loads=tuple(loads))

    def _dispatch(self, output: SchedulerOutput) -> None:
        self._plan = None
        self._in_flight.append(output)
        self.executor.dispatch(self._with_masks(output))

    def _with_masks(self, output: SchedulerOutput) -> SchedulerOutput:
        """Returns a step with what the forms of its requests allow."""
        matchers: dict[int, tuple[Matcher, list[int]]] = {}
        for i, sample in enumerate(output.samples):
            found = self.scheduler.find(sample.seq_id)
            if found is not None and found[0].sampling_params.structured_outputs is not None:
                group, seq = found
                matcher = self.requests[group.request_id].matcher_of(seq)
                assert matcher is not None, "it was made when the request was checked"
                matchers[i] = matcher, seq.output_token_ids
        return dataclasses.replace(output, token_masks=token_masks(output, matchers)) if matchers else output

    def _run(self, plan: StepPlan) -> None:
        assert self._plan is not None, "only what is planned runs"
        output = self._plan.output
        if plan.output != output:
            output = self.scheduler.edit(output, self._plan.places_of(plan))
        self._dispatch(output)
        self._take_in(self._in_flight.popleft(), self.executor.result())

    def take_changed(self) -> list[RequestState]:
        """Returns what has changed since it was last asked for."""
        changed = list(self.changed)
        self.changed.clear()
        return changed

    def _take_in(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        now = time.monotonic()
        self.num_shared_tokens += result.num_shared_tokens
        update = self.scheduler.update(output, result, now)
        for group, start, logprobs in update.prompt_logprobs:
            self.requests[group.request_id].add_prompt_logprobs(start, logprobs)
        ended = dict.fromkeys([*output.ended, *(group.request_id for group in update.ended)])
        for group, seq, start, arrays in update.captured:
            self.requests[group.request_id].add_captured(seq, start, arrays)
        for group, seq, token_ids, logprobs in update.new_tokens:
            found = self.requests[group.request_id].add_tokens(seq, token_ids, logprobs)
            if found is not None:
                stop, num_output_tokens = found
                status = SequenceStatus.FINISHED_STOPPED
                self.scheduler.finish(group, seq, status, now, stop, num_output_tokens=num_output_tokens)
                ended[group.request_id] = None
        if self.scheduler.drafts is not None and self.scheduler.drafts.takes_expected:
            self._expect_forced(update.new_tokens)
        request_ids = [*output.ended, *(group.request_id for group in update.changed)]
        self.changed |= dict.fromkeys(self.requests[request_id] for request_id in request_ids)
        for group in update.changed:
            self.requests[group.request_id].note_weights(self.weight_version)
        for request_id in ended:
            self._finish_ended(self.requests[request_id], now)
        for observe in self.observers:
            observe(self.scheduler, output)

    def _expect_forced(self, new_tokens: list[NewTokens]) -> None:
        """Tells the scheduler what the forms of running requests leave no choice about."""
        for group, seq, _, _ in new_tokens:
            if group.sampling_params.structured_outputs is None or seq.status.is_finished:
                continue
            matcher = self.requests[group.request_id].matcher_of(seq)
            assert matcher is not None, "it was made when the request was checked"
            matcher.follow(seq.output_token_ids)
            if token_ids := matcher.forced():
                self.scheduler.expect(group.request_id, group.sequences.index(seq), token_ids)

    def _finish_ended(self, state: RequestState, now: float) -> None:
        """Finishes the outputs whose sequences have ended; forgets a request that has ended as a whole."""
        for seq, stop in state.finish():
            if seq.status is not SequenceStatus.FINISHED_ABORTED:
                self.scheduler.finish(state.group, seq, SequenceStatus.FINISHED_STOPPED, now, stop)
        if state.is_finished:
            del self.requests[state.group.request_id]

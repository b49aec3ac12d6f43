"""The loop of an engine: schedules steps, keeps the executor busy, and gives requests their tokens."""

import collections
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import SequenceStatus
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.output_processor import RequestState

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor


class StepLoop:
    """Steps the unfinished requests of an engine; the requests themselves are checked before.

    Args:
        scheduler: Decides what each step computes.
        executor: Computes the steps.
        max_in_flight: Steps that the executor works on at a time. A second one keeps it busy while the host
            takes in the first.

    Attributes:
        requests: The unfinished requests, by id.
        observers: Called after each step, with the scheduler and the step that it has taken in.
        failure: What has stopped a step half-way; nothing may be stepped any more then.
    """

    def __init__(self, scheduler: Scheduler, executor: "Executor", max_in_flight: int) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.max_in_flight = max_in_flight
        self.requests: dict[str, RequestState] = {}
        self.observers: list[Callable[[Scheduler, SchedulerOutput], None]] = []
        self.failure: BaseException | None = None
        self._in_flight: collections.deque[SchedulerOutput] = collections.deque()

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do, if only to wait for what the device still works on."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def add(self, state: RequestState) -> None:
        """Puts a request into the queue; its id is that of no unfinished one."""
        self.scheduler.add(state.group)
        self.requests[state.group.request_id] = state

    def abort(self, request_id: str) -> RequestState | None:
        """Ends a request now, also after a failure; returns its state, None if there is none."""
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
        return state

    def advance(self) -> list[RequestState]:
        """Runs one step; returns the requests that got a token or ended."""
        with deferred_interrupt():
            try:
                in_flight, most = self._in_flight, self.max_in_flight
                while not in_flight or (len(in_flight) < most and self.scheduler.can_run_ahead):
                    in_flight.append(self.scheduler.schedule(time.monotonic()))
                    self.executor.dispatch(in_flight[-1])
                return self._take_in(in_flight.popleft())
            except BaseException as error:
                self.failure = error
                raise

    def drain(self) -> bool:
        """Waits for what the device still computes for requests that have ended; returns if no others run."""
        while self._in_flight and not self.scheduler.has_unfinished:
            self.advance()
        return not self.scheduler.has_unfinished

    def _take_in(self, output: SchedulerOutput) -> list[RequestState]:
        result = self.executor.result()
        now = time.monotonic()
        update = self.scheduler.update(output, result, now)
        for group, start, logprobs in update.prompt_logprobs:
            self.requests[group.request_id].add_prompt_logprobs(start, logprobs)
        ended = dict.fromkeys([*output.ended, *(group.request_id for group in update.ended)])
        for group, seq, token_ids, logprobs in update.new_tokens:
            found = self.requests[group.request_id].add_tokens(seq, token_ids, logprobs)
            if found is not None:
                stop, num_output_tokens = found
                status = SequenceStatus.FINISHED_STOPPED
                self.scheduler.finish(group, seq, status, now, stop, num_output_tokens=num_output_tokens)
                ended[group.request_id] = None
        request_ids = [*output.ended, *(group.request_id for group in update.changed)]
        changed = [self.requests[request_id] for request_id in request_ids]
        for request_id in ended:
            self._finish_ended(self.requests[request_id], now)
        for observe in self.observers:
            observe(self.scheduler, output)
        return changed

    def _finish_ended(self, state: RequestState, now: float) -> None:
        """Finishes the outputs whose sequences have ended; forgets a request that has ended as a whole."""
        for seq, stop in state.finish():
            if seq.status is not SequenceStatus.FINISHED_ABORTED:
                self.scheduler.finish(state.group, seq, SequenceStatus.FINISHED_STOPPED, now, stop)
        if state.is_finished:
            del self.requests[state.group.request_id]

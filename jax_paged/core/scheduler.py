"""Decides which sequences run in the next step and how many tokens each of them computes.

Pure logic: no arrays, clock or I/O.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jax_paged.core import composition
from jax_paged.core.admission import Admission, AdmissionResult
from jax_paged.core.batch_slots import BatchSlots
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.preemption import Preemption, PreemptionMode
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import ResultUpdater, StepUpdate
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.step_builder import StepBuilder, StepPlanner
from jax_paged.core.stop_conditions import StopConditions
from jax_paged.core.token_planner import TokenPlanner
from jax_paged.errors import check_choice, check_int, check_number

if TYPE_CHECKING:
    from jax_paged.core.features.interactive.request_edits import RequestEdit
    from jax_paged.speculation import Speculation

Policy = Literal["fcfs", "priority"] | Callable[[SequenceGroup], Any]


class Phase(NamedTuple):
    """One pass over the requests, to fill a step.

    Args:
        next_candidate: Returns the request that is admitted next.
        takes_part: Returns whether a running sequence takes part, given how many tokens it would compute;
            None if all take part.
    """

    next_candidate: Callable[[], SequenceGroup | None]
    takes_part: Callable[[int], bool] | None = None


class Scheduler:
    """Schedules running and waiting requests in one order, while tokens, batch slots and blocks last.

    A request is admitted when the blocks of all its tokens are at hand, and gets them at once; its prompt is
    then computed in chunks of whatever the token budget leaves. A chunk leaves a token to every running
    sequence that only needs one, also to those behind it: so every running request advances in every step,
    unless its beams don't all fit into the budget, or it waits for blocks to copy to.

    When blocks run out, the last request in the order is preempted with all its sequences: it waits, and
    recomputes its tokens when it is admitted again; or its blocks are swapped out to host memory. A request
    with several sequences is swapped, as recomputing would lose what they share, others are recomputed
    (the paper's rule), unless preemption_mode says otherwise; without room in host memory, all are
    recomputed. Requests of a higher priority value or key are preempted for one of a lower, but only if that
    makes room enough for it. While a request is swapped out no new one behind it is admitted, and a step
    that preempts for a running request admits no other. So the first request always advances.

    Every output of schedule() is handed back to update(), in order; add, abort, finish and the schedule() of
    later steps may come in between. A block that is freed meanwhile is held back until update() has seen
    every step that may write to it.

    Args:
        block_manager: Owner of the blocks; used by this scheduler alone.
        max_num_seqs: Maximum sequences running at a time; a request counts all that it may come to have.
        max_num_batched_tokens: Token budget of one step.
        max_model_len: Maximum tokens of a prompt and its output together.
        eos_token_ids: Tokens that end a sequence, unless its request ignores them.
        watermark: Share of the blocks that stays free when a request is admitted beside running ones.
        scheduling_policy: "fcfs", "priority", or a function of a new request that returns its key. A request
            of a lower priority or key goes first, and takes blocks and batch slots from running ones of a
            higher one.
        preemption_mode: "recompute" or "swap" for all requests; None for the paper's rule.
        enable_chunked_prefill: False computes whole prompts only, in steps of their own that go first.
        scheduler_delay_factor: New requests wait this many times as long as the last prompt took, to come
            together.
        num_scheduler_steps: Decode steps done in one while no request waits and the blocks are at hand; 1 for
            none.
        speculation: How drafts of tokens are made; None for no drafts.
        max_loras: Adapters of requests that run at a time.

    Raises:
        ValueError: If a value is out of range.

    Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023, 4.5.
    """

    def __init__(
        self,
        *,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        watermark: float = 0.01,
        scheduling_policy: Policy = "fcfs",
        preemption_mode: PreemptionMode | None = None,
        enable_chunked_prefill: bool = True,
        scheduler_delay_factor: float = 0.0,
        num_scheduler_steps: int = 1,
        speculation: "Speculation | None" = None,
        max_loras: int = 0,
    ) -> None:
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        check_int("max_model_len", max_model_len, 1)
        check_int("num_scheduler_steps", num_scheduler_steps, 1)
        check_int("max_loras", max_loras, 0)
        if not enable_chunked_prefill:
            condition = "(max_model_len) without chunked prefill"
            check_int("max_num_batched_tokens", max_num_batched_tokens, max_model_len, condition=condition)
        check_number("watermark", watermark, 0, 1)
        if not callable(scheduling_policy):
            check_choice("scheduling_policy", scheduling_policy, ("fcfs", "priority"))
        check_choice("preemption_mode", preemption_mode, (None, "recompute", "swap"))
        check_number("scheduler_delay_factor", scheduler_delay_factor, 0, math.inf)
        self.block_manager = block_manager
        # Every running sequence has a token in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.scheduling_policy = scheduling_policy
        self.preemption_mode: PreemptionMode | None = preemption_mode
        self.enable_chunked_prefill = enable_chunked_prefill
        self.scheduler_delay_factor = scheduler_delay_factor
        self.num_scheduler_steps = num_scheduler_steps
        self.speculation = speculation
        self.max_loras = max_loras
        self.watermark = watermark
        self.queues = RequestQueues()
        self._step_ids = itertools.count()
        self._num_in_flight = 0
        self._awaits_results = False  # True if the next step needs the results of the steps in flight
        self._connect()

    def _connect(self) -> None:
        """Builds the parts of the scheduler; composition.py builds those that are features."""
        manager, queues = self.block_manager, self.queues
        self._stop_conditions = stops = StopConditions(self.eos_token_ids, self.max_model_len)
        self.adapters = composition.build_adapter_slots(self.max_loras, queues)
        multi_step = composition.build_multi_step(manager, queues, stops, self.num_scheduler_steps)
        self.drafts = composition.build_draft_planner(
            manager, queues, stops, self.speculation, self.max_num_batched_tokens
        )
        self._step_planners: list[StepPlanner] = [p for p in (self.drafts, multi_step) if p is not None]
        self._batch_slots = BatchSlots(manager, stops, self.adapters)
        self._updater = ResultUpdater(
            manager,
            queues,
            self._batch_slots,
            stops,
            read_planned=composition.read_planned,
            beam_search=composition.build_beam_search(manager, stops),
        )
        self._preemption = Preemption(manager, queues, self._updater, self.preemption_mode)
        self._admission = Admission(
            manager,
            queues,
            self._preemption,
            self.adapters,
            max_num_seqs=self.max_num_seqs,
            watermark=self.watermark,
            enable_chunked_prefill=self.enable_chunked_prefill,
            scheduler_delay_factor=self.scheduler_delay_factor,
        )
        self._token_planner = TokenPlanner(
            manager, queues, self._admission, self._preemption, stops, self.enable_chunked_prefill
        )
        self.editor = composition.RequestEditor(manager, queues, self._preemption, self.max_num_seqs)
        if self.enable_chunked_prefill:
            self._phases = [Phase(self._admission.first)]
        else:  # a step computes either whole prompts or decodes
            self._phases = [
                Phase(self._admission.first_waiting, lambda num_tokens: num_tokens > 1),
                Phase(self._admission.first_if_swapped, lambda num_tokens: num_tokens == 1),
            ]

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting, running or swapped out."""
        return len(self.queues) > 0

    @property
    def can_run_ahead(self) -> bool:
        """True if the next step can be scheduled before the results of the steps in flight have arrived."""
        if self.drafts is not None and self.drafts.waits:
            return False
        return self.has_unfinished and not self._awaits_results

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the sequence of an id, with its request; None if it has left its batch slot."""
        return self._batch_slots.find(seq_id)

    def add(self, group: SequenceGroup) -> None:
        """Puts a request into the waiting queue.

        Args:
            group: With one sequence (or all, if they go on from tokens that are given), which leaves room for
                a token in max_model_len (unless it is pooled), at most max_num_seqs to come, and an own id.
        """
        seq = max(group.unfinished, key=len)
        room = group.sampling_params.pooling is None
        assert 0 < len(seq) <= self.max_model_len - room, f"prompt of {len(seq)} tokens"
        assert group.max_num_seqs <= self.max_num_seqs, f"{group.max_num_seqs} sequences"
        assert self.scheduling_policy != "fcfs" or not group.priority, "a priority under fcfs"
        if group.request.features is not None:
            self._check_features(group)
        self.derive_fields(group)
        self.queues.add(group)

    def _check_features(self, group: SequenceGroup) -> None:
        assert not group.adapter or self.max_loras, "there is no slot for an adapter"

    def derive_fields(self, group: SequenceGroup) -> None:
        """Sets the fields of a request that the scheduler derives: its key and the flags of features."""
        group.key = self.key_of(group)
        composition.set_request_flags(group, self._step_planners)

    def key_of(self, group: SequenceGroup) -> Any:
        """Returns the value that orders requests: those of a lower key go first."""
        return self.scheduling_policy(group) if callable(self.scheduling_policy) else group.priority

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Ends a request as FINISHED_ABORTED, without a time, and frees its blocks; None if there is none."""
        group = self.queues.find(request_id)
        if group is not None:
            self._updater.end_group(group, SequenceStatus.FINISHED_ABORTED, None)
        return group

    def finish(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        now: float,
        stop_reason: int | str | None = None,
        *,
        num_output_tokens: int | None = None,
    ) -> None:
        """Ends a sequence for a reason that the scheduler can't see (a stop string) and frees its blocks.

        A sequence that has ended already only takes the new status and reason.

        Args:
            group: Its request.
            seq: The sequence.
            status: A finished status.
            now: Time, in the engine's clock (seconds).
            stop_reason: What ended it, if a stop string did.
            num_output_tokens: How many of its output tokens stay, those up to a stop string; None for all.
        """
        assert status.is_finished, status
        if seq.status.is_finished:
            seq.status, seq.stop_reason = status, stop_reason
        else:
            self._updater.end(group, seq, status, now, stop_reason)
        if num_output_tokens is not None:
            seq.truncate(num_output_tokens)

    def forget_prefixes(self, kept_salt: str | None) -> None:
        """Shares nothing computed so far from now on; see Preemption. No step is in flight."""
        self._preemption.forget_prefixes(kept_salt)

    def schedule(self, now: float) -> SchedulerOutput:
        """Chooses the sequences and token counts of the next step, and allocates their blocks.

        1. Open a step with the token budget.
        2. A planner may take the whole step: one that verifies draft tokens, or a multi-step.
        3. Otherwise fill the step with running and newly admitted requests, in order.
        4. Build the output: assign batch slots, and collect what the executor has to copy and load.

        It may be called before earlier steps have returned (see can_run_ahead): the tokens that these steps
        draw are NO_TOKEN in the output, and sequences that depend on their values skip the step.

        Args:
            now: Time, in the engine's clock (seconds).

        Returns:
            The step; nothing is left to run if `scheduled` and `ended` are empty.
        """
        assert not self._num_in_flight or self.can_run_ahead, "the step has to know the results of others"
        step = StepBuilder(self.max_num_batched_tokens, is_ahead=self._num_in_flight > 0)
        self._admission.begin_step(now)
        if self.drafts is not None:
            self.drafts.note_schedule(now, is_first=not step.is_ahead)

        if not any(planner.plan(step) for planner in self._step_planners):
            for phase in self._phases:
                step.is_closed = False
                self._fill(step, phase, now)
                if not step.is_empty:
                    break

        output = self._build(step)
        if step.longer_rows and step.planned is None:
            self._admission.note_prompt(now)
        return output

    def edit(self, output: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Drops requests from the step that was scheduled last, or re-orders its rows, before it is computed.

        Args:
            output: What schedule() returned last.
            rows: Indices in output.scheduled of the rows that stay, in their order: rows of one token first,
                and of a request all or none. What is dropped keeps its blocks and is computed later.

        Returns:
            The step that takes the place of `output`, also in update().
        """
        return composition.edit_step(output, rows, self._batch_slots, self.block_manager)

    def schedule_draft(self, request_id: str, token_ids: list[int]) -> SchedulerOutput | None:
        """Schedules a step of one request that decodes, with tokens that may follow; None without blocks."""
        assert not self._num_in_flight, "the draft follows the last token"
        step = StepBuilder(self.max_num_batched_tokens, is_ahead=False)
        return self._build(step) if self.editor.plan_draft(request_id, token_ids, step) else None

    def expect(self, request_id: str, index: int, token_ids: list[int]) -> None:
        """Proposes the tokens that a grammar forces next for sequence `index` of a request, as drafts."""
        group = self.queues.find(request_id)
        if self.drafts is not None and group is not None:
            self.drafts.expect(group, index, token_ids)

    def edit_request(self, edit: "RequestEdit") -> SequenceGroup:
        """Applies an edit between two steps; returns the request, for a fork the new one."""
        assert not self._num_in_flight, "a step in flight knows the request as it was"
        if self.drafts is not None:
            self.drafts.forget(edit.request_id)
        return self.editor.apply(edit)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Takes in the result of a step.

        1. Count the step as returned.
        2. Accept the tokens that were drawn, cache full blocks, and end sequences (ResultUpdater.update).
        3. Tell the draft planner which drafts were accepted, and how long the step took.

        A sequence accepts its tokens up to the one that ends it (see StopConditions). Requests with logits
        that are not finite end as FINISHED_ABORTED. Sequences that ended since schedule(), and beams
        that were dropped, are skipped.

        Args:
            output: What schedule() returned; results are taken in in the order of the steps.
            result: What the executor returned for it.
            now: Time, in the engine's clock (seconds).
        """
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._awaits_results = False
        update = self._updater.update(output, result, now)
        if self.drafts is not None:
            self.drafts.observe(output, result, update.new_tokens, now)
        return update

    def _build(self, step: StepBuilder) -> SchedulerOutput:
        self._num_in_flight += 1
        output = step.build(next(self._step_ids), self._batch_slots)
        self.block_manager.begin_step(output.step_id)
        self._awaits_results = step.awaits_results
        return output

    def _fill(self, step: StepBuilder, phase: Phase, now: float) -> None:
        """Adds rows to a step: running requests and candidates for admission, merged in order.

        No request is admitted after a request was preempted for a running one, nor after the step was closed.
        After preemptions for a waiting request, admission ends at the next running request that is continued.
        """
        running = deque(self.queues.running.values())
        candidate = None if step.preempted else phase.next_candidate()
        while running or candidate is not None:
            is_next = candidate is not None and (not running or candidate.order < running[0].order)
            if candidate is not None and is_next and step.budget:
                self._admit(candidate, running, step, now)
                candidate = None if step.is_closed else phase.next_candidate()
                if candidate is not None and candidate.request_id in step.preempted:
                    candidate = None
            elif running:
                group = running.popleft()
                if group.request_id in self.queues.running:  # not preempted nor ended in this step
                    self._continue(group, running, step, phase, now)
                    if step.preempted or step.is_closed:
                        candidate = None
            else:
                break

    def _continue(
        self, group: SequenceGroup, behind: deque[SequenceGroup], step: StepBuilder, phase: Phase, now: float
    ) -> None:
        """Adds rows of a request that was running when the step began.

        Preempts the last requests if there are not enough blocks, in the end this request itself.
        """
        rows = self._token_planner.plan(group, behind, step, now)
        if phase.takes_part is not None:
            rows = [row for row in rows if phase.takes_part(row[1])]
        if not rows:
            return
        manager = self.block_manager
        copies = manager.append_slots(rows)
        if copies is None:
            copies = self._preemption.preempt_until(group, lambda: manager.append_slots(rows), step, now)
        if copies is not None:
            self._add_rows(group, rows, step)
            step.copies += copies

    def _admit(
        self, group: SequenceGroup, behind: deque[SequenceGroup], step: StepBuilder, now: float
    ) -> None:
        """Admits a request if it has room; otherwise makes room, ends it, or closes the step to others."""
        match self._start(group, behind, step, now):
            case AdmissionResult.ADMITTED:
                pass
            case AdmissionResult.STALLED:
                step.is_closed = True
                if len(self.queues.running) == 1 and not step.is_ahead:  # nothing will free blocks for it
                    self._preemption.end_for_good(group, step, now)
            case AdmissionResult.NO_TOKENS:
                step.is_closed = True
            case AdmissionResult.NO_ROOM if not self.queues.running and not step.is_ahead:
                self._preemption.end_for_good(group, step, now)  # the whole pool is not enough
            case missing:
                if not self._admission.make_way(group, missing, step, now):
                    step.is_closed = True

    def _start(
        self, group: SequenceGroup, behind: deque[SequenceGroup], step: StepBuilder, now: float
    ) -> AdmissionResult:
        """Gives a waiting or swapped request its blocks and adds its rows, or leaves it as it was.

        A request that is STALLED keeps its blocks and runs.
        """
        seq = group.unfinished[0]
        was_swapped = group.request_id in self.queues.swapped
        missing = self._admission.give_blocks(group, step)
        if missing is not None:
            return missing
        if not was_swapped and not self._token_planner.has_tokens(seq, behind, step):
            self._admission.take_back(seq)
            return AdmissionResult.NO_TOKENS
        num_cached_tokens = seq.num_computed_tokens
        self._admission.run(group)
        rows = self._token_planner.plan(group, behind, step, now)
        copies = self.block_manager.append_slots(rows)
        if copies is None:
            if was_swapped:
                return AdmissionResult.STALLED
            self._preemption.requeue(group)
            return AdmissionResult.NO_ROOM
        if group.request.features is not None and not was_swapped:
            step.note_encoder_input(group, self.block_manager.block_tables.get(seq))
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.metrics.num_cached_tokens = min(num_cached_tokens, len(seq.prompt_token_ids))
        self._add_rows(group, rows, step)
        step.copies += copies
        return AdmissionResult.ADMITTED

    def _add_rows(self, group: SequenceGroup, rows: list[tuple[Sequence, int]], step: StepBuilder) -> None:
        for seq, num_tokens in rows:
            samples: tuple[Sequence, ...] = ()
            if num_tokens == seq.num_new_tokens:
                samples = (seq,)
                if len(group.sequences) < group.max_num_seqs:
                    samples = self._token_planner.fork_samples(group, seq)
            step_rows = step.longer_rows if num_tokens > 1 else step.rows_of_one
            step_rows.append((group, seq, num_tokens, samples))
            step.budget -= num_tokens

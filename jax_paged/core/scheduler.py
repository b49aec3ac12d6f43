"""Decides which sequences run in the next step and how many tokens each of them computes.

The scheduler is pure logic: it uses no arrays, clock or I/O.
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
    """One pass over the requests while a step is filled.

    Args:
        next_candidate: Returns the next request to admit, or None.
        takes_part: Returns whether a running sequence takes part in this pass, given the number of tokens
            that it would compute. None if all take part.
    """

    next_candidate: Callable[[], SequenceGroup | None]
    takes_part: Callable[[int], bool] | None = None


class Scheduler:
    """Continuous-batching scheduler of one engine.

    schedule() fills a step with running and waiting requests while token budget, batch slots and KV cache
    blocks allow it. It goes through all requests in one order: by scheduling key, then by arrival. The key is
    the priority or the result of a user's function, and the same for all requests under "fcfs".

    Admission: a request is admitted when there are enough free blocks for all its tokens, and it receives
    these blocks at once. Its prompt is then computed in chunks that fit into the token budget. One token of
    the budget is reserved for every running sequence that decodes, including the sequences that come later in
    the order. A long prompt therefore does not delay decoding. A decoding request skips a step only if there
    are no free blocks for it, if it needs the results of steps in flight, or if the beams of its beam search
    do not all fit into the budget.

    Preemption: when blocks run out, the last running request in the order is preempted with all its
    sequences. Its blocks are either freed, and recomputed after it is admitted again, or swapped out to host
    memory. A waiting request may also preempt running requests with higher keys, but only if that frees
    enough blocks for it to run. See preemption.py.

    Progress: while a request is swapped out, no new request after it in the order is admitted. A step that
    preempts for a running request admits no other request. The first request in the order therefore always
    advances.

    Every output of schedule() must be passed to update(), in the same order. A step is in flight between
    these two calls. add(), abort(), finish() and further schedule() calls are allowed while steps are in
    flight. A block that is freed while steps are in flight is held back until update() has processed every
    step that may write to it.

    Args:
        block_manager: Owner of the blocks. It must not be shared with another scheduler.
        max_num_seqs: Maximum number of running sequences. Each request counts with the largest number of
            sequences that it can still have at the same time.
        max_num_batched_tokens: Token budget of one step.
        max_model_len: Maximum number of tokens in a prompt and its output together.
        eos_token_ids: Tokens that end a sequence, unless its request ignores them.
        watermark: Fraction of the usable blocks that stays free when a request is admitted while others run.
        scheduling_policy: "fcfs", "priority", or a function that returns the scheduling key of a new request.
            Requests with a lower priority value or key go first and may preempt running requests with a
            higher one.
        preemption_mode: "recompute" or "swap" for all requests. None swaps requests with several sequences
            and recomputes the others (the rule of the PagedAttention paper).
        enable_chunked_prefill: If False, prompts are not divided into chunks, and steps compute either
            prompts or decodes. Steps with prompts go first.
        scheduler_delay_factor: New requests wait for this factor times the duration of the last step with
            prompts, so that more of them are scheduled together.
        num_scheduler_steps: Number of decode steps that are run as one step while no request waits and enough
            blocks are free; 1 turns multi-step decoding off.
        speculation: How draft tokens are proposed; None for no draft tokens.
        max_loras: Maximum number of LoRA adapters that running requests use at the same time; 0 turns LoRA
            off.

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
        # The token budget must suffice for one token of every running sequence.
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
        """Creates the parts of the scheduler. Parts that belong to features are created by composition.py."""
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
        else:  # a step computes either whole prompts or decodes, and prompts are tried first
            self._phases = [
                Phase(self._admission.first_waiting, lambda num_tokens: num_tokens > 1),
                Phase(self._admission.first_if_swapped, lambda num_tokens: num_tokens == 1),
            ]

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running or swapped out."""
        return len(self.queues) > 0

    @property
    def can_run_ahead(self) -> bool:
        """True if the next step can be scheduled before the results of the steps in flight have arrived."""
        if self.drafts is not None and self.drafts.verifies_next_step:
            return False
        return self.has_unfinished and not self._awaits_results

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the request and the sequence with this seq_id; None if it has no batch slot."""
        return self._batch_slots.find(seq_id)

    def add(self, group: SequenceGroup) -> None:
        """Adds a request to the waiting queue.

        Args:
            group: A request with one sequence, or with several if it continues prior outputs. Its id must be
                unique. Its tokens must leave room for one more token in max_model_len, except for pooling
                requests. It may have at most max_num_seqs sequences.
        """
        seq = max(group.unfinished, key=len)
        room = group.sampling_params.pooling is None
        assert 0 < len(seq) <= self.max_model_len - room, f"{len(seq)} tokens exceed max_model_len"
        assert group.max_num_seqs <= self.max_num_seqs, f"{group.max_num_seqs} sequences exceed max_num_seqs"
        assert self.scheduling_policy != "fcfs" or not group.priority, "fcfs does not support priorities"
        if group.request.features is not None:
            self._check_features(group)
        self.derive_fields(group)
        self.queues.add(group)

    def _check_features(self, group: SequenceGroup) -> None:
        assert not group.adapter or self.max_loras, "the request has a LoRA adapter, but max_loras is 0"

    def derive_fields(self, group: SequenceGroup) -> None:
        """Sets the scheduling key and the feature flags of a request."""
        group.key = self.key_of(group)
        composition.set_request_flags(group, self._step_planners)

    def key_of(self, group: SequenceGroup) -> Any:
        """Returns the scheduling key of a request. Requests with lower keys are scheduled first."""
        return self.scheduling_policy(group) if callable(self.scheduling_policy) else group.priority

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Ends a request with status FINISHED_ABORTED and frees its blocks.

        Its finished_time is None. The caller sets it.

        Returns:
            The request; None if there is no unfinished request with this id.
        """
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
        """Ends a sequence for a reason outside the scheduler, such as a stop string, and frees its blocks.

        If the sequence has already ended, only its status and stop reason change.

        Args:
            group: The request of the sequence.
            seq: The sequence.
            status: A finished status.
            now: Time in the engine's clock (seconds).
            stop_reason: The stop string, if one ended the sequence.
            num_output_tokens: Number of output tokens to keep, which are the tokens up to the stop string;
                None keeps all.
        """
        assert status.is_finished, f"{status} is not a finished status"
        if seq.status.is_finished:
            seq.status, seq.stop_reason = status, stop_reason
        else:
            self._updater.end(group, seq, status, now, stop_reason)
        if num_output_tokens is not None:
            seq.truncate(num_output_tokens)

    def forget_prefixes(self, kept_salt: str | None) -> None:
        """Empties the prefix cache after a weight update; see Preemption. No step may be in flight."""
        self._preemption.forget_prefixes(kept_salt)

    def schedule(self, now: float) -> SchedulerOutput:
        """Chooses the sequences and token counts of the next step, and allocates their blocks.

        1. Start a step with the token budget.
        2. A step planner may take the whole step, for multi-step decoding or to verify draft tokens.
        3. Otherwise, fill the step with running and newly admitted requests, in order.
        4. Build the output: assign batch slots, and collect the block copies, swaps and adapters of the step.

        If steps are in flight (see can_run_ahead), the tokens that they sample are not known. These tokens
        are NO_TOKEN in the output, and sequences whose next token depends on their values skip the step.

        Args:
            now: Time in the engine's clock (seconds).

        Returns:
            The step. If `scheduled` and `ended` are empty, there is nothing to run.
        """
        assert not self._num_in_flight or self.can_run_ahead, "the step requires results of steps in flight"
        step = StepBuilder(self.max_num_batched_tokens, is_ahead=self._num_in_flight > 0)
        self._admission.begin_step(now)
        if self.drafts is not None:
            self.drafts.record_schedule(now, is_first=not step.is_ahead)

        if not any(planner.plan(step) for planner in self._step_planners):
            for phase in self._phases:
                step.is_closed = False
                self._fill(step, phase, now)
                if not step.is_empty:
                    break

        output = self._build(step)
        if step.multi_token_sequences and step.planned is None:
            self._admission.record_prompt(now)
        return output

    def edit(self, output: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Removes or reorders sequences of the step that was scheduled last, before it is executed.

        Args:
            output: The last output of schedule().
            rows: Indices into output.scheduled of the sequences that stay, in their new order. Sequences with
                one token must come first, and each request must stay with all of its sequences or with none.
                Sequences that are removed keep their blocks and are computed later.

        Returns:
            The step to execute and to pass to update() instead of `output`.
        """
        return composition.edit_step(output, rows, self._batch_slots, self.block_manager)

    def schedule_draft(self, request_id: str, token_ids: list[int]) -> SchedulerOutput | None:
        """Schedules a step in which one decoding request verifies given draft tokens.

        Returns:
            The step; None if there are not enough free blocks.
        """
        assert not self._num_in_flight, "draft tokens cannot be scheduled while a step is in flight"
        step = StepBuilder(self.max_num_batched_tokens, is_ahead=False)
        return self._build(step) if self.editor.plan_draft(request_id, token_ids, step) else None

    def propose_forced(self, request_id: str, index: int, token_ids: list[int]) -> None:
        """Proposes the tokens that a grammar forces next for one sequence of a request, as draft tokens."""
        group = self.queues.find(request_id)
        if self.drafts is not None and group is not None:
            self.drafts.propose_forced(group, index, token_ids)

    def edit_request(self, edit: "RequestEdit") -> SequenceGroup:
        """Applies an edit between two steps. Returns the edited request, or the new request for a fork."""
        assert not self._num_in_flight, "a request cannot be edited while a step is in flight"
        if self.drafts is not None:
            self.drafts.forget(edit.request_id)
        return self.editor.apply(edit)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Processes the result of a step.

        1. Count the step as returned.
        2. Accept the sampled tokens, cache full blocks, and end sequences (ResultUpdater.update).
        3. Pass the accepted draft tokens and the duration of the step to the draft planner.

        A sequence accepts its tokens up to the one that ends it (see StopConditions). Requests whose logits
        are not finite end with status FINISHED_ABORTED. Sequences that have ended since schedule(), and beams
        that were dropped, are skipped.

        Args:
            output: The output of schedule(). Results must be processed in the order of the steps.
            result: The executor's result for this step.
            now: Time in the engine's clock (seconds).
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
        """Adds running requests and candidates for admission to a step, merged in scheduling order.

        No request is admitted after a request was preempted for a running one, or after the step was closed.
        After a waiting request has preempted others, further waiting requests are admitted only if they come
        before the next running request in the order.
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
                if group.request_id in self.queues.running:  # it was neither preempted nor ended in this step
                    self._continue(group, running, step, phase, now)
                    if step.preempted or step.is_closed:
                        candidate = None
            else:
                break

    def _continue(
        self, group: SequenceGroup, later: deque[SequenceGroup], step: StepBuilder, phase: Phase, now: float
    ) -> None:
        """Adds the sequences of a request that was running when the step began.

        If there are not enough blocks, preempts running requests from the end of the order, and finally this
        request itself.
        """
        rows = self._token_planner.plan(group, later, step, now)
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
        self, group: SequenceGroup, later: deque[SequenceGroup], step: StepBuilder, now: float
    ) -> None:
        """Tries to admit a request.

        If it cannot run yet, preempts other requests for it, sets it aside, or closes the step to new
        requests. If it could never run, ends it.
        """
        match self._start(group, later, step, now):
            case AdmissionResult.ADMITTED:
                pass
            case AdmissionResult.STALLED:
                step.is_closed = True
                if len(self.queues.running) == 1 and not step.is_ahead:  # no other request will free blocks
                    self._preemption.end_unschedulable(group, step, now)
            case AdmissionResult.NO_TOKENS:
                step.is_closed = True
            case AdmissionResult.NO_ROOM if not self.queues.running and not step.is_ahead:
                self._preemption.end_unschedulable(group, step, now)  # even the whole KV cache is too small
            case missing:
                if not self._admission.make_room(group, missing, step, now):
                    step.is_closed = True

    def _start(
        self, group: SequenceGroup, later: deque[SequenceGroup], step: StepBuilder, now: float
    ) -> AdmissionResult:
        """Gives a waiting or swapped request its blocks and schedules its sequences.

        If the result is ADMITTED, the request runs. If it is STALLED, the request keeps its blocks and
        computes nothing in this step. Otherwise the request is unchanged.
        """
        seq = group.unfinished[0]
        was_swapped = group.request_id in self.queues.swapped
        missing = self._admission.allocate_or_swap_in(group, step)
        if missing is not None:
            return missing
        if not was_swapped and not self._token_planner.fits_budget(seq, later, step):
            self._admission.revert_allocation(seq)
            return AdmissionResult.NO_TOKENS
        num_cached_tokens = seq.num_computed_tokens
        self._admission.mark_running(group)
        rows = self._token_planner.plan(group, later, step, now)
        copies = self.block_manager.append_slots(rows)
        if copies is None:
            if was_swapped:
                return AdmissionResult.STALLED
            self._preemption.requeue(group)
            return AdmissionResult.NO_ROOM
        if group.request.features is not None and not was_swapped:
            step.add_encoder_input(group, self.block_manager.block_tables.get(seq))
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.metrics.num_cached_tokens = min(num_cached_tokens, len(seq.prompt_token_ids))
        self._add_rows(group, rows, step)
        step.copies += copies
        return AdmissionResult.ADMITTED

    def _add_rows(self, group: SequenceGroup, rows: list[tuple[Sequence, int]], step: StepBuilder) -> None:
        """Adds sequences to a step. Sequences that compute their last token also sample the next one."""
        for seq, num_tokens in rows:
            samples: tuple[Sequence, ...] = ()
            if num_tokens == seq.num_new_tokens:
                samples = (seq,)
                if len(group.sequences) < group.max_num_seqs:
                    samples = self._token_planner.fork_samples(group, seq)
            step_rows = step.multi_token_sequences if num_tokens > 1 else step.single_token_sequences
            step_rows.append((group, seq, num_tokens, samples))
            step.budget -= num_tokens

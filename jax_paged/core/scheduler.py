"""Which sequences compute how many tokens in the next step: a pure function of state and events, no clock."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from jax_paged.core.admission import Admission, Answer
from jax_paged.core.batch_slots import Seats
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features.interactive.request_edits import RequestEdit, RequestEditor
from jax_paged.core.features.interactive.step_edits import take_back, with_rows
from jax_paged.core.features.lora import AdapterSlots
from jax_paged.core.features.multi_step import BurstPlanner
from jax_paged.core.features.speculation.draft_planner import DraftPlanner
from jax_paged.core.features.speculation.num_drafts import Speculation
from jax_paged.core.limits import check_limits, check_order
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.preemption import Preemption, PreemptionMode
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import SequenceUpdater, StepUpdate
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import StopConditions
from jax_paged.core.token_planner import RowPlanner

Policy = Literal["fcfs", "priority"] | Callable[[SequenceGroup], Any]


class Scheduler:
    """Running requests first, then waiting ones, as far as tokens, seats and blocks last.

    A request is admitted when the blocks of all its tokens are at hand, and gets them at once; its prompt is
    then computed in chunks of whatever the token budget leaves. A chunk leaves a token to every running
    sequence that only needs one, also to those behind it: so every running request advances in every step,
    unless its beams don't all fit into the budget, or it waits for blocks to copy to.

    When blocks run out, the last request in the order is preempted with all its sequences: it waits, and
    recomputes its tokens when it is admitted again; or its blocks are swapped out to host memory. A request
    with several sequences is swapped, as recomputing would lose what they share, others are recomputed
    (the paper's rule), unless preemption_mode says otherwise; without room in host memory, all are
    recomputed. Requests of a higher priority value or key are preempted for one of a lower, but only if that
    makes room enough for it. While a request is swapped out no new one behind it is admitted. So the first
    request always advances, and no step that takes blocks from a running request for another admits a third.

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
        policy: "fcfs", "priority", or a function of a new request that returns its key. A request of a lower
            priority or key goes first, and takes blocks and seats from running ones of a higher one.
        preemption_mode: "recompute" or "swap" for all requests; None for the paper's rule.
        enable_chunked_prefill: False computes whole prompts only, in steps of their own that go first.
        delay_factor: New requests wait this many times as long as the last prompt took, to come together.
        burst_size: Decode steps done in one while no request waits and the blocks are at hand; 1 for none.
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
        policy: Policy = "fcfs",
        preemption_mode: PreemptionMode | None = None,
        enable_chunked_prefill: bool = True,
        delay_factor: float = 0.0,
        burst_size: int = 1,
        speculation: Speculation | None = None,
        max_loras: int = 0,
    ) -> None:
        limits = max_num_seqs, max_num_batched_tokens, max_model_len, burst_size, max_loras
        check_limits(*limits, chunks=enable_chunked_prefill)
        check_order(policy, preemption_mode, watermark, delay_factor)
        self.block_manager = block_manager
        # Every running sequence has a token in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.policy = policy
        self.preemption_mode: PreemptionMode | None = preemption_mode
        self.enable_chunked_prefill = enable_chunked_prefill
        self.delay_factor = delay_factor
        self.burst_size = burst_size
        self.max_loras = max_loras
        self.watermark = watermark
        self.queues = RequestQueues()
        stop_conditions = StopConditions(eos_token_ids, max_model_len)
        self.adapters = AdapterSlots(max_loras, self.queues)
        self._seats = Seats(block_manager, stop_conditions, self.adapters)
        self._updater = SequenceUpdater(block_manager, self.queues, self._seats, stop_conditions)
        self._preemption = Preemption(block_manager, self.queues, self._updater, preemption_mode)
        self._admission = Admission(
            block_manager,
            self.queues,
            self._preemption,
            self.adapters,
            max_num_seqs=self.max_num_seqs,
            watermark=watermark,
            enable_chunked_prefill=enable_chunked_prefill,
            delay_factor=delay_factor,
        )
        self._planner = RowPlanner(
            block_manager,
            self.queues,
            self._admission,
            self._preemption,
            stop_conditions,
            enable_chunked_prefill,
        )
        self._bursts = BurstPlanner(block_manager, self.queues, stop_conditions, burst_size)
        self.drafts = DraftPlanner(
            block_manager, self.queues, stop_conditions, speculation, max_num_batched_tokens
        )
        self.editor = RequestEditor(block_manager, self.queues, self._preemption, self.max_num_seqs)
        self._step_ids = itertools.count()
        self._num_in_flight = 0
        self._is_short = False  # the last step, of what those before it bring

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting, running or swapped out."""
        return len(self.queues) > 0

    @property
    def can_run_ahead(self) -> bool:
        """Whether the next step can be scheduled before the results of those in flight are there."""
        return self.has_unfinished and not self._is_short and not self.drafts.waits

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the sequence of an id, with its request; None if it has left its seat."""
        return self._seats.find(seq_id)

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
        assert self.policy != "fcfs" or not group.priority, "a priority under fcfs"
        assert not group.adapter or self.max_loras, "there is no slot for an adapter"
        group.key = self.key_of(group)
        self.queues.add(group)

    def key_of(self, group: SequenceGroup) -> Any:
        """Returns what a request stands in order by: requests of a lower key go first."""
        return self.policy(group) if callable(self.policy) else group.priority

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
        """Chooses the sequences and token counts of the next step, and gives them their blocks.

        It may be called before the steps before it have returned (see can_run_ahead): tokens that these draw
        have NO_TOKEN in their place, and sequences that have to know them sit the step out.

        Args:
            now: Time, in the engine's clock (seconds).

        Returns:
            The step; nothing is left to run if `scheduled` and `ended` are empty.
        """
        assert not self._num_in_flight or self.can_run_ahead, "the step has to know the results of others"
        step = StepBuilder(self.max_num_batched_tokens, is_ahead=self._num_in_flight > 0)
        self._admission.begin_step(now)
        self.drafts.note_schedule(now, is_first=not step.is_ahead)
        is_planned = self.drafts.plan(step) or self._bursts.plan(step)
        if not is_planned and self.enable_chunked_prefill:
            self._fill(step, now, self._admission.first, None)
        elif not is_planned:
            self._fill(step, now, self._admission.first_waiting, lambda n: n > 1)
            if step.is_empty:
                self._fill(step, now, self._admission.first_if_swapped, lambda n: n == 1)
        output = self._built(step)
        if output.scheduled and output.scheduled[-1].num_tokens > 1 and not step.drafts:
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
        dropped = sorted(set(range(len(output.scheduled))) - set(rows))
        take_back(output, dropped, self._seats, self.block_manager)
        return with_rows(output, rows)

    def schedule_draft(self, request_id: str, token_ids: list[int]) -> SchedulerOutput | None:
        """Schedules a step of one request that decodes, with tokens that may follow; None without blocks."""
        assert not self._num_in_flight, "the draft follows the last token"
        step = StepBuilder(self.max_num_batched_tokens, is_ahead=False)
        return self._built(step) if self.editor.plan_draft(request_id, token_ids, step) else None

    def expect(self, request_id: str, index: int, token_ids: list[int]) -> None:
        """Notes which tokens its form lets follow the sequence of an index: drafts that are likely right."""
        self.drafts.expect(self.queues.find(request_id), index, token_ids)

    def edit_request(self, edit: RequestEdit) -> SequenceGroup:
        """Applies an edit between two steps; returns the request, of a fork the new one."""
        assert not self._num_in_flight, "a step in flight knows the request as it was"
        self.drafts.forget(edit.request_id)
        return self.editor.apply(edit)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Takes in the result of a step: appends tokens, caches full blocks, ends and frees what is done.

        A sequence accepts its tokens up to the one that ends it (see StopConditions). Requests with logits
        that are not finite end as FINISHED_ABORTED. Sequences that ended or lost their blocks since
        schedule() are skipped.

        Args:
            output: What schedule() returned; steps are taken in in the order in which they were scheduled.
            result: What the executor made of it.
            now: Time, in the engine's clock (seconds).
        """
        self._num_in_flight -= 1
        if not self._num_in_flight:
            self._is_short = False
        update = self._updater.update(output, result, now)
        self.drafts.observe(output, result, update.new_tokens, now)
        return update

    def _built(self, step: StepBuilder) -> SchedulerOutput:
        self._num_in_flight += 1
        output = step.build(next(self._step_ids), self._seats)
        self.block_manager.begin_step(output.step_id)
        self._is_short = step.is_short
        return output

    def _fill(
        self,
        step: StepBuilder,
        now: float,
        first_to_admit: Callable[[], SequenceGroup | None],
        takes_part: Callable[[int], bool] | None,
    ) -> None:
        """Adds rows to a step, in the order of requests.

        Args:
            first_to_admit: Returns who is next among those that don't run.
            takes_part: Whether a running sequence does, by how many tokens it computes; None: all do.
        """
        running = deque(self.queues.running.values())
        # Looked up again only when someone was admitted, preempted or ended for it.
        head = None if step.preempted else first_to_admit()
        while running or head is not None:
            group = running[0] if running else None
            if head is not None and step.budget and (group is None or head.order < group.order):
                answer = self._admit(head, running, step, now)
                if answer is Answer.NO_TOKENS:
                    head = None
                    continue
                if answer is Answer.NO_ROOM and not self.queues.running and not step.is_ahead:
                    self._preemption.end_for_good(head, step, now)  # all is free, and it is not enough
                elif answer is not Answer.ADMITTED and not self._admission.make_way(head, answer, step, now):
                    head = None
                    continue
                head = first_to_admit()
                if step.is_closed or (head is not None and head.request_id in step.preempted):
                    head = None
            elif group is None:
                break
            else:
                running.popleft()
                if group.request_id in self.queues.running:
                    rows = self._planner.plan(group, running, step, now)
                    if takes_part is not None:
                        rows = [row for row in rows if takes_part(row[1])]
                    if rows:
                        self._run(group, rows, step, now)
                    if step.preempted or step.is_closed:
                        head = None

    def _run(
        self, group: SequenceGroup, rows: list[tuple[Sequence, int]], step: StepBuilder, now: float
    ) -> None:
        """Adds rows of a running request, with the blocks that they need, unless it is itself preempted."""
        manager = self.block_manager
        copies = manager.append_slots(rows)
        if copies is None:
            copies = self._preemption.with_room(group, lambda: manager.append_slots(rows), step, now)
        if copies is not None:
            step.copies += copies
            for seq, num_tokens in rows:
                self._add_row(group, seq, num_tokens, step)

    def _admit(
        self, group: SequenceGroup, behind: deque[SequenceGroup], step: StepBuilder, now: float
    ) -> Answer:
        """Lets a waiting or swapped request run; unless it is ADMITTED, nothing has changed."""
        manager, seq = self.block_manager, group.unfinished[0]
        was_swapped = group.request_id in self.queues.swapped
        if (refusal := self._admission.give_blocks(group, step)) is not None:
            return refusal
        if not was_swapped and not self._planner.within(
            seq.num_new_tokens, self._planner.available(behind, step)
        ):
            self._admission.take_back(seq)
            return Answer.NO_TOKENS
        num_cached_tokens = seq.num_computed_tokens
        self._admission.run(group)
        rows = self._planner.plan(group, behind, step, now)
        copies = manager.append_slots(rows)
        if copies is None and was_swapped:
            # It waits for the next step, if others may leave blocks until then.
            step.is_closed = True
            if len(self.queues.running) == 1 and not step.is_ahead:
                self._preemption.end_for_good(group, step, now)
            return Answer.ADMITTED
        if copies is None:
            self._preemption.recompute(group)
            return Answer.NO_ROOM
        if group.encoder_token_ids and not was_swapped and seq in manager.block_tables:
            step.to_encode.append((group, manager.block_tables[seq]))
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.metrics.num_cached_tokens = min(num_cached_tokens, len(seq.prompt_token_ids))
        step.copies += copies
        for row in rows:
            self._add_row(group, *row, step)
        return Answer.ADMITTED

    def _add_row(self, group: SequenceGroup, seq: Sequence, num_tokens: int, step: StepBuilder) -> None:
        sampling: tuple[Sequence, ...] = ()
        if num_tokens == seq.num_new_tokens:
            sampling = (seq,)
            if len(group.sequences) < group.max_num_seqs and group.beam_params is None:
                sampling = self._planner.fork_samples(group, seq)
        rows = step.longer_rows if num_tokens > 1 else step.rows_of_one
        rows.append((group, seq, num_tokens, sampling))
        step.budget -= num_tokens

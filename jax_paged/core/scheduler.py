"""Which sequences compute how many tokens in the next step: a pure function of state and events, no clock."""

import enum
import functools
import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Literal, TypeVar

from jax_paged.checks import check_choice, check_int, check_number
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import ScheduledSequence, SchedulerOutput, StepBuilder
from jax_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.sequence_updater import SequenceUpdater

if TYPE_CHECKING:
    from jax_paged.core.runner_output import TokenLogprobs

# Why a request ended that could not run (on) in an empty pool.
POOL_TOO_SMALL = "the pool has no room for it"
PreemptionMode = Literal["recompute", "swap"]
T = TypeVar("T")


class Admission(enum.Enum):
    """Answer to a request that wants to run: it does, or blocks or seats lack, or tokens of the step."""

    ADMITTED = enum.auto()
    NO_ROOM = enum.auto()
    NO_TOKENS = enum.auto()


class Scheduler:
    """Running requests first, then waiting ones, as far as tokens, seats and blocks last.

    The order is that of arrival ("fcfs"), or of priority and then arrival. A request is admitted when the
    blocks of all its tokens are at hand, and gets them at once; its prompt is then computed in chunks of
    whatever the token budget leaves. Every running request advances in every step, unless its beams don't all
    fit into the budget, or it waits for blocks to copy to.

    When blocks run out, the last request in the order is preempted with all its sequences: it waits, and
    recomputes its tokens when it is admitted again; or its blocks are swapped out to host memory. A request
    with several sequences is swapped, as recomputing would lose what they share, others are recomputed
    (the paper's rule), unless preemption_mode says else; without room in host memory, all are recomputed.
    While a request is swapped out no new one behind it is admitted. So the first request always advances, and
    no step that takes blocks from a running request for another one admits a third.

    One step is in flight at a time: blocks are handed out in schedule() only, after the update() of the step
    before, so a block freed in between (abort, finish) is not reused while that step may write it.

    Args:
        block_manager: Owner of the blocks; used by this scheduler alone.
        max_num_seqs: Most sequences running at a time; a request counts all it may come to have.
        max_num_batched_tokens: Token budget of one step.
        max_model_len: Most tokens of a prompt and its output together.
        eos_token_ids: Tokens that end a sequence, unless its request ignores them.
        watermark: Share of the usable blocks that stays free when a request is admitted beside running
            ones: room for these to grow, so that the newcomer isn't preempted at once.
        policy: "fcfs" or "priority". A request of a lower priority value goes first, and takes blocks and
            seats from running ones of a higher value.
        preemption_mode: "recompute" or "swap" for all requests; None for the paper's rule.
        enable_chunked_prefill: False computes whole prompts only, in steps of their own that go before
            those of running requests.
        delay_factor: New requests wait until the first of them has waited this many times as long as the
            last step with a prompt took, so that more of them are computed together.

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
        policy: Literal["fcfs", "priority"] = "fcfs",
        preemption_mode: PreemptionMode | None = None,
        enable_chunked_prefill: bool = True,
        delay_factor: float = 0.0,
    ) -> None:
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        check_int("max_model_len", max_model_len, 1)
        check_number("watermark", watermark, 0, 1)
        check_choice("policy", policy, ("fcfs", "priority"))
        check_choice("preemption_mode", preemption_mode, (None, "recompute", "swap"))
        check_number("delay_factor", delay_factor, 0, math.inf)
        if not enable_chunked_prefill:
            check_int("max_num_batched_tokens without chunked prefill", max_num_batched_tokens, max_model_len)
        self.block_manager = block_manager
        # Every running sequence has a token in every step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.policy = policy
        self.preemption_mode = preemption_mode
        self.enable_chunked_prefill = enable_chunked_prefill
        self.delay_factor = delay_factor
        self.watermark = watermark
        self.queues = RequestQueues()
        self._updater = SequenceUpdater(block_manager, self.queues, max_model_len, eos_token_ids)
        self._num_watermark_blocks = math.ceil(watermark * block_manager.num_usable_blocks)
        self._last_prompt_start: float | None = None
        self._last_prompt_s = 0.0
        self._holds_back_new = False

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting, running or swapped out."""
        return len(self.queues) > 0

    def add(self, group: SequenceGroup) -> None:
        """Puts a request into the waiting queue.

        Args:
            group: A request with one sequence, whose prompt leaves room for one token in max_model_len, and
                with no more sequences to come than max_num_seqs. Its id is that of no unfinished request.
        """
        (seq,) = group.sequences
        assert 0 < len(seq) < self.max_model_len, f"prompt of {len(seq)} tokens"
        assert group.max_num_seqs <= self.max_num_seqs, f"{group.max_num_seqs} sequences"
        assert self.policy == "priority" or not group.priority, "a priority under fcfs"
        self.queues.add(group)

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Ends a request at any moment as FINISHED_ABORTED and frees its blocks.

        Returns:
            The request (its finished_time is not set: no clock); None if no unfinished one has this id.
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
    ) -> None:
        """Ends a sequence for a reason that the scheduler can't see (stop string, NaN) and frees its blocks.

        A sequence that has ended already only takes the new status and reason.

        Args:
            group: Its request.
            seq: The sequence.
            status: A finished status.
            now: Time, in the engine's clock (seconds).
            stop_reason: What ended it, if a stop string did.
        """
        assert status.is_finished, status
        if seq.status.is_finished:
            seq.status, seq.stop_reason = status, stop_reason
        else:
            self._updater.end(group, seq, status, now, stop_reason)

    def schedule(self, now: float) -> SchedulerOutput:
        """Chooses the sequences and token counts of the next step, and gives them their blocks.

        Args:
            now: Time, in the engine's clock (seconds).

        Returns:
            The step; nothing is left to run if neither `scheduled` nor `ended` holds anything.
        """
        step = StepBuilder(self.max_num_batched_tokens)
        if self._last_prompt_start is not None:
            self._last_prompt_s, self._last_prompt_start = now - self._last_prompt_start, None
        first = self.queues.first_waiting()
        waited = now - first.metrics.arrival_time if first else 0.0
        self._holds_back_new = bool(self.queues.running) and waited < self.delay_factor * self._last_prompt_s
        if self.enable_chunked_prefill:
            self._fill(step, now, self._first_to_admit, lambda n: True)
        else:
            self._fill(step, now, self._first_waiting, lambda n: n > 1)
            if not step.rows:
                self._fill(step, now, self._first_if_swapped, lambda n: n == 1)
        output = step.build()
        if output.scheduled and output.scheduled[-1].num_tokens > 1:
            self._last_prompt_start = now
        return output

    def update(
        self,
        output: SchedulerOutput,
        token_ids: list[int],
        now: float,
        logprobs: "Items[TokenLogprobs]" = (),
    ) -> list[SequenceGroup]:
        """Takes in the result of a step: appends tokens, caches full blocks, ends and frees what is done.

        A sequence ends at an end token, else at one of its stop tokens (neither before min_tokens), else
        at max_tokens or max_model_len. Sequences that ended since schedule() are skipped.

        Args:
            output: What schedule() returned last.
            token_ids: One a sampling sequence, in the order of the rows.
            now: Time, in the engine's clock (seconds).
            logprobs: The same of log-probabilities; only those of beams are read.

        Returns:
            The requests that got a token, the ended ones among them.
        """
        return self._updater.update(output, token_ids, now, logprobs)

    def _fill(
        self,
        step: StepBuilder,
        now: float,
        first_to_admit: Callable[[], SequenceGroup | None],
        runs: Callable[[int], bool],
    ) -> None:
        """Adds rows to a step, in the order of requests.

        Args:
            first_to_admit: Who is next among those that don't run.
            runs: Whether a running sequence takes part, by the number of tokens that it computes.
        """
        running = deque(self.queues.running.values())
        # Looked up again only when someone was admitted, preempted or ended for it.
        head = None if step.preempted else first_to_admit()
        while running or head is not None:
            group = running[0] if running else None
            if head is not None and step.budget and (group is None or head.order < group.order):
                admission = self._admit(head, step, now)
                if admission is Admission.NO_TOKENS:
                    head = None
                    continue
                if admission is Admission.NO_ROOM:
                    last = self.queues.last_running()
                    if last is None:  # all is free, and it is not enough
                        self._end_for_good(head, step, now)
                    elif group is not None and last.priority > head.priority:
                        self._preempt(last, step)
                    else:
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
                    rows = [row for row in self._plan(group, step, now) if runs(row[1])]
                    if rows:
                        self._run(group, rows, step, now)
                    if step.preempted or step.is_closed:
                        head = None

    def _run(
        self, group: SequenceGroup, rows: list[tuple[Sequence, int]], step: StepBuilder, now: float
    ) -> None:
        """Adds rows of a running request, with the blocks that they need, unless it is itself preempted."""
        copies = self.block_manager.append_slots(rows)
        if copies is None:
            copies = self._with_room(group, lambda: self.block_manager.append_slots(rows), step, now)
        if copies is not None:
            step.copies += copies
            for seq, num_tokens in rows:
                self._add_row(group, seq, num_tokens, step)

    def _add_row(self, group: SequenceGroup, seq: Sequence, num_tokens: int, step: StepBuilder) -> None:
        manager, start = self.block_manager, seq.num_computed_tokens
        sampling: tuple[Sequence, ...] = ()
        if start + num_tokens == len(seq):
            sampling = (seq,)
            if len(group.sequences) < group.max_num_seqs and group.beam_params is None:
                sampling = self._fork_samples(group, seq)
        tables = manager.block_tables[seq]
        if not sampling:
            num_blocks = manager.num_blocks_of(start + num_tokens)
            tables = [
                t if g.is_cross else t[:num_blocks] for g, t in zip(manager.groups, tables, strict=True)
            ]
        step.rows.append(ScheduledSequence(group, seq, start, num_tokens, tables, sampling))
        step.budget -= num_tokens

    def _fork_samples(self, group: SequenceGroup, seq: Sequence) -> tuple[Sequence, ...]:
        """Makes the other samples of a request whose prompt is computed in this step."""
        for index in range(1, group.max_num_seqs):
            sample = seq.fork(index, group.sampling_params.seed_of(index))
            self.block_manager.fork(seq, sample, len(seq))
            group.sequences.append(sample)
        return tuple(group.sequences)

    def _plan(self, group: SequenceGroup, step: StepBuilder, now: float) -> list[tuple[Sequence, int]]:
        """Returns which sequences of a running request compute how many tokens."""
        if len(group.sequences) == 1:
            seq = group.sequences[0]
            num_tokens = self._within(len(seq) - seq.num_computed_tokens, step.budget)
            if num_tokens > 1 and self.enable_chunked_prefill:
                most = self.block_manager.within_windows(seq, num_tokens)
                # Those behind it may not overtake it with the tokens that it leaves.
                step.is_closed |= most < num_tokens
                num_tokens = most
            return [(seq, num_tokens)] if num_tokens else []
        seqs, tables = group.unfinished, self.block_manager.block_tables
        for seq in seqs:
            if seq not in tables:
                self._revive(group, seq, step, now)
                if group.request_id not in self.queues.running:
                    return []
        needed = [(s, len(s) - s.num_computed_tokens) for s in seqs if s in tables]
        is_behind = len(needed) < len(seqs)
        if group.beam_params:
            is_behind |= any(n > 1 for _, n in needed)
            if not is_behind and step.budget < len(seqs):
                return []
        rows, budget = [], step.budget
        for seq, n in needed:
            # Beams sample together, and none may end before the others share its blocks: the last token
            # waits until all are there.
            num_tokens = self._within(n - is_behind, budget)
            budget -= num_tokens
            if num_tokens:
                rows.append((seq, num_tokens))
        return rows

    def _within(self, num_tokens: int, budget: int) -> int:
        if num_tokens <= budget:
            return num_tokens
        return budget if self.enable_chunked_prefill else 0

    def _revive(self, group: SequenceGroup, seq: Sequence, step: StepBuilder, now: float) -> None:
        """Gives a sequence of a recomputed request its blocks back, as far as another's are computed."""
        manager = self.block_manager
        others = [s for s in group.unfinished if s in manager.block_tables]
        # The last token of each is left to compute: its logits are needed.
        common = [(min(seq.num_common_tokens(s), len(s) - 1, len(seq) - 1), s) for s in others]
        shared, parent = max(common, key=lambda pair: pair[0])
        if parent.num_computed_tokens < shared:
            return
        if manager.fork(parent, seq, shared):
            seq.num_computed_tokens = shared
        else:
            # If it is the last one itself, it keeps what it has and tries again in the next step.
            attempt = functools.partial(self._allocate, group, seq, 0)
            self._with_room(group, lambda: attempt() or None, step, now, gives_way=False)

    def _with_room(
        self,
        group: SequenceGroup,
        attempt: Callable[[], T | None],
        step: StepBuilder,
        now: float,
        *,
        gives_way: bool = True,
    ) -> T | None:
        """Tries something for a running request, preempting the last ones until it works.

        Returns:
            What worked; None if the request is alone and has ended, or is the last one: then it is itself
            preempted if it `gives_way`.
        """
        while (result := attempt()) is None:
            last = self.queues.last_running()
            assert last is not None, "the request itself runs"
            if len(self.queues.running) == 1:
                self._end_for_good(group, step, now)
                return None
            if last is not group or gives_way:
                self._preempt(last, step)
            if last is group:
                return None
        return result

    def _admit(self, group: SequenceGroup, step: StepBuilder, now: float) -> Admission:
        """Lets a waiting or swapped request run; unless it is ADMITTED, nothing has changed."""
        if self.queues.num_seats_taken + group.max_num_seqs > self.max_num_seqs:
            return Admission.NO_ROOM
        manager = self.block_manager
        num_reserved = self._num_watermark_blocks if self.queues.running else 0
        if not self.enable_chunked_prefill:  # the running ones have not got their next blocks yet
            num_reserved += self.queues.num_seats_taken * len(manager.groups)
        if group.request_id in self.queues.swapped:
            seqs = group.unfinished
            if self.queues.running:  # so that its next tokens find room
                num_reserved += len(seqs) * len(manager.groups)
            copies = manager.swap_in(seqs, num_reserved=num_reserved)
            if copies is None:
                return Admission.NO_ROOM
            step.swap_in += copies
        else:
            seq, *others = group.unfinished
            if self.queues.running:  # so that the others, forked from it again, find room
                common = [min(seq.num_common_tokens(s), len(s) - 1) // manager.block_size for s in others]
                num_own = [manager.num_blocks_of(len(s) + 1) - n for s, n in zip(others, common, strict=True)]
                num_reserved += sum(num_own) * len(manager.groups)
            if not self._allocate(group, seq, num_reserved):
                return Admission.NO_ROOM
            if not self._within(len(seq) - seq.num_computed_tokens, step.budget):
                manager.free(seq)
                seq.num_computed_tokens = 0
                return Admission.NO_TOKENS
        first = group.unfinished[0]
        num_cached_tokens = first.num_computed_tokens
        was_swapped = group.request_id in self.queues.swapped
        self.queues.run(group)
        for seq in group.unfinished:
            seq.status = SequenceStatus.RUNNING
        rows = self._plan(group, step, now)
        copies = manager.append_slots(rows)
        if (
            copies is None and was_swapped
        ):  # it waits for the next step, if others may leave blocks until then
            step.is_closed = True
            if len(self.queues.running) == 1:
                self._end_for_good(group, step, now)
            return Admission.ADMITTED
        if copies is None:
            self._recompute(group)
            return Admission.NO_ROOM
        if group.encoder_token_ids and not was_swapped and first in manager.block_tables:
            step.to_encode.append((group, manager.block_tables[first]))
        if group.metrics.first_scheduled_time is None:
            group.metrics.first_scheduled_time = now
            group.metrics.num_cached_tokens = num_cached_tokens
        step.copies += copies
        for seq, num_tokens in rows:
            self._add_row(group, seq, num_tokens, step)
        return Admission.ADMITTED

    def _allocate(self, group: SequenceGroup, seq: Sequence, num_reserved: int) -> bool:
        return self.block_manager.allocate(
            seq,
            group.cache_salt,
            # Shared tokens are not computed, so there would be no log-probabilities of them.
            use_cache=group.sampling_params.reads_prefix_cache,
            num_reserved=num_reserved,
            num_encoder_tokens=len(group.encoder_token_ids),
        )

    def _first_waiting(self) -> SequenceGroup | None:
        """Returns the next waiting request, but no new one behind one that is swapped out, or too early."""
        group, swapped = self.queues.first_waiting(), self.queues.first_swapped()
        if group is None or group.metrics.first_scheduled_time is not None:
            return group
        is_behind = swapped is not None and swapped.order < group.order
        return None if self._holds_back_new or is_behind else group

    def _first_to_admit(self) -> SequenceGroup | None:
        both = (self._first_waiting(), self.queues.first_swapped())
        return min((g for g in both if g is not None), key=lambda g: g.order, default=None)

    def _first_if_swapped(self) -> SequenceGroup | None:
        group = self._first_to_admit()
        return group if group is self.queues.first_swapped() else None

    def _preempt(self, group: SequenceGroup, step: StepBuilder) -> None:
        """Takes a running request's blocks, all of them, and notes how it gets them back."""
        manager, seqs = self.block_manager, group.unfinished
        group.metrics.num_preemptions += 1
        step.preempted.append(group.request_id)
        step.to_encode = [(other, tables) for other, tables in step.to_encode if other is not group]
        mode = self.preemption_mode or ("swap" if len(seqs) > 1 else "recompute")
        # Host blocks that are read in this step must not be written in it: swapping out goes first.
        copies = manager.swap_out(seqs) if mode == "swap" and not step.swap_in else None
        if copies is not None:
            step.swap_out += copies
            self.queues.swap(group)
            for seq in seqs:
                seq.status = SequenceStatus.SWAPPED
            return
        self._recompute(group)

    def _recompute(self, group: SequenceGroup) -> None:
        """Sends a request back to wait, without blocks."""
        for seq in group.unfinished:
            if seq in self.block_manager.block_tables:
                self.block_manager.free(seq)
            seq.status, seq.num_computed_tokens = SequenceStatus.WAITING, 0
        self.queues.wait(group)

    def _end_for_good(self, group: SequenceGroup, step: StepBuilder, now: float) -> None:
        """Ends a request that could not run (on) in an empty pool."""
        has_output = any(s.output_token_ids for s in group.sequences)
        status = SequenceStatus.FINISHED_LENGTH_CAPPED if has_output else SequenceStatus.FINISHED_IGNORED
        self._updater.end_group(group, status, now, POOL_TOO_SMALL)
        step.ended.append(group)

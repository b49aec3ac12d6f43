"""Which sequences compute how many tokens in the next step: a pure function of state and events, no clock."""

import dataclasses
import math
from collections import OrderedDict
from typing import NamedTuple

from jax_paged.block_manager import AllocStatus, BlockManager
from jax_paged.config import check_int, check_number
from jax_paged.sequence import Sequence, SequenceGroup, SequenceStatus


class ScheduledSequence(NamedTuple):
    """What one sequence computes in a step (a tuple: a step makes hundreds, and they are cheap to make).

    Args:
        group: Its request.
        seq: The sequence.
        start: Position of the first token that the step computes.
        num_tokens: Tokens that the step computes.
        block_table: Block ids that hold start + num_tokens tokens, no block more. Read-only; valid until
            the next schedule().
    """

    group: SequenceGroup
    seq: Sequence
    start: int
    num_tokens: int
    block_table: list[int]

    @property
    def samples(self) -> bool:
        """Whether the step samples its next token: it computes the last one. Asked before update()."""
        return self.start + self.num_tokens == len(self.seq)


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """One step.

    Args:
        scheduled: Rows of one token first, then the longer ones; each part in the order of arrival.
        blocks_to_copy: (from, to) block ids that the step copies before it computes anything.
        preempted: Ids of the requests that lost their blocks and wait again.
        ignored: Requests that can never run; they ended as FINISHED_IGNORED.
        num_batched_tokens: Sum of num_tokens.
    """

    scheduled: tuple[ScheduledSequence, ...]
    blocks_to_copy: tuple[tuple[int, int], ...]
    preempted: tuple[str, ...]
    ignored: tuple[SequenceGroup, ...]
    num_batched_tokens: int


class Scheduler:
    """First come, first served: running requests first, then waiting ones, as far as tokens and blocks last.

    `running` followed by `waiting` is always in the order of arrival. A request is admitted when the blocks
    of all its tokens are at hand, and gets them at once; its prompt is then computed in chunks of whatever
    the token budget leaves. Every running request advances in every step. When blocks run out, the latest
    running request is preempted: it frees its blocks, waits first in line, and recomputes prompt and output
    when it is admitted again. So the earliest request always advances, and no step both preempts and admits.

    One step is in flight at a time: blocks are handed out in schedule() only, after the update() of the step
    before, so a block freed in between (abort, finish) is not reused while that step may write it.

    Args:
        block_manager: Owner of the blocks; used by this scheduler alone.
        max_num_seqs: Most sequences running at a time.
        max_num_batched_tokens: Token budget of one step.
        max_model_len: Most tokens of a prompt and its output together.
        eos_token_ids: Tokens that end a sequence, unless its request ignores them.
        watermark: Share of the usable blocks that stays free when a request is admitted beside running
            ones: room for these to grow, so that the newcomer isn't preempted at once.

    Raises:
        ValueError: If a limit is not positive or the watermark not in [0, 1].
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
    ) -> None:
        check_int("max_num_seqs", max_num_seqs, 1)
        check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        check_int("max_model_len", max_model_len, 1)
        check_number("watermark", watermark, 0, 1)
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        # Ordered dicts by request id: queues from which an abort takes a request in constant time.
        self.waiting: OrderedDict[str, SequenceGroup] = OrderedDict()
        self.running: OrderedDict[str, SequenceGroup] = OrderedDict()
        num_usable = block_manager.num_usable_blocks
        self._num_watermark_blocks = math.ceil(watermark * num_usable)
        # The last token of a sequence needs no slot, unless another follows. With this bound a request that
        # runs alone always has its blocks, however small the pool.
        self._max_len = min(max_model_len, num_usable * block_manager.block_size + 1)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting or self.running)

    def add(self, group: SequenceGroup) -> None:
        """Puts a request at the end of the waiting queue.

        Args:
            group: A request with one sequence, whose prompt leaves room for one token in max_model_len. Its
                id is that of no unfinished request.
        """
        (seq,) = group.sequences
        assert 0 < len(seq) < self.max_model_len, f"prompt of {len(seq)} tokens"
        assert group.request_id not in self.waiting, group.request_id
        assert group.request_id not in self.running, group.request_id
        self.waiting[group.request_id] = group

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Ends a request at any moment as FINISHED_ABORTED and frees its blocks.

        Returns:
            The request (its finished_time is not set: no clock); None if no unfinished one has this id.
        """
        group = self.running.get(request_id) or self.waiting.get(request_id)
        if group is not None:
            self._end(group, group.sequences[0], SequenceStatus.FINISHED_ABORTED, None)
        return group

    def finish(
        self, seq: Sequence, status: SequenceStatus, now: float, stop_reason: int | str | None = None
    ) -> None:
        """Ends a sequence for a reason that the scheduler can't see (stop string, NaN) and frees its blocks.

        A sequence that has ended already only takes the new status and reason.

        Args:
            seq: A sequence that was added.
            status: A finished status.
            now: Time, in the engine's clock (seconds).
            stop_reason: What ended it, if a stop string did.
        """
        assert status.is_finished, status
        if seq.status.is_finished:
            seq.status, seq.stop_reason = status, stop_reason
            return
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        group = next(group for group in queue.values() if seq in group.sequences)
        self._end(group, seq, status, now, stop_reason)

    def schedule(self, now: float) -> SchedulerOutput:
        """Chooses the sequences and token counts of the next step, and gives them their blocks.

        Args:
            now: Time, in the engine's clock (seconds).

        Returns:
            The step; `scheduled` is empty only if nothing is left to run.
        """
        rows: list[ScheduledSequence] = []
        preempted: list[str] = []
        ignored: list[SequenceGroup] = []
        budget = self.max_num_batched_tokens

        for group in list(self.running.values()):
            seq = group.sequences[0]
            # Victims are the last ones, so not scheduled in this step, and only victims come after one.
            if seq.status is not SequenceStatus.RUNNING or not self._make_room(seq, preempted):
                break
            # Only the last running request can have more than one token left: nothing is admitted behind
            # a prompt that used up the budget. So there is a token at least for everyone.
            assert budget
            rows.append(self._row(group, seq, budget))
            budget -= rows[-1].num_tokens

        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            group = next(iter(self.waiting.values()))
            status = self._allocate(group)
            if status is AllocStatus.LATER:
                break
            if status is AllocStatus.NEVER:
                self._end(group, group.sequences[0], SequenceStatus.FINISHED_IGNORED, now)
                ignored.append(group)
                continue
            self._admit(group, now)
            rows.append(self._row(group, group.sequences[0], budget))
            budget -= rows[-1].num_tokens

        rows.sort(key=_is_longer)
        return SchedulerOutput(
            scheduled=tuple(rows),
            blocks_to_copy=(),
            preempted=tuple(preempted),
            ignored=tuple(ignored),
            num_batched_tokens=self.max_num_batched_tokens - budget,
        )

    def update(self, output: SchedulerOutput, token_ids: list[int | None], now: float) -> list[SequenceGroup]:
        """Takes in the result of a step: appends tokens, caches full blocks, ends and frees what is done.

        A sequence ends at an end token, else at one of its stop tokens (neither before min_tokens), else
        at max_tokens, at max_model_len, or when the whole pool can't hold another token. Sequences that
        ended since schedule() are skipped.

        Args:
            output: What schedule() returned last.
            token_ids: The sampled tokens, parallel to output.scheduled; None where nothing was sampled.
            now: Time, in the engine's clock (seconds).

        Returns:
            The requests that got a token, the ended ones among them.
        """
        block_size = self.block_manager.block_size
        changed: list[SequenceGroup] = []
        for (group, seq, start, num_tokens, _), token_id in zip(output.scheduled, token_ids, strict=True):
            if seq.status is not SequenceStatus.RUNNING:
                continue
            stop = start + num_tokens
            seq.num_computed_tokens = stop
            if start // block_size != stop // block_size:
                self.block_manager.cache_full_blocks(seq, group.cache_salt, start, stop)
            assert (token_id is None) == (stop < len(seq)), f"token {token_id} after {stop} of {len(seq)}"
            if token_id is None:
                continue
            seq.output_token_ids.append(token_id)
            if group.metrics.first_token_time is None:
                group.metrics.first_token_time = now
            self._end_if_done(group, seq, token_id, now)
            changed.append(group)
        return changed

    def _make_room(self, seq: Sequence, preempted: list[str]) -> bool:
        """Gives a sequence blocks for all its tokens, taken from later ones; False if it lost its own."""
        while not self.block_manager.append_slots(seq):
            request_id, victim = self.running.popitem()
            self._preempt(victim)
            preempted.append(request_id)
            if seq in victim.sequences:
                return False
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        for seq in group.sequences:
            self.block_manager.free(seq)
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = 0
        group.metrics.num_preemptions += 1
        self.waiting[group.request_id] = group
        self.waiting.move_to_end(group.request_id, last=False)

    def _allocate(self, group: SequenceGroup) -> AllocStatus:
        return self.block_manager.allocate(
            group.sequences[0],
            group.cache_salt,
            # Shared tokens are not computed, so there would be no log-probabilities of them.
            use_cache=group.sampling_params.prompt_logprobs is None,
            num_reserved=self._num_watermark_blocks if self.running else 0,
        )

    def _admit(self, group: SequenceGroup, now: float) -> None:
        """Moves a request that has its blocks from waiting to running."""
        seq, metrics = group.sequences[0], group.metrics
        del self.waiting[group.request_id]
        self.running[group.request_id] = group
        seq.status = SequenceStatus.RUNNING
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = now
            metrics.num_cached_tokens = seq.num_computed_tokens

    def _row(self, group: SequenceGroup, seq: Sequence, budget: int) -> ScheduledSequence:
        start = seq.num_computed_tokens
        num_tokens = len(seq) - start
        table = self.block_manager.block_tables[seq.seq_id]
        if num_tokens > budget:
            num_tokens = budget
            table = table[: self.block_manager.num_blocks_of(start + budget)]
        return ScheduledSequence(group, seq, start, num_tokens, table)

    def _end_if_done(self, group: SequenceGroup, seq: Sequence, token_id: int, now: float) -> None:
        params = group.sampling_params
        num_output_tokens = len(seq.output_token_ids)
        if num_output_tokens >= params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                self._end(group, seq, SequenceStatus.FINISHED_STOPPED, now)
                return
            if params.stop_token_ids and token_id in params.stop_token_ids:
                self._end(group, seq, SequenceStatus.FINISHED_STOPPED, now, token_id)
                return
        if num_output_tokens == params.max_tokens or len(seq) >= self._max_len:
            self._end(group, seq, SequenceStatus.FINISHED_LENGTH_CAPPED, now)

    def _end(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        now: float | None,
        stop_reason: int | str | None = None,
    ) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self.block_manager.free(seq)
            del self.running[group.request_id]
        else:
            del self.waiting[group.request_id]
        seq.status, seq.stop_reason = status, stop_reason
        group.metrics.finished_time = now


def _is_longer(row: ScheduledSequence) -> bool:
    return row.num_tokens > 1

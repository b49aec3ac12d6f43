"""What the tokens of a step do to sequences: they grow, fork, end, and give back their blocks."""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from jax_paged.core import beam_search
from jax_paged.core.beam_search import Candidate
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import Sequence, SequenceGroup, SequenceStatus

if TYPE_CHECKING:
    from jax_paged.core.runner_output import TokenLogprobs


class SequenceUpdater:
    """Takes in the results of steps, for the scheduler.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests; those that end are taken out.
        max_model_len: Most tokens of a prompt and its output together.
        eos_token_ids: Tokens that end a sequence, unless its request ignores them.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.block_manager = block_manager
        self.queues = queues
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids

    def update(
        self,
        output: SchedulerOutput,
        token_ids: list[int],
        now: float,
        logprobs: "Items[TokenLogprobs]" = (),
    ) -> list[SequenceGroup]:
        """See Scheduler.update."""
        manager = self.block_manager
        size = manager.block_size
        changed: dict[SequenceGroup, None] = {}
        beams: dict[SequenceGroup, list[tuple[Sequence, list[int], list[float]]]] = {}
        i = 0
        for group, seq, start, num_tokens, _, sampling in output.scheduled:
            stop = start + num_tokens
            if seq.status is SequenceStatus.RUNNING:
                seq.num_computed_tokens = stop
                if start // size != stop // size:
                    manager.cache_full_blocks(seq, group.cache_salt, start, stop)
            for sample in sampling:
                token_id = token_ids[i]
                i += 1
                if sample.status is not SequenceStatus.RUNNING:
                    continue
                changed[group] = None
                if group.metrics.first_token_time is None:
                    group.metrics.first_token_time = now
                if group.beam_params:
                    top = logprobs[i - 1]
                    beams.setdefault(group, []).append((sample, top.top_token_ids, top.top_logprobs))
                    continue
                sample.num_computed_tokens = stop
                sample.output_token_ids.append(token_id)
                self._end_if_done(group, sample, token_id, now)
        assert i == len(token_ids), f"{len(token_ids)} tokens for {i} samples"
        for group, candidates in beams.items():
            self._advance_beams(group, candidates, now)
        return list(changed)

    def _end_if_done(self, group: SequenceGroup, seq: Sequence, token_id: int, now: float) -> None:
        params = group.sampling_params
        num_output_tokens = len(seq.output_token_ids)
        if num_output_tokens >= params.min_tokens:
            if token_id in self._eos_token_ids(group):
                self.end(group, seq, SequenceStatus.FINISHED_STOPPED, now)
                return
            if params.stop_token_ids and token_id in params.stop_token_ids:
                self.end(group, seq, SequenceStatus.FINISHED_STOPPED, now, token_id)
                return
        if num_output_tokens == params.max_tokens or len(seq) >= self.max_model_len:
            self.end(group, seq, SequenceStatus.FINISHED_LENGTH_CAPPED, now)

    def _eos_token_ids(self, group: SequenceGroup) -> frozenset[int]:
        return frozenset() if group.sampling_params.ignore_eos else self.eos_token_ids

    def _advance_beams(
        self, group: SequenceGroup, beams: list[tuple[Sequence, list[int], list[float]]], now: float
    ) -> None:
        """Replaces the beams of a search by the best continuations: forks some beams, frees others."""
        assert group.beam_params is not None, "a beam search"
        eos_token_ids = self._eos_token_ids(group)
        going, complete = beam_search.select(group, beams, eos_token_ids)
        ended = [_extended(c.parent.fork(0, 0), c, SequenceStatus.FINISHED_STOPPED) for c in complete]
        beam_search.complete(group, ended, eos_token_ids)
        parents: set[Sequence] = set()
        continued: list[tuple[Sequence, Candidate]] = []
        for candidate in going:
            seq = parent = candidate.parent
            if parent in parents:
                seq = parent.fork(0, 0)
                self.block_manager.fork(parent, seq, parent.num_computed_tokens)
            parents.add(parent)
            continued.append((seq, candidate))
        for seq, _, _ in beams:
            if seq not in parents:
                self.block_manager.free(seq)
        group.sequences = [_extended(seq, c, SequenceStatus.RUNNING) for seq, c in continued]
        max_len = min(self.max_model_len, len(beams[0][0].prompt_token_ids) + group.beam_params.max_tokens)
        is_done = not going or len(group.sequences[0]) >= max_len
        if is_done or beam_search.is_decided(group, max_len, eos_token_ids):
            self.end_group(group, SequenceStatus.FINISHED_LENGTH_CAPPED, now)

    def end(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        now: float | None,
        stop_reason: int | str | None = None,
    ) -> None:
        """Ends a sequence and frees its blocks; its request leaves the queues with the last one."""
        manager = self.block_manager
        if seq in manager.block_tables or seq in manager.swapped_tables:
            manager.free(seq)
        seq.status, seq.stop_reason = status, stop_reason
        if group.is_finished:
            self.queues.remove(group)
            group.metrics.finished_time = now

    def end_group(
        self,
        group: SequenceGroup,
        status: SequenceStatus,
        now: float | None,
        stop_reason: str | None = None,
    ) -> None:
        """Ends all sequences of a request that have not ended; of a beam search, the best are left."""
        seqs = group.unfinished
        for seq in seqs:
            self.end(group, seq, status, now, stop_reason)
        if not seqs:
            self.queues.remove(group)
            group.metrics.finished_time = now
        if group.beam_params and status is SequenceStatus.FINISHED_LENGTH_CAPPED:
            beam_search.complete(group, seqs, self._eos_token_ids(group))
            group.sequences = group.completed


def _extended(seq: Sequence, candidate: Candidate, status: SequenceStatus) -> Sequence:
    """Appends a candidate's token to a sequence with its parent's tokens; returns the sequence."""
    seq.output_token_ids.append(candidate.token_id)
    seq.cum_logprob, seq.status = candidate.cum_logprob, status
    return seq

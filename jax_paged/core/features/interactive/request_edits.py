"""Edits of a request between two steps: fork it, take back tokens, or drop blocks."""

import copy
import dataclasses

from jax_paged.core.batch_slots import PlannedStep
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.preemption import Preemption
from jax_paged.core.request import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.step_builder import StepBuilder


@dataclasses.dataclass(frozen=True)
class Fork:
    """Creation of a new request that continues from the current state of another one.

    Args:
        request_id: The request to fork. It must have one sequence, and continues unchanged.
        new_id: Id of the new request, which no unfinished request has.
        seed: Random seed of the new request.
        now: Time in the engine's clock (seconds).
    """

    request_id: str
    new_id: str
    seed: int
    now: float


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Removal of the last output tokens of a request with one sequence.

    Args:
        request_id: The request.
        num_tokens: Number of tokens to remove, at most `max_rollback_tokens`.
    """

    request_id: str
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class DropBlocks:
    """Removal of some blocks from a decoding request.

    The request must have one sequence, and the model one cache group without a window.

    Args:
        request_id: The request.
        kept: Ascending block table indices of the blocks that stay. The last block with computed tokens must
            be one of them.
    """

    request_id: str
    kept: tuple[int, ...]


RequestEdit = Fork | Rollback | DropBlocks


def max_rollback_tokens(seq: Sequence, block_size: int) -> int:
    """Returns the number of output tokens that can be taken back.

    If blocks were dropped, tokens before the last block that was kept at that time cannot be taken back.
    """
    num_tokens = len(seq.output_token_ids)
    if seq.kept_block_indices:
        # At least one computed token of the last kept block must stay, and after it one token that is still
        # to be computed.
        num_tokens = min(num_tokens, len(seq) - 2 - seq.kept_block_indices[-1] * block_size)
    return num_tokens


class RequestEditor:
    """Edits of requests. No step may be in flight.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        preemption: Requeues requests that cannot continue with their current blocks.
        max_num_seqs: Maximum number of running sequences.
    """

    def __init__(
        self, block_manager: BlockManager, queues: RequestQueues, preemption: Preemption, max_num_seqs: int
    ) -> None:
        self._manager = block_manager
        self._queues = queues
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs

    def apply(self, edit: RequestEdit) -> SequenceGroup:
        """Applies an edit. Returns the edited request, or the new request for a fork."""
        group = self._queues.find(edit.request_id)
        assert group is not None, f"there is no unfinished request {edit.request_id}"
        (seq,) = group.sequences
        assert not seq.num_in_flight_tokens, "a step in flight computes the sequence"
        match edit:
            case Fork():
                return self._fork(group, seq, edit)
            case Rollback(num_tokens=num_tokens):
                self._roll_back(group, seq, num_tokens)
            case DropBlocks(kept=kept):
                self._drop(seq, kept)
        return group

    def can_fork(self, group: SequenceGroup) -> bool:
        """Returns whether a request can be forked now.

        If it has dropped blocks, this requires a free batch slot, because the fork could not be recomputed.
        """
        return not group.sequences[0].num_dropped_tokens or self._has_batch_slot(group)

    def plan_draft(self, request_id: str, token_ids: list[int], step: StepBuilder) -> bool:
        """Plans a step in which one decoding request verifies the given draft tokens.

        Args:
            request_id: The request.
            token_ids: The draft tokens.
            step: An empty step.

        Returns:
            False if there are not enough free blocks. Then nothing has changed, except that blocks outside of
            windows may have been freed.
        """
        group = self._queues.running[request_id]
        (seq,) = group.sequences
        assert seq.num_new_tokens == 1, "the request is not decoding"
        copies = self._manager.append_slots([(seq, 1 + len(token_ids))])
        if copies is None:
            return False
        step.copies += copies
        step.planned = PlannedStep(drafts={seq: token_ids}, scores_drafts=True)
        step.multi_token_sequences.append((group, seq, 1, (seq,)))
        step.budget -= 1 + len(token_ids)
        return True

    def _has_batch_slot(self, group: SequenceGroup) -> bool:
        return (
            group.request_id in self._queues.running and self._queues.num_reserved_slots < self._max_num_seqs
        )

    def _fork(self, group: SequenceGroup, seq: Sequence, edit: Fork) -> SequenceGroup:
        child = seq.fork(0, edit.seed)
        params = copy.copy(group.sampling_params)
        params.seed = edit.seed
        request = dataclasses.replace(group.request, request_id=edit.new_id, sampling_params=params)
        new = dataclasses.replace(group, request=request, sequences=[child], metrics=RequestMetrics(edit.now))
        shares = self._has_batch_slot(group) and self._manager.fork(seq, child, seq.num_computed_tokens)
        self._queues.add(new)
        if shares:
            self._queues.move_to_running(new)
            new.metrics.first_scheduled_time = edit.now
            new.metrics.num_cached_tokens = child.num_computed_tokens
        else:  # the new request waits like any other request, and its tokens are computed again
            assert not child.num_dropped_tokens, "a fork with dropped blocks cannot be recomputed"
            child.status, child.num_computed_tokens = SequenceStatus.WAITING, 0
        return new

    def _roll_back(self, group: SequenceGroup, seq: Sequence, num_tokens: int) -> None:
        manager = self._manager
        assert 0 < num_tokens <= max_rollback_tokens(seq, manager.block_size), (
            f"cannot roll back {num_tokens} tokens"
        )
        seq.truncate(len(seq.output_token_ids) - num_tokens)
        del seq.block_hashes[len(seq) // manager.block_size :]
        manager.prefixes.discard_lookup()  # it may refer to tokens of this sequence that no longer exist
        seq.num_computed_tokens = min(seq.num_computed_tokens, len(seq) - 1)
        tables = manager.block_tables.get(seq) or manager.swapped_tables.get(seq)
        if tables is None:
            return
        lacks_blocks = manager.lacks_window_blocks(tables, seq.num_computed_tokens)
        if lacks_blocks or manager.states.has_states:  # recurrent states cannot be rolled back
            manager.free(seq)
            self._preemption.requeue(group)
        else:
            manager.keep_only(seq, self._computed_block_indices(seq))

    def _drop(self, seq: Sequence, kept: tuple[int, ...]) -> None:
        manager, computed = self._manager, self._computed_block_indices(seq)
        assert kept[-1] == computed[-1], f"the last computed block, {computed[-1]}, is not in {kept}"
        manager.keep_only(seq, list(kept))
        seq.kept_block_indices = tuple([seq.original_block_index(i) for i in kept])
        seq.num_dropped_tokens += (len(computed) - len(kept)) * manager.block_size

    def _computed_block_indices(self, seq: Sequence) -> list[int]:
        """Returns the block table indices of the blocks that contain computed tokens."""
        num_tokens = seq.num_computed_tokens - seq.num_dropped_tokens
        return list(range(self._manager.num_blocks_of(num_tokens)))

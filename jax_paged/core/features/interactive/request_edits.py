"""What a user does to a request between two steps: forks it, takes tokens back, drops blocks of it."""

import copy
import dataclasses

from jax_paged.core.batch_slots import PlannedRows
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.preemption import Preemption
from jax_paged.core.request import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.step_builder import StepBuilder


@dataclasses.dataclass(frozen=True)
class Fork:
    """A new request that goes on from where another one is.

    Args:
        request_id: The one that goes on as it would have; it has one sequence.
        new_id: Of the new one: no unfinished request has it.
        seed: Of the new one.
        now: Time, in the engine's clock (seconds).
    """

    request_id: str
    new_id: str
    seed: int
    now: float


@dataclasses.dataclass(frozen=True)
class Rollback:
    """The last output tokens of a request with one sequence are taken back.

    Args:
        request_id: The request.
        num_tokens: At most `most_taken_back`.
    """

    request_id: str
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class DropBlocks:
    """Some blocks of a request that decodes are dropped; it has one sequence, and one cache group, no window.

    Args:
        request_id: The request.
        kept: Places in its block table of the blocks that stay, in order; the last one with tokens is one.
    """

    request_id: str
    kept: tuple[int, ...]


RequestEdit = Fork | Rollback | DropBlocks


def most_taken_back(seq: Sequence, block_size: int) -> int:
    """Returns how many output tokens can be taken back: of a request with dropped blocks, the latest."""
    most = len(seq.output_token_ids)
    if seq.block_places:
        # A token of that block stays computed, and the one behind it known.
        most = min(most, len(seq) - 2 - seq.block_places[-1] * block_size)
    return most


class RequestEditor:
    """Applies edits while no step is in flight.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        preemption: Takes blocks from requests that can't go on with them.
        max_num_seqs: Maximum sequences running at a time.
    """

    def __init__(
        self, block_manager: BlockManager, queues: RequestQueues, preemption: Preemption, max_num_seqs: int
    ) -> None:
        self._manager = block_manager
        self._queues = queues
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs

    def apply(self, edit: RequestEdit) -> SequenceGroup:
        """Applies an edit; returns the request, of a fork the new one."""
        group = self._queues.find(edit.request_id)
        assert group is not None, f"no request {edit.request_id}"
        (seq,) = group.sequences
        assert not seq.num_in_flight, "a step in flight computes it"
        match edit:
            case Fork():
                return self._fork(group, seq, edit)
            case Rollback(num_tokens=num_tokens):
                self._roll_back(group, seq, num_tokens)
            case DropBlocks(kept=kept):
                self._drop(seq, kept)
        return group

    def can_fork(self, group: SequenceGroup) -> bool:
        """Returns whether a request can be forked now: with dropped blocks, only if there is a batch slot."""
        return not group.sequences[0].num_dropped_tokens or self._has_batch_slot(group)

    def plan_draft(self, request_id: str, token_ids: list[int], step: StepBuilder) -> bool:
        """Makes an empty step that of one request that decodes, with tokens that may be drawn for it.

        Returns:
            Whether there are blocks for them; if not, nothing but windows has changed.
        """
        group = self._queues.running[request_id]
        (seq,) = group.sequences
        assert seq.num_new_tokens == 1, "it decodes"
        copies = self._manager.append_slots([(seq, 1 + len(token_ids))])
        if copies is None:
            return False
        step.copies += copies
        step.planned = PlannedRows(drafts={seq: token_ids}, scores_drafts=True)
        step.longer_rows.append((group, seq, 1, (seq,)))
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
            self._queues.run(new)
            new.metrics.first_scheduled_time = edit.now
            new.metrics.num_cached_tokens = child.num_computed_tokens
        else:  # it waits as any other request, and is computed again
            assert not child.num_dropped_tokens, "see can_fork"
            child.status, child.num_computed_tokens = SequenceStatus.WAITING, 0
        return new

    def _roll_back(self, group: SequenceGroup, seq: Sequence, num_tokens: int) -> None:
        manager = self._manager
        assert 0 < num_tokens <= most_taken_back(seq, manager.block_size), num_tokens
        seq.truncate(len(seq.output_token_ids) - num_tokens)
        del seq.block_hashes[len(seq) // manager.block_size :]
        manager.prefixes.forget_walk()  # it may be that of this sequence, along tokens that are gone
        seq.num_computed_tokens = min(seq.num_computed_tokens, len(seq) - 1)
        tables = manager.block_tables.get(seq) or manager.swapped_tables.get(seq)
        if tables is None:
            return
        has_left = manager.lacks(tables, seq.num_computed_tokens)
        if has_left or manager.states.is_used:  # a state can't go back
            manager.free(seq)
            self._preemption.requeue(group)
        else:
            manager.keep(seq, self._held_places(seq))

    def _drop(self, seq: Sequence, kept: tuple[int, ...]) -> None:
        manager, held = self._manager, self._held_places(seq)
        assert kept[-1] == held[-1], f"the last of {len(held)} blocks is not in {kept}"
        manager.keep(seq, list(kept))
        seq.block_places = tuple([seq.block_place(i) for i in kept])
        seq.num_dropped_tokens += (len(held) - len(kept)) * manager.block_size

    def _held_places(self, seq: Sequence) -> list[int]:
        """Returns the places of the blocks that hold computed tokens."""
        num_tokens = seq.num_computed_tokens - seq.num_dropped_tokens
        return list(range(self._manager.num_blocks_of(num_tokens)))

"""Which sequences the executor knows, by which ids, and how much of their block tables."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.scheduler_output import (
    BlockTables,
    NewSequence,
    Sample,
    ScheduledSequence,
    StateMoves,
)
from jax_paged.core.stop_conditions import StopConditions

if TYPE_CHECKING:
    from jax_paged.core.features.lora import AdapterSlots

# What one sequence computes: its request, the sequence, how many tokens, and the sequences that get a token,
# each drawn from the logits of the last token computed: none before the end of the prompt, all samples of the
# request there, later the sequence alone. (A plain tuple: a step makes hundreds, and they are cheap.)
Row = tuple[SequenceGroup, Sequence, int, tuple[Sequence, ...]]


class PlannedRows(NamedTuple):
    """What the rows of a step do beside computing their tokens, if a StepPlanner has planned the step.

    Args:
        is_multi_step: Whether all tokens of each row except the first are drawn in this step.
        drafts: For sequences that sample, tokens to compute after those that the sequences have.
        scores_drafts: Whether log-probabilities of the drafts are wanted.
    """

    is_multi_step: bool = False
    drafts: Mapping[Sequence, list[int]] = MappingProxyType({})
    scores_drafts: bool = False

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the rows may keep checkpoints of recurrent states."""
        return not self.is_multi_step


class ScheduledRows(NamedTuple):
    """The rows of a step in terms of ids; see SchedulerOutput."""

    new_sequences: list[NewSequence]
    scheduled: list[ScheduledSequence]
    samples: list[Sample]


@dataclasses.dataclass(slots=True)
class BatchSlot:
    """What the executor knows of a sequence: of each table, the first `num_told` blocks."""

    group: SequenceGroup
    seq: Sequence
    tables: BlockTables
    num_told: list[int]


class BatchSlots:
    """Turns sequences and their block tables into what has changed since the executor was told last.

    A sequence has a batch slot from the step that first computes or samples it until it loses its blocks. If
    it gets other blocks later, it takes a new batch slot under a new id.

    Args:
        block_manager: Owner of the block tables; notes what has changed in them until it is told.
        stop_conditions: Tell the tokens that are held back until min_tokens.
        adapters: Owner of the device slots of LoRA adapters; None without LoRA.
    """

    def __init__(
        self, block_manager: BlockManager, stop_conditions: StopConditions, adapters: "AdapterSlots | None"
    ) -> None:
        self._manager = block_manager
        self.adapters = adapters
        self._stop_conditions = stop_conditions
        self._slots: dict[Sequence, BatchSlot] = {}
        self.by_id: dict[int, BatchSlot] = {}  # read-only for others
        self._ids = itertools.count(1)
        # Shared by all rows without news; read-only.
        self._nothing_new: BlockTables = [[] for _ in block_manager.groups]
        self._nothing_replaced: list[tuple[int, int, int]] = []
        self._pending_token = [NO_TOKEN]
        self._ended: list[int] = []

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the sequence of an id, with its request; None if it has left its batch slot."""
        slot = self.by_id.get(seq_id)
        return None if slot is None else (slot.group, slot.seq)

    def release(self) -> tuple[int, ...]:
        """Releases the batch slots of sequences that have lost their blocks; returns their ids."""
        lost = self._manager.lost
        left = [slot for seq in lost if (slot := self._slots.pop(seq, None)) is not None]
        lost.clear()
        for slot in left:
            del self.by_id[slot.seq.seq_id]
        return tuple([slot.seq.seq_id for slot in left])

    def take_state_moves(self) -> StateMoves:
        """Returns what has to be moved between slots of states."""
        return self._manager.states.take_moves()

    def note_end(self, seq: Sequence) -> None:
        """Notes that a sequence has ended; it may have had a batch slot."""
        if seq.seq_id:
            self._ended.append(seq.seq_id)

    def take_ended(self) -> tuple[int, ...]:
        """Returns the ids of the sequences that have ended since the last call."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def rows(self, rows: Iterable[Row], planned: PlannedRows | None) -> ScheduledRows:
        """Gives batch slots to the sequences of a step that have none; returns the step in terms of ids.

        Notes in the sequences what the step computes and draws, now that it is in flight.

        Args:
            rows: In the order in which they are computed.
            planned: What the rows do beside computing their tokens; None for nothing.
        """
        slots, changed, states = self._slots, self._manager.changed, self._manager.states
        new: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        samples: list[Sample] = []
        for i, (group, seq, num_tokens, sampling) in enumerate(rows):
            slot = slots.get(seq)
            if slot is None:
                slot = self._take(group, seq, new)
            new_blocks, replaced = self._nothing_new, self._nothing_replaced
            if seq in changed:
                replaced = changed.pop(seq)
                new_blocks = [t[n:] for t, n in zip(slot.tables, slot.num_told, strict=True)]
                slot.num_told = list(map(len, slot.tables))
            start = seq.num_computed_tokens + seq.num_in_flight
            if seq.num_pending:
                token_ids = self._pending_token
            elif num_tokens == 1 and sampling:
                token_ids = (seq.output_token_ids or seq.prompt_token_ids)[-1:]
            else:
                token_ids = seq.tokens(start, start + num_tokens)
            num_logits = num_drawn = 1
            if planned is not None:
                token_ids, num_logits, num_drawn = _planned_row(planned, seq, token_ids, num_tokens)
            checkpoint = (0, 0)
            if planned is None or planned.keeps_checkpoints:
                checkpoint = states.begin_checkpoint(seq, start, start + num_tokens)
            scheduled.append(
                ScheduledSequence(
                    seq.seq_id, start, token_ids, new_blocks, replaced, states.slot_of(seq), checkpoint
                )
            )
            seq.num_in_flight += num_tokens
            for sample in sampling:
                if sample is not seq:
                    sample.num_in_flight += num_tokens
                    if sample not in slots:
                        self._take(group, sample, new)
                sample.num_pending += num_drawn
                samples.append(Sample(i, sample.seq_id, num_logits))
        return ScheduledRows(new, scheduled, samples)

    def _take(self, group: SequenceGroup, seq: Sequence, new: list[NewSequence]) -> BatchSlot:
        """Gives a sequence a batch slot; appends to `new` what the executor has to know of it."""
        tables = self._manager.block_tables[seq]
        self._manager.changed.pop(seq, None)
        former_id, seq.seq_id = seq.seq_id, next(self._ids)
        slot = BatchSlot(group, seq, tables, list(map(len, tables)))
        self._slots[seq] = self.by_id[seq.seq_id] = slot
        entry = NewSequence(
            seq_id=seq.seq_id,
            request=group.request,
            output_token_ids=list(seq.output_token_ids),
            seed=seq.seed,
            end_token_ids=self._stop_conditions.end_token_ids(group),
            block_tables=[list(table) for table in tables],
            num_dropped_tokens=seq.num_dropped_tokens,
            former_id=former_id,
            adapter_slot=0 if self.adapters is None else self.adapters.slot_of(group.request),
        )
        new.append(entry)
        return slot


def _planned_row(
    planned: PlannedRows, seq: Sequence, token_ids: list[int], num_tokens: int
) -> tuple[list[int], int, int]:
    """Returns the tokens that a planned row computes, its rows of logits, and the tokens that are pending."""
    if planned.is_multi_step:
        return token_ids, 1, num_tokens
    drafts = planned.drafts.get(seq, [])
    return token_ids + drafts, 1 + len(drafts), 1

"""Batch slots: which sequences and block table entries the executor knows, and under which ids."""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.scheduler_output import (
    NO_CHECKPOINT,
    BlockTables,
    NewSequence,
    Sample,
    ScheduledSequence,
    StateMoves,
)
from jax_paged.core.stop_conditions import StopConditions

if TYPE_CHECKING:
    from jax_paged.core.features.lora import AdapterSlots

# A scheduled sequence while its step is built: the request, the sequence, the number of tokens to compute,
# and the sequences that sample from the logits of the last of these tokens. In a chunk before the end of the
# prompt, no sequence samples. At the end of the prompt, all samples of the request do. Later, only the
# sequence itself does.
# It is a plain tuple because tuples are cheap to create, and a step contains hundreds.
StepEntry = tuple[SequenceGroup, Sequence, int, tuple[Sequence, ...]]


class PlannedStep(NamedTuple):
    """Differences between a multi-step, or a step with draft tokens, and an ordinary step.

    A StepPlanner or RequestEditor.plan_draft sets it in StepBuilder.planned.

    Args:
        is_multi_step: Whether the step is a multi-step. All tokens of a sequence except the first are then
            sampled in the step itself.
        drafts: For sequences that sample, draft tokens to compute after the tokens of the sequence.
        scores_drafts: Whether log-probabilities of the draft tokens are requested.
    """

    is_multi_step: bool = False
    drafts: Mapping[Sequence, list[int]] = MappingProxyType({})
    scores_drafts: bool = False

    @property
    def allows_checkpoints(self) -> bool:
        """Whether checkpoints of recurrent states may be made in this step."""
        return not self.is_multi_step


class StepSequences(NamedTuple):
    """The scheduled sequences of a step in the format of SchedulerOutput."""

    new_sequences: list[NewSequence]
    scheduled: list[ScheduledSequence]
    samples: list[Sample]


@dataclasses.dataclass(slots=True)
class BatchSlot:
    """One batch slot, as far as the executor knows it.

    Args:
        group: The request of the sequence.
        seq: The sequence.
        tables: The block tables of the sequence, which the block manager extends in place.
        num_sent_blocks: Per cache group, the number of leading blocks that the executor has received.
    """

    group: SequenceGroup
    seq: Sequence
    tables: BlockTables
    num_sent_blocks: list[int]


class BatchSlots:
    """Owner of the batch slots and ids of sequences.

    It also determines which changes of block tables the executor has to receive.

    A sequence has a batch slot from the first step that computes or samples it until it loses its blocks. If
    it gets blocks again later, it takes a new batch slot under a new id.

    Args:
        block_manager: Owner of the block tables. It records their changes until they are sent to the
            executor.
        stop_conditions: Returns the tokens that end a sequence.
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
        # Shared by all scheduled sequences whose block tables have not changed. Read-only.
        self._nothing_new: BlockTables = [[] for _ in block_manager.groups]
        self._nothing_replaced: list[tuple[int, int, int]] = []
        self._pending_token = [NO_TOKEN]
        self._ended: list[int] = []

    def find(self, seq_id: int) -> tuple[SequenceGroup, Sequence] | None:
        """Returns the request and the sequence of an id; None if the sequence has no batch slot."""
        slot = self.by_id.get(seq_id)
        return None if slot is None else (slot.group, slot.seq)

    def release(self) -> tuple[int, ...]:
        """Releases the batch slots of sequences that have lost their blocks. Returns their ids."""
        lost = self._manager.sequences_without_blocks
        released = [slot for seq in lost if (slot := self._slots.pop(seq, None)) is not None]
        lost.clear()
        for slot in released:
            del self.by_id[slot.seq.seq_id]
        return tuple([slot.seq.seq_id for slot in released])

    def take_state_moves(self) -> StateMoves:
        """Returns the copies between state slots since the last call."""
        return self._manager.states.take_moves()

    def record_end(self, seq: Sequence) -> None:
        """Records that a sequence has ended."""
        if seq.seq_id:
            self._ended.append(seq.seq_id)

    def take_ended(self) -> tuple[int, ...]:
        """Returns the ids of the sequences that have ended since the last call."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def to_scheduled(self, rows: Iterable[StepEntry], planned: PlannedStep | None) -> StepSequences:
        """Converts the scheduled sequences of a step to the format of SchedulerOutput.

        Assigns batch slots to sequences that have none, and adds the tokens of the step to the in-flight and
        pending counts of the sequences.

        Args:
            rows: The scheduled sequences, in the order in which they are computed.
            planned: Differences from an ordinary step; None for an ordinary step.
        """
        slots, changed, states = self._slots, self._manager.table_changes, self._manager.states
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
                new_blocks = [t[n:] for t, n in zip(slot.tables, slot.num_sent_blocks, strict=True)]
                slot.num_sent_blocks = list(map(len, slot.tables))
            start = seq.num_computed_tokens + seq.num_in_flight_tokens
            if seq.num_pending_tokens:
                token_ids = self._pending_token
            elif num_tokens == 1 and sampling:
                token_ids = (seq.output_token_ids or seq.prompt_token_ids)[-1:]
            else:
                token_ids = seq.tokens(start, start + num_tokens)
            num_logits = num_pending = 1
            if planned is not None:
                token_ids, num_logits, num_pending = _planned_tokens(planned, seq, token_ids, num_tokens)
            checkpoint = NO_CHECKPOINT
            if planned is None or planned.allows_checkpoints:
                checkpoint = states.begin_checkpoint(seq, start, start + num_tokens)
            scheduled.append(
                ScheduledSequence(
                    seq.seq_id, start, token_ids, new_blocks, replaced, states.slot_of(seq), checkpoint
                )
            )
            seq.num_in_flight_tokens += num_tokens
            for sample in sampling:
                if sample is not seq:
                    sample.num_in_flight_tokens += num_tokens
                    if sample not in slots:
                        self._take(group, sample, new)
                sample.num_pending_tokens += num_pending
                samples.append(Sample(i, sample.seq_id, num_logits))
        return StepSequences(new, scheduled, samples)

    def _take(self, group: SequenceGroup, seq: Sequence, new: list[NewSequence]) -> BatchSlot:
        """Assigns a batch slot to a sequence, and appends its NewSequence to `new`."""
        tables = self._manager.block_tables[seq]
        self._manager.table_changes.pop(seq, None)
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


def _planned_tokens(
    planned: PlannedStep, seq: Sequence, token_ids: list[int], num_tokens: int
) -> tuple[list[int], int, int]:
    """Returns a sequence's tokens to compute, its number of logits rows and its number of pending tokens."""
    if planned.is_multi_step:
        return token_ids, 1, num_tokens
    drafts = planned.drafts.get(seq, [])
    return token_ids + drafts, 1 + len(drafts), 1

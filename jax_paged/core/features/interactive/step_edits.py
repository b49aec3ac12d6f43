"""Edits of a step after it was scheduled and before it is executed."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from jax_paged.core.batch_slots import BatchSlots
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler_output import Sample, SchedulerOutput


def select_sequences(output: SchedulerOutput, rows: Iterable[int]) -> SchedulerOutput:
    """Returns a step that computes only some of its scheduled sequences, in the given order.

    Batch slots, copies, swaps and encoder inputs of the step stay unchanged.

    Args:
        output: The step.
        rows: Indices into output.scheduled. Sequences with one token must come first.
    """
    rows, multi_step = list(rows), output.num_multi_step_tokens
    samples: dict[int, list[Sample]] = defaultdict(list)
    for sample in output.samples:
        samples[sample.scheduled_index].append(sample)
    scheduled = [output.scheduled[i] for i in rows]
    return dataclasses.replace(
        output,
        scheduled=tuple(scheduled),
        samples=tuple(
            sample._replace(scheduled_index=new) for new, i in enumerate(rows) for sample in samples[i]
        ),
        num_batched_tokens=sum(row.num_tokens for row in scheduled),
        num_logits_rows=sum(sum(sample.num_logits for sample in samples[i]) or 1 for i in rows),
        num_multi_step_tokens=tuple(multi_step[i] for i in rows) if multi_step else (),
    )


def edit_step(
    output: SchedulerOutput, rows: list[int], batch_slots: BatchSlots, manager: BlockManager
) -> SchedulerOutput:
    """Removes or reorders sequences of the step that was scheduled last; see Scheduler.edit.

    Sequences that are removed keep their batch slots and blocks, including blocks that they share or have
    copied. Their block table changes are sent again when they are scheduled next. Samples that were forked in
    the step are removed, and forked again when the end of their prompt is scheduled again.

    Args:
        output: The step that was scheduled last.
        rows: Indices into output.scheduled of the sequences that stay, in their new order.
        batch_slots: The scheduler's batch slots.
        manager: Owner of the blocks.
    """
    slots, kept, multi_step = batch_slots.by_id, set(rows), output.num_multi_step_tokens
    dropped = {
        i: multi_step[i] if multi_step else row.num_tokens
        for i, row in enumerate(output.scheduled)
        if i not in kept
    }
    for sample in output.samples:
        if sample.scheduled_index in dropped:  # draft tokens are not counted as in flight
            dropped[sample.scheduled_index] -= sample.num_logits - 1
    for i, num_tokens in dropped.items():
        row = output.scheduled[i]
        slot = slots[row.seq_id]
        slot.seq.num_in_flight_tokens -= num_tokens
        manager.states.revert_prepare(slot.seq, row.start)
        if slot.seq in manager.block_tables and (any(row.new_blocks) or row.replaced_blocks):
            sent = zip(slot.num_sent_blocks, row.new_blocks, strict=True)
            slot.num_sent_blocks = [num_sent - len(blocks) for num_sent, blocks in sent]
            manager.table_changes[slot.seq] = [*row.replaced_blocks, *manager.table_changes.get(slot.seq, [])]
    for sample in output.samples:
        if sample.scheduled_index not in dropped:
            continue
        slot = slots[sample.seq_id]
        if sample.seq_id == output.scheduled[sample.scheduled_index].seq_id:
            slot.seq.num_pending_tokens -= dropped[sample.scheduled_index] if multi_step else 1
        elif not slot.seq.status.is_finished:
            manager.free(slot.seq)
            slot.group.sequences.remove(slot.seq)
    return select_sequences(output, rows)

"""A step with fewer requests, or in another order, after it was scheduled and before it is computed."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from jax_paged.core.batch_slots import Seats
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler_output import Sample, SchedulerOutput


def with_rows(output: SchedulerOutput, rows: Iterable[int]) -> SchedulerOutput:
    """Returns a step that computes only some of its rows, in a given order.

    Whatever else the step does stays in it: seats, copies, swaps and encoders.

    Args:
        output: The step.
        rows: Indices in output.scheduled, those of rows of one token first.
    """
    rows = list(rows)
    samples: dict[int, list[Sample]] = defaultdict(list)
    for sample in output.samples:
        samples[sample.row].append(sample)
    scheduled = [output.scheduled[i] for i in rows]
    return dataclasses.replace(
        output,
        scheduled=tuple(scheduled),
        samples=tuple(sample._replace(row=new) for new, i in enumerate(rows) for sample in samples[i]),
        num_batched_tokens=sum(row.num_tokens for row in scheduled),
        num_logits_rows=sum(sum(sample.num_logits for sample in samples[i]) or 1 for i in rows),
        burst=tuple(output.burst[i] for i in rows) if output.burst else (),
    )


def take_back(output: SchedulerOutput, rows: Iterable[int], seats: Seats, manager: BlockManager) -> None:
    """Undoes that a step was to compute some of its rows.

    Their sequences keep seats and blocks, and the blocks that they share or have copied stay so: the next row
    of each tells the executor what this one would have told. Samples that were to be forked in the step are
    forked again when their prompt is computed.

    Args:
        output: The step that was scheduled last.
        rows: Indices in output.scheduled: all rows of each of their requests.
        seats: Of the step's scheduler.
        manager: Owner of the blocks.
    """
    dropped = {i: output.burst[i] if output.burst else output.scheduled[i].num_tokens for i in rows}
    for sample in output.samples:
        if sample.row in dropped:
            dropped[sample.row] -= sample.num_logits - 1  # drafts are no tokens of the sequence yet
    for i, num_tokens in dropped.items():
        row = output.scheduled[i]
        seat = seats.by_id[row.seq_id]
        seat.seq.num_in_flight -= num_tokens
        manager.states.take_back(seat.seq, row.start)
        if seat.seq in manager.block_tables and (any(row.new_blocks) or row.replaced_blocks):
            told = zip(seat.num_told, row.new_blocks, strict=True)
            seat.num_told = [num_told - len(blocks) for num_told, blocks in told]
            manager.changed[seat.seq] = [*row.replaced_blocks, *manager.changed.get(seat.seq, [])]
    for sample in output.samples:
        if sample.row not in dropped:
            continue
        seat = seats.by_id[sample.seq_id]
        if sample.seq_id == output.scheduled[sample.row].seq_id:
            seat.seq.num_pending -= dropped[sample.row] if output.burst else 1
        elif not seat.seq.status.is_finished:
            manager.free(seat.seq)
            seat.group.sequences.remove(seat.seq)

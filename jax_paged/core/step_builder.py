"""One step while it is scheduled, and how it becomes a SchedulerOutput."""

from typing import NamedTuple

from jax_paged.core.scheduler_output import (
    BlockTables,
    Copies,
    EncoderInput,
    NewSequence,
    Sample,
    ScheduledSequence,
    SchedulerOutput,
)
from jax_paged.core.seats import Seats
from jax_paged.core.sequence import Sequence, SequenceGroup


class Row(NamedTuple):
    """What one sequence computes.

    Args:
        group: Its request.
        seq: The sequence.
        num_tokens: Tokens that it computes.
        sampling: The sequences that get a token, each drawn from the logits of the last token computed: none
            before the end of the prompt, all samples of the request there, later the sequence alone.
    """

    group: SequenceGroup
    seq: Sequence
    num_tokens: int
    sampling: tuple[Sequence, ...]


class StepBuilder:
    """Collects a step while it is scheduled.

    Args:
        budget: Tokens that it may still compute.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.is_closed = False  # to requests that don't run yet
        self.rows: list[Row] = []
        self.swap_out: Copies = []
        self.swap_in: Copies = []
        self.copies: Copies = []
        self.to_encode: list[tuple[SequenceGroup, BlockTables]] = []
        self.preempted: list[str] = []
        self.ended: list[str] = []

    def build(self, step_id: int, seats: Seats) -> SchedulerOutput:
        """Returns the step; takes and gives seats."""
        released = seats.release()
        new: list[NewSequence | None] = []
        scheduled: list[ScheduledSequence] = []
        samples: list[Sample] = []
        for i, (group, seq, num_tokens, sampling) in enumerate(sorted(self.rows, key=_is_longer)):
            new.append(seats.take(group, seq))
            scheduled.append(seats.row(seq, num_tokens))
            for sample in sampling:
                if sample is not seq:
                    new.append(seats.take(group, sample))
                samples.append(Sample(i, sample.seq_id))
        return SchedulerOutput(
            step_id=step_id,
            scheduled=tuple(scheduled),
            samples=tuple(samples),
            new_sequences=tuple([entry for entry in new if entry is not None]),
            released_seq_ids=released,
            blocks_to_swap_out=tuple(self.swap_out),
            blocks_to_swap_in=tuple(self.swap_in),
            blocks_to_copy=tuple(self.copies),
            to_encode=tuple(
                [EncoderInput(g.request_id, g.encoder_token_ids, tables) for g, tables in self.to_encode]
            ),
            preempted=tuple(self.preempted),
            ended=tuple(self.ended),
            num_batched_tokens=sum([row.num_tokens for row in self.rows]),
            num_logits_rows=sum([len(row.sampling) or 1 for row in self.rows]),
        )


def _is_longer(row: Row) -> bool:
    return row.num_tokens > 1

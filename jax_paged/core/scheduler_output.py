"""What the scheduler hands to the runner: one step, as values."""

import dataclasses
from typing import NamedTuple

from jax_paged.core.block_manager import BlockTables, Copies
from jax_paged.core.sequence import Sequence, SequenceGroup


class ScheduledSequence(NamedTuple):
    """What one sequence computes in a step (a tuple: a step makes hundreds, and they are cheap to make).

    Args:
        group: Its request.
        seq: The sequence.
        start: Position of the first token that the step computes.
        num_tokens: Tokens that the step computes.
        block_tables: A list of block ids a cache group, that hold start + num_tokens tokens, no block more.
            Read-only; valid until the next schedule().
        sampling: The sequences that get a token, each drawn from the logits of the last token computed: none
            before the end of the prompt, all samples of the request there, later the sequence alone.
    """

    group: SequenceGroup
    seq: Sequence
    start: int
    num_tokens: int
    block_tables: BlockTables
    sampling: tuple[Sequence, ...]


@dataclasses.dataclass(frozen=True)
class SchedulerOutput:
    """One step. The runner swaps out, swaps in, copies blocks, runs encoders, then computes the rows.

    Args:
        scheduled: Rows of one token first, then the longer ones; each part in the order of requests.
        blocks_to_swap_out: (device block, host block) ids.
        blocks_to_swap_in: (host block, device block) ids.
        blocks_to_copy: (from, to) device block ids; no block is both.
        to_encode: Requests whose encoder runs before the rows are computed, and their block tables.
        preempted: Ids of the requests that lost their blocks on the device.
        ended: Requests that ended as they can never run (on).
        num_batched_tokens: Sum of num_tokens.
        num_logits_rows: Sampling sequences, and rows without any: of these too the logits are looked at, so
            that NaN is noticed before a block that holds it is cached.
    """

    scheduled: tuple[ScheduledSequence, ...]
    blocks_to_swap_out: tuple[tuple[int, int], ...]
    blocks_to_swap_in: tuple[tuple[int, int], ...]
    blocks_to_copy: tuple[tuple[int, int], ...]
    to_encode: tuple[tuple[SequenceGroup, BlockTables], ...]
    preempted: tuple[str, ...]
    ended: tuple[SequenceGroup, ...]
    num_batched_tokens: int
    num_logits_rows: int


class StepBuilder:
    """Collects a step while it is scheduled.

    Args:
        budget: Tokens that it may still compute.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.is_closed = False  # to requests that don't run yet
        self.rows: list[ScheduledSequence] = []
        self.swap_out: Copies = []
        self.swap_in: Copies = []
        self.copies: Copies = []
        self.to_encode: list[tuple[SequenceGroup, BlockTables]] = []
        self.preempted: list[str] = []
        self.ended: list[SequenceGroup] = []

    def build(self) -> SchedulerOutput:
        """Returns the step."""
        rows = sorted(self.rows, key=_is_longer)
        return SchedulerOutput(
            scheduled=tuple(rows),
            blocks_to_swap_out=tuple(self.swap_out),
            blocks_to_swap_in=tuple(self.swap_in),
            blocks_to_copy=tuple(self.copies),
            to_encode=tuple(self.to_encode),
            preempted=tuple(self.preempted),
            ended=tuple(self.ended),
            num_batched_tokens=sum([row.num_tokens for row in rows]),
            num_logits_rows=sum([len(row.sampling) or 1 for row in rows]),
        )


def _is_longer(row: ScheduledSequence) -> bool:
    return row.num_tokens > 1

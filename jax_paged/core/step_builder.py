"""One step while it is scheduled, and how it becomes a SchedulerOutput."""

from jax_paged.core.batch_slots import Row, Seats
from jax_paged.core.scheduler_output import BlockTables, Copies, EncoderInput, SchedulerOutput
from jax_paged.core.sequence import Sequence, SequenceGroup


class StepBuilder:
    """Collects a step while it is scheduled.

    Args:
        budget: Tokens that it may still compute.
        is_ahead: Whether a step before it has not returned: then nobody is preempted, nor ends for lack of
            blocks, as what returns may change the need for it.
    """

    def __init__(self, budget: int, *, is_ahead: bool) -> None:
        self.budget = budget
        self.is_ahead = is_ahead
        self.is_short = False  # of what only the results of the steps before it can bring
        self._initial_budget = budget
        self.is_closed = False  # to requests that don't run yet
        self.is_burst = False  # of decode steps: rows of one token draw as many as they are said to compute
        self.rows_of_one: list[Row] = []  # that compute one token
        self.longer_rows: list[Row] = []
        self.scores_drafts = False
        self.drafts: dict[Sequence, list[int]] = {}  # tokens to compute after those that a sequence has
        self.swap_out: Copies = []
        self.swap_in: Copies = []
        self.copies: Copies = []
        self.to_encode: list[tuple[SequenceGroup, BlockTables]] = []
        self.preempted: list[str] = []
        self.ended: list[str] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed yet."""
        return not self.rows_of_one and not self.longer_rows

    def build(self, step_id: int, seats: Seats) -> SchedulerOutput:
        """Returns the step; takes and gives seats."""
        released = seats.release()
        rows = [*self.rows_of_one, *self.longer_rows]
        new, scheduled, samples = seats.rows(rows, is_burst=self.is_burst, drafts=self.drafts)
        moves = seats.take_state_moves()
        return SchedulerOutput(
            step_id=step_id,
            scheduled=tuple(scheduled),
            samples=tuple(samples),
            new_sequences=tuple(new),
            released_seq_ids=released,
            blocks_to_swap_out=tuple(self.swap_out),
            blocks_to_swap_in=tuple(self.swap_in),
            blocks_to_copy=tuple(self.copies),
            to_encode=tuple(
                [
                    EncoderInput(group.request_id, group.encoder_token_ids, [list(table) for table in tables])
                    for group, tables in self.to_encode
                ]
            ),
            preempted=tuple(self.preempted),
            ended=tuple(self.ended),
            num_batched_tokens=self._initial_budget - self.budget,
            num_logits_rows=len(samples)
            + sum(map(len, self.drafts.values()))
            + sum([not sampling for _, _, _, sampling in rows]),
            ended_seq_ids=seats.take_ended(),
            scores_drafts=self.scores_drafts,
            burst=tuple([num_tokens for _, _, num_tokens, _ in rows]) if self.is_burst else (),
            adapter_loads=seats.adapters.take_loads(),
            states_to_swap_out=tuple(moves.swap_out),
            states_to_swap_in=tuple(moves.swap_in),
            states_to_copy=tuple(moves.copies),
        )

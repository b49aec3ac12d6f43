"""One step while it is scheduled, and how it becomes a SchedulerOutput."""

from typing import Protocol

from jax_paged.core.batch_slots import BatchSlots, Row
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
        self.is_short = False  # the next step needs the results of the steps in flight
        self._initial_budget = budget
        self.is_closed = False  # no other request is admitted
        self.is_multi_step = False  # the token count of a row is the number of its decode steps
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

    def note_encoder_input(self, group: SequenceGroup, tables: BlockTables | None) -> None:
        """Notes that the encoder runs for a request, if the request has input for it and still its blocks."""
        if group.encoder_token_ids and tables is not None:
            self.to_encode.append((group, tables))

    def build(self, step_id: int, batch_slots: BatchSlots) -> SchedulerOutput:
        """Returns the step; assigns and releases batch slots."""
        released = batch_slots.release()
        rows = [*self.rows_of_one, *self.longer_rows]
        new, scheduled, samples = batch_slots.rows(rows, is_multi_step=self.is_multi_step, drafts=self.drafts)
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
            ended_seq_ids=batch_slots.take_ended(),
            scores_drafts=self.scores_drafts,
            burst=tuple([num_tokens for _, _, num_tokens, _ in rows]) if self.is_multi_step else (),
            adapter_loads=batch_slots.take_adapter_loads(),
            state_moves=batch_slots.take_state_moves(),
        )


class StepPlanner(Protocol):
    """A feature that may take a whole step for itself: multi-step decoding, speculation."""

    def plan(self, step: StepBuilder) -> bool:
        """Fills an empty step with rows of all running sequences, or leaves it empty and returns False."""
        ...

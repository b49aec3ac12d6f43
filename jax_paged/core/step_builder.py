"""A step while it is being scheduled, and its conversion to a SchedulerOutput."""

import dataclasses
from typing import Protocol

from jax_paged.core.batch_slots import BatchSlots, PlannedStep, StepEntry
from jax_paged.core.request import SequenceGroup
from jax_paged.core.scheduler_output import BlockTables, Copies, EncoderInput, SchedulerOutput


class StepBuilder:
    """A step while it is being scheduled.

    Args:
        budget: Number of tokens that the step may still compute.
        is_ahead: Whether earlier steps are in flight. Then no request is preempted, or ended for lack of
            blocks, because the results of these steps may free blocks.
    """

    def __init__(self, budget: int, *, is_ahead: bool) -> None:
        self.budget = budget
        self.is_ahead = is_ahead
        self.awaits_results = False  # True if the next step needs the results of steps in flight
        self._initial_budget = budget
        self.is_closed = False  # True if no other request may be admitted
        # Sequences that compute one token in this step, and sequences that compute several tokens.
        self.single_token_sequences: list[StepEntry] = []
        self.multi_token_sequences: list[StepEntry] = []
        self.planned: PlannedStep | None = None  # None for an ordinary step
        self.swap_out: Copies = []
        self.swap_in: Copies = []
        self.copies: Copies = []
        self.encoder_groups: list[tuple[SequenceGroup, BlockTables]] = []
        self.preempted: list[str] = []
        self.ended: list[str] = []

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has been added yet."""
        return not self.single_token_sequences and not self.multi_token_sequences

    def add_encoder_input(self, group: SequenceGroup, tables: BlockTables | None) -> None:
        """Schedules the encoder for a request that has encoder input and block tables."""
        if group.request.encoder_token_ids and tables is not None:
            self.encoder_groups.append((group, tables))

    def build(self, step_id: int, batch_slots: BatchSlots) -> SchedulerOutput:
        """Returns the finished step. Assigns and releases batch slots."""
        released = batch_slots.release()
        rows = [*self.single_token_sequences, *self.multi_token_sequences]
        new, scheduled, samples = batch_slots.to_scheduled(rows, self.planned)
        output = SchedulerOutput(
            step_id=step_id,
            scheduled=tuple(scheduled),
            samples=tuple(samples),
            new_sequences=tuple(new),
            released_seq_ids=released,
            blocks_to_swap_out=tuple(self.swap_out),
            blocks_to_swap_in=tuple(self.swap_in),
            blocks_to_copy=tuple(self.copies),
            encoder_inputs=self._encoder_inputs() if self.encoder_groups else (),
            preempted=tuple(self.preempted),
            ended=tuple(self.ended),
            num_batched_tokens=self._initial_budget - self.budget,
            num_logits_rows=len(samples) + sum([not sampling for _, _, _, sampling in rows]),
            ended_seq_ids=batch_slots.take_ended(),
            adapter_loads=() if batch_slots.adapters is None else batch_slots.adapters.take_loads(),
            state_moves=batch_slots.take_state_moves(),
        )
        return output if self.planned is None else _with_planned(output, rows, self.planned)

    def _encoder_inputs(self) -> tuple[EncoderInput, ...]:
        return tuple(
            EncoderInput(group.request_id, group.request.encoder_token_ids, [list(table) for table in tables])
            for group, tables in self.encoder_groups
        )


class StepPlanner(Protocol):
    """A feature that may plan a whole step: multi-step decoding or speculative decoding."""

    def plan(self, step: StepBuilder) -> bool:
        """Fills an empty step with all running sequences if the feature applies now.

        Returns:
            True if the step has been filled. If False, the step is still empty, but blocks outside of windows
            may have been freed.
        """
        ...

    def set_flag(self, group: SequenceGroup) -> None:
        """Sets the flag of a new request that tells whether its sequences may take part in such steps."""
        ...


def _with_planned(output: SchedulerOutput, rows: list[StepEntry], planned: PlannedStep) -> SchedulerOutput:
    num_tokens = tuple(n for _, _, n, _ in rows)
    return dataclasses.replace(
        output,
        num_logits_rows=output.num_logits_rows + sum(map(len, planned.drafts.values())),
        scores_drafts=planned.scores_drafts,
        num_multi_step_tokens=num_tokens if planned.is_multi_step else (),
    )

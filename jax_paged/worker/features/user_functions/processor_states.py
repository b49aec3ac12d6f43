"""The states of logits processors while their sequences have no seat."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Array

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker.input_batch import InputBatch


class KeptStates:
    """Keeps states of preempted sequences in host memory, by the ids that they had in their seats."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[np.ndarray]] = {}

    def keep(self, output: SchedulerOutput, batch: InputBatch, states: list[Array]) -> None:
        """Copies the states of the sequences that lose their seats in a step and go on, before they do.

        Args:
            output: The step.
            batch: Before it knows of the step.
            states: [S, ...] each.
        """
        if output.step_id == 0:
            self._by_id.clear()
        for seq_id in output.ended_seq_ids:
            self._by_id.pop(seq_id, None)
        left = [seq_id for seq_id in output.released_seq_ids if seq_id not in output.ended_seq_ids]
        if states and left:
            seats = batch.seats_of(left)
            rows = [np.asarray(leaf)[seats] for leaf in states]
            is_on = batch.processor_args[seats].any(axis=1)
            self._by_id |= {left[i]: [leaf[i] for leaf in rows] for i in np.flatnonzero(is_on).tolist()}

    def bring_back(
        self,
        output: SchedulerOutput,
        batch: InputBatch,
        states: list[Array],
        place: Callable[..., tuple[Array, ...]],
    ) -> list[Array]:
        """Returns the states with those of the sequences that come back in a step, in their new seats."""
        back = [new for new in output.new_sequences if new.former_id in self._by_id]
        if not back:
            return states
        host = [np.array(leaf) for leaf in states]
        seats = batch.seats_of([new.seq_id for new in back]).tolist()
        for new, seat in zip(back, seats, strict=True):
            for leaf, row in zip(host, self._by_id.pop(new.former_id), strict=True):
                leaf[seat] = row
        return list(place(*host))

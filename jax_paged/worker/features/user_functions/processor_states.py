"""States of logits processors: storage while a sequence has no batch slot, and initialization."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Array

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker.features.user_functions.logits_processors import BEGINS
from jax_paged.worker.input_batch import InputBatch


class SavedStates:
    """Processor states of preempted sequences, in host memory, by the sequence id before the preemption."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[np.ndarray]] = {}
        self._on_host: list[np.ndarray] = []

    def move(
        self,
        output: SchedulerOutput,
        batch: InputBatch,
        states: list[Array],
        to_devices: Callable[..., tuple[Array, ...]],
    ) -> list[Array]:
        """Saves the states of preempted sequences, and restores the states of resumed sequences.

        Args:
            output: The step.
            batch: State of the batch slots, already updated for the step.
            states: The device arrays, each [S, ...], after the previous steps.
            to_devices: Copies host arrays to all devices.

        Returns:
            The device arrays, with the states of resumed sequences in their new batch slots.
        """
        if output.step_id == 0:
            self._by_id.clear()
            batch.features.released_processors.clear()  # they belong to a previous scheduler
        for seq_id in output.ended_seq_ids:
            self._by_id.pop(seq_id, None)
        released = batch.features.released_processors
        left = [x for x in released if x[0] not in output.ended_seq_ids]
        released.clear()
        if states and left:
            rows = [np.asarray(leaf)[[batch_slot for _, batch_slot in left]] for leaf in states]
            self._by_id |= {seq_id: [leaf[i] for leaf in rows] for i, (seq_id, _) in enumerate(left)}
        return self._restore_resumed(output, batch, states, to_devices)

    def free(self, states: list[Array]) -> None:
        """Copies the states of all batch slots to host memory."""
        self._on_host = [np.array(leaf) for leaf in states]

    def restore(self, states: list[Array], to_devices: Callable[..., tuple[Array, ...]]) -> list[Array]:
        """Returns the states that `free` has copied, or `states` if nothing was copied."""
        saved, self._on_host = self._on_host, []
        return list(to_devices(*saved)) if saved else states

    def _restore_resumed(
        self,
        output: SchedulerOutput,
        batch: InputBatch,
        states: list[Array],
        to_devices: Callable[..., tuple[Array, ...]],
    ) -> list[Array]:
        """Restores the states of resumed sequences. It has the same arguments as `move`."""
        resumed = [new for new in output.new_sequences if new.former_id in self._by_id]
        if not resumed:
            return states
        host = [np.array(leaf) for leaf in states]
        batch_slots = batch.slots_of([new.seq_id for new in resumed]).tolist()
        for new, batch_slot in zip(resumed, batch_slots, strict=True):
            for leaf, row in zip(host, self._by_id.pop(new.former_id), strict=True):
                leaf[batch_slot] = row
        return list(to_devices(*host))


def fill_processor_args(filled: np.ndarray, batch: InputBatch, batch_slots: np.ndarray) -> None:
    """Fills the field `processor_args` of the packed buffer for the logits rows that tokens are drawn from.

    Processors of a sequence begin with their initial state when its first token is drawn.

    Args:
        filled: The field, int32 [L, P], bits of float32.
        batch: State of the batch slots. The given batch slots are removed from `new_slots`.
        batch_slots: Batch slot of each logits row that a token is drawn from.
    """
    features = batch.features
    args = features.processor_args[batch_slots]
    if features.new_slots:
        is_new = np.array([batch_slot in features.new_slots for batch_slot in batch_slots.tolist()], bool)
        modes = np.cumsum([0, *(1 + n for n in features.processors.values())])[:-1]
        args[np.ix_(is_new, modes)] *= BEGINS
        features.new_slots.difference_update(batch_slots.tolist())
    filled[: len(batch_slots)] = args.view(np.int32)

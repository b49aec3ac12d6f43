"""Slots of recurrent states: the field `state_slots` of the packed buffer."""

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput


def fill_state_slots(filled: np.ndarray, output: SchedulerOutput, num_slots: int) -> None:
    """Fills the field `state_slots`, int32 [3, B].

    Its rows are the state slot of each sequence, the slot that gets a checkpoint of the state in this step,
    and the number of tokens before the checkpoint. Unused slots are `num_slots`, which does not exist.
    """
    rows, n = output.scheduled, len(output.scheduled)
    num_before, slots = np.array([row.checkpoint for row in rows], np.int32).T
    filled[:2] = num_slots
    filled[0, :n] = [row.state_slot for row in rows]
    assert filled[0, :n].min() > 0, "a sequence has no state slot"
    filled[1, :n] = np.where(slots > 0, slots, num_slots)
    filled[2, :n] = num_before

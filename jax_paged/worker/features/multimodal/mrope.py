"""M-RoPE: the rotary positions of prompts with images, whose tokens stand in rows and columns.

Source: Wang et al., Qwen2-VL, 2024.
"""

import numpy as np
from jaxtyping import Int

from jax_paged.core.request import StandIn
from jax_paged.worker.input_batch import InputBatch


def mrope_positions(stand_ins: tuple[StandIn, ...]) -> tuple[Int[np.ndarray, "3 n"], int]:
    """Returns the positions up to the end of the last image, and how far those behind stand from the text's.

    A token of text has the same position along all axes. An image begins where a token in its place would
    stand; each of its tokens has that position, and those that are as many further on as rows and columns are
    before it. What follows comes behind the largest. A position thus depends on nothing that follows it, and
    the keys of cached blocks stay right.

    Args:
        stand_ins: The images of a prompt, in order; at least one.
    """
    positions, offset = np.tile(np.arange(stand_ins[-1].stop, dtype=np.int32), (3, 1)), 0
    for image in stand_ins:
        own, (num_rows, num_columns) = slice(image.start, image.stop), image.data.grid
        positions[:, own] = positions[0, image.start]
        positions[1, own] += np.repeat(np.arange(num_rows, dtype=np.int32), num_columns)
        positions[2, own] += np.tile(np.arange(num_columns, dtype=np.int32), num_rows)
        change = max(num_rows, num_columns) - num_rows * num_columns
        positions[:, image.stop :] += change
        offset += change
    return positions, offset


def fill_mrope(
    filled: Int[np.ndarray, "3 t"],
    batch: InputBatch,
    token_batch_slots: Int[np.ndarray, " t"],
    positions: Int[np.ndarray, " t"],
) -> None:
    """Fills the rotary positions of token rows.

    Args:
        filled: The field mrope_positions.
        batch: The batch slots.
        token_batch_slots: The batch slot of each token row.
        positions: The position of each token in its sequence.
    """
    filled[:] = positions + batch.features.mrope_offsets[token_batch_slots]
    is_known = positions < batch.features.mrope_stops[token_batch_slots]  # none in steps that decode
    for batch_slot in np.unique(token_batch_slots[is_known]).tolist():
        rows = np.flatnonzero(is_known & (token_batch_slots == batch_slot))
        filled[:, rows] = batch.features.mrope[batch_slot][:, positions[rows]]

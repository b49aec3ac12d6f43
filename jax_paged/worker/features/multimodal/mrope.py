"""M-RoPE: rotary positions with three axes (time, row, column) for prompts with images.

Source: Wang et al., Qwen2-VL, 2024.
"""

import numpy as np
from jaxtyping import Int

from jax_paged.core.request import PlaceholderData
from jax_paged.worker.input_batch import InputBatch


def mrope_positions(placeholder_data: tuple[PlaceholderData, ...]) -> tuple[Int[np.ndarray, "3 n"], int]:
    """Returns the M-RoPE positions up to the end of the last image, and the offset of later positions.

    A text token has the same position on all three axes. An image starts at the position p that a text token
    in its place would have. Its token in row r and column c has the position (p, p + r, p + c). Text after
    the image continues at p + max(rows, columns). With two text tokens, an image of 2 x 3 tokens, and more
    text:

        token     0  1 | 2  3  4  5  6  7 | 8  9
        time      0  1 | 2  2  2  2  2  2 | 5  6
        row       0  1 | 2  2  2  3  3  3 | 5  6
        column    0  1 | 2  3  4  2  3  4 | 5  6

    A position depends on earlier tokens only, so the keys in cached blocks stay valid.

    Args:
        placeholder_data: The images of a prompt, in order; at least one.

    Returns:
        int32 [3, n], and the number to add to the index of a later token to get its position (-3 above).
    """
    positions, offset = np.tile(np.arange(placeholder_data[-1].stop, dtype=np.int32), (3, 1)), 0
    for image in placeholder_data:
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
    """Fills the field `mrope_positions` of the packed buffer.

    Args:
        filled: The field, without padding.
        batch: State of the batch slots.
        token_batch_slots: Batch slot of each token row.
        positions: Index of each token in its sequence.
    """
    filled[:] = positions + batch.features.mrope_offsets[token_batch_slots]
    is_known = positions < batch.features.mrope_stops[token_batch_slots]  # always False in decode steps
    for batch_slot in np.unique(token_batch_slots[is_known]).tolist():
        rows = np.flatnonzero(is_known & (token_batch_slots == batch_slot))
        filled[:, rows] = batch.features.mrope[batch_slot][:, positions[rows]]

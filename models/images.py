"""What a model reads of images, and how an image reaches it. Imports neither JAX nor NumPy."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True)
class ImageSpec:
    """How images stand in the prompts of a model: cut into square tiles, each in place of some tokens.

    Args:
        token_id: The placeholder in whose place the vectors of an image stand.
        num_tokens: How many of them stand for a tile.
        tile_size: Pixels on each side of a tile.
    """

    token_id: int
    num_tokens: int
    tile_size: int


class Tile(NamedTuple):
    """A part of an image; the encoder gets pixels * scale + offset.

    Args:
        pixels: uint8 [3, tile_size, tile_size].
        scale: float32 [3], of each channel.
        offset: float32 [3], of each channel.
    """

    pixels: "np.ndarray"
    scale: "np.ndarray"
    offset: "np.ndarray"

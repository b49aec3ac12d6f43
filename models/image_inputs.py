"""What a model reads of images, and how an image reaches it. Imports neither JAX nor NumPy."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import numpy as np


# Patches of an image: what attends to so many takes a second and some gigabytes.
MAX_PATCHES = 2**16


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
    added_paths: ClassVar[tuple[str, ...]] = ()


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


@dataclasses.dataclass(frozen=True)
class PatchSpec:
    """How images stand in the prompts of a model: cut into patches, with a token for each square of some.

    The tokens of an image have rotary positions by their rows and columns.

    Args:
        token_id: The placeholder in whose place the vectors of an image stand.
        patch_size: Pixels on each side of a patch.
        merge_size: Patches on each side of a square.
        added_paths: A token has one more vector for each of these modules, which is added to its output.
    """

    token_id: int
    patch_size: int
    merge_size: int
    added_paths: tuple[str, ...]


class Patches(NamedTuple):
    """An image of a size of its own; the encoder gets pixels * scale + offset.

    Args:
        pixels: uint8 [patches, 3 * patch_size**2], those of a square of patches side by side.
        scale: float32 [3], of each channel.
        offset: float32 [3], of each channel.
        grid: Rows and columns of its tokens.
    """

    pixels: "np.ndarray"
    scale: "np.ndarray"
    offset: "np.ndarray"
    grid: tuple[int, int]

"""Image formats of models, and the image data that is passed to the encoder.

This module imports neither JAX nor NumPy.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import numpy as np


# Maximum number of patches of an image. The time of the encoder's attention grows with the square of this
# number, and attention over this many patches takes several gigabytes of memory.
MAX_PATCHES = 2**16


@dataclasses.dataclass(frozen=True)
class ImageSpec:
    """Image format of a model that cuts images into square tiles of a fixed size.

    In the prompt, each tile is a fixed number of placeholder tokens.

    Args:
        token_id: Token id of the placeholder. The embeddings of the placeholders are replaced by image
            vectors.
        num_tokens: Number of placeholders per tile.
        tile_size: Width and height of a tile (pixels).
    """

    token_id: int
    num_tokens: int
    tile_size: int
    added_paths: ClassVar[tuple[str, ...]] = ()


class Tile(NamedTuple):
    """A square part of an image. The encoder's input is pixels * scale + offset.

    Args:
        pixels: uint8 [3, tile_size, tile_size].
        scale: float32 [3], factor for each channel.
        offset: float32 [3], offset for each channel.
    """

    pixels: "np.ndarray"
    scale: "np.ndarray"
    offset: "np.ndarray"


@dataclasses.dataclass(frozen=True)
class PatchSpec:
    """Image format of a model that cuts images of any size into patches.

    In the prompt, each square of merge_size * merge_size patches is one placeholder token. The rotary
    positions of these tokens are their rows and columns in the image.

    Args:
        token_id: Token id of the placeholder. The embeddings of the placeholders are replaced by image
            vectors.
        patch_size: Width and height of a patch (pixels).
        merge_size: Width and height of a square of patches (patches).
        added_paths: Paths of modules. For each of them, the image encoder returns one more vector per
            placeholder, which is added to the output of the module (DeepStack).
    """

    token_id: int
    patch_size: int
    merge_size: int
    added_paths: tuple[str, ...]


class Patches(NamedTuple):
    """An image of any size. The encoder's input is pixels * scale + offset.

    Args:
        pixels: uint8 [patches, 3 * patch_size**2]. The patches of one square are consecutive.
        scale: float32 [3], factor for each channel.
        offset: float32 [3], offset for each channel.
        grid: Rows and columns of the image's placeholder tokens.
    """

    pixels: "np.ndarray"
    scale: "np.ndarray"
    offset: "np.ndarray"
    grid: tuple[int, int]

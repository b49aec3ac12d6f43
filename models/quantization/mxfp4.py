"""MXFP4: weights of four bits, in groups of 32 with a power of two in common, decoded as they are read.

A stack of kernels [G, I, O] is stored as two tensors of bytes, each kernel transposed:

    name_blocks [G, O, I / 32, 16]   two codes a byte, the one of the lower row in its lower half
    name_scales [G, O, I / 32]       exponent of each group's scale, plus 127; 255 makes the group NaN

A code is a sign, two bits of exponent and one of mantissa. Code times scale is a bfloat16 without rounding.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; the layout is that of gpt-oss.
"""

import dataclasses
import functools
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from jaxtyping import Int, UInt8, UInt32

from jax_paged.models.loading.stored_tensors import StoredTensor

GROUP_SIZE = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _NAN = 127, 255


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor(StoredTensor):
    """Kernels in MXFP4, with the shape that they have when they are decoded, and the place of their blocks.

    Args:
        blocks: The codes.
        scales: The scales.
    """

    blocks: StoredTensor
    scales: StoredTensor

    def read(self) -> np.ndarray:
        """Returns the decoded kernels."""
        return self.read_columns([np.arange(n) for n in self.shape])

    def read_columns(self, columns: Sequence[Int[np.ndarray, " c"]]) -> np.ndarray:
        """Returns some columns of each dimension, decoded; of no other experts, and no other columns."""
        experts, rows, outer = columns
        assert min(part.min() for part in columns) >= 0, "experts have no padding"
        groups = np.arange(rows.min() // GROUP_SIZE, rows.max() // GROUP_SIZE + 1)
        blocks = self.blocks.read_columns([experts, outer, groups, np.arange(GROUP_SIZE // 2)])
        scales = self.scales.read_columns([experts, outer, groups])
        own = rows - groups[0] * GROUP_SIZE
        out = np.empty((len(experts), len(outer), len(own)), ml_dtypes.bfloat16)
        for expert, *parts in zip(out, blocks, scales, strict=True):  # one at a time, as indices are large
            expert[...] = decode(*parts)[:, own]
        return out.swapaxes(1, 2)


def decode(blocks: UInt8[np.ndarray, "*n 16"], scales: UInt8[np.ndarray, "*n"]) -> np.ndarray:
    """Returns the numbers of codes and scales, in bfloat16 and with the last two dimensions of blocks in one.

    Args:
        blocks: Two codes a byte.
        scales: Of each group.
    """
    pairs = _pairs()[scales[..., None].astype(np.uint16) << 8 | blocks]
    return pairs.view(ml_dtypes.bfloat16).reshape(*blocks.shape[:-2], -1)


@functools.cache
def _pairs() -> UInt32[np.ndarray, " 65536"]:
    """Returns the two bfloat16 that a byte stands for, side by side, by scale * 256 + byte."""
    values = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
    scales = np.append(np.ldexp(np.float32(1), np.arange(_NAN) - _BIAS), np.float32(np.nan))
    with np.errstate(over="ignore"):
        table = (scales[:, None] * values).astype(ml_dtypes.bfloat16)
    byte = np.arange(256)
    pairs = np.stack([table[:, byte & 15], table[:, byte >> 4]], axis=-1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1)


def with_decoded(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by key, with decoded ones in place of blocks and scales.

    Raises:
        ValueError: If blocks and scales do not belong together; the message lists all that do not.
    """
    stored, problems = dict(stored), []
    for key in [key.removesuffix("_blocks") for key in stored if key.endswith("_blocks")]:
        blocks, scales = stored.pop(f"{key}_blocks"), stored.pop(f"{key}_scales", None)
        expected = (*blocks.shape[:-1], GROUP_SIZE // 2)
        if len(blocks.shape) != 4 or blocks.shape != expected or blocks.dtype != "U8":
            problems.append(
                f"{key}_blocks must be U8 of 4 dimensions, the last 16, got {blocks.dtype} {blocks.shape}"
            )
        elif scales is None or scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            is_now = "nothing" if scales is None else f"{scales.dtype} {scales.shape}"
            problems.append(f"{key}_scales must be U8 {blocks.shape[:-1]}, as the blocks, got {is_now}")
        else:
            experts, outer, groups, _ = blocks.shape
            shape = experts, groups * GROUP_SIZE, outer
            stored[key] = Mxfp4Tensor(blocks.file, key, blocks.offset, shape, "BF16", blocks, scales)
    if problems:
        raise ValueError("\n  ".join(["the checkpoint's MXFP4 tensors can't be read:", *problems]))
    return stored

"""MXFP4 weights: 4-bit floats in groups of 32 that share a power of two as scale.

The weights are decoded to bfloat16 while they are read. A stack of matrices [G, I, O] is stored as two
tensors of bytes, with each matrix transposed:

    name_blocks [G, O, I / 32, 16]   two codes per byte; the code of the lower row is in the low bits
    name_scales [G, O, I / 32]       exponent of each group's scale, plus 127; 255 makes the group NaN

A code has a sign bit, two exponent bits and one mantissa bit. The product of a code and its scale is exact in
bfloat16.

Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; the layout is the one of gpt-oss.
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
    """A stack of MXFP4 matrices that is decoded when it is read.

    The inherited shape and dtype describe the decoded matrices; the file and the offset belong to the blocks.

    Args:
        blocks: The tensor of codes, uint8 [G, O, I / 32, 16].
        scales: The tensor of scales, uint8 [G, O, I / 32].
    """

    blocks: StoredTensor
    scales: StoredTensor

    def read(self) -> np.ndarray:
        """Returns the decoded matrices, bfloat16 [G, I, O]."""
        return self.read_columns([np.arange(n) for n in self.shape])

    def read_columns(self, columns: Sequence[Int[np.ndarray, " c"]]) -> np.ndarray:
        """Returns the selected experts, rows and columns, decoded. Other experts and columns are not read.

        Args:
            columns: For each dimension, int [c]: the indices to select; none of them is -1.

        Returns:
            bfloat16 [experts, rows, columns].
        """
        experts, rows, outputs = columns
        assert min(part.min() for part in columns) >= 0, "MXFP4 weights have no padding"
        groups = np.arange(rows.min() // GROUP_SIZE, rows.max() // GROUP_SIZE + 1)
        blocks = self.blocks.read_columns([experts, outputs, groups, np.arange(GROUP_SIZE // 2)])
        scales = self.scales.read_columns([experts, outputs, groups])
        own = rows - groups[0] * GROUP_SIZE
        out = np.empty((len(experts), len(outputs), len(own)), ml_dtypes.bfloat16)
        # One expert at a time, because the arrays of indices into the table are large.
        for expert, *parts in zip(out, blocks, scales, strict=True):
            expert[...] = decode(*parts)[:, own]
        return out.swapaxes(1, 2)


def decode(blocks: UInt8[np.ndarray, "*n 16"], scales: UInt8[np.ndarray, "*n"]) -> np.ndarray:
    """Returns the numbers for codes and scales.

    Args:
        blocks: uint8 [..., groups, 16], two codes per byte.
        scales: uint8 [..., groups], the scale of each group.

    Returns:
        bfloat16 [..., groups * 32].
    """
    pairs = _pairs()[scales[..., None].astype(np.uint16) << 8 | blocks]
    return pairs.view(ml_dtypes.bfloat16).reshape(*blocks.shape[:-2], -1)


@functools.cache
def _pairs() -> UInt32[np.ndarray, " 65536"]:
    """Returns a table of the two bfloat16 numbers of a byte, packed in a uint32, by scale * 256 + byte."""
    values = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], np.float32)
    scales = np.append(np.ldexp(np.float32(1), np.arange(_NAN) - _BIAS), np.float32(np.nan))
    with np.errstate(over="ignore"):
        table = (scales[:, None] * values).astype(ml_dtypes.bfloat16)
    byte = np.arange(256)
    pairs = np.stack([table[:, byte & 15], table[:, byte >> 4]], axis=-1)
    return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1)


def with_decoded(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint with an Mxfp4Tensor in place of each pair of blocks and scales.

    Args:
        stored: The tensors of the checkpoint by key.

    Raises:
        ValueError: If blocks and scales do not match. The message lists all of them.
    """
    stored, problems = dict(stored), []
    for key in [key.removesuffix("_blocks") for key in stored if key.endswith("_blocks")]:
        blocks, scales = stored.pop(f"{key}_blocks"), stored.pop(f"{key}_scales", None)
        expected = (*blocks.shape[:-1], GROUP_SIZE // 2)
        if len(blocks.shape) != 4 or blocks.shape != expected or blocks.dtype != "U8":
            problems.append(
                f"{key}_blocks must be U8 [experts, outputs, groups, 16], got {blocks.dtype} {blocks.shape}"
            )
        elif scales is None or scales.shape != blocks.shape[:-1] or scales.dtype != "U8":
            got = "nothing" if scales is None else f"{scales.dtype} {scales.shape}"
            problems.append(f"{key}_scales must be U8 {blocks.shape[:-1]} to match the blocks, got {got}")
        else:
            experts, outputs, groups, _ = blocks.shape
            shape = experts, groups * GROUP_SIZE, outputs
            stored[key] = Mxfp4Tensor(blocks.file, key, blocks.offset, shape, "BF16", blocks, scales)
    if problems:
        raise ValueError("\n  ".join(["the checkpoint's MXFP4 tensors can't be read:", *problems]))
    return stored

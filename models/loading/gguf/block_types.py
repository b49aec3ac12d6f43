"""The types of tensors in GGUF files, and their conversion to the arrays of a quantized weight.

A tensor [*e, O, I] consists of blocks of 32 or 256 values along the last dimension, the inputs of a linear
map. A block contains groups of 16 or 32 numbers q with a scale and possibly a minimum:

    type   group  value                    stored as          bytes per 256 values: file, here
    Q4_0     32   (q - 8) * d              4 bits, zero point   144, 152
    Q4_1     32   q * d + m                4 bits, offset       160, 160
    Q5_0     32   (q - 16) * d             int8                 176, 272
    Q5_1     32   q * d + m                int8, offset         192, 288
    Q8_0     32   q * d                    int8                 272, 272
    Q4_K     32   q * (d * s) - dmin * m   4 bits, offset       144, 192
    Q5_K     32   q * (d * s) - dmin * m   int8, offset         176, 320
    Q6_K     16   (q - 32) * (d * s)       int8                 210, 320
    MXFP4    32   q * 2**(e - 128)         int8                 136, 272

The products d * s and dmin * m are exact in float32, so the arrays represent exactly the values of the file.

Source: ggml's ggml-quants.c; MXFP4: OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Int, UInt8

from jax_paged.models.quantization.quantized_linear import QuantizationScheme, QuantizedArrays

# Maximum number of values that are converted to floats at a time.
_CHUNK = 1 << 22
# MXFP4's numbers, doubled.
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


class Numbers(NamedTuple):
    """The numbers of some blocks, in the order of the file.

    Args:
        values: uint8 [*n, B, V] with numbers of 4 bits, or int8 [*n, B, V].
        scales: float [*n, B, G], the scale of each group.
        offsets: float [*n, B, G], added to the values of each group; None if they are 0.
    """

    values: Int[np.ndarray, "*n b v"]
    scales: np.ndarray
    offsets: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class BlockType:
    """A quantized type.

    Args:
        unpack: Converts blocks, uint8 [*n, B, bytes], to their numbers.
        group_size: Number of values in a group.
        scale_dtype: Name of the dtype of scales and offsets.
        zero: Zero point of numbers with 4 bits; None if they have offsets or 8 bits.
        has_offsets: Whether there are offsets.
        is_4bit: Whether the numbers have 4 bits and are stored in pairs.
    """

    unpack: Callable[[UInt8[np.ndarray, "*n b s"]], Numbers]
    group_size: int = 32
    scale_dtype: str = "float16"
    zero: int | None = None
    has_offsets: bool = False
    is_4bit: bool = False

    def floats(self, blocks: UInt8[np.ndarray, "*n b s"]) -> np.ndarray:
        """Returns the values of some blocks, float32 [*n, values].

        Args:
            blocks: uint8 [*n, B, bytes].
        """
        values, scales, offsets = self.unpack(blocks)
        grouped = values.reshape(*scales.shape, self.group_size).astype(np.float32)
        if self.zero is not None:
            grouped -= self.zero
        grouped *= scales.astype(np.float32)[..., None]
        if offsets is not None:
            grouped += offsets.astype(np.float32)[..., None]
        return grouped.reshape(*blocks.shape[:-2], -1)

    def arrays(self, blocks: UInt8[np.ndarray, "*e o b s"]) -> QuantizedArrays:
        """Returns the arrays of a quantized weight [*e, I, O].

        Args:
            blocks: uint8 [*e, O, B, bytes].
        """
        values, scales, offsets = self.unpack(blocks)
        by_column = values.reshape(*blocks.shape[:-2], -1)
        if self.is_4bit:
            by_column = by_column[..., ::2] | by_column[..., 1::2] << 4
        scales = _transposed(scales.reshape(*blocks.shape[:-2], -1))
        return QuantizedArrays(
            _transposed(by_column),
            scales,
            None if self.zero is None else np.full(scales.shape, self.zero, np.uint8),
            None,
            None if offsets is None else _transposed(offsets.reshape(*blocks.shape[:-2], -1)),
        )


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.swapaxes(-1, -2))


def _halves(blocks: np.ndarray, first: int, num: int = 1) -> np.ndarray:
    """Returns float16 numbers [*n, B, num] that begin at a byte of each block."""
    return np.ascontiguousarray(blocks[..., first : first + 2 * num]).view(np.float16)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns the low bits of all bytes, then the high bits: [..., n] to [..., 2 * n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Returns 32 bits of four bytes as 0 or 16: [..., 4] to [..., 32]."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> Numbers:
    return Numbers(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Numbers:
    return Numbers(_nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> Numbers:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Numbers(values.view(np.int8) - np.int8(16), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Numbers:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Numbers(values.view(np.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: np.ndarray) -> Numbers:
    return Numbers(np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _halves(blocks, 0))


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and the offsets of the eight groups of a Q4_K or Q5_K block.

    A block begins with d, dmin, and 12 bytes with eight scales and eight minima of 6 bits. The first four of
    each are in the low bits of four bytes. The others consist of 4 bits of the last four bytes, and of the
    upper bits of the first eight.
    """
    packed = blocks[..., 4:16].reshape(*blocks.shape[:-1], 3, 4)
    low, middle, high = packed[..., 0, :], packed[..., 1, :], packed[..., 2, :]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    factors = _halves(blocks, 0, 2).astype(np.float32)
    return factors[..., :1] * scales, -(factors[..., 1:] * minima)


def _q4_k(blocks: np.ndarray) -> Numbers:
    packed = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32)
    return Numbers(_nibbles(packed).reshape(*blocks.shape[:-1], 256), *_k_scales(blocks))


def _q5_k(blocks: np.ndarray) -> Numbers:
    packed = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32)
    low = _nibbles(packed).reshape(*blocks.shape[:-1], 8, 32)
    # Bit s of byte i is the fifth bit of number i of group s.
    high = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    values = (low | high << 4).view(np.int8)
    return Numbers(values.reshape(*blocks.shape[:-1], 256), *_k_scales(blocks))


def _q6_k(blocks: np.ndarray) -> Numbers:
    shape = blocks.shape[:-1]
    # Each half of a block has 64 bytes of low bits and 32 bytes of high bits for four runs of 32 numbers.
    low = _nibbles(blocks[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = (low | high << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Numbers(values.reshape(*shape, 256), _halves(blocks, 208).astype(np.float32) * scales)


def _mxfp4(blocks: np.ndarray) -> Numbers:
    scales = np.ldexp(np.float32(1), blocks[..., :1].astype(np.int32) - 128).astype(ml_dtypes.bfloat16)
    return Numbers(_MXFP4[_nibbles(blocks[..., 1:])], scales)


BLOCK_TYPES = {
    "Q4_0": BlockType(_q4_0, zero=8, is_4bit=True),
    "Q4_1": BlockType(_q4_1, has_offsets=True, is_4bit=True),
    "Q5_0": BlockType(_q5_0),
    "Q5_1": BlockType(_q5_1, has_offsets=True),
    "Q8_0": BlockType(_q8_0),
    "Q4_K": BlockType(_q4_k, scale_dtype="float32", has_offsets=True, is_4bit=True),
    "Q5_K": BlockType(_q5_k, scale_dtype="float32", has_offsets=True),
    "Q6_K": BlockType(_q6_k, group_size=16, scale_dtype="float32"),
    "MXFP4": BlockType(_mxfp4, scale_dtype="bfloat16"),
}
FLOAT_TYPES = ("F32", "F16", "BF16")
READABLE = (*FLOAT_TYPES, *BLOCK_TYPES)


@dataclasses.dataclass(frozen=True)
class GgufMatrix:
    """A quantized matrix of a GGUF file, or a stack of matrices. Implements StoredMatrix.

    Args:
        type: Name of the type.
        end: Last part of the tensor's key; "" if the key has no end that is common to all weights.
        stack: Shape of the dimensions before the matrix.
    """

    type: str
    end: str = "weight"
    stack: tuple[int, ...] = ()

    def scheme(self) -> QuantizationScheme:
        """Returns the layout of the weight on the device."""
        kind = BLOCK_TYPES[self.type]
        return QuantizationScheme(
            "uint8" if kind.is_4bit else "int8",
            kind.group_size,
            self,
            kind.scale_dtype,
            has_zeros=kind.zero is not None,
            has_offsets=kind.has_offsets,
        )

    def tensors(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
        """Returns the expected shape and type of the tensor; see StoredMatrix."""
        return {self.end: ((*self.stack, columns, rows), (self.type,))}

    def arrays(self, tensors: dict[str, np.ndarray]) -> QuantizedArrays:
        """Returns the arrays of the quantized weight; see StoredMatrix."""
        return BLOCK_TYPES[self.type].arrays(tensors[self.end])


def to_floats(blocks: Sequence[np.ndarray] | np.ndarray, type_name: str, dtype: str) -> np.ndarray:
    """Returns the values of a tensor as floats, without large temporary arrays.

    Args:
        blocks: uint8 [*n, B, bytes].
        type_name: Name of the type, one of BLOCK_TYPES.
        dtype: The dtype of the result.

    Returns:
        [*n, values].
    """
    kind, blocks = BLOCK_TYPES[type_name], np.asarray(blocks)
    flat = blocks.reshape(-1, *blocks.shape[-2:])
    num = kind.unpack(flat[:1]).values.shape[-1] * blocks.shape[-2]
    out, step = np.empty((len(flat), num), dtype), max(1, _CHUNK // num)
    for first in range(0, len(flat), step):
        out[first : first + step] = kind.floats(flat[first : first + step])
    return out.reshape(*blocks.shape[:-2], num)

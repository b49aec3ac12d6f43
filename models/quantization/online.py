"""Quantization of float matrices, for weights that are quantized while they are loaded.

"int8" and "fp8" have one float32 scale per column: the largest magnitude of the column divided by the largest
number of the type. "int4" has a scale and an offset in bfloat16 for each group of rows in a column. They are
chosen by least squares. For each of a few ranges that are smaller or larger than the range of the group, the
numbers are rounded, and the scale and offset with the smallest squared error for the rounded numbers are
computed. The best of these pairs is then refined: rounding and fitting are repeated. The final numbers are
rounded with the scale and offset in bfloat16, so the precision of these two hardly matters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jax_paged.models.quantization.quantized_linear import (
    OnlineDtype,
    QuantizationScheme,
    QuantizedArrays,
)

_LARGEST = {"int8": 127.0, "fp8": 448.0}
# Number of columns that are quantized to 8 bits at a time.
_COLUMNS = 256
# Number of 4-bit numbers that are quantized at a time. Their floats fit into the cache of a core.
_NUMBERS = 1 << 16
# Ranges of 4-bit numbers that are tried, relative to the range of a group, and the number of refinements.
# More ranges or refinements reduce the squared error of normally distributed weights by less than 1 %.
_RANGES = 0.75, 0.85, 0.95, 1.05
_NUM_REFINEMENTS = 2
_TOP = 15


def quantize(kernel: Float[Array, "*e i o"], target: OnlineDtype) -> QuantizedArrays:
    """Quantizes a matrix.

    Args:
        kernel: float32 or bfloat16 [*e, I, O].
        target: The type to quantize to; see the top of this file.

    Returns:
        The arrays, in the layout of `QuantizationScheme.online(target, I)`.
    """
    value = np.asarray(kernel)
    return jax.tree.map(jnp.asarray, quantize_file(value, value.dtype, target))


def quantize_file(
    kernel: Float[np.ndarray, "*e i o"], dtype: DTypeLike, target: OnlineDtype
) -> QuantizedArrays:
    """Quantizes a matrix of a memory-mapped file as `quantize` does, a few columns at a time.

    Args:
        kernel: float [*e, I, O], the mapped array. If the file stores the matrix transposed, this is a
            transposed view of it.
        dtype: The dtype that the numbers are rounded to before they are quantized.
        target: The type to quantize to; see the top of this file.

    Returns:
        The arrays in host memory; see `quantize`.
    """
    scheme = QuantizationScheme.online(target, kernel.shape[-2])
    found = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), scheme.shapes(kernel.shape))
    for i in np.ndindex(*kernel.shape[:-2]):
        own = jax.tree.map(lambda x, i=i: x[i], found)
        if scheme.source == "int4":
            _quantize_groups(kernel[i].T, np.dtype(dtype), scheme.group_size, own)
        else:
            _quantize_columns(kernel[i].T, np.dtype(dtype), scheme.source == "fp8", own)
    return found


def _quantize_columns(
    columns: Float[np.ndarray, "o i"], dtype: np.dtype[Any], is_fp8: bool, found: QuantizedArrays
) -> None:
    """Quantizes the columns of a matrix to 8 bits per number and writes them to `found`."""
    largest = np.float32(_LARGEST["fp8" if is_fp8 else "int8"])
    for first in range(0, len(columns), _COLUMNS):
        part = slice(first, first + _COLUMNS)
        x = np.ascontiguousarray(columns[part]).astype(dtype).astype(np.float32)
        magnitude = np.max(np.abs(x), axis=1)
        scales = np.where(magnitude > 0, magnitude, np.float32(1)) * (1 / largest)
        x /= scales[:, None]
        np.clip(x, -largest, largest, out=x)
        values = _to_fp8(x) if is_fp8 else np.rint(x, out=x).astype(np.int8)
        found.values[:, part], found.scales[0, part] = values.T, scales


def _to_fp8(x: Float[np.ndarray, "*n"]) -> np.ndarray:
    """Returns float32 numbers as float8_e4m3fn. It is four times as fast as NumPy's conversion."""
    bits = x.view(np.uint32)
    # The upper 16 bits determine the result, together with whether the lower ones are 0.
    upper = (bits >> 16) | ((bits & 0xFFFF) != 0)
    return _fp8_of_upper_bits()[upper].view(ml_dtypes.float8_e4m3fn)


@functools.cache
def _fp8_of_upper_bits() -> UInt8[np.ndarray, "65536"]:
    with np.errstate(invalid="ignore"):
        numbers = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
        return numbers.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _quantize_groups(
    columns: Float[np.ndarray, "o i"], dtype: np.dtype[Any], group_size: int, found: QuantizedArrays
) -> None:
    """Quantizes the columns of a matrix to 4 bits per number in groups and writes them to `found`."""
    num_columns, rows = columns.shape
    num_groups, num_at_once = rows // group_size, _NUMBERS // group_size
    step = max(1, num_at_once // num_groups)
    for first in range(0, num_columns, step):
        part = slice(first, first + step)
        groups = np.ascontiguousarray(columns[part]).astype(dtype).reshape(-1, group_size)
        # All calls have the same shape, so that only one program is compiled.
        pieces = [
            _fitted(groups[i : i + num_at_once], num_at_once) for i in range(0, len(groups), num_at_once)
        ]
        values, scales, offsets = (np.concatenate(x) for x in zip(*pieces, strict=True))
        found.values[:, part] = values.reshape(-1, rows // 2).T
        found.scales[:, part] = scales.reshape(-1, num_groups).T
        found.offsets[:, part] = offsets.reshape(-1, num_groups).T


def _fitted(groups: Float[np.ndarray, "n k"], num: int) -> list[np.ndarray]:
    """Returns the arrays of some groups, see `_fit`; the groups are padded to `num` groups."""
    padded = np.pad(groups, ((0, num - len(groups)), (0, 0))) if len(groups) < num else groups
    return [np.asarray(x)[: len(groups)] for x in _fit(padded)]


@jax.jit
def _fit(groups: Float[Array, "n k"]) -> tuple[Array, Array, Array]:
    """Quantizes groups to 4 bits per number.

    Args:
        groups: float [N, K], each row a group.

    Returns:
        uint8 [N, K / 2], the numbers of each group in pairs, see `QuantizedArrays.values`; bfloat16 [N], the
        scales; bfloat16 [N], the offsets.
    """
    numbers = groups.astype(jnp.float32).T
    lowest, highest = jnp.min(numbers, axis=0), jnp.max(numbers, axis=0)
    middle, width = (lowest + highest) / 2, (highest - lowest) / _TOP
    unit = jnp.where(width > 0, width, 1)
    # From -7.5 to 7.5, because the sums below would lose digits if the numbers were far from 0, very large or
    # very small.
    x = (numbers - middle) / unit
    sum_x = jnp.sum(x, axis=0)

    def rounded(scale: Array, offset: Array) -> Array:
        return jnp.clip(jnp.round((x - offset) * (1 / scale)), 0, _TOP)

    def best_for(q: Array) -> tuple[Array, Array, Array]:
        """Returns scale and offset with the smallest squared error for these numbers.

        The third result is the reduction of the squared error by them.
        """
        num, sum_q, sum_qq, sum_xq = (
            len(x),
            jnp.sum(q, axis=0),
            jnp.sum(q * q, axis=0),
            jnp.sum(x * q, axis=0),
        )
        variance, covariance = num * sum_qq - sum_q * sum_q, num * sum_xq - sum_x * sum_q
        scale = jnp.where(variance > 0, covariance / jnp.maximum(variance, 1), 0)
        scale = jnp.where(scale > 0, scale, 1)
        offset = (sum_x - scale * sum_q) / num
        return scale, offset, (covariance * scale + sum_x * sum_x) / num

    def try_range(i: Array, best: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        scale = jnp.broadcast_to(jnp.asarray(_RANGES, jnp.float32)[i], width.shape)
        found = best_for(rounded(scale, -_TOP / 2 * scale))
        is_better = found[2] > best[2]
        return tuple(jnp.where(is_better, a, b) for a, b in zip(found, best, strict=True))  # pyright: ignore

    first = jnp.ones_like(width), jnp.zeros_like(width), jnp.full_like(width, -1)
    best = jax.lax.fori_loop(0, len(_RANGES), try_range, first)
    best = jax.lax.fori_loop(0, _NUM_REFINEMENTS, lambda _, b: best_for(rounded(b[0], b[1])), best)
    # A group of equal numbers is 0 times 1 plus the number.
    scales = jnp.where(width > 0, best[0] * unit, 1).astype(jnp.bfloat16)
    offsets = jnp.where(width > 0, best[1] * unit + middle, middle).astype(jnp.bfloat16)
    scale, offset = scales.astype(jnp.float32), offsets.astype(jnp.float32)
    q = jnp.clip(jnp.round((numbers - offset) / scale), 0, _TOP).astype(jnp.uint8)
    return (q[::2] | q[1::2] << 4).T, scales, offsets

"""Keys and values of a byte per number: how the pool stores them, and what they stand for.

A row, the key or the value of one token and kv head, is D numbers of a byte and one byte more, its scale:

    int8         -128 ... 127 times the scale    the pool's dtype is int8
    fp8_e4m3     float8_e4m3fn times the scale   the pool's dtype is uint8, and holds the bits

A tile of a page, its S keys or values of one kv head, has the numbers of all rows first, so that GPUs can
load words of them, and all scales behind them:

    | row 0: D numbers | row 1: D numbers | ... | row S - 1: D numbers | S scales |

Its shape is [S, D + 1], so that nobody who moves whole tiles needs to know; `rows_of` makes rows of it.

A token's bytes depend on its own numbers alone, so that whatever is written once never changes: under a scale
for a block it would, as a block is filled token by token. The scale is a power of two, as in the OCP's MX
formats, and its byte the exponent of a float32 without a fraction: 0 stands for 0, and 255 for infinity. So
the quantiser multiplies exactly and rounds once, to the same bytes in every program; and the numbers that a
row stands for are exact in bfloat16 and in float32, so that all backends attend to the same ones. A scale of
full precision would take a third off the error of int8, and one to three bytes more in every row.

Source: OCP Microscaling Formats (MX) Specification, version 1.0, 2023: scales of the type E8M0.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# The pool's dtype for each name of a quantised cache.
DTYPES = {"fp8_e4m3": jnp.dtype("uint8"), "int8": jnp.dtype("int8")}
# The largest number of a row lies in [2**n, 2**(n + 1)) scales.
_TOP_EXPONENT = {"uint8": 7, "int8": 6}
_INFINITY = 255


def is_quantized(kv_pages: Array) -> bool:
    """Returns whether a pool holds rows of this kind."""
    return kv_pages.dtype in DTYPES.values()


def row_size(head_dim: int, dtype: jnp.dtype) -> int:
    """Returns the elements that a row has in a pool of some dtype."""
    return head_dim + (dtype in DTYPES.values())


def quantize(x: Float[Array, "*n d"], dtype: jnp.dtype) -> Array:
    """Returns the rows that numbers are stored as: [..., D + 1], or in a pool of floats [..., D].

    The error is at most half a scale in int8 (a whole one at its upper end), where the scale is at most
    1/64 of the row's largest number; in fp8_e4m3, 1/16 of the number, down to 2**-14 of the largest. A row
    with NaN or infinity stands for NaN alone.

    Args:
        x: The numbers.
        dtype: Of the pool.
    """
    if dtype not in DTYPES.values():
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    # As integers, NaN is the largest.
    exponent = bits.max(axis=-1, keepdims=True) >> 23
    is_finite = exponent < _INFINITY
    scale = jnp.where(is_finite, jnp.maximum(exponent - _TOP_EXPONENT[dtype.name], 0), _INFINITY)
    inverse = lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    scaled = jnp.where(is_finite, x.astype(jnp.float32) * inverse, 0)
    if dtype == jnp.int8:
        values = jnp.clip(jnp.rint(scaled), -128, 127).astype(jnp.int8)
    else:
        values = lax.bitcast_convert_type(scaled.astype(jnp.float8_e4m3fn), jnp.uint8)
    scale = lax.bitcast_convert_type(scale.astype(jnp.uint8), dtype)
    return jnp.concatenate([values, scale], axis=-1)


def rows_of(tiles: Array) -> Array:
    """Returns the rows [..., S, D + 1], each with its scale, that are in tiles [..., S, D + 1] of a pool.

    In a pool of floats, tiles are rows already.
    """
    if not is_quantized(tiles):
        return tiles
    *others, size, row = tiles.shape
    numbers, scales = jnp.split(tiles.reshape(*others, size * row), [size * (row - 1)], axis=-1)
    return jnp.concatenate([numbers.reshape(*others, size, row - 1), scales[..., None]], axis=-1)


def tiles_of(rows: Array) -> Array:
    """Returns the tiles whose rows these are: the reverse of rows_of."""
    if not is_quantized(rows):
        return rows
    *others, size, row = rows.shape
    numbers = rows[..., :-1].reshape(*others, size * (row - 1))
    return jnp.concatenate([numbers, rows[..., -1]], axis=-1).reshape(rows.shape)


def dequantize(rows: Array, dtype: jnp.dtype) -> Array:
    """Returns the numbers [..., D] that rows stand for; those of a pool of floats are converted.

    Args:
        rows: [..., D + 1] for a quantised pool, [..., D] for another.
        dtype: Of the result; float32 and bfloat16 hold quantised numbers exactly.
    """
    if not is_quantized(rows):
        return rows.astype(dtype)
    scale = lax.bitcast_convert_type(rows[..., -1:], jnp.uint8).astype(jnp.int32)
    values = rows[..., :-1]
    if rows.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    numbers = values.astype(jnp.float32) * lax.bitcast_convert_type(scale << 23, jnp.float32)
    return numbers.astype(dtype)

"""Quantized KV cache with one byte per number: its storage format, and conversion to and from it.

A row is the key or the value of one token and one kv head: D numbers of one byte, and one scale byte.

    int8         -128 ... 127 times the scale    the pool's dtype is int8
    fp8_e4m3     float8_e4m3fn times the scale   the pool's dtype is uint8, which stores the bits

A tile of a page (its S keys or S values of one kv head) stores the numbers of all rows first and all scales
after them. With this order a GPU can load the numbers in aligned words:

    | row 0: D numbers | row 1: D numbers | ... | row S - 1: D numbers | S scales |

The tile has the shape [S, D + 1], so code that moves whole tiles works for all pools. `rows_of` converts
tiles to rows [S, D + 1] in which each row ends with its scale, and `tiles_of` converts rows to tiles.

Each row has its own scale because a page is filled token by token. With one scale per page, a later token
with larger numbers would require the earlier ones to be requantized. With a scale per row, written bytes
never change.

The scale is a power of two, as in the MX formats of the Open Compute Project (OCP). Its byte is the biased
exponent of a float32 with a zero fraction: 0 means 0.0 and 255 means infinity. Quantizing multiplies by the
exact inverse and rounds only once, so that every program produces the same bytes. Dequantized numbers are
exact in bfloat16 and float32, so that all backends attend to the same numbers. A full-precision scale would
reduce the int8 error by one third, at the cost of one to three more bytes per row.

Source: OCP Microscaling Formats (MX) Specification, version 1.0, 2023: scales of the type E8M0.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

# Dtype of the pool for each quantized value of `kv_cache_dtype`.
DTYPES = {"fp8_e4m3": jnp.dtype("uint8"), "int8": jnp.dtype("int8")}
# Exponent n such that the largest number of a row, divided by its scale, lies in [2**n, 2**(n + 1)).
_TOP_EXPONENT = {"uint8": 7, "int8": 6}
_INFINITY = 255


def is_quantized(kv_pages: Array) -> bool:
    """Returns whether a pool, or an array of its rows or tiles, is quantized."""
    return kv_pages.dtype in DTYPES.values()


def row_size(head_dim: int, dtype: jnp.dtype) -> int:
    """Returns the number of elements of a row in a pool with this dtype: head_dim, plus 1 for the scale."""
    return head_dim + (dtype in DTYPES.values())


def quantize(x: Float[Array, "*n d"], dtype: jnp.dtype) -> Array:
    """Returns the numbers as stored in a pool: rows [..., D + 1] if it is quantized, otherwise [..., D].

    In int8 the error is at most half a scale (one scale for numbers above 127.5 scales, which are clipped),
    and the scale is at most 1/64 of the row's largest number. In fp8_e4m3 the error is at most 1/16 of the
    number itself, for numbers down to 2**-14 of the row's largest. A row that contains NaN or infinity is
    stored such that all of its numbers dequantize to NaN.

    Args:
        x: The numbers.
        dtype: Dtype of the pool. If it is not a quantized dtype, x is only converted.
    """
    if dtype not in DTYPES.values():
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    # Compared as integers, the bits of NaN are larger than the bits of any other number.
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
    """Returns tiles [..., S, D + 1] of a pool as rows [..., S, D + 1], each with its scale at the end.

    Tiles of a pool that is not quantized are returned unchanged.
    """
    if not is_quantized(tiles):
        return tiles
    *others, size, row = tiles.shape
    numbers, scales = jnp.split(tiles.reshape(*others, size * row), [size * (row - 1)], axis=-1)
    return jnp.concatenate([numbers.reshape(*others, size, row - 1), scales[..., None]], axis=-1)


def tiles_of(rows: Array) -> Array:
    """Returns rows as tiles, the reverse of rows_of."""
    if not is_quantized(rows):
        return rows
    *others, size, row = rows.shape
    numbers = rows[..., :-1].reshape(*others, size * (row - 1))
    return jnp.concatenate([numbers, rows[..., -1]], axis=-1).reshape(rows.shape)


def dequantize(rows: Array, dtype: jnp.dtype) -> Array:
    """Returns the numbers [..., D] of rows in `dtype`; rows that are not quantized are only converted.

    Args:
        rows: [..., D + 1] from a quantized pool, [..., D] from other pools.
        dtype: Dtype of the result; float32 and bfloat16 represent dequantized numbers exactly.
    """
    if not is_quantized(rows):
        return rows.astype(dtype)
    scale = lax.bitcast_convert_type(rows[..., -1:], jnp.uint8).astype(jnp.int32)
    values = rows[..., :-1]
    if rows.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    numbers = values.astype(jnp.float32) * lax.bitcast_convert_type(scale << 23, jnp.float32)
    return numbers.astype(dtype)

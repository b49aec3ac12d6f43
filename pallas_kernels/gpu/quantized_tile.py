"""Quantised pools in the kernels: the tile of a page goes from global memory to registers, and on as numbers.

A pool of floats goes to shared memory by TMA or cp.async, and the tensor units read it there. These can't
multiply a byte per number, so every number passes through registers once in any case. They are loaded there
at once, a step ahead of the one that needs them, and written to shared memory in the dtype of the queries:

    step i       write the numbers of i, load the bytes of i + 1, multiply
    step i + 1   write the numbers of i + 1, load the bytes of i + 2, multiply

By way of shared memory, a copy more, TMA would have to take rows of S bytes, as a tile has D + 1 of these.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jax_paged.pallas_kernels.gpu import tuning

# Bytes [S, D] and scales [S] of a tile.
Loaded = tuple[Array, Array]


def flat(kv_pages: Array) -> Array:
    """Returns the pool with its tiles as [S * (D + 1)], for `load`."""
    return kv_pages.reshape(*kv_pages.shape[:3], -1)


class Pages(NamedTuple):
    """Where a kernel finds the pages of one kv head.

    Args:
        pool_ref: The pool, as `flat` returns it.
        head: The kv head.
        page_size: Tokens of a page.
        head_dim: Numbers of a row.
        interpret: Whether the kernel runs in the interpreter.
    """

    pool_ref: Any
    head: Array
    page_size: int
    head_dim: int
    interpret: bool

    def load(self, which: int, pages: list[Array]) -> list[Loaded]:
        """Loads the keys (0) or the values (1) of pages."""
        tiles = [self.pool_ref.at[page, which, self.head] for page in pages]
        return [load(x, self.page_size, self.head_dim, interpret=self.interpret) for x in tiles]

    def begin(self, pages: list[Array], next_pages: list[Array]) -> tuple[Any, ...]:
        """Returns what lies ahead of the first step: the next pages, and keys and values of its own."""
        return next_pages, self.load(0, pages), self.load(1, pages)

    def advance(self, target_ref: Any, which: int, loaded: list[Loaded], pages: list[Array]) -> list[Loaded]:
        """Writes what was loaded to shared memory [tokens, D]; loads the same of the next pages."""
        for i, tile in enumerate(loaded):
            store(target_ref.at[pl.ds(i * self.page_size, self.page_size)], tile)
        return self.load(which, pages)


def load(tile_ref: Any, page_size: int, head_dim: int, *, interpret: bool) -> Loaded:
    """Loads a tile [S * (D + 1)] into registers."""
    tile_layout, size = layout(head_dim), page_size * head_dim
    if interpret:  # which knows no reshape of a reference
        numbers = plgpu.layout_cast(tile_ref[:size].reshape(page_size, head_dim), tile_layout)
    else:
        numbers_ref = tile_ref.at[:size].reshape(page_size, head_dim)
        numbers = plgpu.load(numbers_ref, layout=tile_layout, optimized=False)
    return numbers, plgpu.load(tile_ref.at[size:], layout=tile_layout.reduce(1), optimized=False)


def store(target_ref: Any, loaded: Loaded) -> None:
    """Writes the numbers of a tile to shared memory [S, D], in its dtype: see quantization.py."""
    values, scales = loaded
    exponent = scales.astype(jnp.int32) & 0xFF
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    if values.dtype == jnp.uint8:
        # The bits of a float16 of 2**-8 times the number; it has all of its subnormal ones, too.
        bits = values.astype(jnp.int16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256.0
    else:
        numbers = values.astype(jnp.float32)
    numbers *= lax.broadcast_in_dim(scale, values.shape, [0])
    tuning.store(target_ref, numbers.astype(target_ref.dtype))


def layout(head_dim: int) -> Any:
    """Returns a layout of [S, head_dim] in which eight lanes share a row, with up to eight numbers each."""
    width = next(n for n in (64, 32, 16) if head_dim % n == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((16, width), (4, width // 8))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
    )

"""Quantized pools in the attention kernels: pages are loaded into registers and dequantized there.

Pages of a pool of floats are copied to shared memory by TMA or cp.async, where the tensor cores read them.
Tensor cores cannot multiply the bytes of a quantized pool together with their scales, so that every number
has to pass through registers anyway. The kernels therefore load the bytes directly from global memory to
registers, one step ahead of their use, and write the dequantized numbers to shared memory in the dtype of the
queries:

    step i       write the numbers of i, load the bytes of i + 1, multiply
    step i + 1   write the numbers of i + 1, load the bytes of i + 2, multiply

A kernel calls `Pages.begin` before its first step and `Pages.advance` in every step, once for the keys and
once for the values.

TMA is not used here. It cannot copy rows of D + 1 bytes, and would have to treat a tile as D + 1 rows of S
bytes, with an additional pass through shared memory.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jax_paged.pallas_kernels.gpu import tuning

# A tile in registers: bytes [S, D] and scales [S].
Loaded = tuple[Array, Array]


def flat(kv_pages: Array) -> Array:
    """Returns the pool with its tiles flattened to [S * (D + 1)], as `load` expects them."""
    return kv_pages.reshape(*kv_pages.shape[:3], -1)


class Pages(NamedTuple):
    """Pages of one kv head in a quantized pool.

    Args:
        pool_ref: The pool, as returned by `flat`.
        head: The kv head.
        page_size: Tokens per page.
        head_dim: Elements of a head.
        interpret: Whether the kernel runs in the interpreter.
    """

    pool_ref: Any
    head: Array
    page_size: int
    head_dim: int
    interpret: bool

    def load(self, which: int, pages: list[Array]) -> list[Loaded]:
        """Loads the keys (`which` = 0) or the values (`which` = 1) of pages into registers."""
        tiles = [self.pool_ref.at[page, which, self.head] for page in pages]
        return [load(x, self.page_size, self.head_dim, interpret=self.interpret) for x in tiles]

    def begin(self, pages: list[Array], next_pages: list[Array]) -> tuple[Any, ...]:
        """Returns the pipeline state before the first step.

        The state consists of `next_pages`, the page ids of the second step, and the loaded keys and values of
        `pages`.
        """
        return next_pages, self.load(0, pages), self.load(1, pages)

    def advance(self, target_ref: Any, which: int, loaded: list[Loaded], pages: list[Array]) -> list[Loaded]:
        """Writes a step's keys or values to shared memory, and loads the keys or values of the next step.

        Args:
            target_ref: Shared memory [tokens, D].
            which: 0 for the keys, 1 for the values.
            loaded: Tiles of this step.
            pages: Page ids of the next step.

        Returns:
            The tiles of the next step.
        """
        for i, tile in enumerate(loaded):
            store(target_ref.at[pl.ds(i * self.page_size, self.page_size)], tile)
        return self.load(which, pages)


def load(tile_ref: Any, page_size: int, head_dim: int, *, interpret: bool) -> Loaded:
    """Loads a tile [S * (D + 1)] into registers."""
    tile_layout, size = layout(head_dim), page_size * head_dim
    # The interpreter does not support reshaping a reference.
    if interpret:
        numbers = plgpu.layout_cast(tile_ref[:size].reshape(page_size, head_dim), tile_layout)
    else:
        numbers_ref = tile_ref.at[:size].reshape(page_size, head_dim)
        numbers = plgpu.load(numbers_ref, layout=tile_layout, optimized=False)
    return numbers, plgpu.load(tile_ref.at[size:], layout=tile_layout.reduce(1), optimized=False)


def store(target_ref: Any, loaded: Loaded) -> None:
    """Dequantizes a tile (see quantization.py) to the dtype of the target, and writes it to shared memory.

    Args:
        target_ref: Shared memory [S, D].
        loaded: The tile.
    """
    values, scales = loaded
    exponent = scales.astype(jnp.int32) & 0xFF
    scale = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    if values.dtype == jnp.uint8:
        # These bits, read as a float16, are the fp8 number times 2**-8. Subnormal fp8 numbers are represented
        # too.
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

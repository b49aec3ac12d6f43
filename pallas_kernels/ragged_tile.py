"""What both ragged kernels do with a tile: the steps that it walks, the softmax of a step, and the masks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from jax_paged.pallas_kernels import tuning
from jax_paged.pallas_kernels.tuning import LOG2E, MASKED_SCORE, KernelConfig

# Rows of one wgmma.
WGMMA_ROWS = 64

# Accumulator, largest score in base 2, sum of the probabilities.
Carry = tuple[Array, Array, Array]


class Tile(NamedTuple):
    """A tile of the work list, a run of queries of one sequence.

    Args:
        seq: Row of the block tables.
        first: Position of its first query in the sequence.
        last: One past the position of its last query; 0 in an unused tile.
        context_len: Tokens of the sequence.
    """

    seq: Array
    first: Array
    last: Array
    context_len: Array


class Kernel(NamedTuple):
    """What is known of a kernel when it is traced."""

    config: KernelConfig
    num_tiles: int
    kv_heads: int
    group: int
    page_size: int
    head_dim: int
    dtype: Any
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    interpret: bool

    @property
    def rows(self) -> int:
        """Query rows per warpgroup."""
        return min(WGMMA_ROWS, self.config.block_rows)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of keys and values, and queries (probabilities without wgmma); no barriers."""
        config, itemsize = self.config, self.dtype.itemsize
        staged = config.num_stages * 2 * config.block_tokens * self.head_dim
        beside = config.block_rows * (self.head_dim if config.has_wgmma else config.block_tokens)
        return (staged + beside) * itemsize


def spans(kernel: Kernel, tile: Tile) -> tuple[Array, Array, Array, Array]:
    """Returns begin, full_begin, full_end and end of a tile's steps; every row sees the full ones whole."""
    tokens = jnp.int32(kernel.config.block_tokens)
    end = lax.div(tile.last + tokens - 1, tokens)
    begin = full_begin = jnp.int32(0)
    if kernel.window is not None:
        begin = jnp.minimum(lax.div(jnp.maximum(tile.first - kernel.window + 1, 0), tokens), end)
        full_begin = lax.div(jnp.maximum(tile.last - kernel.window, 0) + tokens - 1, tokens)
        full_begin = jnp.clip(full_begin, begin, end)
    return begin, full_begin, jnp.clip(lax.div(tile.first + 1, tokens), full_begin, end), end


def walk(kernel: Kernel, tile: Tile, attend: Callable[..., Carry], carry: Carry) -> Array:
    """Runs a tile's steps, with masks only where needed; returns the attention, 0 if there was nothing."""
    begin, full_begin, full_end, end = spans(kernel, tile)
    masked = functools.partial(attend, is_full=False)
    if kernel.window is not None:
        carry = lax.fori_loop(begin, full_begin, masked, carry)
    carry = lax.fori_loop(full_begin, full_end, functools.partial(attend, is_full=True), carry)
    acc, _, total = lax.fori_loop(full_end, end, masked, carry)
    factor = lax.integer_pow(jnp.where(total > 0, total, 1.0), -1)
    return (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(kernel.dtype)


def tile_of_block(kernel: Kernel, tiles_ref: Any) -> tuple[Array, Array, Tile]:
    """Returns kv head, index and tile of this block of threads.

    The last tiles of a prompt see most tokens, so they go first, those of all heads: the last name of a grid
    changes fastest.
    """
    index = kernel.num_tiles - 1 - lax.axis_index("tile")
    tile = Tile(*(tiles_ref[index, column] for column in range(len(Tile._fields))))
    return lax.axis_index("head"), index, tile


def make(kernel: Kernel, body: Callable[..., None], scratch_types: list[Any], **threads: Any) -> Any:
    """Returns the kernel with this body, for a grid of a block of threads per tile and kv head."""
    shape = (kernel.num_tiles, kernel.kv_heads, kernel.config.block_rows, kernel.head_dim)

    def call(tiles_ref, q_ref, kv_ref, tables_ref, *rest):
        sinks_ref, out_ref, *scratch = rest if kernel.has_sinks else (None, *rest)
        body(tiles_ref, q_ref, kv_ref, tables_ref, sinks_ref, out_ref, *scratch)

    return plgpu.kernel(
        call,
        out_type=jax.ShapeDtypeStruct(shape, kernel.dtype),
        scratch_types=scratch_types,
        grid=(kernel.num_tiles, kernel.kv_heads),
        grid_names=("tile", "head"),
        kernel_name="ragged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(kernel.interpret),
        **threads,
    )


def start(kernel: Kernel, layout: Any, sinks_ref: Any) -> Carry:
    """Returns the carry before the first step: a sink has a score and no value."""
    acc = plgpu.layout_cast(jnp.zeros((kernel.rows, kernel.head_dim), jnp.float32), layout)
    largest = jnp.full((kernel.rows,), MASKED_SCORE, jnp.float32)
    total = jnp.full((kernel.rows,), 1.0 if kernel.has_sinks else 0.0, jnp.float32)
    if kernel.has_sinks:
        largest = plgpu.load(sinks_ref, layout=layout.reduce(1), optimized=False)
    return acc, *(plgpu.layout_cast(x, layout.reduce(1)) for x in (largest, total))


def softmax(kernel: Kernel, scores: Array, carry: Carry, live: Array | None) -> tuple[Array, Carry]:
    """Returns the probabilities of a step, relative to the largest score so far, and the new carry."""
    acc, largest, total = carry
    factor = kernel.scale * LOG2E
    if kernel.soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), as the hardware's has 11 bits; softmax does not see the 1 left out.
        # A power takes fewer registers than a division.
        power = jnp.exp2(scores * (2 * factor / kernel.soft_cap))
        scores, factor = -2 * lax.integer_pow(power + 1, -1), kernel.soft_cap * LOG2E
    if live is not None:
        # Infinite: a finite score times the factor, less itself, is not 0 in a fused multiply-add.
        scores = jnp.where(live, scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
    decay = jnp.exp2(largest - new_largest)
    probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    return probs.astype(kernel.dtype), (acc, new_largest, total * decay + probs.sum(axis=1))


def live(kernel: Kernel, tile: Tile, first_row: Array | int, step: Array, layout: Any) -> Array:
    """Returns which tokens of a step each row sees; what rows past the tile's last see does not matter."""
    shape = (kernel.rows, kernel.config.block_tokens)
    row = first_row + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
    position = lax.div(row, jnp.full_like(row, kernel.group)) + tile.first
    # The step is added to the tokens, not to the positions: otherwise the compiler keeps all columns in
    # registers.
    token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + step * kernel.config.block_tokens
    distance = lax.broadcast_in_dim(position, shape, [0]) - token
    # One comparison does for both ends: a token ahead of the row wraps around to a large distance.
    return distance >= 0 if kernel.window is None else distance.astype(jnp.uint32) < kernel.window


def clear_dead(kernel: Kernel, tile: Tile, values: Array, first_token: Array, layout: Any) -> Array:
    """Clears the values of slots outside of context and window, as 0 * NaN is NaN."""
    token = tuning.iota(values.shape, 0, layout) + first_token
    live = token < tile.context_len
    if kernel.window is not None:
        live &= token > tile.first - kernel.window
    return jnp.where(live, values, jnp.zeros_like(values))


def pages_of(kernel: Kernel, tile: Tile, step: Array, tables_ref: Any) -> list[Array]:
    """Returns the pages of a step."""
    pages = kernel.config.block_tokens // kernel.page_size
    return [tables_ref[tile.seq, step * pages + i] for i in range(pages)]

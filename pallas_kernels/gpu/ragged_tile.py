"""Functions that the ragged kernels share: the steps of a tile, the softmax of a step, and the masks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from jax_paged.pallas_kernels.gpu import tuning
from jax_paged.pallas_kernels.gpu.tuning import LOG2E, MASKED_SCORE, KernelConfig

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


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Static shape and options of a ragged attention kernel.

    Args:
        config: Tile sizes.
        num_tiles: Tiles of the batch.
        kv_heads: Key-value heads.
        group: Query heads per kv head.
        page_size: Tokens per page.
        head_dim: Elements of a head.
        dtype: Dtype of the queries.
        scale: Factor of the scores.
        window: Number of last tokens that a query sees; None for all.
        soft_cap: Limit of the scores; None for no limit.
        has_sinks: Whether each head has a sink.
        has_bias: Whether scores have a distance bias.
        is_quantized: Whether the pool stores one byte per number.
        interpret: Whether the kernel runs in the interpreter.
    """

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
    has_bias: bool
    is_quantized: bool
    interpret: bool

    @property
    def queries(self) -> int:
        """Queries per tile."""
        return self.config.block_rows // self.group

    @property
    def num_computing(self) -> int:
        """Warpgroups that multiply by wgmma."""
        return self.config.block_rows // WGMMA_ROWS

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

    def stage(self, step: Array) -> Array:
        """Returns the stage of a step."""
        return lax.rem(step, jnp.int32(self.config.num_stages))


def prefill_config(
    gpu: tuning.Target,
    head_dim: int,
    page_size: int,
    itemsize: int,
    *,
    is_heavy: bool = False,
    is_bytes: bool = False,
) -> KernelConfig:
    """Returns the largest tiles that spill no registers, on sm_90 with as many stages as fit, up to four.

    With three warpgroups a thread has 168 registers, with two all 255, which head_dim 256 needs. Moving
    registers between warpgroups does not help: nvJitLink, with which JAX links kernels, ignores setmaxnreg.
    Without wgmma two blocks of threads share a multiprocessor: on sm_80 they have two stages each, on
    Blackwell as many as fit. Of a quantised pool, registers hold the second stage, which is why the tiles are
    smaller there.
    """
    is_wide = head_dim > 128
    rows = (64 if is_wide else 128) if gpu.has_wgmma else (32 if is_wide or is_bytes else 64)
    tokens = max(page_size, 64 if gpu.has_wgmma and is_heavy else rows)
    rest = gpu.smem_bytes // (1 if gpu.has_wgmma else 2) - 1024 - rows * max(head_dim, tokens) * itemsize
    num_stages = max(2, min(4, rest // (2 * tokens * head_dim * itemsize)))
    if not gpu.has_wgmma and (is_bytes or not gpu.has_tma):
        num_stages = 2 - is_bytes
    return KernelConfig(rows, tokens, num_stages, 0, gpu.has_tma, gpu.has_wgmma)


def plan_tiles(
    context_lens: Int[Array, " b"], query_start_loc: Int[Array, " b1"], num_tiles: int, queries: int
) -> tuple[Int[Array, "n 4"], Int[Array, " n"]]:
    """Plans the tiles of a batch; T // Q + B of them hold any batch.

    Returns:
        The work list, one Tile per row, and the row of q that each tile starts at.
    """
    starts = query_start_loc[:-1] // queries + jnp.arange(context_lens.shape[0])
    tile = jnp.arange(num_tiles)
    seq = jnp.sum(tile[:, None] >= starts, axis=1) - 1
    row = query_start_loc[seq] + (tile - starts[seq]) * queries
    end, context_len = query_start_loc[seq + 1], context_lens[seq]
    count = jnp.clip(end - row, 0, queries)
    first = context_len - end + row
    last = jnp.where((count > 0) & (context_len > 0), first + count, 0)
    return jnp.stack(Tile(seq, first, last, context_len), axis=1).astype(jnp.int32), row


def of_block(shape: PrefillShape, tiles_ref: Any) -> tuple[Array, Array, Tile]:
    """Returns kv head, index and tile of this block of threads.

    The last tiles of a prompt see most tokens, so they go first, those of all heads: the last name of a grid
    changes fastest.
    """
    index = shape.num_tiles - 1 - lax.axis_index("tile")
    tile = Tile(*(tiles_ref[index, column] for column in range(len(Tile._fields))))
    return lax.axis_index("head"), index, tile


def make(shape: PrefillShape, body: Callable[..., None], scratch_types: list[Any], **threads: Any) -> Any:
    """Returns the kernel with this body, for a grid of a block of threads per tile and kv head."""
    out_shape = (shape.num_tiles, shape.kv_heads, shape.config.block_rows, shape.head_dim)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, shape.dtype),
        scratch_types=scratch_types,
        grid=(shape.num_tiles, shape.kv_heads),
        grid_names=("tile", "head"),
        kernel_name="ragged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(shape.interpret),
        **threads,
    )


def spans(shape: PrefillShape, tile: Tile) -> tuple[Array, Array, Array, Array]:
    """Returns begin, full_begin, full_end and end of a tile's steps; every row sees the full ones whole."""
    tokens = jnp.int32(shape.config.block_tokens)
    end = lax.div(tile.last + tokens - 1, tokens)
    begin = full_begin = jnp.int32(0)
    if shape.window is not None:
        begin = jnp.minimum(lax.div(jnp.maximum(tile.first - shape.window + 1, 0), tokens), end)
        full_begin = lax.div(jnp.maximum(tile.last - shape.window, 0) + tokens - 1, tokens)
        full_begin = jnp.clip(full_begin, begin, end)
    return begin, full_begin, jnp.clip(lax.div(tile.first + 1, tokens), full_begin, end), end


def walk(shape: PrefillShape, tile: Tile, attend: Callable[..., Carry], carry: Carry) -> Array:
    """Runs a tile's steps, with masks only where needed; returns the attention, 0 if there was nothing."""
    begin, full_begin, full_end, end = spans(shape, tile)
    masked = functools.partial(attend, is_full=False)
    if shape.window is not None:
        carry = lax.fori_loop(begin, full_begin, masked, carry)
    carry = lax.fori_loop(full_begin, full_end, functools.partial(attend, is_full=True), carry)
    acc, _, total, *_ = lax.fori_loop(full_end, end, masked, carry)
    factor = lax.integer_pow(jnp.where(total > 0, total, 1.0), -1)
    return (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(shape.dtype)


def start(shape: PrefillShape, layout: Any, sinks_ref: Any) -> Carry:
    """Returns the carry before the first step: a sink has a score and no value."""
    acc = plgpu.layout_cast(jnp.zeros((shape.rows, shape.head_dim), jnp.float32), layout)
    largest = jnp.full((shape.rows,), MASKED_SCORE, jnp.float32)
    total = jnp.full((shape.rows,), 1.0 if shape.has_sinks else 0.0, jnp.float32)
    if shape.has_sinks:
        largest = plgpu.load(sinks_ref, layout=layout.reduce(1), optimized=False)
    return acc, *(plgpu.layout_cast(x, layout.reduce(1)) for x in (largest, total))


def softmax(
    shape: PrefillShape, scores: Array, carry: Carry, live: Array | None, bias: Array | None
) -> tuple[Array, Carry]:
    """Returns the probabilities of a step, relative to the largest score so far, and the new carry."""
    acc, largest, total = carry
    factor = shape.scale * LOG2E
    if shape.soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), as the hardware's has 11 bits; softmax does not see the 1 left out.
        # A power takes fewer registers than a division.
        power = jnp.exp2(scores * (2 * factor / shape.soft_cap))
        scores, factor = -2 * lax.integer_pow(power + 1, -1), shape.soft_cap * LOG2E
    if bias is not None:
        scores, factor = scores * factor + bias, 1.0
    if live is not None:
        # Infinite: a finite score times the factor, less itself, is not 0 in a fused multiply-add.
        scores = jnp.where(live, scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
    decay = jnp.exp2(largest - new_largest)
    probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    return probs.astype(shape.dtype), (acc, new_largest, total * decay + probs.sum(axis=1))


def distances(
    shape: PrefillShape, tile: Tile, first_row: Array | int, step: Array, layout: Any
) -> tuple[Array, Array]:
    """Returns how far each row's query is behind each token of a step, and the number of the row's head."""
    scores_shape = (shape.rows, shape.config.block_tokens)
    row = first_row + plgpu.broadcasted_iota(jnp.int32, scores_shape[:1], 0, layout=layout.reduce(1))
    query = lax.div(row, jnp.full_like(row, shape.group))
    position = query + tile.first
    # The step is added to the tokens, not to the positions: otherwise the compiler keeps all columns in
    # registers.
    token = (
        plgpu.broadcasted_iota(jnp.int32, scores_shape, 1, layout=layout) + step * shape.config.block_tokens
    )
    return lax.broadcast_in_dim(position, scores_shape, [0]) - token, row - query * shape.group


def bias(
    shape: PrefillShape,
    tile: Tile,
    head: Array,
    first_row: Array | int,
    step: Array,
    layout: Any,
    table_ref: Any,
) -> Array | None:
    """Returns what is added to the scores of a step in base 2, by distance; None for nothing.

    Args:
        table_ref: float32 [H * n] in base 2, or None.
    """
    if table_ref is None:
        return None
    distance, own = distances(shape, tile, first_row, step, layout)
    bias_len = table_ref.shape[0] // (shape.kv_heads * shape.group)
    first = lax.broadcast_in_dim((head * shape.group + own) * bias_len, distance.shape, [0])
    index = first + jnp.clip(distance, 0, bias_len - 1)
    return tuning.look_up(table_ref, index, layout, interpret=shape.interpret)


def live(shape: PrefillShape, tile: Tile, first_row: Array | int, step: Array, layout: Any) -> Array:
    """Returns which tokens of a step each row sees; what rows past the tile's last see does not matter."""
    distance, _ = distances(shape, tile, first_row, step, layout)
    # One comparison does for both ends: a token ahead of the row wraps around to a large distance.
    return distance >= 0 if shape.window is None else distance.astype(jnp.uint32) < shape.window


def clear_dead(shape: PrefillShape, tile: Tile, values: Array, first_token: Array, layout: Any) -> Array:
    """Clears the values of slots outside of context and window, as 0 * NaN is NaN."""
    token = tuning.iota(values.shape, 0, layout) + first_token
    live = token < tile.context_len
    if shape.window is not None:
        live &= token > tile.first - shape.window
    return jnp.where(live, values, jnp.zeros_like(values))


def pages_of(shape: PrefillShape, tile: Tile, tables_ref: Any, step: Array) -> list[Array]:
    """Returns the pages of a step."""
    pages = shape.config.block_tokens // shape.page_size
    return [tables_ref[tile.seq, step * pages + i] for i in range(pages)]

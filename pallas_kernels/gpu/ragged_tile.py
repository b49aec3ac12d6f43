"""Functions that the ragged attention kernels share: the steps of a tile, their softmax, and the masks.

ragged_prefill.py describes tiles and steps. A step is full if every row of the tile attends to all of its
tokens; only the other steps need masks.
"""

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

# Rows of one wgmma product.
WGMMA_ROWS = 64

# The state of the online softmax: accumulator, largest score in base 2, sum of the probabilities.
Carry = tuple[Array, Array, Array]


class Tile(NamedTuple):
    """A tile in the list of tiles: consecutive queries of one sequence.

    Args:
        seq: Row of the block tables.
        first: Position of the tile's first query in the sequence.
        end: One past the position of its last query; 0 in an unused tile.
        context_len: Context length of the sequence (tokens).
    """

    seq: Array
    first: Array
    end: Array
    context_len: Array


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """Static shape and options of a ragged attention kernel.

    Args:
        config: Tile sizes.
        num_tiles: Number of tiles of the batch.
        kv_heads: Number of kv heads.
        group: Query heads per kv head.
        page_size: Tokens per page.
        head_dim: Elements of a head.
        dtype: Dtype of the queries.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
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
        """The number of queries per tile."""
        return self.config.block_rows // self.group

    @property
    def num_computing(self) -> int:
        """The number of warpgroups that multiply by wgmma."""
        return self.config.block_rows // WGMMA_ROWS

    @property
    def rows(self) -> int:
        """The number of query rows per warpgroup."""
        return min(WGMMA_ROWS, self.config.block_rows)

    @property
    def smem_bytes(self) -> int:
        """The shared memory of the kernel (bytes), without barriers.

        It holds keys and values, and either the queries (kernels with wgmma) or the probabilities (other
        kernels).
        """
        config, itemsize = self.config, self.dtype.itemsize
        staged = config.num_stages * 2 * config.block_tokens * self.head_dim
        beside = config.block_rows * (self.head_dim if config.has_wgmma else config.block_tokens)
        return (staged + beside) * itemsize

    def stage(self, step: Array) -> Array:
        """Returns the stage that holds a step."""
        return lax.rem(step, jnp.int32(self.config.num_stages))


def prefill_config(
    gpu: tuning.Target,
    head_dim: int,
    page_size: int,
    itemsize: int,
    *,
    needs_registers: bool = False,
    is_quantized: bool = False,
) -> KernelConfig:
    """Returns the largest tile sizes that spill no registers, with up to four stages.

    With three warpgroups (block_rows 128) a thread has 168 registers. With two it has 255, which head_dim 256
    needs. Moving registers between warpgroups has no effect, because nvJitLink, with which JAX links kernels,
    ignores setmaxnreg. Without wgmma two thread blocks share an SM. They have two stages each on sm_80, and
    as many as fit on Blackwell. For a quantized pool without wgmma the tiles are smaller, because registers
    take the place of the second stage.

    Args:
        gpu: The GPU that the kernel is lowered for.
        head_dim: Elements of a head.
        page_size: Tokens per page.
        itemsize: Bytes per element of the queries.
        needs_registers: Whether the options of the kernel need additional registers.
        is_quantized: Whether the pool is quantized.
    """
    is_wide = head_dim > 128
    rows = (64 if is_wide else 128) if gpu.has_wgmma else (32 if is_wide or is_quantized else 64)
    tokens = max(page_size, 64 if gpu.has_wgmma and needs_registers else rows)
    rest = gpu.smem_bytes // (1 if gpu.has_wgmma else 2) - 1024 - rows * max(head_dim, tokens) * itemsize
    num_stages = max(2, min(4, rest // (2 * tokens * head_dim * itemsize)))
    if not gpu.has_wgmma and (is_quantized or not gpu.has_tma):
        num_stages = 2 - is_quantized
    return KernelConfig(rows, tokens, num_stages, 0, gpu.has_tma, gpu.has_wgmma)


def plan_tiles(
    context_lens: Int[Array, " b"], query_start_loc: Int[Array, " b1"], num_tiles: int, queries: int
) -> tuple[Int[Array, "n 4"], Int[Array, " n"]]:
    """Lists the tiles of a batch.

    Args:
        context_lens: int32 [B].
        query_start_loc: int32 [B + 1], first row of each sequence.
        num_tiles: Length of the list; T // Q + B is sufficient for any batch.
        queries: Q, queries per tile.

    Returns:
        The list of tiles, one Tile per row, and the row of q at which each tile starts.
    """
    starts = query_start_loc[:-1] // queries + jnp.arange(context_lens.shape[0])
    tile = jnp.arange(num_tiles)
    seq = jnp.sum(tile[:, None] >= starts, axis=1) - 1
    row = query_start_loc[seq] + (tile - starts[seq]) * queries
    end_row, context_len = query_start_loc[seq + 1], context_lens[seq]
    count = jnp.clip(end_row - row, 0, queries)
    first = context_len - end_row + row
    end = jnp.where((count > 0) & (context_len > 0), first + count, 0)
    return jnp.stack(Tile(seq, first, end, context_len), axis=1).astype(jnp.int32), row


def current_tile(shape: PrefillShape, tiles_ref: Any) -> tuple[Array, Array, Tile]:
    """Returns the kv head, the tile index and the tile of the current thread block.

    The last tiles of a prompt attend to the most tokens, so they are started first, for all heads. The last
    axis of the grid changes fastest.
    """
    index = shape.num_tiles - 1 - lax.axis_index("tile")
    tile = Tile(*(tiles_ref[index, column] for column in range(len(Tile._fields))))
    return lax.axis_index("head"), index, tile


def make_kernel(
    shape: PrefillShape, body: Callable[..., None], scratch_types: list[Any], **threads: Any
) -> Any:
    """Returns the kernel with this body, for a grid with one thread block per tile and kv head."""
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


def step_ranges(shape: PrefillShape, tile: Tile) -> tuple[Array, Array, Array, Array]:
    """Returns the steps begin, full_begin, full_end and end of a tile.

    The tile attends to the steps [begin, end). Every row attends to all tokens of the steps [full_begin,
    full_end).
    """
    tokens = jnp.int32(shape.config.block_tokens)
    end = lax.div(tile.end + tokens - 1, tokens)
    begin = full_begin = jnp.int32(0)
    if shape.window is not None:
        begin = jnp.minimum(lax.div(jnp.maximum(tile.first - shape.window + 1, 0), tokens), end)
        full_begin = lax.div(jnp.maximum(tile.end - shape.window, 0) + tokens - 1, tokens)
        full_begin = jnp.clip(full_begin, begin, end)
    return begin, full_begin, jnp.clip(lax.div(tile.first + 1, tokens), full_begin, end), end


def run_steps(shape: PrefillShape, tile: Tile, attend: Callable[..., Carry], carry: Carry) -> Array:
    """Runs the steps of a tile, with masks only where necessary.

    Args:
        shape: Static shape of the kernel.
        tile: The tile.
        attend: Takes a step, the carry and `is_full`, and returns the new carry.
        carry: The carry before the first step.

    Returns:
        The normalized attention; 0 in rows that attend to nothing.
    """
    begin, full_begin, full_end, end = step_ranges(shape, tile)
    masked = functools.partial(attend, is_full=False)
    if shape.window is not None:
        carry = lax.fori_loop(begin, full_begin, masked, carry)
    carry = lax.fori_loop(full_begin, full_end, functools.partial(attend, is_full=True), carry)
    acc, _, total, *_ = lax.fori_loop(full_end, end, masked, carry)
    factor = lax.integer_pow(jnp.where(total > 0, total, 1.0), -1)
    return (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(shape.dtype)


def initial_carry(shape: PrefillShape, layout: Any, sinks_ref: Any) -> Carry:
    """Returns the carry before the first step. A sink contributes a score and no value."""
    acc = plgpu.layout_cast(jnp.zeros((shape.rows, shape.head_dim), jnp.float32), layout)
    largest = jnp.full((shape.rows,), MASKED_SCORE, jnp.float32)
    total = jnp.full((shape.rows,), 1.0 if shape.has_sinks else 0.0, jnp.float32)
    if shape.has_sinks:
        largest = plgpu.load(sinks_ref, layout=layout.reduce(1), optimized=False)
    return acc, *(plgpu.layout_cast(x, layout.reduce(1)) for x in (largest, total))


def softmax(
    shape: PrefillShape, scores: Array, carry: Carry, live: Array | None, bias: Array | None
) -> tuple[Array, Carry]:
    """Computes the softmax of one step, relative to the largest score so far.

    Args:
        shape: Static shape of the kernel.
        scores: Products of queries and keys, without the factor `scale`.
        carry: The state before the step.
        live: Mask of the tokens that each row attends to; None for all.
        bias: Distance bias in base 2; None for none.

    Returns:
        The probabilities of the step, and the state after it. Its accumulator is rescaled but does not
        include the values of the step yet.
    """
    acc, largest, total = carry
    factor = shape.scale * LOG2E
    if shape.soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), because the hardware instruction is accurate to 11 bits only. The
        # constant 1 is omitted, because a softmax does not change if all scores are shifted. A power takes
        # fewer registers than a division.
        power = jnp.exp2(scores * (2 * factor / shape.soft_cap))
        scores, factor = -2 * lax.integer_pow(power + 1, -1), shape.soft_cap * LOG2E
    if bias is not None:
        scores, factor = scores * factor + bias, 1.0
    if live is not None:
        # Masked scores are infinite. With a finite score, score * factor - maximum would not be exactly 0 in
        # a fused multiply-add.
        scores = jnp.where(live, scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
    decay = jnp.exp2(largest - new_largest)
    probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    return probs.astype(shape.dtype), (acc, new_largest, total * decay + probs.sum(axis=1))


def distances(
    shape: PrefillShape, tile: Tile, first_row: Array | int, step: Array, layout: Any
) -> tuple[Array, Array]:
    """Returns the distance from each token of a step to each row's query, and the row's query head.

    Args:
        shape: Static shape of the kernel.
        tile: The tile.
        first_row: First row of the warpgroup within the tile.
        step: The step.
        layout: Register layout of the scores.

    Returns:
        int32 [rows, block_tokens], query position minus token position, and int32 [rows], the index of the
        query head within its group.
    """
    scores_shape = (shape.rows, shape.config.block_tokens)
    row = first_row + plgpu.broadcasted_iota(jnp.int32, scores_shape[:1], 0, layout=layout.reduce(1))
    query = lax.div(row, jnp.full_like(row, shape.group))
    position = query + tile.first
    # The step is added to the token indices and not to the positions. Otherwise the compiler keeps all
    # columns in registers.
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
    """Returns the distance bias of a step, in base 2; None without a table.

    Args:
        shape: Static shape of the kernel.
        tile: The tile.
        head: The kv head.
        first_row: First row of the warpgroup within the tile.
        step: The step.
        layout: Register layout of the scores.
        table_ref: float32 [H * n] in base 2, or None.
    """
    if table_ref is None:
        return None
    distance, own = distances(shape, tile, first_row, step, layout)
    bias_len = table_ref.shape[0] // (shape.kv_heads * shape.group)
    first = lax.broadcast_in_dim((head * shape.group + own) * bias_len, distance.shape, [0])
    index = first + jnp.clip(distance, 0, bias_len - 1)
    return tuning.gather_table(table_ref, index, layout, interpret=shape.interpret)


def live(shape: PrefillShape, tile: Tile, first_row: Array | int, step: Array, layout: Any) -> Array:
    """Returns a mask of the tokens of a step that each row attends to.

    The mask is arbitrary for rows past the tile's last query.
    """
    distance, _ = distances(shape, tile, first_row, step, layout)
    # One comparison is sufficient for both ends: as an unsigned integer, the negative distance of a token
    # after the query is large.
    return distance >= 0 if shape.window is None else distance.astype(jnp.uint32) < shape.window


def clear_dead(shape: PrefillShape, tile: Tile, values: Array, first_token: Array, layout: Any) -> Array:
    """Replaces the values of tokens outside of context and window by 0, because they may be NaN."""
    token = tuning.iota(values.shape, 0, layout) + first_token
    live = token < tile.context_len
    if shape.window is not None:
        live &= token > tile.first - shape.window
    return jnp.where(live, values, jnp.zeros_like(values))


def pages_of(shape: PrefillShape, tile: Tile, tables_ref: Any, step: Array) -> list[Array]:
    """Returns the page ids of a step."""
    pages = shape.config.block_tokens // shape.page_size
    return [tables_ref[tile.seq, step * pages + i] for i in range(pages)]

"""The ragged attention kernel: chunks of prompts and single queries of decodes in one launch.

A tile is Q queries of one sequence with the G heads of one kv head: Q * G rows of a matrix product. Sequence b has the tiles from query_start_loc[b] // Q + b on, so that a tile finds its sequence,
and a token its tile, without a running sum:

    Q = 4      sequence a, 6 queries         b, 1 query    c, 5 queries
    tile       0: a0 a1 a2 a3   1: a4 a5     2: b0         3: c0 c1 c2 c3   4: c4        (5 is not used)

A tile walks the pages that its rows see, `block_tokens` at a time, with an online softmax (Dao, 2023). On sm_90
one warpgroup issues the TMA copies of pages into a ring of stages, two others multiply by wgmma, as in
FlashAttention-3 (Shah et al., 2024). On sm_80 one warpgroup copies by cp.async and multiplies by mma.sync.

Rows that don't fill a tile: XLA gathers the queries into an array of tiles, and the tokens' rows from an array of
tiles. TMA copies swizzled tiles from rows that are multiples of 8 only, and clips only at an array's end: in place, a
tile could not start at any row, and its store would overwrite its neighbour's rows. The price is one more pass over
queries and output.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import tuning
from jax_paged.pallas_kernels.tuning import LOG2E, MASKED_SCORE, KernelConfig

# Rows that a warpgroup multiplies at a time.
WARPGROUP_ROWS = 64


class Tile(NamedTuple):
    """A tile of the work list: its sequence, and what its rows see.

    Args:
        seq: Row of the block tables.
        first: Position of the tile's first row in the sequence.
        last: One past the position of its last row; 0 in a tile that is not used.
        context_len: Tokens of the sequence.
    """

    seq: Array
    first: Array
    last: Array
    context_len: Array


class Kernel(NamedTuple):
    """What is known when the kernel is traced."""

    config: KernelConfig
    group: int
    page_size: int
    head_dim: int
    dtype: Any
    scale: float
    window: int | None
    soft_cap: float | None
    interpret: bool

    @property
    def rows(self) -> int:
        """Rows that a warpgroup multiplies."""
        return min(WARPGROUP_ROWS, self.config.block_rows)

    @property
    def queries(self) -> int:
        """Queries of a tile, Q."""
        return self.config.block_rows // self.group


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    config: KernelConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "t h d"]:
    """See ops.ragged_attention.

    Args:
        config: Sizes of tiles; None for those of `choose_config`.
        interpret: Whether JAX's interpreter runs the kernel.

    Raises:
        ValueError: If the kernel does not support the shapes or the dtype, or they need too much shared memory.
    """
    tuning.check_shape(q, kv_pages, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    (num_tokens, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    group = num_heads // kv_heads
    config = config or choose_config(gpu, head_dim, page_size, q.dtype.itemsize)
    kernel = Kernel(config, group, page_size, head_dim, q.dtype, scale, window, soft_cap, interpret)
    tuning.check_smem(smem_bytes(kernel), gpu, f"ragged_attention with {config} and head_dim {head_dim}")

    # [T, H, D] -> [N, K, R, D]
    queries = kernel.queries
    tiles, row = plan_tiles(context_lens, query_start_loc, num_tokens, queries)
    q_tiles = q.at[row[:, None] + jnp.arange(queries)].get(mode="clip")
    q_tiles = q_tiles.reshape(-1, queries, kv_heads, group, head_dim).swapaxes(1, 2)
    q_tiles = q_tiles.reshape(-1, kv_heads, queries * group, head_dim)
    padding = config.block_rows - queries * group
    q_tiles = jnp.pad(q_tiles, ((0, 0), (0, 0), (0, padding), (0, 0)))
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group) * LOG2E, (1, queries))
        sinks = jnp.pad(sinks, ((0, 0), (0, padding)))
    run = _run_wgmma if config.has_tma else _run_mma
    out = run(kernel, tiles, q_tiles, kv_pages, block_tables, sinks)

    # And back.
    token = jnp.arange(num_tokens)
    seq = jnp.sum(token[:, None] >= query_start_loc[1:], axis=1)
    is_padding = seq >= context_lens.shape[0]
    seq = jnp.minimum(seq, context_lens.shape[0] - 1)
    tile, offset = jnp.divmod(token - query_start_loc[seq], queries)
    tile += query_start_loc[seq] // queries + seq
    out = out[:, :, : queries * group].reshape(-1, kv_heads, queries, group, head_dim)
    out = out.at[tile, :, offset].get(mode="clip").reshape(q.shape)
    return jnp.where((is_padding | (context_lens[seq] == 0))[:, None, None], 0, out)


def choose_config(gpu: tuning.Target, head_dim: int, page_size: int, itemsize: int) -> KernelConfig:
    """Returns tile sizes: on sm_90 as many stages as fit, up to four; on sm_80 two, for two blocks an SM."""
    rows = (128 if head_dim <= 128 else 64) if gpu.has_tma else (64 if head_dim <= 128 else 32)
    tokens = (128 if head_dim <= 128 else 64) if gpu.has_tma else (64 if head_dim <= 128 else 32)
    tokens = max(tokens, page_size)
    rest = gpu.smem_bytes - 1024 - rows * head_dim * itemsize
    num_stages = max(2, min(4, rest // (2 * tokens * head_dim * itemsize))) if gpu.has_tma else 2
    return KernelConfig(rows, tokens, num_stages, num_items=0, has_tma=gpu.has_tma)


def smem_bytes(kernel: Kernel) -> int:
    """Returns the shared memory that the kernel's buffers take, barriers aside."""
    config, itemsize = kernel.config, kernel.dtype.itemsize
    staged = config.num_stages * 2 * config.block_tokens * kernel.head_dim * itemsize
    return (
        staged + config.block_rows * (kernel.head_dim if config.has_tma else config.block_tokens) * itemsize
    )


def plan_tiles(
    context_lens: Int[Array, " b"], query_start_loc: Int[Array, " b1"], num_tokens: int, queries: int
) -> tuple[Int[Array, "n 4"], Int[Array, " n"]]:
    """Returns the work list and each tile's first row of q; num_tokens // queries + B tiles hold any batch."""
    num_seqs = context_lens.shape[0]
    starts = query_start_loc[:-1] // queries + jnp.arange(num_seqs)
    tile = jnp.arange(num_tokens // queries + num_seqs)
    seq = jnp.sum(tile[:, None] >= starts, axis=1) - 1
    row = query_start_loc[seq] + (tile - starts[seq]) * queries
    end, context_len = query_start_loc[seq + 1], context_lens[seq]
    count = jnp.clip(end - row, 0, queries)
    first = context_len - end + row
    last = jnp.where((count > 0) & (context_len > 0), first + count, 0)
    return jnp.stack(Tile(seq, first, last, context_len), axis=1).astype(jnp.int32), row


def _spans(kernel: Kernel, tile: Tile) -> tuple[Array, Array, Array, Array]:
    """Returns begin, full_begin, full_end and end of a tile's steps; in the middle ones every row sees all."""
    tokens = jnp.int32(kernel.config.block_tokens)
    end = lax.div(tile.last + tokens - 1, tokens)
    begin = full_begin = jnp.int32(0)
    if kernel.window is not None:
        begin = jnp.minimum(lax.div(jnp.maximum(tile.first - kernel.window + 1, 0), tokens), end)
        full_begin = lax.div(jnp.maximum(tile.last - kernel.window, 0) + tokens - 1, tokens)
        full_begin = jnp.clip(full_begin, begin, end)
    full_end = jnp.clip(lax.div(tile.first + 1, tokens), full_begin, end)
    return begin, full_begin, full_end, end


def _load_tile(tiles_ref: Any, index: Array) -> Tile:
    return Tile(*(tiles_ref[index, column] for column in range(len(Tile._fields))))


def _softmax_step(
    kernel: Kernel, scores: Array, carry: tuple[Array, Array, Array], live: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Returns the probabilities of a step and the rescaled acc, maximum and sum."""
    acc, largest, total = carry
    factor = kernel.scale * LOG2E
    if kernel.soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1): the hardware's tanh is good to 11 bits only.
        power = jnp.exp2(scores * (2 * factor / kernel.soft_cap))
        scores, factor = 1 - 2 / (power + 1), kernel.soft_cap * LOG2E
    if live is not None:
        # Infinite: a finite one less a row's maximum of the same would round to anything in a fused multiply-add.
        scores = jnp.where(live, scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
    decay = jnp.exp2(largest - new_largest)
    probs = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_largest, scores.shape, [0]))
    acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
    return probs, acc, new_largest, total * decay + probs.sum(axis=1)


def _live(kernel: Kernel, tile: Tile, first_row: Array | int, step: Array, layout: Any) -> Array:
    """Returns which tokens of a step each row sees; rows past the tile's last see what does not matter."""
    shape = (kernel.rows, kernel.config.block_tokens)
    row = first_row + plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
    position = lax.div(row, jnp.full_like(row, kernel.group)) + tile.first
    token = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout) + step * kernel.config.block_tokens
    distance = lax.broadcast_in_dim(position, shape, [0]) - token
    if kernel.window is None:
        return distance >= 0
    return distance.astype(jnp.uint32) < kernel.window  # one comparison: what is ahead wraps around


def _start(kernel: Kernel, layout: Any, sinks_ref: Any | None) -> tuple[Array, Array, Array]:
    """Returns the accumulator, maximum and sum before the first step."""
    acc = plgpu.layout_cast(jnp.zeros((kernel.rows, kernel.head_dim), jnp.float32), layout)
    rows = layout.reduce(1)
    if sinks_ref is not None:
        largest = plgpu.load(sinks_ref, layout=rows, optimized=False)
        return acc, largest, plgpu.layout_cast(jnp.ones((kernel.rows,), jnp.float32), rows)
    largest = plgpu.layout_cast(jnp.full((kernel.rows,), MASKED_SCORE, jnp.float32), rows)
    return acc, largest, plgpu.layout_cast(jnp.zeros((kernel.rows,), jnp.float32), rows)


def _walk(
    kernel: Kernel, attend: Callable[..., Any], spans: tuple[Array, ...], carry: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    """Runs the steps of a tile, those that every row sees in whole without masks."""
    begin, full_begin, full_end, end = spans
    masked = functools.partial(attend, is_full=False)
    if kernel.window is not None:
        carry = lax.fori_loop(begin, full_begin, masked, carry)
    carry = lax.fori_loop(full_begin, full_end, functools.partial(attend, is_full=True), carry)
    return lax.fori_loop(full_end, end, masked, carry)


def _is_read(kernel: Kernel, tile: Tile, token: Array) -> Array:
    """Returns which slots hold something: 0 * NaN is NaN, so the values of the others must be cleared."""
    if kernel.window is None:
        return token < tile.context_len
    return (token < tile.context_len) & (token > tile.first - kernel.window)


def _divide(acc: Array, total: Array) -> Array:
    """Returns acc / total; 0 where nothing was attended to."""
    return acc / lax.broadcast_in_dim(jnp.where(total > 0, total, 1.0), acc.shape, [0])


def _run_wgmma(
    kernel: Kernel,
    tiles: Int[Array, "n 4"],
    q: Float[Array, "n k r d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    sinks: Float[Array, "k r"] | None,
) -> Float[Array, "n k r d"]:
    """sm_90: a warpgroup that copies, and two that multiply and share its keys and values."""
    config, head_dim, dtype, interpret = kernel.config, kernel.head_dim, kernel.dtype, kernel.interpret
    tokens, pages, num_stages = (
        config.block_tokens,
        config.block_tokens // kernel.page_size,
        config.num_stages,
    )
    num_tiles, kv_heads, wgmma = tiles.shape[0], kv_pages.shape[2], plgpu.Layout.WGMMA
    num_computing = config.block_rows // WARPGROUP_ROWS

    def body(tiles_ref, q_ref, kv_ref, tables_ref, *rest):
        sinks_ref, out_ref, q_s, k_s, v_s, p_s, q_bar, k_bar, v_bar, k_free, v_free, is_clean = (
            rest if sinks is not None else (None, *rest)
        )
        head, index = lax.axis_index("head"), lax.axis_index("tile")
        # The last tiles of a prompt see most: they go first.
        index = num_tiles - 1 - index
        tile, warpgroup = _load_tile(tiles_ref, index), lax.axis_index("warpgroup")
        begin, full_begin, full_end, end = _spans(kernel, tile)

        @pl.when((warpgroup == num_computing) & (end > begin))
        def _copy():
            if num_computing > 1:
                plgpu.set_max_registers(40, action="decrease")
            for half in range(num_computing):
                rows = pl.ds(half * WARPGROUP_ROWS, WARPGROUP_ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[index, head, rows], q_s.at[half], q_bar)
            last_page = lax.div(tile.context_len - 1, jnp.int32(kernel.page_size))

            @pl.loop(begin, end)
            def _(step):
                slot = lax.rem(step, jnp.int32(num_stages))
                # Past the context the last page stands in: the table's rest may be anything.
                page = [tables_ref[tile.seq, jnp.minimum(step * pages + i, last_page)] for i in range(pages)]
                for which, (ref, bar, free) in enumerate(((k_s, k_bar, k_free), (v_s, v_bar, v_free))):

                    @pl.when(step - begin >= num_stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    for i in range(pages):
                        dst = ref.at[slot, pl.ds(i * kernel.page_size, kernel.page_size)]
                        plgpu.copy_gmem_to_smem(kv_ref.at[page[i], which, head], dst, bar.at[slot])

        @pl.when((warpgroup < num_computing) & (end > begin))
        def _compute():
            if num_computing > 1:
                plgpu.set_max_registers(232, action="increase")
            own_q = q_s.at[warpgroup]
            rows = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            carry = _start(kernel, wgmma, None if sinks_ref is None else sinks_ref.at[head, rows])
            plgpu.barrier_wait(q_bar)

            def attend(step: Array, carry: tuple[Array, ...], *, is_full: bool) -> tuple[Array, ...]:
                slot = lax.rem(step, jnp.int32(num_stages))
                if not is_full:  # first, as it takes registers that scores take too
                    plgpu.barrier_wait(v_bar.at[slot])
                    clean_values(step, v_s.at[slot])
                plgpu.barrier_wait(k_bar.at[slot])

                def multiply_keys(acc_ref):
                    plgpu.wgmma(acc_ref, own_q, k_s.at[slot].transpose((1, 0)))
                    return acc_ref[...]

                scores = pl.run_scoped(multiply_keys, plgpu.ACC((WARPGROUP_ROWS, tokens), jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                live = None
                if not is_full:
                    live = _live(kernel, tile, warpgroup * WARPGROUP_ROWS, step, wgmma)
                probs, acc, largest, total = _softmax_step(kernel, scores, carry, live)
                if is_full:
                    plgpu.barrier_wait(v_bar.at[slot])
                acc = multiply_values(acc, probs.astype(dtype), v_s.at[slot])
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, largest, total

            def clean_values(step: Array, ref: Any) -> None:
                """Clears the values of dead slots: 0 * NaN is NaN."""
                is_dirty = (step + 1) * tokens > tile.context_len
                if kernel.window is not None:
                    is_dirty |= step * tokens <= tile.first - kernel.window

                @pl.when(is_dirty)
                def _():
                    @pl.when(warpgroup == 0)
                    def _():
                        width = head_dim if head_dim % 64 else 64
                        starts = itertools.product(
                            range(0, tokens, WARPGROUP_ROWS), range(0, head_dim, width)
                        )
                        for start, column in starts:
                            part = ref.at[pl.ds(start, WARPGROUP_ROWS), pl.ds(column, width)]
                            values = plgpu.load(part, layout=wgmma, optimized=False)
                            token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=wgmma)
                            live = _is_read(kernel, tile, token + (step * tokens + start))
                            part[...] = jnp.where(live, values, jnp.zeros_like(values))
                        plgpu.commit_smem()

                    plgpu.barrier_arrive(is_clean)
                    plgpu.barrier_wait(is_clean)

            def multiply_values(acc: Array, probs: Array, values: Any) -> Array:
                if not interpret:
                    add = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, probs, values))
                    return add(plgpu.ACC.init(acc))
                # The interpreter takes no operand from registers and no initial accumulator.
                own_p = p_s.at[warpgroup]
                own_p[...] = probs
                plgpu.commit_smem()

                def multiply(acc_ref):
                    plgpu.wgmma(acc_ref, own_p, values)
                    return acc_ref[...]

                return acc + pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, head_dim), jnp.float32))

            acc, _, total = _walk(kernel, attend, (begin, full_begin, full_end, end), carry)
            own_q[...] = _divide(acc, total).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, out_ref.at[index, head, rows])
            plgpu.wait_smem_to_gmem(0)

    transforms = tuning.smem_transforms(head_dim, dtype)
    buffer = functools.partial(plgpu.SMEM, dtype=dtype, transforms=transforms)
    probs_shape = (num_computing, WARPGROUP_ROWS, tokens)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tiles, kv_heads, config.block_rows, head_dim), dtype),
        scratch_types=[
            buffer((num_computing, WARPGROUP_ROWS, head_dim)),
            buffer((num_stages, tokens, head_dim)),
            buffer((num_stages, tokens, head_dim)),
            plgpu.SMEM(probs_shape, dtype) if interpret else None,
            plgpu.Barrier(num_arrivals=num_computing),
            plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=pages, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=num_computing, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=num_computing, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=num_computing),
        ],
        grid=(kv_heads, num_tiles),
        grid_names=("head", "tile"),
        num_threads=num_computing + 1,
        thread_name="warpgroup",
        kernel_name="ragged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tuning.interpret_params(interpret),
    )(tiles, q, kv_pages, block_tables, *([] if sinks is None else [sinks]))


def _run_mma(
    kernel: Kernel,
    tiles: Int[Array, "n 4"],
    q: Float[Array, "n k r d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    sinks: Float[Array, "k r"] | None,
) -> Float[Array, "n k r d"]:
    """sm_80: one warpgroup copies the next stage by cp.async while it multiplies."""
    config, head_dim, dtype, interpret = kernel.config, kernel.head_dim, kernel.dtype, kernel.interpret
    tokens, pages, page_size = config.block_tokens, config.block_tokens // kernel.page_size, kernel.page_size
    num_tiles, kv_heads = tiles.shape[0], kv_pages.shape[2]
    lhs, rhs, out = (
        layout(dtype, m_warps=kernel.rows // 16)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )

    def body(tiles_ref, q_ref, kv_ref, tables_ref, *rest):
        sinks_ref, out_ref, k_s, v_s, p_s = rest if sinks is not None else (None, *rest)
        head, index = lax.axis_index("head"), num_tiles - 1 - lax.axis_index("tile")
        tile = _load_tile(tiles_ref, index)
        begin, full_begin, full_end, end = _spans(kernel, tile)
        last_page = lax.div(tile.context_len - 1, jnp.int32(page_size))

        def copy(step: Array) -> None:
            for i in range(pages):
                page = tables_ref[tile.seq, jnp.minimum(step * pages + i, last_page)]
                for which, ref in enumerate((k_s, v_s)):
                    dst = ref.at[lax.rem(step, jnp.int32(2)), pl.ds(i * page_size, page_size)]
                    tuning.copy_to_smem(kv_ref.at[page, which, head], dst, None)

        def attend(step: Array, carry: tuple[Array, ...], *, is_full: bool) -> tuple[Array, ...]:
            slot = lax.rem(step, jnp.int32(2))
            # All warps have read the other slot when they meet here.
            plgpu.wait_gmem_to_smem(0)

            @pl.when(step + 1 < end)
            def _():
                copy(step + 1)

            queries = plgpu.load(q_ref.at[index, head], layout=lhs, optimized=False)
            keys = plgpu.load(k_s.at[slot].T, layout=rhs, optimized=False)
            scores = plgpu.layout_cast(jnp.zeros((kernel.rows, tokens), jnp.float32), out)
            scores = tuning.mma(scores, queries, keys, interpret=interpret)
            live = None if is_full else _live(kernel, tile, 0, step, out)
            probs, acc, largest, total = _softmax_step(kernel, scores, carry, live)
            p_s[...] = probs.astype(dtype)
            weights = plgpu.load(p_s, layout=lhs, optimized=False)
            values = plgpu.load(v_s.at[slot], layout=rhs, optimized=False)
            if not is_full:
                token = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=rhs) + step * tokens
                values = jnp.where(_is_read(kernel, tile, token), values, jnp.zeros_like(values))
            return tuning.mma(acc, weights, values, interpret=interpret), largest, total

        @pl.when(end > begin)
        def _():
            copy(begin)
            carry = _start(kernel, out, None if sinks_ref is None else sinks_ref.at[head])
            acc, _, total = _walk(kernel, attend, (begin, full_begin, full_end, end), carry)
            tuning.store(out_ref.at[index, head], _divide(acc, total).astype(dtype))

    transforms = tuning.smem_transforms(head_dim, dtype, page_size)
    stages = plgpu.SMEM((config.num_stages, tokens, head_dim), dtype, transforms=transforms)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_tiles, kv_heads, config.block_rows, head_dim), dtype),
        scratch_types=[
            stages,
            stages,
            plgpu.SMEM((kernel.rows, tokens), dtype, transforms=tuning.smem_transforms(tokens, dtype)),
        ],
        grid=(kv_heads, num_tiles),
        grid_names=("head", "tile"),
        kernel_name="ragged_attention",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=tuning.interpret_params(interpret),
    )(tiles, q, kv_pages, block_tables, *([] if sinks is None else [sinks]))

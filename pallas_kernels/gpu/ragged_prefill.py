"""The ragged attention kernel: chunks of prompts. Single queries beside them go to paged_decode.

A tile is Q queries of one sequence with the G heads of one kv head: Q * G rows of a matrix product.
Sequence b has the tiles from query_start_loc[b] // Q + b on, so a tile finds its sequence, and a token its
tile, without a running sum:

    Q = 4      sequence a, 6 queries         b, 1 query    c, 5 queries
    tile       0: a0 a1 a2 a3   1: a4 a5     2: b0         3: c0 c1 c2 c3   4: c4        (5 is not used)

A tile walks the pages that its rows see, `block_tokens` at a time, with an online softmax. On sm_90 one
warpgroup issues the TMA copies of pages into a ring of stages, and two others multiply by wgmma. On sm_80 one
warpgroup copies by cp.async and multiplies by mma.sync; ragged_blackwell.py has the kernel for Blackwell.

As rows do not fill whole tiles, XLA gathers the queries into an array of tiles, and the tokens' outputs from
an array of tiles. TMA copies swizzled tiles only from rows that are multiples of 8, and clips only at the end
of an array: in place, a tile could not start at any row, and its store would overwrite the rows of its
neighbour. The price is one more pass over queries and output.

Source: Shah et al., FlashAttention-3, 2024; for sm_80 Dao, FlashAttention-2, 2023.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, ragged_blackwell, ragged_tile, tuning
from jax_paged.pallas_kernels.gpu.paged_decode import paged_decode
from jax_paged.pallas_kernels.gpu.ragged_tile import WGMMA_ROWS, Carry, Kernel
from jax_paged.pallas_kernels.gpu.tuning import LOG2E, MASKED_SCORE, KernelConfig
from jax_paged.pallas_kernels.quantization import is_quantized

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


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
    distance_bias: Float[Array, "h n"] | None = None,
    config: KernelConfig | None = None,
    interpret: bool = False,
) -> Float[Array, "t h d"]:
    """See ops.ragged_attention.

    Args:
        config: Tile sizes; None for those of ragged_tile.prefill_config.
        interpret: Whether to run in the interpreter.

    Raises:
        ValueError: If the shapes, the dtype or the GPU are not supported, or the shapes need more shared
            memory than the GPU has.
    """
    tuning.check_shape(q, kv_pages, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    (num_tokens, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    num_seqs, group, is_bytes = context_lens.shape[0], num_heads // kv_heads, is_quantized(kv_pages)
    is_heavy = (window is not None and soft_cap is not None) or distance_bias is not None
    is_heavy |= is_bytes and (head_dim % 64 > 0 or kv_pages.dtype == jnp.uint8)
    config = config or ragged_tile.prefill_config(
        gpu, head_dim, page_size, q.dtype.itemsize, is_heavy=is_heavy, is_bytes=is_bytes
    )
    num_tiles = num_tokens // (config.block_rows // group) + num_seqs
    kernel = Kernel(
        config, num_tiles, kv_heads, group, page_size, head_dim, q.dtype, scale, window, soft_cap,
        sinks is not None, distance_bias is not None, is_bytes, interpret,
    )  # fmt: skip
    tuning.check_smem(kernel.smem_bytes, gpu, f"ragged_attention with head_dim {head_dim} and {config}")

    attend = functools.partial(_attend, kernel, q, kv_pages, block_tables)
    if num_seqs == 1:
        return attend(context_lens, query_start_loc, sinks, distance_bias)
    # A single query would walk its context in one tile, on one multiprocessor: paged_decode splits it.
    starts = query_start_loc[:-1]
    is_single = query_start_loc[1:] - starts == 1
    rows, lens = q.at[starts].get(mode="clip"), jnp.where(is_single, context_lens, 0)
    single = paged_decode(
        rows, kv_pages, block_tables, lens,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, distance_bias=distance_bias,
        interpret=interpret,
    )  # fmt: skip
    out = attend(jnp.where(is_single, 0, context_lens), query_start_loc, sinks, distance_bias)
    return out.at[jnp.where(is_single, starts, num_tokens)].set(single, mode="drop")


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    kernel: Kernel,
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    sinks: Float[Array, " h"] | None,
    distance_bias: Float[Array, "h n"] | None,
) -> Float[Array, "t h d"]:
    """Gathers queries into tiles, attends, gathers back; jitted, so that equal layers are lowered once."""
    config, num_tiles, kv_heads, group, page_size, head_dim, *_ = kernel
    num_tokens, num_seqs, queries = q.shape[0], context_lens.shape[0], config.block_rows // group
    padding, soft_cap = config.block_rows - queries * group, kernel.soft_cap

    # [T, H, D] -> [N, K, R, D]
    tiles, row = ragged_tile.plan_tiles(context_lens, query_start_loc, num_tiles, queries)
    q_tiles = q.at[row[:, None] + jnp.arange(queries)].get(mode="clip")
    q_tiles = q_tiles.reshape(num_tiles, queries, kv_heads, group, head_dim).swapaxes(1, 2)
    q_tiles = q_tiles.reshape(num_tiles, kv_heads, -1, head_dim)
    q_tiles = jnp.pad(q_tiles, ((0, 0), (0, 0), (0, padding), (0, 0)))
    # Before the window of a sequence's first query and past its context the table may hold anything, even ids
    # outside of the pool: there page 0 is loaded, and masked.
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % (config.block_tokens // page_size))))
    first_token = jnp.arange(tables.shape[1]) * page_size
    is_live = first_token < context_lens[:, None]
    if kernel.window is not None:
        first_query = context_lens - (query_start_loc[1:] - query_start_loc[:-1])
        is_live &= first_token + page_size > (first_query - kernel.window + 1)[:, None]
    pool = quantized_tile.flat(kv_pages) if kernel.is_bytes else kv_pages
    operands = [tiles, q_tiles, pool, jnp.where(is_live, tables, 0)]
    if sinks is not None:
        # Less the soft cap, which ragged_tile.softmax leaves out of every score. Finite, as a row that sees
        # nothing in its first step would get -inf - -inf, which is NaN.
        sinks = jnp.maximum((sinks.astype(jnp.float32) - (soft_cap or 0)) * LOG2E, MASKED_SCORE)
        rows = jnp.tile(sinks.reshape(kv_heads, group), (1, queries))
        operands.append(jnp.pad(rows, ((0, 0), (0, padding))))
    if distance_bias is not None:
        operands.append(distance_bias.astype(jnp.float32).reshape(-1) * LOG2E)
    # The bytes of a quantised pool go to registers: neither TMA nor cp.async has a part in it.
    has_copies = config.has_tma and not kernel.is_bytes
    without_wgmma = ragged_blackwell.mma_kernel if has_copies else _mma_kernel
    out = (_wgmma_kernel if config.has_wgmma else without_wgmma)(kernel)(*operands)

    # And back.
    token = jnp.arange(num_tokens)
    seq = jnp.sum(token[:, None] >= query_start_loc[1:], axis=1)
    is_padding = seq >= num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    tile, offset = jnp.divmod(token - query_start_loc[seq], queries)
    tile += query_start_loc[seq] // queries + seq
    out = out[:, :, : queries * group].reshape(num_tiles, kv_heads, queries, group, head_dim)
    out = out.at[tile, :, offset].get(mode="clip").reshape(q.shape)
    return jnp.where((is_padding | (context_lens[seq] == 0))[:, None, None], 0, out)


def _wgmma_kernel(kernel: Kernel) -> Callable[..., Array]:
    """sm_90: one warpgroup that copies, and one or two that multiply and share its keys and values."""
    config, head_dim, page_size = kernel.config, kernel.head_dim, kernel.page_size
    tokens, num_stages, wgmma = config.block_tokens, config.num_stages, plgpu.Layout.WGMMA
    num_computing = config.block_rows // WGMMA_ROWS

    def body(
        tiles_ref, q_ref, kv_ref, tables_ref, sinks_ref, bias_ref, out_ref,
        q_s, k_s, v_s, p_s, q_bar, k_bar, v_bar, k_free, v_free, is_clean,
    ):  # fmt: skip
        head, index, tile = ragged_tile.of_block(kernel, tiles_ref)
        begin, *_middle, end = ragged_tile.spans(kernel, tile)
        bytes_of = quantized_tile.Pages(kv_ref, head, page_size, kernel.head_dim, kernel.interpret)
        pages_of = functools.partial(ragged_tile.pages_of, kernel, tile, tables_ref)
        second = jnp.minimum(begin + 1, end - 1)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when((warpgroup == num_computing) & (end > begin))
        def _copy():
            for i in range(num_computing):
                rows = pl.ds(i * WGMMA_ROWS, WGMMA_ROWS)
                plgpu.copy_gmem_to_smem(q_ref.at[index, head, rows], q_s.at[i], q_bar)

            def copy(step):
                slot = lax.rem(step, jnp.int32(num_stages))
                pages = pages_of(step)
                for which, (ref, bar, free) in enumerate(((k_s, k_bar, k_free), (v_s, v_bar, v_free))):
                    pl.when(step - begin >= num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                    for i, page in enumerate(pages):
                        target = ref.at[slot, pl.ds(i * page_size, page_size)]
                        plgpu.copy_gmem_to_smem(kv_ref.at[page, which, head], target, bar.at[slot])

            def unpack(step, ahead):
                """Writes the numbers of a step to its stage; loads what it can of the next ones."""
                slot, (pages, *tiles) = lax.rem(step, jnp.int32(num_stages)), ahead
                for which, (ref, bar, free) in enumerate(((k_s, k_bar, k_free), (v_s, v_bar, v_free))):
                    pl.when(step - begin >= num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                    tiles[which] = bytes_of.advance(ref.at[slot], which, tiles[which], pages)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(bar.at[slot])
                return pages_of(jnp.minimum(step + 2, end - 1)), *tiles

            if kernel.is_bytes:
                lax.fori_loop(begin, end, unpack, bytes_of.begin(pages_of(begin), pages_of(second)))
            else:
                pl.loop(begin, end)(copy)

            @pl.loop(jnp.maximum(begin, end - num_stages), end)
            def _(step):  # a kernel must not end with an arrival that nobody waited for
                for free in (k_free, v_free):
                    plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(num_stages))])

        @pl.when((warpgroup < num_computing) & (end > begin))
        def _compute():
            own_q, first_row = q_s.at[warpgroup], warpgroup * WGMMA_ROWS
            rows = pl.ds(first_row, WGMMA_ROWS)
            carry = ragged_tile.start(kernel, wgmma, sinks_ref.at[head, rows] if kernel.has_sinks else None)
            plgpu.barrier_wait(q_bar)

            def attend(step: Array, carry: Carry, *, is_full: bool) -> Carry:
                slot = lax.rem(step, jnp.int32(num_stages))
                if not is_full:  # before the scores, as cleaning takes registers
                    plgpu.barrier_wait(v_bar.at[slot])
                    clean_values(step, v_s.at[slot])
                plgpu.barrier_wait(k_bar.at[slot])
                scores = multiply(own_q, k_s.at[slot].transpose((1, 0)), tokens)
                plgpu.barrier_arrive(k_free.at[slot])
                live = None if is_full else ragged_tile.live(kernel, tile, first_row, step, wgmma)
                bias = ragged_tile.bias(kernel, tile, head, first_row, step, wgmma, bias_ref)
                probs, (acc, largest, total) = ragged_tile.softmax(kernel, scores, carry, live, bias)
                if is_full:
                    plgpu.barrier_wait(v_bar.at[slot])
                if kernel.interpret:  # where wgmma takes no operand from registers and no accumulator
                    p_s.at[warpgroup][...] = probs
                    plgpu.commit_smem()
                    acc += multiply(p_s.at[warpgroup], v_s.at[slot], head_dim)
                else:
                    add = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, probs, v_s.at[slot]))
                    acc = add(ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, largest, total

            def multiply(a: Any, b: Any, columns: int) -> Array:
                def run(acc_ref):
                    plgpu.wgmma(acc_ref, a, b)
                    return acc_ref[...]

                return pl.run_scoped(run, ACC((WGMMA_ROWS, columns), jnp.float32))

            def clean_values(step: Array, ref: Any) -> None:
                """Clears dead slots in place: the first warpgroup does, the other waits for it."""
                is_dirty = (step + 1) * tokens > tile.context_len
                if kernel.window is not None:
                    is_dirty |= step * tokens <= tile.first - kernel.window

                def clean() -> None:
                    width = head_dim if head_dim % 64 else 64
                    corners = itertools.product(range(0, tokens, WGMMA_ROWS), range(0, head_dim, width))
                    for start, column in corners:
                        part = ref.at[pl.ds(start, WGMMA_ROWS), pl.ds(column, width)]
                        values = plgpu.load(part, layout=wgmma, optimized=False)
                        part[...] = ragged_tile.clear_dead(kernel, tile, values, step * tokens + start, wgmma)
                    plgpu.commit_smem()

                @pl.when(is_dirty)
                def _():
                    pl.when(warpgroup == 0)(clean)
                    if num_computing > 1:
                        plgpu.barrier_arrive(is_clean)
                        plgpu.barrier_wait(is_clean)

            result = ragged_tile.walk(kernel, tile, attend, carry)
            plgpu.commit_smem()  # all warps have multiplied their queries, which the result overwrites
            own_q[...] = result
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, out_ref.at[index, head, rows])
            plgpu.wait_smem_to_gmem(0)

    transforms = tuning.smem_transforms(head_dim, kernel.dtype)
    stages = plgpu.SMEM((num_stages, tokens, head_dim), kernel.dtype, transforms=transforms)
    arrivals = 1 if kernel.is_bytes else tokens // page_size
    loaded = plgpu.Barrier(num_arrivals=arrivals, num_barriers=num_stages)
    free = plgpu.Barrier(num_arrivals=num_computing, num_barriers=num_stages)
    scratch_types = [
        plgpu.SMEM((num_computing, WGMMA_ROWS, head_dim), kernel.dtype, transforms=transforms),
        stages,
        stages,
        plgpu.SMEM((num_computing, WGMMA_ROWS, tokens), kernel.dtype) if kernel.interpret else None,
        plgpu.Barrier(num_arrivals=num_computing),
        *(loaded, loaded, free, free),
        plgpu.Barrier(num_arrivals=num_computing) if num_computing > 1 else None,
    ]
    return ragged_tile.make(
        kernel, body, scratch_types, num_threads=num_computing + 1, thread_name="warpgroup"
    )


def _mma_kernel(kernel: Kernel) -> Callable[..., Array]:
    """sm_80: one warpgroup, which copies the keys and values of the next step while it multiplies."""
    config, page_size, tokens = kernel.config, kernel.page_size, kernel.config.block_tokens
    lhs, rhs, out = (
        layout(kernel.dtype, m_warps=kernel.rows // 16)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    mma = functools.partial(tuning.mma, interpret=kernel.interpret)
    pages = tokens // page_size

    def body(tiles_ref, q_ref, kv_ref, tables_ref, sinks_ref, bias_ref, out_ref, k_s, v_s, p_s):
        head, index, tile = ragged_tile.of_block(kernel, tiles_ref)
        begin, *_middle, end = ragged_tile.spans(kernel, tile)
        bytes_of = quantized_tile.Pages(kv_ref, head, page_size, kernel.head_dim, kernel.interpret)
        pages_of = functools.partial(ragged_tile.pages_of, kernel, tile, tables_ref)
        second = jnp.minimum(begin + 1, end - 1)

        def copy(step: Array) -> None:
            page_ids = pages_of(step)
            for which, ref in enumerate((k_s, v_s)):
                for i, page in enumerate(page_ids):
                    target = ref.at[lax.rem(step, jnp.int32(2)), pl.ds(i * page_size, page_size)]
                    tuning.copy_to_smem(kv_ref.at[page, which, head], target, None)

        def unpack(step, ahead):
            """Writes the numbers of a step to shared memory; loads what it can of the next ones.

            All warps have multiplied the keys of the step before; here they meet after its values.
            """
            page_ids, *tiles = ahead
            for which, ref in enumerate((k_s, v_s)):
                tiles[which] = bytes_of.advance(ref.at[0], which, tiles[which], page_ids)
                if which == 0:
                    tuning.meet(config.has_tma)
            return pages_of(jnp.minimum(step + 2, end - 1)), *tiles

        def attend(step: Array, carry: Any, *, is_full: bool) -> Any:
            if kernel.is_bytes:
                slot, (*carry, ahead) = 0, carry
                ahead = [unpack(step, ahead)]
            else:
                slot, ahead = lax.rem(step, jnp.int32(2)), []
                # The keys have arrived; and as all warps meet here, the other slot has been read.
                plgpu.wait_gmem_to_smem(pages)
                pl.when(step + 1 < end)(lambda: copy(step + 1))
            # Loaded again at every step, as no registers are left to keep them.
            queries = plgpu.load(q_ref.at[index, head], layout=lhs, optimized=False)
            keys = plgpu.load(k_s.at[slot].T, layout=rhs, optimized=False)
            scores = plgpu.layout_cast(jnp.zeros((kernel.rows, tokens), jnp.float32), out)
            live = None if is_full else ragged_tile.live(kernel, tile, 0, step, out)
            bias = ragged_tile.bias(kernel, tile, head, 0, step, out, bias_ref)
            probs, (acc, largest, total) = ragged_tile.softmax(
                kernel, mma(scores, queries, keys), carry, live, bias
            )
            p_s[...] = probs
            if kernel.is_bytes:
                tuning.meet(config.has_tma)
            else:
                tuning.wait_cp_async(step + 1 >= end, 0, 2 * pages)  # for the values, and for the others' p_s
            probs = plgpu.load(p_s, layout=lhs, optimized=False)
            values = plgpu.load(v_s.at[slot], layout=rhs, optimized=False)
            if not is_full:
                values = ragged_tile.clear_dead(kernel, tile, values, step * tokens, rhs)
            return mma(acc, probs, values), largest, total, *ahead

        @pl.when(end > begin)
        def _():
            carry: Any = ragged_tile.start(kernel, out, sinks_ref.at[head] if kernel.has_sinks else None)
            if kernel.is_bytes:
                carry += (bytes_of.begin(pages_of(begin), pages_of(second)),)
            else:
                copy(begin)
            tuning.store(out_ref.at[index, head], ragged_tile.walk(kernel, tile, attend, carry))

    transforms = tuning.smem_transforms(kernel.head_dim, kernel.dtype, 32 if kernel.is_bytes else page_size)
    stages = plgpu.SMEM((config.num_stages, tokens, kernel.head_dim), kernel.dtype, transforms=transforms)
    probs = plgpu.SMEM(
        (kernel.rows, tokens), kernel.dtype, transforms=tuning.smem_transforms(tokens, kernel.dtype)
    )
    return ragged_tile.make(kernel, body, [stages, stages, probs])

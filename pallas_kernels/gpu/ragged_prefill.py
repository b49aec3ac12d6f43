"""The ragged attention kernel: prefill chunks of any length, batched with decodes.

A sequence with a single query would occupy one thread block for its whole context. Such sequences are
therefore computed by paged_decode, which splits contexts, and their rows are inserted into the output.

Division of the work. A tile consists of Q queries of one sequence and the G query heads of one kv head: Q * G
rows of a matrix product. The tiles of sequence b begin at index query_start_loc[b] // Q + b. With this
formula, the sequence of a tile and the tile of a token are found without a running sum:

    Q = 4      sequence a, 6 queries         b, 1 query    c, 5 queries
    tile       0: a0 a1 a2 a3   1: a4 a5     2: b0         3: c0 c1 c2 c3   4: c4        (5 is not used)

The grid is (tile, kv head). A thread block walks the part of the context that its rows attend to, in steps of
`block_tokens` tokens, with an online softmax. There are three kernels:

- ragged_hopper.py for sm_90: one warpgroup copies by TMA, one or two others multiply by wgmma;
- ragged_blackwell.py for sm_100 and sm_120: one warpgroup, TMA and mma.sync;
- `_mma_kernel` in this module for sm_80, and for quantized pools on Blackwell: one warpgroup, cp.async and
  mma.sync.

Memory of `_mma_kernel`:

- Global memory: tiles of queries, pool, block tables, list of tiles, and tiles of output.
- Shared memory: two stages with the keys and values of one step each, and the probabilities of the current
  step.
- Registers: scores, float32 accumulator, running maximum and sum. The queries are loaded from global memory
  in every step, because there are not enough registers to keep them.

The loop of `_mma_kernel`, after the copies of the first step have been started:

1. Wait for the keys of the step, and start copying the next step into the other stage (cp.async).
2. Multiply queries and keys, mask the scores if necessary, and update the online softmax.
3. Write the probabilities to shared memory, and wait for the values.
4. Multiply probabilities and values, and accumulate.
5. After the last step, divide by the denominator and write the tile of output.

If the pool is quantized there is one stage, and the bytes of the next step are loaded into registers
(quantized_tile.py).

Since queries do not fill whole tiles, XLA gathers them into an array of tiles before the kernel, and gathers
each token's output from an array of tiles after it. The price is one more pass over the queries and the
output. Working in place is not possible, for two reasons. TMA copies swizzled tiles only from rows that are
multiples of 8, but a sequence may begin at any row. A store by TMA is clipped only at the end of an array, so
that a partly filled tile would overwrite rows of the next sequence.

Source: Shah et al., FlashAttention-3, 2024; for sm_80 Dao, FlashAttention-2, 2023.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import quantized_tile, ragged_blackwell, ragged_hopper, ragged_tile, tuning
from jax_paged.pallas_kernels.gpu.paged_decode import paged_decode
from jax_paged.pallas_kernels.gpu.ragged_tile import PrefillShape
from jax_paged.pallas_kernels.gpu.tuning import LOG2E, MASKED_SCORE, KernelConfig
from jax_paged.pallas_kernels.quantization import is_quantized


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
        q: Queries of all sequences.
        kv_pages: The pool.
        block_tables: int32 [B, M], pages of the sequences.
        context_lens: int32 [B].
        query_start_loc: int32 [B + 1], first row of each sequence.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        sinks: Sink logit of each head; None for none.
        distance_bias: Biases by head and distance; None for none.
        config: Tile sizes; None for the sizes of ragged_tile.prefill_config.
        interpret: Whether to run in the interpreter.

    Raises:
        ValueError: If the shapes, the dtype or the GPU are not supported, or the shapes need more shared
            memory than the GPU has.
    """
    tuning.check_shape(q, kv_pages, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    (num_tokens, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    num_seqs, group, quantized = context_lens.shape[0], num_heads // kv_heads, is_quantized(kv_pages)
    needs_registers = (window is not None and soft_cap is not None) or distance_bias is not None
    needs_registers |= quantized and (head_dim % 64 > 0 or kv_pages.dtype == jnp.uint8)
    config = config or ragged_tile.prefill_config(
        gpu, head_dim, page_size, q.dtype.itemsize, needs_registers=needs_registers, is_quantized=quantized
    )
    shape = PrefillShape(
        config=config, num_tiles=num_tokens // (config.block_rows // group) + num_seqs, kv_heads=kv_heads,
        group=group, page_size=page_size, head_dim=head_dim, dtype=q.dtype, scale=scale, window=window,
        soft_cap=soft_cap, has_sinks=sinks is not None, has_bias=distance_bias is not None,
        is_quantized=quantized, interpret=interpret,
    )  # fmt: skip
    tuning.check_smem(shape.smem_bytes, gpu, f"ragged_attention with head_dim {head_dim} and {config}")

    attend = functools.partial(_attend, shape, q, kv_pages, block_tables)
    if num_seqs == 1:
        return attend(context_lens, query_start_loc, sinks, distance_bias)
    # A single query would occupy one SM for its whole context. paged_decode splits the context.
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
    shape: PrefillShape,
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    sinks: Float[Array, " h"] | None,
    distance_bias: Float[Array, "h n"] | None,
) -> Float[Array, "t h d"]:
    """Gathers the queries into tiles, runs the kernel, and gathers the output of the tokens from the tiles.

    The function is jitted so that equal layers are lowered once.
    """
    padding = shape.config.block_rows - shape.queries * shape.group
    tiles, row = ragged_tile.plan_tiles(context_lens, query_start_loc, shape.num_tiles, shape.queries)
    q_tiles = q.at[row[:, None] + jnp.arange(shape.queries)].get(mode="clip")  # [N, Q, H, D]
    q_tiles = q_tiles.reshape(shape.num_tiles, shape.queries, shape.kv_heads, shape.group, shape.head_dim)
    q_tiles = q_tiles.swapaxes(1, 2).reshape(shape.num_tiles, shape.kv_heads, -1, shape.head_dim)
    q_tiles = jnp.pad(q_tiles, ((0, 0), (0, 0), (0, padding), (0, 0)))
    tables = _live_tables(shape, block_tables, context_lens, query_start_loc)
    pool = quantized_tile.flat(kv_pages) if shape.is_quantized else kv_pages
    sink_rows = bias = None
    if sinks is not None:
        # The soft cap is subtracted because ragged_tile.softmax omits this constant in all scores. The sinks
        # are made finite: in a row that attends to nothing in its first step, -inf would lead to -inf - -inf,
        # which is NaN.
        sinks = (sinks.astype(jnp.float32) - (shape.soft_cap or 0)) * LOG2E
        sinks = jnp.maximum(sinks, MASKED_SCORE)
        sink_rows = jnp.tile(sinks.reshape(shape.kv_heads, shape.group), (1, shape.queries))
        sink_rows = jnp.pad(sink_rows, ((0, 0), (0, padding)))
    if distance_bias is not None:
        bias = distance_bias.astype(jnp.float32).reshape(-1) * LOG2E
    # The kernel for Blackwell needs TMA, but a quantized pool is loaded into registers.
    if shape.config.has_wgmma:
        kernel = ragged_hopper.wgmma_kernel
    elif shape.config.has_tma and not shape.is_quantized:
        kernel = ragged_blackwell.mma_kernel
    else:
        kernel = _mma_kernel
    out = kernel(shape)(tiles, q_tiles, pool, tables, sink_rows, bias)
    return _gather_outputs(shape, out, context_lens, query_start_loc, len(q))


def _live_tables(
    shape: PrefillShape,
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
) -> Int[Array, "b m"]:
    """Returns the block tables padded to whole steps, with page 0 in place of pages that no query attends to.

    Entries before the window of a sequence's first query, and past its context, may have any value, even page
    ids outside of the pool. For these entries page 0 is loaded, and its scores are masked.
    """
    pages = shape.config.block_tokens // shape.page_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % pages)))
    first_token = jnp.arange(tables.shape[1]) * shape.page_size
    is_live = first_token < context_lens[:, None]
    if shape.window is not None:
        first_query = context_lens - (query_start_loc[1:] - query_start_loc[:-1])
        is_live &= first_token + shape.page_size > (first_query - shape.window + 1)[:, None]
    return jnp.where(is_live, tables, 0)


def _gather_outputs(
    shape: PrefillShape,
    out: Float[Array, "n k r d"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    num_tokens: int,
) -> Float[Array, "t h d"]:
    """Gathers the output of each token from the tiles; 0 for padding and for empty contexts."""
    num_seqs, token = context_lens.shape[0], jnp.arange(num_tokens)
    seq = jnp.sum(token[:, None] >= query_start_loc[1:], axis=1)
    is_padding = seq >= num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    tile, offset = jnp.divmod(token - query_start_loc[seq], shape.queries)
    tile += query_start_loc[seq] // shape.queries + seq
    out = out[:, :, : shape.queries * shape.group]
    out = out.reshape(shape.num_tiles, shape.kv_heads, shape.queries, shape.group, shape.head_dim)
    out = out.at[tile, :, offset].get(mode="clip").reshape(num_tokens, -1, shape.head_dim)
    return jnp.where((is_padding | (context_lens[seq] == 0))[:, None, None], 0, out)


def _mma_kernel(shape: PrefillShape) -> Callable[..., Array]:
    """Returns the kernel for one warpgroup with cp.async and mma.sync, described in the module docstring."""
    config, page_size, tokens = shape.config, shape.page_size, shape.config.block_tokens
    lhs, rhs, acc_layout = (
        layout(shape.dtype, m_warps=shape.rows // 16)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    mma = functools.partial(tuning.mma, interpret=shape.interpret)
    pages = tokens // page_size

    def body(tiles_ref, q_ref, kv_ref, tables_ref, sinks_ref, bias_ref, out_ref, k_s, v_s, p_s):
        head, index, tile = ragged_tile.current_tile(shape, tiles_ref)
        begin, *_middle, end = ragged_tile.step_ranges(shape, tile)
        quantized_pages = quantized_tile.Pages(kv_ref, head, page_size, shape.head_dim, shape.interpret)
        pages_of = functools.partial(ragged_tile.pages_of, shape, tile, tables_ref)
        second = jnp.minimum(begin + 1, end - 1)

        def copy(step: Array) -> None:
            page_ids = pages_of(step)
            for which, ref in enumerate((k_s, v_s)):
                for i, page in enumerate(page_ids):
                    target = ref.at[lax.rem(step, jnp.int32(2)), pl.ds(i * page_size, page_size)]
                    tuning.copy_to_smem(kv_ref.at[page, which, head], target, None)

        def unpack(step, ahead):
            """Writes a step of a quantized pool to shared memory, and loads the tiles of the next step.

            At this point all warps have multiplied the keys of the previous step. After the barrier that
            follows the keys, all warps have also multiplied its values.
            """
            page_ids, *tiles = ahead
            for which, ref in enumerate((k_s, v_s)):
                tiles[which] = quantized_pages.advance(ref.at[0], which, tiles[which], page_ids)
                if which == 0:
                    tuning.sync_warps(config.has_tma)
            return pages_of(jnp.minimum(step + 2, end - 1)), *tiles

        def attend(step: Array, carry: Any, *, is_full: bool) -> Any:
            if shape.is_quantized:
                slot, (*carry, ahead) = 0, carry
                ahead = [unpack(step, ahead)]
            else:
                slot, ahead = lax.rem(step, jnp.int32(2)), []
                # The keys have arrived. This wait is also a barrier, after which all warps have read the
                # other stage.
                plgpu.wait_gmem_to_smem(pages)
                pl.when(step + 1 < end)(lambda: copy(step + 1))
            # The queries are loaded in every step because there are not enough registers to keep them.
            queries = plgpu.load(q_ref.at[index, head], layout=lhs, optimized=False)
            keys = plgpu.load(k_s.at[slot].T, layout=rhs, optimized=False)
            scores = plgpu.layout_cast(jnp.zeros((shape.rows, tokens), jnp.float32), acc_layout)
            live = None if is_full else ragged_tile.live(shape, tile, 0, step, acc_layout)
            bias = ragged_tile.bias(shape, tile, head, 0, step, acc_layout, bias_ref)
            probs, (acc, largest, total) = ragged_tile.softmax(
                shape, mma(scores, queries, keys), carry, live, bias
            )
            p_s[...] = probs
            if shape.is_quantized:
                tuning.sync_warps(config.has_tma)
            else:
                # This wait for the values is also the barrier after which all probabilities are visible.
                tuning.wait_cp_async(step + 1 >= end, 0, 2 * pages)
            probs = plgpu.load(p_s, layout=lhs, optimized=False)
            values = plgpu.load(v_s.at[slot], layout=rhs, optimized=False)
            if not is_full:
                values = ragged_tile.clear_dead(shape, tile, values, step * tokens, rhs)
            return mma(acc, probs, values), largest, total, *ahead

        @pl.when(end > begin)
        def _():
            sinks = sinks_ref.at[head] if shape.has_sinks else None
            carry: Any = ragged_tile.initial_carry(shape, acc_layout, sinks)
            if shape.is_quantized:
                carry += (quantized_pages.begin(pages_of(begin), pages_of(second)),)
            else:
                copy(begin)
            tuning.store(out_ref.at[index, head], ragged_tile.run_steps(shape, tile, attend, carry))

    transforms = tuning.smem_transforms(shape.head_dim, shape.dtype, 32 if shape.is_quantized else page_size)
    stages = plgpu.SMEM((config.num_stages, tokens, shape.head_dim), shape.dtype, transforms=transforms)
    probs = plgpu.SMEM(
        (shape.rows, tokens), shape.dtype, transforms=tuning.smem_transforms(tokens, shape.dtype)
    )
    return ragged_tile.make_kernel(shape, body, [stages, stages, probs])

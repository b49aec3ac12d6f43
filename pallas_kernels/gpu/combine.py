"""The combine kernel: merges the partial results of paged_decode by their log-sum-exp.

paged_decode computes a softmax over each item, which is a part of a context. This kernel merges the items of
each sequence that has several of them, and writes 0 for sequences without tokens.

The grid is (sequence, query head). A thread block has four warps, and each warp reads every fourth item:

1. Each warp loads the normalized result [D], the maximum score and the denominator of four items from global
   memory, so that the thread block has 16 items in flight.
2. The warp adds the items to its running result in registers, as in the online softmax: [4, D] in float32,
   with one row per warp, and a maximum and a denominator per row.
3. After the last item, the four rows are merged and the sink is added to the denominator. The quotient is
   written to global memory.

Source: Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import tuning

# Number of loads in flight. Each load reads four items, one per warp.
UNROLL = 4


def combine(
    partial_outputs: Float[Array, "w k g d"],
    stats: Float[Array, "w k 2 r"],
    item_ranges: Int[Array, "b 2"],
    sinks: Float[Array, " h"] | None,
    out_ref: Any,
    *,
    interpret: bool,
) -> None:
    """Merges the items of every sequence that does not have exactly one item; writes the result to `out_ref`.

    Args:
        partial_outputs: float32, the normalized result of each item. The last three rows are padding.
        stats: float32, for each item the largest score, in base 2, and the sum of exp2(score - largest). R is
            at least the number of query heads per kv head.
        item_ranges: int32, the first item and the number of items of each sequence.
        sinks: One logit per head, in base 2, that is added to the denominator; -inf for no sink.
        out_ref: [B, H, D], receives the attention of these sequences; exactly 0 for a sequence without items.
        interpret: Whether to run in the interpreter.
    """
    num_seqs, num_heads, head_dim = out_ref.shape
    group = num_heads // partial_outputs.shape[1]
    layout = _item_per_warp(head_dim)

    def body(partial_outputs_ref, stats_ref, item_ranges_ref, *sinks_ref):
        head, seq = lax.axis_index("head"), lax.axis_index("seq")
        kv_head, row = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
        first, count = item_ranges_ref[seq, 0], item_ranges_ref[seq, 1]

        def load(ref, layout):
            return plgpu.load(ref, layout=layout, optimized=False)

        def broadcast(line):
            return lax.broadcast_in_dim(line, (tuning.WARPS, head_dim), [0])

        def join(step, carry):
            acc, largest, total = carry
            tiles, tops, sums = [], [], []
            for u in range(UNROLL):
                index = jnp.minimum((step * UNROLL + u) * tuning.WARPS, count - 1)
                items = pl.ds(first + index, tuning.WARPS)
                tiles.append(load(partial_outputs_ref.at[items, kv_head, row], layout))
                tops.append(load(stats_ref.at[items, kv_head, 0, row], layout.reduce(1)))
                sums.append(load(stats_ref.at[items, kv_head, 1, row], layout.reduce(1)))
            warp = plgpu.broadcasted_iota(jnp.int32, (tuning.WARPS,), 0, layout=layout.reduce(1))
            index = [warp + (step * UNROLL + u) * tuning.WARPS for u in range(UNROLL)]
            tops = [
                jnp.where(i < count, top, tuning.MASKED_SCORE) for i, top in zip(index, tops, strict=True)
            ]
            new_largest = functools.reduce(jnp.maximum, tops, largest)
            decay = jnp.exp2(largest - new_largest)
            acc, total = acc * broadcast(decay), total * decay
            for i, tile, top, part in zip(index, tiles, tops, sums, strict=True):
                weight = jnp.where(i < count, part * jnp.exp2(top - new_largest), 0.0)
                # Rows after the last item may be NaN.
                acc += jnp.where(broadcast(i) < count, tile, 0.0) * broadcast(weight)
                total += weight
            return acc, new_largest, total

        @pl.when(count != 1)
        def _():
            line = jnp.zeros((tuning.WARPS,), jnp.float32)
            acc = plgpu.layout_cast(jnp.zeros((tuning.WARPS, head_dim), jnp.float32), layout)
            largest, total = (
                plgpu.layout_cast(x, layout.reduce(1)) for x in (line + tuning.MASKED_SCORE, line)
            )
            trips = pl.cdiv(count, UNROLL * tuning.WARPS)
            acc, largest, total = lax.fori_loop(0, trips, join, (acc, largest, total))
            top = largest.max()
            if sinks_ref:
                top = jnp.maximum(top, sinks_ref[0][head])
            decay = jnp.exp2(largest - top)
            total = (total * decay).sum()
            if sinks_ref:
                total += jnp.exp2(sinks_ref[0][head] - top)
            out = (acc * broadcast(decay)).sum(axis=0) / jnp.where(total > 0, total, 1.0)
            tuning.store(out_ref.at[seq, head], out.astype(out_ref.dtype))

    plgpu.kernel(
        body,
        grid=(num_seqs, num_heads),
        grid_names=("seq", "head"),
        kernel_name="combine",
        interpret=tuning.interpret_params(interpret),
    )(partial_outputs, stats, item_ranges, *([] if sinks is None else [sinks]))


def _item_per_warp(head_dim: int) -> Any:
    """Returns a layout of [items, head_dim] in which each warp holds one item."""
    lanes = 32 if head_dim % 32 == 0 else 8
    vector = next(n for n in (4, 2, 1) if head_dim % (lanes * n) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((tuning.WARPS, lanes * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,) if lanes == 32 else (-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )

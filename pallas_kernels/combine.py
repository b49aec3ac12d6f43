"""The combine kernel: joins partial softmaxes over parts of a context by their log-sum-exp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import tuning

# Partial results whose loads are in flight together.
UNROLL = 4


@functools.partial(jax.jit, static_argnames=("num_heads", "dtype", "interpret"))
def combine(
    weighted: Float[Array, "w k g d"],
    stats: Float[Array, "w k 2 r"],
    spans: Int[Array, "b 2"],
    *,
    num_heads: int,
    dtype: Any,
    sinks: Float[Array, " h"] | None,
    interpret: bool,
) -> Float[Array, "b h d"]:
    """Joins the partial results of every sequence, with one block of threads per sequence and query head.

    Args:
        weighted: float32, the sum of exp2(score - largest) * value over the tokens of an item.
        stats: float32, the largest score among the tokens of an item, in base 2, and the sum of
            exp2(score - largest); R is at least the number of query heads per kv head.
        spans: int32, the first item and the number of items of each sequence.
        num_heads: Number of query heads, H.
        dtype: Dtype of the result.
        sinks: One logit per head that joins the sum, in base e; -inf for none.
        interpret: Whether to run in the interpreter.

    Returns:
        The attention, exactly 0 for a sequence without items.

    Source: Dao et al., Flash-Decoding for long-context inference, 2023.
    """
    head_dim, group = weighted.shape[3], num_heads // weighted.shape[1]
    layout = tuning.row_layout(head_dim)

    def body(weighted_ref, stats_ref, spans_ref, *refs):
        *sinks_ref, out_ref = refs
        head, seq = lax.axis_index("head"), lax.axis_index("seq")
        kv_head, row = lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))
        first, count = spans_ref[seq, 0], spans_ref[seq, 1]

        def join(step, carry):
            acc, largest, total = carry
            index = [step * UNROLL + u for u in range(UNROLL)]
            items = [first + jnp.minimum(i, count - 1) for i in index]
            tiles = [
                plgpu.load(weighted_ref.at[item, kv_head, pl.ds(row, 1)], layout=layout, optimized=False)
                for item in items
            ]
            tops = [stats_ref[item, kv_head, 0, row] for item in items]
            sums = [stats_ref[item, kv_head, 1, row] for item in items]
            new_largest = largest
            for top in tops:
                new_largest = jnp.maximum(new_largest, top)
            decay = jnp.exp2(largest - new_largest)
            acc, total = acc * decay, total * decay
            for i, tile, top, part in zip(index, tiles, tops, sums, strict=True):
                weight = jnp.where(i < count, jnp.exp2(top - new_largest), 0.0)
                acc, total = acc + tile * weight, total + part * weight
            return acc, new_largest, total

        acc = jnp.zeros((1, head_dim), jnp.float32)
        acc = acc if layout is None else plgpu.layout_cast(acc, layout)
        carry = (acc, jnp.float32(tuning.MASKED_SCORE), jnp.float32(0))
        acc, largest, total = lax.fori_loop(0, pl.cdiv(count, UNROLL), join, carry)
        if sinks_ref:
            sink = sinks_ref[0][head] * tuning.LOG2E
            new_largest = jnp.maximum(largest, sink)
            decay = jnp.exp2(largest - new_largest)
            acc, total = acc * decay, total * decay + jnp.exp2(sink - new_largest)
        out = acc / jnp.where(total > 0, total, 1.0)
        tuning.store(out_ref.at[seq, pl.ds(head, 1)], out.astype(dtype))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((spans.shape[0], num_heads, head_dim), dtype),
        grid=(num_heads, spans.shape[0]),
        grid_names=("head", "seq"),
        kernel_name="combine",
        interpret=tuning.interpret_params(interpret),
    )(weighted, stats, spans, *([] if sinks is None else [sinks.astype(jnp.float32)]))

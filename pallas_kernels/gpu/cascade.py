"""paged_decode for sequences that share leading pages (cascade attention).

1. The queries of sequences with the same shared pages are grouped into tiles (shared_tiles.py). Each tile is
   passed to the paged_decode kernel as one sequence, whose context is the shared pages. The rows of its
   sequences take the place of query heads, up to 16 rows per kv head. The shared pages are therefore read
   once per tile instead of once per sequence.
2. A second call of the kernel computes each sequence's attention to its remaining pages. For this, the block
   tables are shifted to begin after the shared pages.
3. The two results of each sequence, and the sink, are merged by their log-sum-exp, in XLA.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import tuning
from jax_paged.pallas_kernels.gpu.paged_decode import attend_with_stats, decode_shape, work_list
from jax_paged.pallas_kernels.gpu.shared_tiles import shared_tiles


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    shared_blocks: Int[Array, " b"],
    sinks: Float[Array, " h"] | None = None,
    **options: Any,
) -> Float[Array, "b h d"]:
    """See ops.paged_decode.

    Args:
        q: Queries.
        kv_pages: The pool.
        block_tables: int32 [B, M], pages of the sequences.
        context_lens: int32 [B].
        shared_blocks: int32 [B], number of leading pages that each sequence shares with others.
        sinks: Sink logit of each head; None for none.
        **options: Passed to with_denominators.
    """
    (_, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    rows = max(1, tuning.MAX_GROUP_SIZE // (num_heads // kv_heads))
    tiles = shared_tiles(block_tables, context_lens, shared_blocks, page_size, rows)
    queries = tiles.queries(q, kv_heads)
    found = with_denominators(
        queries.reshape(len(queries), -1, head_dim),
        kv_pages,
        block_tables[tiles.members[:, 0]],
        tiles.context_lens,
        **options,
    )
    shared, denominators = (x.reshape(*queries.shape[:3], *x.shape[2:]) for x in found)
    column = jnp.arange(block_tables.shape[1]) + (tiles.num_tokens // page_size)[:, None]
    tables = jnp.take_along_axis(block_tables, jnp.minimum(column, block_tables.shape[1] - 1), axis=1)
    own, own_denominators = with_denominators(q, kv_pages, tables, context_lens - tiles.num_tokens, **options)

    values = [own, tiles.gather_results(shared, 0).reshape(q.shape)]
    logarithms = [own_denominators, tiles.gather_results(denominators, -jnp.inf).reshape(q.shape[:2])]
    if sinks is not None:
        logarithms.append(jnp.broadcast_to(sinks.astype(jnp.float32) * tuning.LOG2E, q.shape[:2]))
    top = functools.reduce(jnp.maximum, logarithms)
    weights = [jnp.exp2(logarithm - jnp.where(jnp.isfinite(top), top, 0)) for logarithm in logarithms]
    # The sink is the last weight and has no value.
    out = sum(x.astype(jnp.float32) * w[..., None] for x, w in zip(values, weights, strict=False))
    total = sum(weights)
    return (out / jnp.where(total > 0, total, 1)[..., None]).astype(q.dtype)


def with_denominators(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    soft_cap: float | None,
    interpret: bool,
) -> tuple[Float[Array, "b h d"], Float[Array, "b h"]]:
    """Returns the output of paged_decode and the log2 of its denominators; -inf for an empty context."""
    shape = decode_shape(q, kv_pages, scale=scale, window=None, soft_cap=soft_cap, interpret=interpret)
    work = work_list(context_lens, shape.config.num_parts, shape.tokens, None)
    out, stats = attend_with_stats(shape, q, kv_pages, block_tables, context_lens, work)
    item, (first, count) = jnp.arange(len(stats)), work.item_ranges.T
    is_its = (item >= first[:, None]) & (item < (first + count)[:, None])
    seq = jnp.where(is_its.any(0), is_its.argmax(0), len(q))
    group = q.shape[1] // kv_pages.shape[2]
    tops, sums = (stats[:, :, i, :group].reshape(len(stats), -1) for i in range(2))
    # Items that belong to no sequence were never written.
    top = jax.ops.segment_max(jnp.where(seq[:, None] < len(q), tops, -jnp.inf), seq, len(q) + 1)
    parts = jnp.where(seq[:, None] < len(q), sums * jnp.exp2(tops - top[seq]), 0)
    return out, (top + jnp.log2(jax.ops.segment_sum(parts, seq, len(q) + 1)))[:-1]

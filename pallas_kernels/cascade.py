"""paged_decode for sequences that share leading pages: two calls of the kernel, whose softmaxes are joined.

The queries of sequences that share are query heads of one sequence, whose context is what they share: as many
as fill the kernel's rows. So the pages are read once for 16 query rows, in place of once for those of a
sequence. What each has for itself is a sequence with a table that begins there.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import tuning
from jax_paged.pallas_kernels.paged_decode import with_denominators
from jax_paged.pallas_kernels.shared_tiles import shared_tiles


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
    """See ops.paged_decode; the options are those of with_denominators."""
    (_, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    group = num_heads // kv_heads
    rows = max(1, tuning.MAX_GROUP_SIZE // group)
    tiles = shared_tiles(block_tables, context_lens, shared_blocks, page_size, rows)
    num_tiles = len(tiles.lens)

    queries = q[tiles.members].reshape(num_tiles, rows, kv_heads, group, head_dim)
    queries = queries.swapaxes(1, 2).reshape(num_tiles, -1, head_dim)
    tables = block_tables[tiles.members[:, 0]]
    shared, denominators = with_denominators(queries, kv_pages, tables, tiles.lens, **options)

    def of_seqs(of_tiles: Array, nothing: float) -> Array:
        split = of_tiles.reshape(num_tiles, kv_heads, rows, group, *of_tiles.shape[2:]).swapaxes(1, 2)
        split = split.reshape(num_tiles * rows, num_heads, *of_tiles.shape[2:]).astype(jnp.float32)
        return split.at[tiles.places].get(mode="fill", fill_value=nothing)

    column = jnp.arange(block_tables.shape[1]) + (tiles.num_tokens // page_size)[:, None]
    tables = jnp.take_along_axis(block_tables, jnp.minimum(column, block_tables.shape[1] - 1), axis=1)
    own, own_denominators = with_denominators(q, kv_pages, tables, context_lens - tiles.num_tokens, **options)

    parts = [
        (own.astype(jnp.float32), own_denominators),
        (of_seqs(shared, 0), of_seqs(denominators, -jnp.inf)),
    ]
    top = jnp.maximum(parts[0][1], parts[1][1])
    if sinks is not None:
        sink = sinks.astype(jnp.float32) * tuning.LOG2E
        top = jnp.maximum(top, sink)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = [jnp.exp2(logarithm - top) for _, logarithm in parts]
    total = weights[0] + weights[1]
    if sinks is not None:
        total += jnp.exp2(sink - top)
    out = sum(x * weight[..., None] for (x, _), weight in zip(parts, weights, strict=True))
    return (out / jnp.where(total > 0, total, 1)[..., None]).astype(q.dtype)

"""The CPU backend: the ops as fast as XLA makes them, and a plain GPU baseline.

Both attentions walk the pages in chunks that fit a core's cache, with an online softmax (Milakov and
Gimelshein, 2018), and stop at the longest live context: the cost follows the tokens that are there, not
the padded table. A gather of the whole padded table goes through memory three times and is most of a
decode step.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# Finite, so that a row with nothing to attend to gives exp(0), masked away, and not NaN.
MASKED_SCORE = -1e30
# Tokens of keys that one decode iteration loads for all its sequences: about 1 MiB at 4 kv heads of 64.
DECODE_CHUNK_TOKENS = 1024
DECODE_ROWS = 16
PREFILL_TILE_ROWS = 64
PREFILL_CHUNK_TOKENS = 128


def write_kv(
    kv_pages: Float[Array, "p 2 k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    slot_mapping: Int[Array, " t"],
) -> Float[Array, "p 2 k s d"]:
    """See ops.write_kv."""
    page_size = kv_pages.shape[3]
    kv = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return kv_pages.at[page, :, :, offset].set(kv, mode="drop")


def copy_blocks(
    kv_pages: Float[Array, "p 2 k s d"], src: Int[Array, " n"], dst: Int[Array, " n"]
) -> Float[Array, "p 2 k s d"]:
    """See ops.copy_blocks."""
    num_pages = kv_pages.shape[0]
    dst = jnp.where(src < num_pages, dst, num_pages)
    return kv_pages.at[dst].set(kv_pages.at[src].get(mode="clip"), mode="drop")


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "b h d"]:
    """See ops.paged_decode.

    Sequences are sorted by length and taken DECODE_ROWS at a time, so that those that share a loop end at
    about the same page.
    """
    (num_seqs, num_heads, head_dim), kv_heads, page_size = q.shape, kv_pages.shape[2], kv_pages.shape[3]
    rows = min(DECODE_ROWS, num_seqs)
    pages = min(max(1, DECODE_CHUNK_TOKENS // (rows * page_size)), block_tables.shape[1])
    order = jnp.argsort(-context_lens)
    padding = -num_seqs % rows
    order = jnp.pad(order, (0, padding))
    lens = jnp.where(jnp.arange(num_seqs + padding) < num_seqs, context_lens[order], 0)
    tables = _pad_columns(block_tables, pages)[order]
    queries = q.reshape(num_seqs, kv_heads, -1, head_dim)[order].astype(jnp.float32) * scale
    blocks = []
    for first in range(0, num_seqs + padding, rows):
        block = slice(first, first + rows)
        attend = functools.partial(_attend_rows, kv_pages, tables[block], pages, soft_cap=soft_cap)
        end = lens[block][:, None]
        start = 0 if window is None else end - window
        blocks.append(attend(queries[block], lens[block], lambda t, s=start, e=end: (t >= s) & (t < e)))
    inverse = jnp.argsort(order[:num_seqs])
    out = jnp.concatenate(blocks)[inverse]
    return out.reshape(num_seqs, num_heads, head_dim).astype(q.dtype)


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "t h d"]:
    """See ops.ragged_attention.

    Sequences with one query go through paged_decode together. The queries of the others are cut into
    tiles of PREFILL_TILE_ROWS rows; a loop over the tiles that are there attends one tile at a time.
    """
    (num_tokens, num_heads, head_dim), (_, _, kv_heads, page_size, _) = q.shape, kv_pages.shape
    group = num_heads // kv_heads
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    is_decode = query_lens == 1
    decoded = paged_decode(
        q.at[query_start_loc[:-1]].get(mode="clip"),
        kv_pages,
        block_tables,
        jnp.where(is_decode, context_lens, 0),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )

    tile_rows = min(PREFILL_TILE_ROWS, num_tokens)
    pages = min(max(1, PREFILL_CHUNK_TOKENS // page_size), block_tables.shape[1])
    tables = _pad_columns(block_tables, pages)
    num_tiles = jnp.where(is_decode, 0, -(-query_lens // tile_rows))
    last_tile = jnp.cumsum(num_tiles)
    queries = jnp.pad(q, ((0, tile_rows), (0, 0), (0, 0)))

    def attend_tile(tile: Array, out: Array) -> Array:
        seq = jnp.sum(tile >= last_tile)
        offset = (tile - (last_tile[seq] - num_tiles[seq])) * tile_rows
        row = query_start_loc[seq] + offset
        rows = lax.dynamic_slice_in_dim(queries, row, tile_rows)
        # [1, K, G * rows, D]: a kv head's whole group attends in one product.
        rows_by_head = rows.reshape(tile_rows, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        rows_by_head = rows_by_head.reshape(1, kv_heads, group * tile_rows, head_dim)
        position = context_lens[seq] - query_lens[seq] + offset + jnp.arange(tile_rows)
        end = jnp.minimum(position[-1] + 1, context_lens[seq])[None]
        position = jnp.tile(position, group)[None, None, :, None]

        def is_live(t: Array) -> Array:
            t = t[:, None, None]
            return (t <= position) if window is None else (t <= position) & (t > position - window)

        table = lax.dynamic_slice_in_dim(tables, seq, 1)
        scaled = rows_by_head.astype(jnp.float32) * scale
        tile_out = _attend_rows(kv_pages, table, pages, scaled, end, is_live, soft_cap=soft_cap)
        tile_out = tile_out.reshape(kv_heads, group, tile_rows, head_dim).transpose(2, 0, 1, 3)
        tile_out = tile_out.reshape(tile_rows, num_heads, head_dim).astype(q.dtype)
        # The tile may reach into the rows of the next sequence: those keep what they have.
        is_own = (offset + jnp.arange(tile_rows) < query_lens[seq])[:, None, None]
        kept = lax.dynamic_slice_in_dim(out, row, tile_rows)
        return lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, tile_out, kept), row, axis=0)

    prefilled = lax.fori_loop(0, last_tile[-1], attend_tile, jnp.zeros_like(queries))[:num_tokens]
    token = jnp.arange(num_tokens)
    seq = jnp.minimum(jnp.sum(token[:, None] >= query_start_loc[1:], axis=1), block_tables.shape[0] - 1)
    is_decode_row = is_decode[seq] & (token < query_start_loc[-1])
    return jnp.where(is_decode_row[:, None, None], decoded[seq], prefilled)


def _attend_rows(
    kv_pages: Float[Array, "p 2 k s d"],
    tables: Int[Array, "r m"],
    pages: int,
    queries: Float[Array, "r k g d"],
    lens: Int[Array, " r"],
    is_live: Callable[[Int[Array, "*r t"]], Bool[Array, "..."]],
    *,
    soft_cap: float | None,
) -> Float[Array, "r k g d"]:
    """Attends R rows of scaled float32 queries over their tables, `pages` columns an iteration.

    Args:
        kv_pages: The pool.
        tables: Pages of each row; the number of columns is a multiple of `pages`.
        pages: Columns an iteration.
        queries: Scaled float32 queries.
        lens: Tokens of each row; those from there on are dead.
        is_live: Positions [1, T] -> whether each is attended to, broadcastable to [R, T] or [R, K, G, T].
        soft_cap: See ops.paged_decode.
    """
    num_pages, _, kv_heads, page_size, head_dim = kv_pages.shape
    rows, tokens = tables.shape[0], pages * page_size
    # A row of this view is the [S, D] tile of one page, one of keys and values, one head.
    tiles = kv_pages.reshape(num_pages * 2 * kv_heads, page_size * head_dim)
    head = jnp.arange(kv_heads)[:, None]

    def load(page: Array, which: int) -> Array:
        tile = (page[:, None, :] * 2 + which) * kv_heads + head
        loaded = tiles.at[tile].get(mode="promise_in_bounds")
        return loaded.reshape(rows, kv_heads, tokens, head_dim).astype(jnp.float32)

    def attend_chunk(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, largest, total = carry
        page = lax.dynamic_slice_in_dim(tables, i * pages, pages, axis=1)
        position = i * tokens + jnp.arange(tokens)
        written = position < lens[:, None]
        live = is_live(position[None])
        if live.ndim == 2:
            live = (live & written)[:, None, None]
        else:
            live = live & written[:, None, None]
        scores = jnp.einsum("rkgd,rktd->rkgt", queries, load(page, 0))
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        scores = jnp.where(live, scores, MASKED_SCORE)
        new_largest = jnp.maximum(largest, scores.max(-1))
        probs = jnp.where(live, jnp.exp(scores - new_largest[..., None]), 0)
        decay = jnp.exp(largest - new_largest)
        # 0 * NaN is NaN: what a dead slot holds must not reach the product.
        values = jnp.where(written[:, None, :, None], load(page, 1), 0)
        acc = acc * decay[..., None] + jnp.einsum("rkgt,rktd->rkgd", probs, values)
        return acc, new_largest, total * decay + probs.sum(-1)

    zero = jnp.zeros(queries.shape, jnp.float32)
    carry = (zero, jnp.full(queries.shape[:-1], MASKED_SCORE), zero[..., 0])
    num_chunks = -(-lens.max() // tokens)
    acc, _, total = lax.fori_loop(0, num_chunks, attend_chunk, carry)
    return acc / jnp.where(total > 0, total, 1)[..., None]


def _pad_columns(tables: Int[Array, "b m"], multiple: int) -> Int[Array, "b m2"]:
    """Pads block tables with the null page to a multiple of columns: a slice past the end would clamp."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % multiple)))

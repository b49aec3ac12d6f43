"""The backend "xla": the ops as fast as XLA makes them on a CPU, and a plain baseline on a GPU.

Both attentions walk a work list. A tile is a few query rows of one sequence (one row in decode, up to
PREFILL_TILE_ROWS in prefill); an item is a tile and ITEM_TOKENS tokens of the context that it sees:

    sequence, context      tiles        items (32 tokens each)
    a, 80 tokens           a0           (a0, 0-31) (a0, 32-63) (a0, 64-79)
    b, 30 tokens           b0           (b0, 0-29)
    c, prefill of 20       c0 c1        (c0, 0-15) (c1, 0-19)

The items are packed: a loop takes them chunk by chunk, as many as stay in the caches of the cores. So the
cost follows the live tokens and not the padded tables; a gather of whole padded tables would go through
memory three times. The items of a tile are neighbours, so a chunk finishes all its tiles but the last, whose
softmax goes on in the next chunk (Milakov and Gimelshein, 2018). Temporary arrays stay below 32 MiB, as above
that size malloc maps and clears new memory at every step.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Finite: a row with nothing to attend to gets exp(0), which is masked, and not NaN.
MASKED_SCORE = -1e30
# Longer items take fewer and larger products, but more of them is padding.
DECODE_ITEM_TOKENS = 32
MANY_SEQS = 32
MANY_DECODE_ITEM_TOKENS = 64
PREFILL_ITEM_TOKENS = 64
PREFILL_TILE_ROWS = 16
# Bytes of keys per chunk. All of a chunk is computed, so in decode it grows with the sequences: it holds
# CHUNK_TOKENS_PER_SEQ of each, within these bounds.
CHUNK_TOKENS_PER_SEQ = 128
MIN_DECODE_CHUNK_BYTES = 2**18
MAX_DECODE_CHUNK_BYTES = 2**21
PREFILL_CHUNK_BYTES = 2**20


def write_kv(
    kv_pages: Float[Array, "p 2 k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    slot_mapping: Int[Array, " t"],
) -> Float[Array, "p 2 k s d"]:
    """See ops.write_kv."""
    num_pages, _, _, page_size, _ = kv_pages.shape
    kv = jnp.stack([k, v], axis=1).astype(kv_pages.dtype)
    if kv.shape[0] == 1:
        # XLA turns a scatter of one row into an update that it computes twice, each on a copy of the pool. A
        # second row, which is dropped, keeps it a scatter.
        kv = jnp.pad(kv, ((0, 1), (0, 0), (0, 0), (0, 0)))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=num_pages * page_size)
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    return kv_pages.at[page, :, :, offset].set(kv, mode="drop")


def copy_blocks(
    kv_pages: Float[Array, "p 2 k s d"], src: Int[Array, " n"], dst: Int[Array, " n"]
) -> Float[Array, "p 2 k s d"]:
    """See ops.copy_blocks."""
    num_pages = kv_pages.shape[0]
    dst = jnp.where(src < num_pages, dst, num_pages)
    return kv_pages.at[dst].set(kv_pages.at[src].get(mode="clip"), mode="drop")


class Tiles(NamedTuple):
    """Query tiles; the R rows of a kv head are those of its query heads, one head after the other.

    Args:
        queries: [N, K, R, D].
        positions: int32 [N, R], the position of each row in its sequence.
        context_lens: int32 [N], the tokens that the tile's last row sees; 0 in an unused tile.
        seq: int32 [N], the row of the block tables.
    """

    queries: Float[Array, "n k r d"]
    positions: Int[Array, "n r"]
    context_lens: Int[Array, " n"]
    seq: Int[Array, " n"]


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    scale: float,
    **options: Any,
) -> Float[Array, "b h d"]:
    """See ops.paged_decode: every sequence is a tile of one row; the options go to _attend."""
    num_seqs, _, head_dim = q.shape
    queries = q.reshape(num_seqs, kv_pages.shape[2], -1, head_dim)
    positions = jnp.broadcast_to(context_lens[:, None] - 1, (num_seqs, queries.shape[2]))
    tiles = Tiles(queries, positions, context_lens, jnp.arange(num_seqs))
    token_bytes = kv_pages.shape[2] * head_dim * kv_pages.dtype.itemsize
    chunk_bytes = num_seqs * CHUNK_TOKENS_PER_SEQ * token_bytes
    chunk_bytes = min(max(chunk_bytes, MIN_DECODE_CHUNK_BYTES), MAX_DECODE_CHUNK_BYTES)
    out = _attend(
        tiles,
        kv_pages,
        block_tables,
        item_tokens=DECODE_ITEM_TOKENS if num_seqs < MANY_SEQS else MANY_DECODE_ITEM_TOKENS,
        chunk_bytes=chunk_bytes,
        scale=scale,
        **options,
    )
    return out.reshape(q.shape).astype(q.dtype)


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    *,
    scale: float,
    **options: Any,
) -> Float[Array, "t h d"]:
    """See ops.ragged_attention: sequences with one query go through paged_decode, the others in tiles."""
    (num_tokens, num_heads, head_dim), (num_seqs, _) = q.shape, block_tables.shape
    kv_heads, rows = kv_pages.shape[2], min(PREFILL_TILE_ROWS, num_tokens)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    is_decode = query_lens == 1
    decoded = paged_decode(
        q.at[query_start_loc[:-1]].get(mode="clip"),
        kv_pages,
        block_tables,
        jnp.where(is_decode, context_lens, 0),
        scale=scale,
        **options,
    )

    # Each sequence leaves at most one tile partly filled, and has at least two rows.
    num_tiles = num_tokens // rows + min(num_seqs, num_tokens // 2) + 1
    tile_counts = jnp.where(is_decode, 0, -(-query_lens // rows))
    tile_ends = jnp.cumsum(tile_counts)
    seq, index, is_used = _spread(tile_ends, tile_counts, num_tiles)
    offset = index * rows
    row = (query_start_loc[seq] + offset)[:, None] + jnp.arange(rows)
    queries = q.at[row].get(mode="clip").reshape(num_tiles, rows, kv_heads, -1, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, -1, head_dim)
    positions = (context_lens[seq] - query_lens[seq] + offset)[:, None] + jnp.arange(rows)
    seen = jnp.where(is_used, jnp.minimum(positions[:, -1] + 1, context_lens[seq]), 0)
    positions = jnp.tile(positions, (1, num_heads // kv_heads))
    out = _attend(
        Tiles(queries, positions, seen, seq),
        kv_pages,
        block_tables,
        item_tokens=PREFILL_ITEM_TOKENS,
        chunk_bytes=PREFILL_CHUNK_BYTES,
        scale=scale,
        **options,
    )
    out = out.reshape(num_tiles, kv_heads, -1, rows, head_dim).transpose(0, 3, 1, 2, 4)
    out = out.reshape(num_tiles * rows, num_heads, head_dim).astype(q.dtype)

    # Back from tiles to token rows.
    token = jnp.arange(num_tokens)
    seq = jnp.sum(token[:, None] >= query_start_loc[1:], axis=1)
    is_padding = seq >= num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    prefilled = (tile_ends - tile_counts)[seq] * rows + token - query_start_loc[seq]
    out = jnp.where(is_decode[seq][:, None, None], decoded[seq], out.at[prefilled].get(mode="clip"))
    return jnp.where(is_padding[:, None, None], 0, out)


def _spread(ends: Int[Array, " b"], counts: Int[Array, " b"], size: int) -> tuple[Array, Array, Array]:
    """Lists counts[b] entries for each b, one b after the other.

    Args:
        ends: Running sum of counts.
        counts: Entries of each b.
        size: Length of the list.

    Returns:
        For each entry its b (the last b where unused), its index within b, and whether it is used.
    """
    entry = jnp.arange(size)
    owner = jnp.sum(entry[:, None] >= ends, axis=1)
    is_used = owner < counts.shape[0]
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    return owner, entry - (ends - counts)[owner], is_used


def _attend(
    tiles: Tiles,
    kv_pages: Float[Array, "p 2 k s d"],
    block_tables: Int[Array, "b m"],
    *,
    item_tokens: int,
    chunk_bytes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
) -> Float[Array, "n k r d"]:
    """Attends with every tile over its context, a chunk of items at a time; 0 in unused tiles."""
    num_pages, _, kv_heads, page_size, head_dim = kv_pages.shape
    num_tiles, _, rows, _ = tiles.queries.shape
    dtype = jnp.promote_types(tiles.queries.dtype, kv_pages.dtype)
    pages = max(1, item_tokens // page_size)
    tokens = pages * page_size
    max_num_items = num_tiles * -(-block_tables.shape[1] // pages)
    size = min(max(1, chunk_bytes // (tokens * kv_heads * head_dim * dtype.itemsize)), max_num_items)
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % pages)))
    # A row of this view is the [S, D] tile of one page, one of keys and values, one head.
    page_tiles = kv_pages.reshape(num_pages * 2 * kv_heads, page_size * head_dim)
    item_counts = -(-tiles.context_lens // tokens)
    first_token = jnp.zeros_like(tiles.context_lens)
    if window is not None:
        first_token = jnp.maximum(tiles.positions[:, 0] - window + 1, 0)
        item_counts = jnp.maximum(item_counts - first_token // tokens, 0)
    item_ends = jnp.cumsum(item_counts)
    # Tiles that have items are neighbours in the output, so that a chunk writes one slice of it.
    place = jnp.cumsum(item_counts > 0) - 1

    def of_rows(of_heads: Array) -> Array:
        of_heads = of_heads.astype(jnp.float32).reshape(kv_heads, -1, *of_heads.shape[1:])
        return jnp.repeat(of_heads, rows // of_heads.shape[1], axis=1)

    def of_page_tiles(values: Array) -> Array:
        values = jnp.broadcast_to(values, (size, kv_heads, pages))
        return lax.optimization_barrier(values.reshape(-1))

    def load(page: Array, which: int) -> Array:
        row = of_page_tiles((page[:, None] * 2 + which) * kv_heads + jnp.arange(kv_heads)[:, None])
        return page_tiles.at[row].get(mode="promise_in_bounds").astype(dtype)

    def as_tokens(loaded: Array) -> Array:
        # A loop over whole page tiles is made of vectors; fused with the reshape it would go by head_dim, and
        # LLVM unrolls such short loops before it looks for vectors.
        return lax.optimization_barrier(loaded).reshape(size, kv_heads, tokens, head_dim)

    bias = None if distance_bias is None else of_rows(distance_bias)
    sink = None if sinks is None else of_rows(sinks)
    page_start, token = jnp.arange(pages) * page_size, jnp.arange(tokens)

    def attend_chunk(chunk: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        out, last_acc, last_largest, last_total = carry
        tile, index, is_used = _spread(item_ends - chunk * size, item_counts, size)
        # Tokens count from the start of their item; those from low to high are there.
        start = (index + first_token[tile] // tokens) * tokens
        low, high = first_token[tile] - start, jnp.where(is_used, tiles.context_lens[tile] - start, 0)
        position = tiles.positions[tile] - start[:, None]
        # Page 0 stands for pages that no row sees: the table may say anything of them, and they cost nothing.
        page_is_there = (page_start < high[:, None]) & (page_start + page_size > low[:, None])
        column = jnp.where(page_is_there, start[:, None] // page_size + jnp.arange(pages), 0)
        page = jnp.where(page_is_there, tables[tiles.seq[tile][:, None], column], 0)
        # An unused item gets a segment out of range: what it adds is dropped.
        segment = jnp.where(is_used, place[tile] - place[tile[0]], size)
        queries = tiles.queries[tile].astype(dtype)
        # The barriers here and below end fusions, which would compute all this again for each element.
        low, high, position, page, segment, queries = lax.optimization_barrier(
            (low, high, position, page, segment, queries)
        )
        live = token < jnp.minimum(position + 1, high[:, None])[:, None, :, None]
        if window is not None:
            live &= token > position[:, None, :, None] - window

        keys = as_tokens(load(page, 0))
        scores = jnp.einsum("nkrd,nktd->nkrt", queries, keys, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = jnp.tanh(scores / soft_cap) * soft_cap
        if bias is not None:
            distance = jnp.clip(position[:, None, :, None] - token, 0, bias.shape[2] - 1)
            head = jnp.arange(kv_heads)[:, None, None]
            scores += bias[head, jnp.arange(rows)[:, None], distance]
        # The first segment may go on with the last tile of the chunk before.
        is_continued = index[0] > 0
        last_largest = jnp.where(is_continued, last_largest, MASKED_SCORE)
        largest = jnp.full((size, kv_heads, rows), MASKED_SCORE).at[0].set(last_largest)
        largest = largest.at[segment].max(jnp.where(live, scores, MASKED_SCORE).max(-1), mode="drop")
        shift = lax.optimization_barrier(largest.at[segment].get(mode="clip"))[..., None]
        # In one dimension, the exponential is made of vectors.
        exponents = jnp.where(live, scores - shift, -jnp.inf).reshape(-1)
        probs = jnp.exp(lax.optimization_barrier(exponents))
        probs = lax.optimization_barrier(probs).reshape(scores.shape)
        # 0 * NaN is NaN: what a dead slot holds must not reach the product.
        slot = jnp.arange(page_size * head_dim) // head_dim
        values = load(page, 1)
        is_there = slot < of_page_tiles(high[:, None, None] - page_start)[:, None]
        if window is not None:
            is_there &= slot >= of_page_tiles(low[:, None, None] - page_start)[:, None]
        values = as_tokens(jnp.where(is_there, values, 0))
        weighted = jnp.einsum(
            "nkrt,nktd->nkrd", probs.astype(dtype), values, preferred_element_type=jnp.float32
        )
        decay = jnp.exp(last_largest - largest[0])
        acc = jnp.zeros(weighted.shape).at[0].set(jnp.where(is_continued, last_acc * decay[..., None], 0))
        total = jnp.zeros(largest.shape).at[0].set(jnp.where(is_continued, last_total * decay, 0))
        acc = acc.at[segment].add(weighted, mode="drop")
        total = total.at[segment].add(probs.sum(-1), mode="drop")

        attended, sum_of_weights = acc, total
        if sink is not None:
            new_largest = jnp.maximum(largest, sink)
            decay = jnp.exp(largest - new_largest)
            attended, sum_of_weights = acc * decay[..., None], total * decay + jnp.exp(sink - new_largest)
        attended /= jnp.where(sum_of_weights > 0, sum_of_weights, 1)[..., None]
        out = lax.dynamic_update_slice_in_dim(out, attended, place[tile[0]], axis=0)
        last = jnp.max(jnp.where(is_used, segment, 0))
        return out, acc[last], largest[last], total[last]

    out = jnp.zeros((num_tiles + size, kv_heads, rows, head_dim))
    carry = (out, out[0], out[0, ..., 0], out[0, ..., 0])
    num_chunks = -(-item_ends[-1] // size)
    out, *_ = lax.fori_loop(0, num_chunks, attend_chunk, carry)
    return jnp.where((item_counts > 0)[:, None, None, None], out[place], 0)

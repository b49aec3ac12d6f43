"""The backend "xla": plain JAX, optimized for XLA on a CPU; on a GPU, a simple baseline.

Both attention operations walk a work list. A tile is a few query rows of one sequence: one row in decode, up
to PREFILL_TILE_ROWS rows in prefill. An item is one tile and ITEM_TOKENS consecutive tokens of the context it
attends to:

    sequence, context      tiles        items (64 tokens each)
    a, 150 tokens          a0           (a0, 0-63) (a0, 64-127) (a0, 128-149)
    b, 30 tokens           b0           (b0, 0-29)
    c, prefill of 20       c0 c1        (c0, 0-15) (c1, 0-19)

1. `_list_items` lists the items of all tiles without gaps, with the page ids of each item.
2. A loop with a dynamic trip count processes the list in chunks of equally many items. A chunk is small
   enough for its keys to stay in the cache of a core.
3. For each chunk, `_ChunkAttention` gathers the pages, computes the scores, a softmax per item, and the
   weighted sum of the values.
4. The results of the items are added to the running sums of their tiles, in the order of the list.
5. After the loop, the sums are divided by the softmax denominators.

The cost therefore follows the number of live tokens, not the padded size of the block tables. A gather of
whole padded tables would pass through memory three times.

The softmax of an item uses powers of two: the weights are 2**(score - e), where the integer e is the item's
largest score, rounded up. Adding items (as in the online softmax of Milakov and Gimelshein, 2018) then only
rescales by integer powers of two, which is exact. Within one compiled program, the output of a sequence
therefore does not depend on where the chunks begin.

The pages that several sequences share (`shared_blocks`) are attended to by tiles that contain a row of each
of these sequences. Their sums are added to the sums of the sequences' own tiles in the same way.

Temporary arrays stay below 32 MiB. Above this size malloc maps and clears new memory in every step.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu.shared_tiles import SharedTiles, shared_tiles
from jax_paged.pallas_kernels.quantization import dequantize, is_quantized, rows_of

# These are finite because the difference of two infinities is NaN. MASKED_EXPONENT is so far above
# MASKED_SCORE that all weights of a row with nothing to attend to are 0.
MASKED_SCORE, MASKED_EXPONENT = -1e30, -1e29
LOG2_E = 1.4426950408889634
ITEM_TOKENS = 64
PREFILL_TILE_ROWS = 16
# Items per chunk in decode for each tile, and the limit for the bytes of a chunk's keys. Unused items of a
# chunk are computed too, so chunks should not be larger than the batch needs.
DECODE_TILE_ITEMS = 2
CHUNK_BYTES = 2 * 2**20


def write_kv(
    kv_pages: Float[Array, "p n k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"] | None,
    slot_mapping: Int[Array, " t"],
) -> Float[Array, "p n k s d"]:
    """See ops.write_kv."""
    num_pages, _, _, page_size, _ = kv_pages.shape
    kv = jnp.stack([k] if v is None else [k, v], axis=1).astype(kv_pages.dtype)
    if kv.shape[0] == 1:
        # XLA turns a scatter of one row into an update, which it computes twice, each time on a copy of the
        # pool. A second row, which is dropped, keeps it a scatter.
        kv = jnp.pad(kv, ((0, 1), (0, 0), (0, 0), (0, 0)))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=num_pages * page_size)
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    if not is_quantized(kv_pages):
        return kv_pages.at[page, :, :, offset].set(kv, mode="drop")
    head_dim = kv.shape[-1] - 1
    tiles = kv_pages.reshape(*kv_pages.shape[:3], -1)
    windows = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 3)
    )
    for rows, start in ((kv[..., :-1], offset * head_dim), (kv[..., -1:], page_size * head_dim + offset)):
        place = jnp.stack([page, start], axis=1)
        tiles = lax.scatter(tiles, place, rows, windows, mode="drop")
    return tiles.reshape(kv_pages.shape)


def copy_blocks(
    kv_pages: Float[Array, "p n k s d"], src: Int[Array, " c"], dst: Int[Array, " c"]
) -> Float[Array, "p n k s d"]:
    """See ops.copy_blocks."""
    num_pages = kv_pages.shape[0]
    dst = jnp.where(src < num_pages, dst, num_pages)
    return kv_pages.at[dst].set(kv_pages.at[src].get(mode="clip"), mode="drop")


class Tiles(NamedTuple):
    """Query tiles.

    A tile has R rows for each kv head: all query rows of the tile for its first query head, then all query
    rows for the next query head, and so on.

    Args:
        queries: [N, K, R, D].
        positions: int32 [N, R], the position of each row in its sequence.
        context_lens: int32 [N], number of tokens that the tile's last row attends to; 0 in an unused tile.
        seq: int32 [N], the row of the block tables.
        first: int32 [N], the first token that the tile's first row attends to; None if it is 0 in all tiles.
    """

    queries: Float[Array, "n k r d"]
    positions: Int[Array, "n r"]
    context_lens: Int[Array, " n"]
    seq: Int[Array, " n"]
    first: Int[Array, " n"] | None


class Sums(NamedTuple):
    """Unnormalized softmax of each row, relative to a power of two.

    Args:
        values: float32 [N, K, R, V], weighted sums of the values. The weights are 2**(score - exponent).
        exponents: float32 [N, K, R], integers, at least as large as all scores so far.
        totals: float32 [N, K, R], sums of the weights.
    """

    values: Float[Array, "n k r v"]
    exponents: Float[Array, "n k r"]
    totals: Float[Array, "n k r"]


def paged_decode(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    *,
    window: int | None = None,
    sinks: Float[Array, " h"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    **options: Any,
) -> Float[Array, "b h v"]:
    """See ops.paged_decode. Every sequence is a tile of one row; `options` are passed to _attend."""
    num_seqs, _, head_dim = q.shape
    queries = q.reshape(num_seqs, kv_pages.shape[2], -1, head_dim)
    positions = jnp.broadcast_to(context_lens[:, None] - 1, (num_seqs, queries.shape[2]))
    prefixes, first = None, _first_tokens(positions, window)
    if shared_blocks is not None:
        tile_rows = min(PREFILL_TILE_ROWS, num_seqs)
        prefixes = shared_tiles(block_tables, context_lens, shared_blocks, kv_pages.shape[3], tile_rows)
        first = prefixes.num_tokens
    tiles = Tiles(queries, positions, context_lens, jnp.arange(num_seqs), first)
    sums = _attend(tiles, kv_pages, block_tables, DECODE_TILE_ITEMS * num_seqs, window=window, **options)
    if prefixes is not None:
        together = functools.partial(_attend_shared, prefixes=prefixes, **options)
        sums = lax.cond(
            jnp.any(prefixes.num_tokens > 0),
            lambda own: _merge_sums(own, together(q, kv_pages, block_tables, context_lens)),
            lambda own: own,
            sums,
        )
    return _normalize(sums, sinks).reshape(*q.shape[:2], -1).astype(q.dtype)


def ragged_attention(
    q: Float[Array, "t h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    query_start_loc: Int[Array, " b1"],
    *,
    window: int | None = None,
    sinks: Float[Array, " h"] | None = None,
    shared_blocks: Int[Array, " b"] | None = None,
    **options: Any,
) -> Float[Array, "t h v"]:
    """See ops.ragged_attention. Sequences with one query use paged_decode; others are divided into tiles."""
    (num_tokens, num_heads, head_dim), (num_seqs, _) = q.shape, block_tables.shape
    kv_heads, tile_rows = kv_pages.shape[2], min(PREFILL_TILE_ROWS, num_tokens)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    is_decode = query_lens == 1
    decoded = paged_decode(
        q.at[query_start_loc[:-1]].get(mode="clip"),
        kv_pages,
        block_tables,
        jnp.where(is_decode, context_lens, 0),
        window=window,
        sinks=sinks,
        shared_blocks=shared_blocks,
        **options,
    )

    # Upper bound: each sequence of at least two rows leaves at most one tile partly filled.
    num_tiles = num_tokens // tile_rows + min(num_seqs, num_tokens // 2) + 1
    tile_counts = jnp.where(is_decode, 0, -(-query_lens // tile_rows))
    tile_ends = jnp.cumsum(tile_counts)
    seq, index, is_used = _expand_counts(tile_ends, tile_counts, num_tiles)
    offset = index * tile_rows
    row = (query_start_loc[seq] + offset)[:, None] + jnp.arange(tile_rows)
    queries = q.at[row].get(mode="clip").reshape(num_tiles, tile_rows, kv_heads, -1, head_dim)
    queries = queries.transpose(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, -1, head_dim)
    positions = (context_lens[seq] - query_lens[seq] + offset)[:, None] + jnp.arange(tile_rows)
    tile_lens = jnp.where(is_used, jnp.minimum(positions[:, -1] + 1, context_lens[seq]), 0)
    positions = jnp.tile(positions, (1, num_heads // kv_heads))
    tiles = Tiles(queries, positions, tile_lens, seq, _first_tokens(positions, window))
    out = _normalize(_attend(tiles, kv_pages, block_tables, num_tiles, window=window, **options), sinks)
    out = out.reshape(num_tiles, kv_heads, -1, tile_rows, out.shape[-1]).transpose(0, 3, 1, 2, 4)
    out = out.reshape(num_tiles * tile_rows, num_heads, -1).astype(q.dtype)

    # Gather the results of the token rows from the tiles.
    token = jnp.arange(num_tokens)
    seq = jnp.sum(token[:, None] >= query_start_loc[1:], axis=1)
    is_padding = seq >= num_seqs
    seq = jnp.minimum(seq, num_seqs - 1)
    out_row = (tile_ends - tile_counts)[seq] * tile_rows + token - query_start_loc[seq]
    out = jnp.where(is_decode[seq][:, None, None], decoded[seq], out.at[out_row].get(mode="clip"))
    return jnp.where(is_padding[:, None, None], 0, out)


def _first_tokens(positions: Int[Array, "n r"], window: int | None) -> Int[Array, " n"] | None:
    """Returns the first token that each tile attends to; None if all tiles attend from token 0 on."""
    return None if window is None else jnp.maximum(positions[:, 0] - window + 1, 0)


def _attend_shared(
    q: Float[Array, "b h d"],
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    prefixes: SharedTiles,
    **options: Any,
) -> Sums:
    """Attends to the shared pages of sequences, with tiles that contain the rows of several sequences.

    Returns:
        The sums of each sequence; neutral values (zero weights) for sequences without shared pages.
    """
    tile_rows = prefixes.members.shape[1]
    queries = prefixes.queries(q, kv_pages.shape[2])
    positions = jnp.tile(context_lens[prefixes.members] - 1, (1, queries.shape[2] // tile_rows))
    tiles = Tiles(queries, positions, prefixes.context_lens, prefixes.members[:, 0], None)
    # If all sequences share the same pages, there are at most as many tiles as the factor in parentheses.
    sums = _attend(tiles, kv_pages, block_tables, DECODE_TILE_ITEMS * (len(q) // tile_rows + 1), **options)
    nothing = (0, MASKED_EXPONENT, 0)
    return Sums(*(prefixes.gather_results(x, fill) for x, fill in zip(sums, nothing, strict=True)))


def _expand_counts(ends: Int[Array, " b"], counts: Int[Array, " b"], size: int) -> tuple[Array, Array, Array]:
    """Lists counts[b] entries for each b, one b after the other.

    Args:
        ends: Running sum of counts.
        counts: Number of entries of each b.
        size: Length of the list.

    Returns:
        For each entry: its b (the last b if the entry is unused), its index within b, and whether it is used.
    """
    entry = jnp.arange(size)
    owner = jnp.sum(entry[:, None] >= ends, axis=1)
    is_used = owner < counts.shape[0]
    owner = jnp.minimum(owner, counts.shape[0] - 1)
    return owner, entry - (ends - counts)[owner], is_used


def _attend(
    tiles: Tiles,
    kv_pages: Float[Array, "p n k s d"],
    block_tables: Int[Array, "b m"],
    chunk_items: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
    value_dim: int | None = None,
) -> Sums:
    """Attends to the context of every tile, one chunk of items at a time.

    Args:
        tiles: The query tiles.
        kv_pages: The pool.
        block_tables: int32 [B, M], pages of the sequences.
        chunk_items: Maximum number of items per chunk.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        distance_bias: Biases by head and distance; None for none.
        value_dim: Size of the values in a latent pool; None for other pools.

    Returns:
        The sums of each tile.
    """
    _, kv_heads, rows, _ = tiles.queries.shape
    shape = _chunk_shape(tiles, kv_pages, block_tables, chunk_items)
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % shape.pages)))
    # A row of this view is the [S, D] tile of one page, one kv head, and either keys or values.
    page_tiles = kv_pages.reshape(kv_pages.shape[0] * shape.parts * kv_heads, -1)
    page_start, token = jnp.arange(shape.pages) * shape.page_size, jnp.arange(shape.tokens)
    items, num_items = _list_items(shape, tiles, tables, page_start)
    attention = _ChunkAttention(
        shape=shape, tiles=tiles, items=items, page_tiles=page_tiles, page_start=page_start, token=token,
        bias=None if distance_bias is None else _repeat_heads(distance_bias, kv_heads, rows), scale=scale,
        window=window, soft_cap=soft_cap, value_dim=value_dim,
    )  # fmt: skip
    zero = jnp.zeros(tiles.queries[..., :value_dim].shape)
    nothing = Sums(zero, jnp.full(zero.shape[:-1], MASKED_EXPONENT), zero[..., 0])
    return lax.fori_loop(0, -(-num_items // shape.size), attention.attend_chunk, nothing)


@dataclasses.dataclass(frozen=True)
class _ChunkShape:
    """Sizes of items and chunks.

    Args:
        size: Items per chunk.
        num_chunks: Maximum number of chunks.
        pages: Pages per item.
        page_size: Tokens per page.
        parts: 2 for a pool of keys and values, 1 for a latent pool.
        kv_heads: Number of kv heads.
        head_dim: Elements of a key.
        dtype: Dtype in which keys and values are multiplied.
        is_quantized: Whether the pool stores one byte per number.
    """

    size: int
    num_chunks: int
    pages: int
    page_size: int
    parts: int
    kv_heads: int
    head_dim: int
    dtype: Any
    is_quantized: bool

    @property
    def tokens(self) -> int:
        """The number of tokens per item."""
        return self.pages * self.page_size


def _chunk_shape(
    tiles: Tiles, kv_pages: Float[Array, "p n k s d"], block_tables: Int[Array, "b m"], chunk_items: int
) -> _ChunkShape:
    """Returns the sizes: at most `chunk_items` items per chunk, and at most CHUNK_BYTES of keys per chunk."""
    _, parts, kv_heads, page_size, _ = kv_pages.shape
    num_tiles, _, _, head_dim = tiles.queries.shape
    dtype = jnp.promote_types(tiles.queries.dtype, kv_pages.dtype)
    if is_quantized(kv_pages) and dtype == jnp.float16:
        dtype = jnp.dtype("float32")  # quantized numbers have a larger range than float16
    pages = max(1, ITEM_TOKENS // page_size)
    max_num_items = num_tiles * -(-block_tables.shape[1] // pages)
    item_bytes = pages * page_size * kv_heads * head_dim * dtype.itemsize
    size = min(chunk_items, max_num_items, max(1, CHUNK_BYTES // item_bytes))
    return _ChunkShape(
        size=size, num_chunks=-(-max_num_items // size), pages=pages, page_size=page_size, parts=parts,
        kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, is_quantized=is_quantized(kv_pages),
    )  # fmt: skip


class _Items(NamedTuple):
    """All items, or the items of one chunk. Token indices are relative to the first token of the item.

    Args:
        segment: int32 [I], index of the tile; out of range for an unused item, so that its results are
            dropped.
        start: int32 [I], position of the item's first token in the sequence.
        low: int32 [I], first token that the tile attends to.
        high: int32 [I], end of the tokens that the tile attends to.
        pages: int32 [I, pages], page ids; 0 for pages that no row attends to, whose table entries may be
            invalid.
    """

    segment: Int[Array, " i"]
    start: Int[Array, " i"]
    low: Int[Array, " i"]
    high: Int[Array, " i"]
    pages: Int[Array, "i n"]


def _list_items(
    shape: _ChunkShape, tiles: Tiles, tables: Int[Array, "b m"], page_start: Int[Array, " n"]
) -> tuple[_Items, Array]:
    """Returns the list of all items, tile by tile, and the number of used items.

    The list is the same in every layer, so that XLA computes it once per step.
    """
    tokens = shape.tokens
    first_token = jnp.zeros_like(tiles.context_lens) if tiles.first is None else tiles.first
    item_counts = -(-tiles.context_lens // tokens)
    item_counts = jnp.maximum(item_counts - first_token // tokens, 0)
    item_ends = jnp.cumsum(item_counts)
    tile, index, is_used = _expand_counts(item_ends, item_counts, shape.num_chunks * shape.size)
    start = (index + first_token[tile] // tokens) * tokens
    low, high = first_token[tile] - start, jnp.where(is_used, tiles.context_lens[tile] - start, 0)
    page_is_there = (page_start < high[:, None]) & (page_start + shape.page_size > low[:, None])
    column = jnp.where(page_is_there, start[:, None] // shape.page_size + jnp.arange(shape.pages), 0)
    page = jnp.where(page_is_there, tables[tiles.seq[tile][:, None], column], 0)
    segment = jnp.where(is_used, tile, len(tiles.context_lens))
    # The optimization barriers here and below end fusions. Without them XLA would recompute the fused values
    # for each element.
    return lax.optimization_barrier(_Items(segment, start, low, high, page)), item_ends[-1]


@dataclasses.dataclass(frozen=True)
class _ChunkAttention:
    """Attention of the query tiles to the items of one chunk.

    Args:
        shape: Sizes of items and chunks.
        tiles: The query tiles.
        items: All items.
        page_tiles: View of the pool with one row per page, part (keys or values) and head.
        page_start: int32 [pages], index of the first token of each page within an item.
        token: int32 [tokens], indices of the tokens within an item.
        bias: float32 [K, R, n], distance bias of each row; None for none.
        scale: Factor of the scores.
        window: Sliding window (tokens); None for none.
        soft_cap: Soft cap of the scores; None for none.
        value_dim: Size of the values in a latent pool; None for other pools.
    """

    shape: _ChunkShape
    tiles: Tiles
    items: _Items
    page_tiles: Array
    page_start: Array
    token: Array
    bias: Array | None
    scale: float
    window: int | None
    soft_cap: float | None
    value_dim: int | None

    def attend_chunk(self, chunk: Array, sums: Sums) -> Sums:
        """Returns `sums` with the results of the items of a chunk added."""
        shape, tiles, size = self.shape, self.tiles, self.shape.size
        items = _Items(*(lax.dynamic_slice_in_dim(x, chunk * size, size) for x in self.items))
        queries, position = (x.at[items.segment].get(mode="clip") for x in (tiles.queries, tiles.positions))
        low, high, position, pages, queries = lax.optimization_barrier(
            (items.low, items.high, position - items.start[:, None], items.pages, queries.astype(shape.dtype))
        )
        live = self.token < jnp.minimum(position + 1, high[:, None])[:, None, :, None]
        if tiles.first is not None:
            live &= self.token >= low[:, None, None, None]
        if self.window is not None:
            live &= self.token > position[:, None, :, None] - self.window

        keys = self.load(pages, 0)
        # From here on, scores are in base 2.
        scores = jnp.where(live, self.scores(queries, position, keys) * LOG2_E, MASKED_SCORE)
        scores = lax.optimization_barrier(scores)
        exponents = jnp.maximum(jnp.ceil(scores.max(-1)), MASKED_EXPONENT)
        # XLA vectorizes the exponential only in one dimension.
        shifted = (scores - exponents[..., None]).reshape(-1)
        probs = jnp.exp2(lax.optimization_barrier(shifted))
        probs = lax.optimization_barrier(probs).reshape(scores.shape)
        # The values in dead slots are replaced by 0 because they may be NaN, and 0 * NaN is NaN.
        slot = jnp.arange(shape.page_size * shape.head_dim) // shape.head_dim
        is_there = slot < self.broadcast_to_page_tiles(high[:, None, None] - self.page_start)[:, None]
        if tiles.first is not None:
            is_there &= slot >= self.broadcast_to_page_tiles(low[:, None, None] - self.page_start)[:, None]
        values = keys if shape.parts == 1 else self.load(pages, 1)
        values = self.as_tokens(jnp.where(is_there, values, 0))[..., : self.value_dim]
        weighted = jnp.einsum(
            "nkrt,nktd->nkrd", probs.astype(shape.dtype), values, preferred_element_type=jnp.float32
        )
        return _with_items(sums, items.segment, Sums(weighted, exponents, probs.sum(-1)))

    def scores(self, queries: Array, position: Array, keys: Array) -> Float[Array, "i k r t"]:
        """Returns the scores of the rows for the tokens of their items, before masking."""
        scores = (
            jnp.einsum("nkrd,nktd->nkrt", queries, self.as_tokens(keys), preferred_element_type=jnp.float32)
            * self.scale
        )
        if self.soft_cap is not None:
            scores = jnp.tanh(scores / self.soft_cap) * self.soft_cap
        if self.bias is not None:
            num_heads, rows, bias_len = self.bias.shape
            distance = jnp.clip(position[:, None, :, None] - self.token, 0, bias_len - 1)
            scores += self.bias[jnp.arange(num_heads)[:, None, None], jnp.arange(rows)[:, None], distance]
        return scores

    def load(self, pages: Array, part: int) -> Array:
        """Gathers the page tiles of the items, [I * K * pages, S * D].

        Args:
            pages: int32 [I, pages], page ids.
            part: 0 for the keys, 1 for the values.
        """
        shape = self.shape
        row = (pages[:, None] * shape.parts + part) * shape.kv_heads + jnp.arange(shape.kv_heads)[:, None]
        loaded = self.page_tiles.at[self.broadcast_to_page_tiles(row)].get(mode="promise_in_bounds")
        if not shape.is_quantized:
            return loaded.astype(shape.dtype)
        stored = lax.optimization_barrier(loaded).reshape(-1, shape.page_size, shape.head_dim + 1)
        return dequantize(rows_of(stored), shape.dtype).reshape(len(loaded), -1)

    def broadcast_to_page_tiles(self, values: Array) -> Array:
        """Broadcasts values to [I, K, pages] and flattens them: one value for each page tile of a chunk."""
        shape = self.shape
        values = jnp.broadcast_to(values, (shape.size, shape.kv_heads, shape.pages))
        return lax.optimization_barrier(values.reshape(-1))

    def as_tokens(self, loaded: Array) -> Array:
        """Reshapes page tiles to [I, K, tokens, D].

        The barrier keeps the preceding loop over whole page tiles separate, so that LLVM vectorizes it. Fused
        with the reshape, its inner loop would run over head_dim, and LLVM unrolls such short loops before it
        vectorizes.
        """
        shape = self.shape
        loaded = lax.optimization_barrier(loaded)
        return loaded.reshape(shape.size, shape.kv_heads, shape.tokens, shape.head_dim)


def _with_items(sums: Sums, segment: Int[Array, " i"], items: Sums) -> Sums:
    """Returns the sums of the tiles with the sums of their items added, after rescaling by powers of two."""
    exponents = sums.exponents.at[segment].max(items.exponents, mode="drop")
    decay = _power_of_two(sums.exponents - exponents)
    factor = _power_of_two(items.exponents - exponents.at[segment].get(mode="clip"))
    decay, factor = lax.optimization_barrier((decay, factor))
    values = (sums.values * decay[..., None]).at[segment].add(items.values * factor[..., None], mode="drop")
    totals = (sums.totals * decay).at[segment].add(items.totals * factor, mode="drop")
    return Sums(values, exponents, totals)


def _repeat_heads(of_heads: Array, kv_heads: int, rows: int) -> Array:
    """Repeats values of query heads [H, ...] for each of their rows: float32 [K, R, ...]."""
    of_heads = of_heads.astype(jnp.float32).reshape(kv_heads, -1, *of_heads.shape[1:])
    return jnp.repeat(of_heads, rows // of_heads.shape[1], axis=1)


def _merge_sums(sums: Sums, others: Sums) -> Sums:
    """Returns the sums over the tokens of both arguments."""
    exponents = jnp.maximum(sums.exponents, others.exponents)
    factors = [_power_of_two(x.exponents - exponents) for x in (sums, others)]
    values = sums.values * factors[0][..., None] + others.values * factors[1][..., None]
    return Sums(values, exponents, sums.totals * factors[0] + others.totals * factors[1])


def _normalize(sums: Sums, sinks: Float[Array, " h"] | None) -> Float[Array, "n k r v"]:
    """Returns the values divided by the softmax denominators, including sinks; 0 for rows without tokens."""
    values, exponents, totals = sums
    if sinks is not None:
        sink = _repeat_heads(sinks, *totals.shape[1:]) * LOG2_E
        new = jnp.maximum(exponents, jnp.ceil(sink))
        decay = _power_of_two(exponents - new)
        values, totals = values * decay[..., None], totals * decay + jnp.exp2(sink - new)
    return values / jnp.where(totals > 0, totals, 1)[..., None]


def _power_of_two(exponent: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns 2**exponent exactly, for integers up to 0; 0 if the result would be a subnormal number."""
    biased = jnp.maximum(exponent, -127.0) + 127
    return lax.bitcast_convert_type(biased.astype(jnp.int32) << 23, jnp.float32)

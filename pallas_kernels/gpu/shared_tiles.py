"""Groups sequences that share leading pages into tiles of query rows.

Example: sequences a, c and d share three pages, sequences b and e share two others. Tiles have two rows:

    sequence        a  b  c  d  e
    shared_blocks   3  2  3  3  2
    tiles           (a c) (d -) (b e)      each attends to the shared pages of its first sequence
    row_index       0  4  1  2  5          index of the sequence's row among the rows of all tiles
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class SharedTiles(NamedTuple):
    """Tiles of sequences with shared pages: B sequences, N tiles of R rows.

    Args:
        num_tokens: int32 [B], number of tokens in the pages that each sequence shares; 0 for none.
        row_index: int32 [B], row index of each sequence in the flattened tiles; N * R for sequences without
            shared pages.
        members: int32 [N, R], the sequence of each row; arbitrary for unused rows.
        context_lens: int32 [N], number of tokens that the rows of each tile attend to; 0 for an unused tile.
    """

    num_tokens: Int[Array, " b"]
    row_index: Int[Array, " b"]
    members: Int[Array, "n r"]
    context_lens: Int[Array, " n"]

    def queries(self, q: Float[Array, "b h d"], kv_heads: int) -> Float[Array, "n k gr d"]:
        """Returns the queries of the tiles: per kv head, G query heads with R rows each."""
        (num_tiles, rows), (_, num_heads, head_dim) = self.members.shape, q.shape
        split = q[self.members].reshape(num_tiles, rows, kv_heads, num_heads // kv_heads, head_dim)
        return split.transpose(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, -1, head_dim)

    def gather_results(self, of_rows: Float[Array, "n k gr *d"], nothing: float) -> Float[Array, "b k g *d"]:
        """Gathers the results of each sequence from the tiles.

        Args:
            of_rows: Results of the rows of all tiles.
            nothing: Value for sequences without shared pages.
        """
        (num_tiles, rows), (_, kv_heads, _, *rest) = self.members.shape, of_rows.shape
        split = jnp.moveaxis(of_rows.reshape(num_tiles, kv_heads, -1, rows, *rest), 3, 1)
        split = split.reshape(num_tiles * rows, kv_heads, -1, *rest)
        return split.at[self.row_index].get(mode="fill", fill_value=nothing)


def shared_tiles(
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    shared_blocks: Int[Array, " b"],
    page_size: int,
    rows: int,
) -> SharedTiles:
    """Groups the queries of sequences that share pages into tiles.

    Args:
        block_tables: int32 [B, M], see ops.paged_decode.
        context_lens: int32 [B]. A sequence with an empty context shares nothing.
        shared_blocks: int32 [B], see ops.paged_decode.
        page_size: Tokens per page.
        rows: Rows per tile.
    """
    num_seqs = block_tables.shape[0]
    seq, is_there = jnp.arange(num_seqs), (shared_blocks > 0) & (context_lens > 0)
    last = jnp.take_along_axis(block_tables, jnp.maximum(shared_blocks - 1, 0)[:, None], axis=1)[:, 0]
    is_same = (shared_blocks[:, None] == shared_blocks) & (last[:, None] == last)
    together = is_same & is_there & is_there[:, None]
    is_shared = jnp.sum(together, axis=1) > 1
    # A shared prefix is identified by its first sequence.
    first = jnp.where(is_shared, jnp.argmax(together, axis=1), num_seqs)
    counts = -(-jnp.zeros(num_seqs, jnp.int32).at[first].add(1, mode="drop") // rows)
    first_tile = (jnp.cumsum(counts) - counts).at[first].get(mode="clip")
    # Upper bound: each prefix has at least two rows and leaves at most one tile partly filled.
    num_tiles = num_seqs // rows + num_seqs // 2 + 1
    rank = jnp.sum(together & (seq < seq[:, None]), axis=1)
    row_index = jnp.where(is_shared, first_tile * rows + rank, num_tiles * rows)
    num_tokens = jnp.where(is_shared, shared_blocks * page_size, 0)
    members = jnp.zeros(num_tiles * rows, jnp.int32).at[row_index].set(seq, mode="drop")
    lens = jnp.zeros(num_tiles, jnp.int32).at[row_index // rows].max(num_tokens, mode="drop")
    return SharedTiles(num_tokens, row_index, members.reshape(num_tiles, rows), lens)

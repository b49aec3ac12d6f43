"""Which sequences attend to leading pages together, and in which tiles their queries lie.

Sequences a, c and d share three pages, b and e two others; tiles have two rows:

    sequence        a  b  c  d  e
    shared_blocks   3  2  3  3  2
    tiles           (a c) (d -) (b e)      each attends to the pages of its first sequence
    places          0  4  1  2  5          of a sequence among the rows of all tiles
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class SharedTiles(NamedTuple):
    """What sequences share, B sequences and N tiles of R rows.

    Args:
        num_tokens: int32 [B], tokens that each sequence attends to with others; 0 for none.
        places: int32 [B], where the row of each sequence is, N * R where nothing is shared.
        members: int32 [N, R], the sequence of each row; anything in rows that are not used.
        lens: int32 [N], tokens that the rows of each tile attend to; 0 in an unused tile.
    """

    num_tokens: Int[Array, " b"]
    places: Int[Array, " b"]
    members: Int[Array, "n r"]
    lens: Int[Array, " n"]

    def queries(self, q: Float[Array, "b h d"], kv_heads: int) -> Float[Array, "n k gr d"]:
        """Returns the queries of the tiles, G query heads per kv head, R rows each."""
        (num_tiles, rows), (_, num_heads, head_dim) = self.members.shape, q.shape
        split = q[self.members].reshape(num_tiles, rows, kv_heads, num_heads // kv_heads, head_dim)
        return split.transpose(0, 2, 3, 1, 4).reshape(num_tiles, kv_heads, -1, head_dim)

    def of_seqs(self, of_rows: Float[Array, "n k gr *d"], nothing: float) -> Float[Array, "b k g *d"]:
        """Returns what the tiles have for each sequence, and `nothing` for those that share nothing."""
        (num_tiles, rows), (_, kv_heads, _, *rest) = self.members.shape, of_rows.shape
        split = jnp.moveaxis(of_rows.reshape(num_tiles, kv_heads, -1, rows, *rest), 3, 1)
        split = split.reshape(num_tiles * rows, kv_heads, -1, *rest)
        return split.at[self.places].get(mode="fill", fill_value=nothing)


def shared_tiles(
    block_tables: Int[Array, "b m"],
    context_lens: Int[Array, " b"],
    shared_blocks: Int[Array, " b"],
    page_size: int,
    rows: int,
) -> SharedTiles:
    """Lays the queries of sequences that share pages into tiles.

    Args:
        block_tables: As ops.paged_decode takes them, and so are the two that follow. A sequence without
            context shares nothing.
        context_lens: See there.
        shared_blocks: See there.
        page_size: Tokens per page.
        rows: Rows of a tile.
    """
    num_seqs = block_tables.shape[0]
    seq, is_there = jnp.arange(num_seqs), (shared_blocks > 0) & (context_lens > 0)
    last = jnp.take_along_axis(block_tables, jnp.maximum(shared_blocks - 1, 0)[:, None], axis=1)[:, 0]
    is_same = (shared_blocks[:, None] == shared_blocks) & (last[:, None] == last)
    together = is_same & is_there & is_there[:, None]
    is_shared = jnp.sum(together, axis=1) > 1
    # A prefix goes by its first sequence.
    first = jnp.where(is_shared, jnp.argmax(together, axis=1), num_seqs)
    counts = -(-jnp.zeros(num_seqs, jnp.int32).at[first].add(1, mode="drop") // rows)
    first_tile = (jnp.cumsum(counts) - counts).at[first].get(mode="clip")
    # Each prefix leaves at most one tile partly filled, and has at least two rows.
    num_tiles = num_seqs // rows + num_seqs // 2 + 1
    rank = jnp.sum(together & (seq < seq[:, None]), axis=1)
    places = jnp.where(is_shared, first_tile * rows + rank, num_tiles * rows)
    num_tokens = jnp.where(is_shared, shared_blocks * page_size, 0)
    members = jnp.zeros(num_tiles * rows, jnp.int32).at[places].set(seq, mode="drop")
    lens = jnp.zeros(num_tiles, jnp.int32).at[places // rows].max(num_tokens, mode="drop")
    return SharedTiles(num_tokens, places, members.reshape(num_tiles, rows), lens)

"""The attention layer, and what it needs to know of a batch and of the cache.

A padded batch of T token rows holds B sequences one after the other (here T = 8, B = 4, one row unused):

    token row        0   1 | 2   3   4 | 5 | 6   7
    sequence         a   a | b   b   b | c | -   -
    query_start_loc  0       2           5   6   6     (B + 1 entries; an unused sequence is empty)
    context_lens     9       3           41  0         (tokens attended to, this step's included)
"""

import dataclasses
import functools
from typing import Literal

import jax
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import ops

Backend = Literal["xla"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["positions", "slot_mapping", "block_tables", "context_lens", "query_start_loc"],
    meta_fields=["is_decode", "backend"],
)
@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a padded batch stand, and where their keys and values lie.

    Args:
        positions: int32 [T], position of each token in its sequence; 0 in padding rows.
        slot_mapping: int32 [T], block_id * block_size + offset that each token's key and value go to;
            num_blocks * block_size or more in padding rows, which are not written.
        block_tables: int32 [B, M], block ids of each sequence, padded with the null block 0.
        context_lens: int32 [B], tokens of each sequence, this step's included; 0 in unused rows.
        query_start_loc: int32 [B + 1], first token row of each sequence.
        is_decode: Static; True if T == B and sequence b has just the token row b.
        backend: Static; which kernels attend.
    """

    positions: Int[Array, " t"]
    slot_mapping: Int[Array, " t"]
    block_tables: Int[Array, "b m"]
    context_lens: Int[Array, " b"]
    query_start_loc: Int[Array, " b1"]
    is_decode: bool
    backend: Backend


@dataclasses.dataclass(frozen=True)
class FullAttentionSpec:
    """A layer that caches the keys and values of every token of a sequence.

    Args:
        num_kv_heads: Key and value heads.
        head_dim: Size of a head.
    """

    num_kv_heads: int
    head_dim: int


def dense_attention(
    q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], *, scale: float
) -> Float[Array, "b t h d"]:
    """Causal attention of a dense batch without a cache: what trains, and what checks the paged path."""
    return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)


def paged_attention(
    q: Float[Array, "t h d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    kv_pages: Float[Array, "p 2 k s d"],
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> tuple[Float[Array, "t h d"], Float[Array, "p 2 k s d"]]:
    """Writes this step's keys and values to their slots, then attends over the block tables.

    Returns:
        The attention of every token row (0 in padding rows), and the pool with the new entries.
    """
    backend = metadata.backend
    kv_pages = ops.write_kv(kv_pages, k, v, metadata.slot_mapping, backend=backend)
    tables, lens = metadata.block_tables, metadata.context_lens
    if metadata.is_decode:
        return ops.paged_decode(q, kv_pages, tables, lens, scale=scale, backend=backend), kv_pages
    start = metadata.query_start_loc
    return ops.ragged_attention(q, kv_pages, tables, lens, start, scale=scale, backend=backend), kv_pages

"""Attention of a step's token rows over the paged KV cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import (
    HEADS_SPEC,
    POOL_SPEC,
    AttentionMetadata,
    Backend,
    FullAttentionSpec,
    KVCacheSpec,
    LatentAttentionSpec,
    StateSpec,
    value_dim_of,
    window_of,
)
from jax_paged.models.parallel.sharding import TENSOR, DeviceGrid
from jax_paged.pallas_kernels import ops


@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """The KV cache during one forward pass over a paged batch.

    Args:
        specs: The model's kv_cache_specs().
        pools: The pool arrays, [P, N, K, S, D] each. When an array is written, it is replaced in this list.
        metadata: Positions of the token rows, block tables, and the pool array of each layer.
    """

    specs: Sequence[KVCacheSpec]
    pools: list[Array]
    metadata: AttentionMetadata


def paged_attention(
    cache: PagedKVCache,
    layer: int,
    q: Float[Array, "t h d"],
    k: Float[Array, "t k d"] | None,
    v: Float[Array, "t k d"] | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " h"] | None = None,
    distance_bias: Float[Array, "h n"] | None = None,
) -> Float[Array, "t h d"]:
    """Writes this step's keys and values to their slots, then attends over the block tables.

    Args:
        cache: The KV cache. The layer's pool array is replaced by the written one.
        layer: Index into the model's kv_cache_specs().
        q: float [T, H, D], queries.
        k: float [T, K, D], keys; None if this step's keys and values of the layer have already been written.
        v: float [T, K, D], values; None if `k` is None. For a LatentAttentionSpec, the same array as `k`.
        scale: Factor of the scores.
        soft_cap: See `attention.dense_attention`.
        sinks: float [H], see `attention.dense_attention`.
        distance_bias: float [H, n], see `attention.dense_attention`.

    Returns:
        float [T, H, D], or [T, H, value_dim] for a LatentAttentionSpec; 0 in padding.
    """
    spec, metadata = cache.specs[layer], cache.metadata
    assert not isinstance(spec, StateSpec), f"layer {layer} has no attention"
    pool, group, view = metadata.kv_locations[layer]
    value_dim = value_dim_of(spec)

    def attend(
        kv_pages: Array,
        q: Array,
        k: Array | None,
        v: Array | None,
        by_head: dict[str, Array],
        metadata: AttentionMetadata,
    ) -> tuple[Array, Array]:
        backend, shape = metadata.backend, kv_pages.shape
        slots, block_tables = metadata.slot_mapping[group], metadata.block_tables
        if view is not None:
            kv_pages, block_tables = view.pages(kv_pages), view.blocks(block_tables)
            slots = view.slots(slots, shape[0], shape[3])
            metadata = dataclasses.replace(metadata, block_tables=block_tables)
        if k is not None:
            # If some layers see a pool array in another shape, XLA would copy the array before a kernel that
            # writes it in place. XLA's own scatter avoids the copy.
            writer = "xla" if any(location.view for location in metadata.kv_locations) else backend
            values = v if value_dim is None else None
            kv_pages = ops.write_kv(kv_pages, k, values, slots, backend=writer)
        written = kv_pages.reshape(shape)
        options: dict[str, Any] = {"scale": scale, "window": window_of(spec), "soft_cap": soft_cap, **by_head}
        if value_dim is not None:
            options["value_dim"] = value_dim
        if metadata.attend is not None:
            tables, lens = metadata.block_tables[group], metadata.context_lens[group]
            out = metadata.attend(q, kv_pages, tables, lens, metadata.query_start_loc, **options)
            return written, out
        options["backend"] = backend
        if isinstance(spec, FullAttentionSpec | LatentAttentionSpec):
            options["shared_blocks"] = metadata.shared_blocks
        if metadata.is_decode or metadata.is_row_by_row:
            tables, lens = metadata.per_token_row(group, is_causal=True)
            return written, ops.paged_decode(q, kv_pages, tables, lens, **options)
        tables, lens = metadata.block_tables[group], metadata.context_lens[group]
        return written, ops.ragged_attention(q, kv_pages, tables, lens, metadata.query_start_loc, **options)

    if metadata.grid is not None:
        keys = HEADS_SPEC if value_dim is None else PartitionSpec()
        specs = POOL_SPEC, HEADS_SPEC, keys, keys, PartitionSpec(TENSOR), PartitionSpec()
        attend = metadata.grid.shard_map(attend, specs, (POOL_SPEC, HEADS_SPEC))
    optional = {"sinks": sinks, "distance_bias": distance_bias}
    by_head = {name: x for name, x in optional.items() if x is not None}
    cache.pools[pool], out = attend(cache.pools[pool], q, k, v, by_head, metadata)
    return out


def write_kv(
    kv_pages: Float[Array, "p 2 k s d"],
    k: Float[Array, "t k d"],
    v: Float[Array, "t k d"],
    slots: Int[Array, " t"],
    *,
    backend: Backend,
    grid: DeviceGrid | None,
) -> Float[Array, "p 2 k s d"]:
    """Writes keys and values to their slots in a pool array that may be divided among devices.

    Args:
        kv_pages: [P, 2, K, S, D], the pool array, in the dtype of the KV cache.
        k: float [T, K, D], keys.
        v: float [T, K, D], values.
        slots: int32 [T], slot of each row. Slots out of range are not written.
        backend: The implementation that writes.
        grid: The devices that the heads are divided among; None for a single device.

    Returns:
        [P, 2, K, S, D], the written pool array.
    """
    write = functools.partial(ops.write_kv, backend=backend)
    if grid is not None:
        write = grid.shard_map(write, (POOL_SPEC, HEADS_SPEC, HEADS_SPEC, PartitionSpec()), POOL_SPEC)
    return write(kv_pages, k, v, slots)


def cross_attention(
    cache: PagedKVCache, layer: int, q: Float[Array, "t h d"], *, scale: float
) -> Float[Array, "t h d"]:
    """Returns the attention of each token row to the encoder's keys and values in the pool.

    Args:
        cache: The KV cache; not modified.
        layer: Index of a CrossAttentionSpec in the model's kv_cache_specs().
        q: float [T, H, D], queries.
        scale: Factor of the scores.

    Returns:
        float [T, H, D]; 0 in padding.
    """
    metadata = cache.metadata
    pool, group, _ = metadata.kv_locations[layer]
    tables, lens = metadata.per_token_row(group, is_causal=False)
    decode = functools.partial(ops.paged_decode, scale=scale, backend=metadata.backend)
    if metadata.grid is not None:
        specs = HEADS_SPEC, POOL_SPEC, PartitionSpec(), PartitionSpec()
        decode = metadata.grid.shard_map(decode, specs, HEADS_SPEC)
    return decode(q, cache.pools[pool], tables, lens)

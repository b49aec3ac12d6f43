"""The pool: one array a layer, [blocks, 2, kv_heads, block_size, head_dim], and how many blocks fit."""

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.models.attention import FullAttentionSpec
from jax_paged.models.layers import TENSOR

CPU_KV_CACHE_BYTES = 256 * 2**20


def block_bytes(specs: list[FullAttentionSpec], block_size: int, dtype: jnp.dtype) -> int:
    """Returns the bytes that one block takes in all layers together."""
    return sum(2 * s.num_kv_heads * block_size * s.head_dim for s in specs) * dtype.itemsize


def kv_cache_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how a mesh splits a layer's pool: along the kv heads."""
    return NamedSharding(mesh, PartitionSpec(None, None, TENSOR))


def allocate_kv_cache(
    specs: list[FullAttentionSpec], num_blocks: int, block_size: int, dtype: jnp.dtype, mesh: Mesh
) -> list[Array]:
    """Makes the pools of all layers, zeros."""
    sharding = kv_cache_sharding(mesh)
    shapes = [(num_blocks, 2, s.num_kv_heads, block_size, s.head_dim) for s in specs]
    return [jnp.zeros(shape, dtype, device=sharding) for shape in shapes]


def gpu_kv_cache_bytes(memory_stats: dict[str, int], step_bytes: int, gpu_memory_utilization: float) -> int:
    """Returns the bytes that are left for the pool.

    Args:
        memory_stats: Of a GPU on which the weights lie.
        step_bytes: What the largest step needs beside weights and pool.
        gpu_memory_utilization: Share of the memory that all may fill together.

    Raises:
        ValueError: If nothing is left.
    """
    # bytes_limit is what JAX has set aside, its own share of the whole GPU.
    used, limit = memory_stats["bytes_in_use"] + step_bytes, memory_stats["bytes_limit"]
    left = int(limit * gpu_memory_utilization) - used
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization is {gpu_memory_utilization}, which leaves no memory for the pool: "
            f"{used / 2**30:.1f} of {limit / 2**30:.1f} GiB are taken; allowed: a larger share, a smaller "
            "model, or fewer max_num_batched_tokens"
        )
    return left

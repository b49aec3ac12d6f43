"""The pool: which layers share blocks, how many blocks fit, and the arrays.

Layers that cache the same are split into groups of one size; the i-th layers of all groups share the i-th
array, [blocks, 2, kv_heads, block_size, head_dim]. A block belongs to one group at a time, so all groups take
theirs from one pool. Four layers, every second one with a window, and two arrays:

    layer            0        1        2        3
    window           -       128       -       128
    group            0        1        0        1
    array            0        0        1        1
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_paged.core.block_manager import CacheGroup
from jax_paged.models.attention import CrossAttentionSpec, KVCacheSpec, window_of
from jax_paged.models.layers import TENSOR

CPU_KV_CACHE_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class KVCacheLayout:
    """How the layers of a model lie in the pool.

    Args:
        groups: What the layers of each group need.
        places: (array, group) of each layer, in the order of the model's kv_cache_specs().
        num_pools: Arrays.
        num_kv_heads: Of every layer.
        head_dim: Of every layer.
    """

    groups: tuple[CacheGroup, ...]
    places: tuple[tuple[int, int], ...]
    num_pools: int
    num_kv_heads: int
    head_dim: int

    def pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Returns the shape of each array."""
        return num_blocks, 2, self.num_kv_heads, block_size, self.head_dim

    def block_bytes(self, block_size: int, dtype: jnp.dtype) -> int:
        """Returns the bytes that one block takes in all arrays together."""
        return self.num_pools * math.prod(self.pool_shape(1, block_size)) * dtype.itemsize


def plan_layout(specs: list[KVCacheSpec]) -> KVCacheLayout:
    """Groups the layers of a model.

    The kind with the fewest layers sets the size of a group, so that no array is used by few groups only;
    where the kinds have nearly the same number of layers, the larger does.

    Args:
        specs: One a layer.

    Raises:
        ValueError: If the layers differ in heads.
    """
    shapes = {(s.num_kv_heads, s.head_dim) for s in specs}
    if len(shapes) != 1:
        raise ValueError(
            f"the layers have (kv heads, head_dim) {sorted(shapes)}; allowed: the same for all layers"
        )
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups: list[CacheGroup] = []
    places = [(0, 0)] * len(specs)
    for spec, layers in kinds.items():
        for first in range(0, len(layers), size):
            for pool, layer in enumerate(layers[first : first + size]):
                places[layer] = pool, len(groups)
            groups.append(CacheGroup(window_of(spec), isinstance(spec, CrossAttentionSpec)))
    return KVCacheLayout(tuple(groups), tuple(places), size, *shapes.pop())


def kv_cache_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how a mesh splits an array of the pool: along the kv heads."""
    return NamedSharding(mesh, PartitionSpec(None, None, TENSOR))


def allocate_kv_cache(
    layout: KVCacheLayout, num_blocks: int, block_size: int, dtype: jnp.dtype, mesh: Mesh
) -> list[Array]:
    """Makes the arrays of the pool, zeros."""
    shape, sharding = layout.pool_shape(num_blocks, block_size), kv_cache_sharding(mesh)
    return [jnp.zeros(shape, dtype, device=sharding) for _ in range(layout.num_pools)]


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

"""Layout of the KV cache: which layers share block tables and arrays, and how many bytes are free for it.

Layers with the same KVCacheSpec are split into cache groups of equal size (the last group may be smaller).
The layers of a group share block tables. The i-th layers of all groups share the i-th array, [blocks, 2,
kv_heads, block_size, head_dim]. A block belongs to one group at a time, so all groups take their blocks from
one pool. For example, four layers in two groups need two arrays if every second layer has a window:

    layer            0        1        2        3
    window           -       128       -       128
    group            0        1        0        1
    array            0        0        1        1

In a quantized cache each row has a scale after its numbers (pallas_kernels/quantization.py). If layers cache
latents, the second dimension is 1 instead of 2 (pallas_kernels/ops.py).

Layers may differ in the number and size of heads. Each array then has the size of the layer with the most
elements per token. If layers have 1/n of these elements, n layers of the same group share one array (PageView
in models/kv_location.py). In this example layers 1, 3, 4 and 5 have a window and half as many elements:

    layer            0        1        2        3        4        5
    group            0        1        0        1        1        1
    array            0        0        1        0        1        1
    half             -        0        -        1        0        1

Layers with a recurrent state belong to no group. Their arrays, [slots, ...], follow the arrays of blocks.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.models.attention import (
    POOL_SPEC,
    AttentionSpec,
    CrossAttentionSpec,
    KVCacheSpec,
    StateArray,
    StateSpec,
    value_dim_of,
    window_of,
)
from jax_paged.models.kv_location import NO_GROUP, KVLocation, PageView
from jax_paged.models.parallel.sharding import repeated
from jax_paged.pallas_kernels.quantization import DTYPES, quantize, row_size, tiles_of


class DeviceMemory(NamedTuple):
    """Platform of a device and the memory statistics of its allocator.

    Args:
        platform: The platform name in JAX: "cpu", "gpu" or another.
        stats: Statistics such as the bytes in use and the limit; None if the allocator does not report any.
    """

    platform: str
    stats: dict[str, int] | None


def device_memory(devices: Sequence[Any]) -> DeviceMemory:
    """Returns the platform of devices, and the statistics of the device with the least free memory."""
    stats = [device.memory_stats() for device in devices]
    least = None if None in stats else min(stats, key=lambda s: s["bytes_limit"] - s["bytes_in_use"])
    return DeviceMemory(devices[0].platform, least)


@dataclasses.dataclass(frozen=True)
class KVCacheLayout:
    """Assignment of a model's layers to cache groups and arrays.

    Args:
        groups: The cache groups.
        locations: For each entry of the model's kv_cache_specs(), the group and the array of the layer. For a
            layer with a recurrent state, its first array and NO_GROUP.
        num_block_arrays: Number of arrays of blocks.
        num_kv_heads: Number of kv heads of each array on all devices together. A head that is replicated on
            several devices counts several times.
        head_dim: Size of a head in each array.
        dtype: Dtype of the arrays of blocks.
        num_devices: Number of devices that divide the heads.
        value_dim: Size of the value in a cached latent; None for layers that cache separate keys and values.
        states: Arrays of recurrent states, which follow the arrays of blocks.
    """

    groups: tuple[CacheGroup, ...]
    locations: tuple[KVLocation, ...]
    num_block_arrays: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    num_devices: int = 1
    value_dim: int | None = None
    states: tuple[StateArray, ...] = ()

    @property
    def num_arrays(self) -> int:
        """The number of arrays of blocks and of states."""
        return self.num_block_arrays + len(self.states)

    @property
    def state_bytes(self) -> int:
        """The size of one slot in all arrays of states together (bytes per device)."""
        sizes = (math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in self.states)
        return sum(sizes) // self.num_devices

    def pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Returns the shape of each array of blocks."""
        parts = 2 if self.value_dim is None else 1
        return num_blocks, parts, self.num_kv_heads, block_size, row_size(self.head_dim, self.dtype)

    def block_bytes(self, block_size: int) -> int:
        """Returns the size of one block in all arrays together (bytes per device)."""
        num_values = math.prod(self.pool_shape(1, block_size)) // self.num_devices
        return self.num_block_arrays * num_values * self.dtype.itemsize


def stage_layout(layout: KVCacheLayout, layers: Sequence[int]) -> KVCacheLayout:
    """Returns the layout of one pipeline stage, which has its own arrays.

    Block ids are the same in all stages. If a cache group has fewer layers in the stage than another, the
    last arrays contain unused space: no layer reads or writes the blocks of the smaller group there.

    Args:
        layout: Layout of all layers.
        layers: Indices of the stage's layers.
    """
    counts = [0] * len(layout.groups)
    locations = [location._replace(array=0) for location in layout.locations]
    for layer in layers:
        location = locations[layer]
        locations[layer] = _nth_location(counts[location.group], location)
        counts[location.group] += 1
    num_block_arrays = 1 + max(locations[layer].array for layer in layers)
    return dataclasses.replace(layout, locations=tuple(locations), num_block_arrays=num_block_arrays)


def _nth_location(n: int, location: KVLocation) -> KVLocation:
    """Returns the location of the n-th layer of a cache group, given the location of any of its layers."""
    if (view := location.view) is None:
        return location._replace(array=n)
    return location._replace(array=n // view.num_parts, view=view._replace(part=n % view.num_parts))


def plan_layout(
    specs: list[KVCacheSpec],
    dtype: jnp.dtype,
    num_devices: int = 1,
    *,
    state_dtype: jnp.dtype | None = None,
) -> KVCacheLayout:
    """Splits the layers of a model into cache groups.

    Layers with equal specs are of the same type. A type needs one array per layer, or fewer if several of its
    layers share an array. A group uses at most as many arrays as the type that needs the fewest, so types
    that need more are divided into several groups. For example, 6 layers with full attention and 30 with a
    window become 1 + 5 groups that use the same 6 arrays. If the type that needs the most arrays needs less
    than 25% more than the one that needs the fewest, every type is one group.

    Args:
        specs: The cache spec of each layer.
        dtype: Dtype of the arrays of blocks.
        num_devices: Number of devices that divide the heads.
        state_dtype: Dtype of recurrent states whose spec names no dtype; None for `dtype`.

    Raises:
        ValueError: If no layer attends, the heads cannot be divided, or layers that differ cannot share
            arrays.
    """

    def heads_of(spec: AttentionSpec) -> int:
        (heads,) = repeated(spec.num_kv_heads, spec.head_dim)
        return num_devices * heads.per_device(num_devices)

    layers_by_spec: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if not isinstance(spec, StateSpec):
            layers_by_spec.setdefault(spec, []).append(layer)
    if not layers_by_spec:
        raise ValueError(f"the model must have attention layers, got {specs}")
    cached = {(s.num_kv_heads, s.head_dim, value_dim_of(s)) for s in layers_by_spec}
    value_dim = value_dim_of(next(iter(layers_by_spec)))
    if len(cached) > 1 and any(dim is not None for *_, dim in cached):
        raise ValueError(
            "all layers must have the same (kv heads, head_dim, value_dim) if one of them caches latents, "
            f"got {sorted(cached, key=str)}"
        )
    shapes = {(s.num_kv_heads, s.head_dim): (heads_of(s), s.head_dim) for s in layers_by_spec}
    num_kv_heads, head_dim = max(shapes.values(), key=math.prod)
    if any((num_kv_heads * head_dim) % math.prod(shape) for shape in shapes.values()):
        raise ValueError(
            "the size of a token's keys (kv heads * head_dim) must divide that of the largest layer, got (kv "
            f"heads, head_dim) {sorted(shapes)} on {num_devices} devices"
        )
    if len(shapes) > 1 and dtype in DTYPES.values():
        names = {quantized: name for name, quantized in DTYPES.items()}
        raise ValueError(
            f"`kv_cache_dtype` must be 'auto' because (kv heads, head_dim) differ between layers, "
            f"{sorted(shapes)}, got {names[dtype]!r}"
        )
    array_counts, views = list[int](), dict[AttentionSpec, PageView | None]()
    for spec, layers in layers_by_spec.items():
        parts = num_kv_heads * head_dim // (heads_of(spec) * spec.head_dim)
        views[spec] = None if spec.head_dim == head_dim and parts == 1 else PageView(spec.head_dim, parts, 0)
        array_counts.append(-(-len(layers) // parts))
    num_arrays = max(array_counts) if max(array_counts) < 1.25 * min(array_counts) else min(array_counts)
    groups: list[CacheGroup] = []
    locations = [KVLocation(0, 0)] * len(specs)
    for spec, layers in layers_by_spec.items():
        view = views[spec]
        num_layers = num_arrays * (1 if view is None else view.num_parts)
        for first in range(0, len(layers), num_layers):
            for n, layer in enumerate(layers[first : first + num_layers]):
                locations[layer] = _nth_location(n, KVLocation(0, len(groups), view))
            groups.append(CacheGroup(window_of(spec), isinstance(spec, CrossAttentionSpec)))
    states: list[StateArray] = []
    for layer, spec in enumerate(specs):
        if isinstance(spec, StateSpec):
            locations[layer] = KVLocation(num_arrays + len(states), NO_GROUP)
            states += [StateArray(a.shape, a.dtype or str(state_dtype or dtype)) for a in spec.arrays]
    shape = num_kv_heads, head_dim, dtype, num_devices, value_dim
    return KVCacheLayout(tuple(groups), tuple(locations), num_arrays, *shape, tuple(states))


def kv_cache_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns the sharding of a KV cache array on a mesh: kv heads are divided."""
    return NamedSharding(mesh, POOL_SPEC)


def filled(array: Array, value: float) -> Array:
    """Returns a KV cache array of the same shape, dtype and sharding, with one value everywhere."""
    # A row of a quantized cache has one more element, its scale.
    head_dim = array.shape[-1] - (array.dtype in DTYPES.values())
    row = quantize(jnp.full(head_dim, value), array.dtype)
    tile = tiles_of(jnp.broadcast_to(row, array.shape[3:]))
    return jax.device_put(jnp.broadcast_to(tile, array.shape), array.sharding)


def free_kv_cache_bytes(memory: DeviceMemory, step_bytes: int, gpu_memory_utilization: float) -> int:
    """Returns the number of bytes that a device has free for the KV cache.

    Args:
        memory: Memory of the device, after the weights were loaded.
        step_bytes: Memory that the engine needs in addition to weights and KV cache (bytes).
        gpu_memory_utilization: Fraction of the memory that weights, KV cache and steps may use together.

    Raises:
        ValueError: If nothing is left, or the device does not report its memory.
    """
    if memory.stats is None:
        raise ValueError(
            "`kv_cache_memory_bytes` must be a number of bytes because the device does not report its free "
            "memory, got None"
        )
    # bytes_limit is the memory that JAX may use. It can be less than the memory of the GPU.
    used, limit = memory.stats["bytes_in_use"] + step_bytes, memory.stats["bytes_limit"]
    left = int(limit * gpu_memory_utilization) - used
    if left <= 0:
        raise ValueError(
            "`gpu_memory_utilization` must be large enough to leave memory for the KV cache, got "
            f"{gpu_memory_utilization}: {used / 2**30:.1f} of {limit / 2**30:.1f} GiB are in use. Increase "
            "it, or reduce the model, max_num_batched_tokens or max_num_seqs"
        )
    return left

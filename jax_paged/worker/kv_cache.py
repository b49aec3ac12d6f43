"""The pool: which layers share blocks, how many blocks fit, and the arrays.

Layers that cache the same are split into cache groups of one size; the i-th layers of all groups share the
i-th array, [blocks, 2, kv_heads, block_size, head_dim]; of a quantised cache, each row has a scale behind it
(pallas_kernels/quantization.py), and where layers cache latents there is a 1 in place of the 2
(pallas_kernels/ops.py). A block belongs to one group at a time, so all groups take theirs from one pool. Four
layers, every second one with a window, and two arrays:

    layer            0        1        2        3
    window           -       128       -       128
    group            0        1        0        1
    array            0        0        1        1

Layers may differ in heads. The arrays are then those of the layers with most numbers per token, and where
others have half or a third of them, two or three of one group share an array (View in models/kv_location.py).
Layers 1, 3, 4 and 5 have a window here, and half as many numbers:

    layer            0        1        2        3        4        5
    group            0        1        0        1        1        1
    array            0        0        1        0        1        1
    half             -        0        -        1        0        1

Layers that keep a state of each sequence have arrays of their own behind these, [slots, ...], and no group.
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
from jax_paged.models.kv_location import NO_GROUP, Place, View
from jax_paged.models.parallel.sharding import repeated
from jax_paged.pallas_kernels.quantization import DTYPES, quantize, row_size, tiles_of


class DeviceMemory(NamedTuple):
    """The kind of a device, and what its allocator says.

    Args:
        platform: "cpu", "gpu" or another of JAX's names.
        stats: Bytes in use, and what JAX has set aside in all; None if the allocator does not tell.
    """

    platform: str
    stats: dict[str, int] | None


def device_memory(devices: Sequence[Any]) -> DeviceMemory:
    """Returns the kind of devices, and what the allocator of the one with the least memory left says now."""
    stats = [device.memory_stats() for device in devices]
    least = None if None in stats else min(stats, key=lambda s: s["bytes_limit"] - s["bytes_in_use"])
    return DeviceMemory(devices[0].platform, least)


@dataclasses.dataclass(frozen=True)
class KVCacheLayout:
    """How the layers of a model lie in the pool.

    Args:
        groups: What the layers of each cache group need.
        places: Of each layer, in the order of the model's kv_cache_specs(); of one that keeps a state, its
            first array and NO_GROUP.
        num_pools: Arrays of blocks.
        num_kv_heads: Of each of them; on all devices together, so that one may be there several times.
        head_dim: Of each of them.
        dtype: Of the arrays.
        num_devices: How many share the heads.
        value_dim: Of every layer that attends, as value_dim_of says it.
        states: Of the arrays of states, which lie behind those of blocks.
    """

    groups: tuple[CacheGroup, ...]
    places: tuple[Place, ...]
    num_pools: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype
    num_devices: int = 1
    value_dim: int | None = None
    states: tuple[StateArray, ...] = ()

    @property
    def num_arrays(self) -> int:
        """Arrays of blocks and of states."""
        return self.num_pools + len(self.states)

    @property
    def state_bytes(self) -> int:
        """The bytes that one slot takes in all arrays of states together, on each device."""
        sizes = (math.prod(a.shape) * jnp.dtype(a.dtype).itemsize for a in self.states)
        return sum(sizes) // self.num_devices

    def pool_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Returns the shape of each array."""
        parts = 2 if self.value_dim is None else 1
        return num_blocks, parts, self.num_kv_heads, block_size, row_size(self.head_dim, self.dtype)

    def block_bytes(self, block_size: int) -> int:
        """Returns the bytes that one block takes in all arrays together, on each device."""
        num_values = math.prod(self.pool_shape(1, block_size)) // self.num_devices
        return self.num_pools * num_values * self.dtype.itemsize


def stage_layout(layout: KVCacheLayout, layers: Sequence[int]) -> KVCacheLayout:
    """Returns how some layers lie in a pool of their own, whose blocks are those of the whole one.

    Where one cache group has more of these layers than another, the arrays that are over have blocks that
    the latter never uses.

    Args:
        layout: Of all layers.
        layers: Those of one stage.
    """
    counts = [0] * len(layout.groups)
    places = [place._replace(array=0) for place in layout.places]
    for layer in layers:
        place = places[layer]
        places[layer] = _nth_place(counts[place.group], place)
        counts[place.group] += 1
    num_pools = 1 + max(places[layer].array for layer in layers)
    return dataclasses.replace(layout, places=tuple(places), num_pools=num_pools)


def _nth_place(n: int, place: Place) -> Place:
    """Returns the place of the n-th layer of a cache group, given that of another."""
    if (view := place.view) is None:
        return place._replace(array=n)
    return place._replace(array=n // view.num_parts, view=view._replace(part=n % view.num_parts))


def plan_layout(
    specs: list[KVCacheSpec],
    dtype: jnp.dtype,
    num_devices: int = 1,
    *,
    state_dtype: jnp.dtype | None = None,
) -> KVCacheLayout:
    """Splits the layers of a model into cache groups.

    The kind whose layers fill the fewest arrays sets the size of a group, so that no array is used by few
    groups only; where the kinds fill nearly the same number of arrays, the larger does.

    Args:
        specs: One per layer.
        dtype: Of the arrays of blocks.
        num_devices: How many share the heads.
        state_dtype: Of the states that have the model's type; None if that is dtype.

    Raises:
        ValueError: If no layer attends, the heads can't be divided, or layers that differ can't share arrays.
    """

    def heads_of(spec: AttentionSpec) -> int:
        (heads,) = repeated(spec.num_kv_heads, spec.head_dim)
        return num_devices * heads.on(num_devices)

    kinds: dict[AttentionSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if not isinstance(spec, StateSpec):
            kinds.setdefault(spec, []).append(layer)
    if not kinds:
        raise ValueError(f"the model must have attention layers, got {specs}")
    cached = {(s.num_kv_heads, s.head_dim, value_dim_of(s)) for s in kinds}
    value_dim = value_dim_of(next(iter(kinds)))
    if len(cached) > 1 and any(dim is not None for *_, dim in cached):
        raise ValueError(
            "(kv heads, head_dim, value_dim of latents) must be the same for all layers if one caches "
            f"latents, got {sorted(cached, key=str)}"
        )
    shapes = {(s.num_kv_heads, s.head_dim): (heads_of(s), s.head_dim) for s in kinds}
    num_kv_heads, head_dim = max(shapes.values(), key=math.prod)
    if any((num_kv_heads * head_dim) % math.prod(shape) for shape in shapes.values()):
        raise ValueError(
            "the size of a token's keys in each layer must divide that in the largest layer, got (kv heads, "
            f"head_dim) {sorted(shapes)} on {num_devices} devices"
        )
    if len(shapes) > 1 and dtype in DTYPES.values():
        names = {quantized: name for name, quantized in DTYPES.items()}
        raise ValueError(
            f"`kv_cache_dtype` must be 'auto' because (kv heads, head_dim) differ between layers, "
            f"{sorted(shapes)}, got {names[dtype]!r}"
        )
    counts, views = list[int](), dict[AttentionSpec, View | None]()
    for spec, layers in kinds.items():
        parts = num_kv_heads * head_dim // (heads_of(spec) * spec.head_dim)
        views[spec] = None if spec.head_dim == head_dim and parts == 1 else View(spec.head_dim, parts, 0)
        counts.append(-(-len(layers) // parts))
    size = max(counts) if max(counts) < 1.25 * min(counts) else min(counts)
    groups: list[CacheGroup] = []
    places = [Place(0, 0)] * len(specs)
    for spec, layers in kinds.items():
        view = views[spec]
        num_layers = size * (1 if view is None else view.num_parts)
        for first in range(0, len(layers), num_layers):
            for n, layer in enumerate(layers[first : first + num_layers]):
                places[layer] = _nth_place(n, Place(0, len(groups), view))
            groups.append(CacheGroup(window_of(spec), isinstance(spec, CrossAttentionSpec)))
    states: list[StateArray] = []
    for layer, spec in enumerate(specs):
        if isinstance(spec, StateSpec):
            places[layer] = Place(size + len(states), NO_GROUP)
            states += [StateArray(a.shape, a.dtype or str(state_dtype or dtype)) for a in spec.arrays]
    shape = num_kv_heads, head_dim, dtype, num_devices, value_dim
    return KVCacheLayout(tuple(groups), tuple(places), size, *shape, tuple(states))


def kv_cache_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Returns how a mesh splits an array of the pool: along the kv heads."""
    return NamedSharding(mesh, POOL_SPEC)


def filled(array: Array, value: float) -> Array:
    """Returns an array of the pool that holds one number everywhere."""
    # A row of a quantised pool is as long as what it holds, and a scale.
    head_dim = array.shape[-1] - (array.dtype in DTYPES.values())
    row = quantize(jnp.full(head_dim, value), array.dtype)
    tile = tiles_of(jnp.broadcast_to(row, array.shape[3:]))
    return jax.device_put(jnp.broadcast_to(tile, array.shape), array.sharding)


def free_kv_cache_bytes(memory: DeviceMemory, step_bytes: int, gpu_memory_utilization: float) -> int:
    """Returns the bytes that a device has left for the pool.

    Args:
        memory: Of a device on which the weights lie.
        step_bytes: What the engine needs beside weights and pool.
        gpu_memory_utilization: Share of the memory that all may fill together.

    Raises:
        ValueError: If nothing is left, or the device does not tell how much is.
    """
    if memory.stats is None:
        raise ValueError(
            "`kv_cache_memory_bytes` must be a number of bytes because the device does not report its free "
            "memory, got None"
        )
    # bytes_limit is what JAX has set aside, its own share of the whole GPU.
    used, limit = memory.stats["bytes_in_use"] + step_bytes, memory.stats["bytes_limit"]
    left = int(limit * gpu_memory_utilization) - used
    if left <= 0:
        raise ValueError(
            "`gpu_memory_utilization` must be large enough to leave memory for the KV cache, got "
            f"{gpu_memory_utilization}: {used / 2**30:.1f} of {limit / 2**30:.1f} GiB are in use. Increase "
            "it, or reduce the model, max_num_batched_tokens or max_num_seqs"
        )
    return left

"""How layers that differ in heads lie in the pool, and that every byte belongs to one of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.models.attention import (
    AttentionMetadata,
    Backend,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from jax_paged.models.paged_attention import PagedKVCache, paged_attention
from jax_paged.pallas_kernels import native
from jax_paged.worker.kv_cache import plan_layout, stage_layout

FLOAT32 = jnp.dtype("float32")
SIZE, BLOCKS = 2, 3


def of_pattern(
    num_layers: int, every: int, window: tuple[int, int], full: tuple[int, int]
) -> list[KVCacheSpec]:
    return [
        FullAttentionSpec(*full) if (i + 1) % every == 0 else SlidingWindowSpec(*window, 512)
        for i in range(num_layers)
    ]


# By their layers with a cache: those of Gemma 4's E2B, E4B, 26B and 31B.
E2B = of_pattern(15, 5, (1, 256), (1, 512))
E4B = of_pattern(24, 6, (2, 256), (2, 512))
MOE_26B = of_pattern(30, 6, (8, 256), (2, 512))
DENSE_31B = of_pattern(60, 6, (16, 256), (4, 512))


@pytest.mark.parametrize(
    ("specs", "num_devices", "pools", "groups", "heads"),
    [
        (E2B, 1, 3, 3, (1, 512)),
        (E4B, 1, 4, 4, (2, 512)),
        (MOE_26B, 1, 3, 10, (8, 256)),
        (MOE_26B, 8, 5, 4, (8, 512)),  # each of the two heads is on four devices
        (DENSE_31B, 1, 5, 11, (16, 256)),
        (DENSE_31B, 4, 5, 11, (16, 256)),
    ],
)
def test_arrays_and_groups(
    specs: list[KVCacheSpec], num_devices: int, pools: int, groups: int, heads: tuple[int, int]
) -> None:
    layout = plan_layout(specs, FLOAT32, num_devices)
    assert (layout.num_block_arrays, len(layout.groups)) == (pools, groups)
    assert (layout.num_kv_heads, layout.head_dim) == heads
    check_bytes(specs, layout, num_devices)


def test_a_stage_has_arrays_for_its_own_layers() -> None:
    layout = plan_layout(DENSE_31B, FLOAT32)
    for layers in (range(7), range(7, 60), range(5, 6)):
        own = stage_layout(layout, layers)
        check_bytes(DENSE_31B, own, 1, layers)
        in_groups = [sum(own.locations[i].group == g for i in layers) for g in range(len(own.groups))]
        assert own.num_block_arrays == max(in_groups[0], *in_groups[1:-1], -(-in_groups[-1] // 2))


def check_bytes(specs: list[KVCacheSpec], layout, num_devices: int, layers: range | None = None) -> None:
    """Each layer writes its own number over its blocks; none is overwritten, and each can be read again."""
    arrays = [np.full(layout.pool_shape(BLOCKS, SIZE), -1.0) for _ in range(layout.num_block_arrays)]
    layers = layers or range(len(specs))
    local = layout.num_kv_heads // num_devices
    for device in range(num_devices):
        heads = np.s_[:, :, device * local : (device + 1) * local]
        for layer in layers:
            array, group, view = layout.locations[layer]
            block = np.array(group % BLOCKS)
            others = [i for i in layers if layout.locations[i].group == group and i < layer]
            pages, page = arrays[array][heads], block
            if view is not None:
                pages, page = np.array(view.pages(jnp.asarray(pages))), view.blocks(block)
            wanted = max(1, specs[layer].num_kv_heads // num_devices), specs[layer].head_dim
            assert (pages.shape[2], pages.shape[4]) == wanted
            taken = set(np.unique(pages[page])) - {-1.0}
            assert not taken & set(map(float, others)), "another layer of the group has these bytes"
            pages[page] = layer
            arrays[array][heads] = pages.reshape(arrays[array][heads].shape)
            whole = (
                arrays[array]
                if view is None
                else np.array(view.pages(jnp.asarray(arrays[array]), num_devices))
            )
            mine = whole[page, :, device * wanted[0] : (device + 1) * wanted[0]]
            assert (mine == layer).all()


@pytest.mark.parametrize(
    "backend",
    [
        "xla",
        pytest.param("native", marks=pytest.mark.skipif(native.problem() is not None, reason="not built")),
    ],
)
@pytest.mark.parametrize("is_decode", [False, True])
def test_no_layer_makes_a_copy_of_an_array(backend: Backend, is_decode: bool) -> None:
    """Layers that see an array in two ways, and one that shares keys, by turns."""
    wide, half = FullAttentionSpec(2, 64), SlidingWindowSpec(2, 32, 64)
    specs = [wide, half, half]
    layout = plan_layout(specs, FLOAT32)
    pool = jax.ShapeDtypeStruct(layout.pool_shape(2000, 16), FLOAT32)
    num_rows = 4 if is_decode else 32

    def step(pool: Any, x: Any, ints: tuple[Any, ...]) -> tuple[Any, Any]:
        pools, total = [pool], jnp.zeros(())
        metadata = AttentionMetadata(
            *ints, is_decode=is_decode, backend=backend, kv_locations=layout.locations
        )
        cache = PagedKVCache(specs, pools, metadata)
        for layer, writes in ((0, True), (1, True), (0, False), (2, True), (1, False)):
            q = x[..., : specs[layer].head_dim] + total
            kv = (q[:, :2], q[:, 2:]) if writes else (None, None)
            total += paged_attention(cache, layer, q, *kv, scale=1.0).sum()
        return pools[0], total

    shapes = [(num_rows,), (2, num_rows), (2, 4, 8), (2, 4), (5,)]
    ints = tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    x = jax.ShapeDtypeStruct((num_rows, 4, 64), FLOAT32)
    memory: Any = jax.jit(step, donate_argnums=0).lower(pool, x, ints).compile().memory_analysis()
    size = layout.block_bytes(16) * 2000
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 10

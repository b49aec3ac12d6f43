"""Lowering for CUDA without a GPU: Mosaic's layouts, copies and shared memory, from sm_80 to sm_120."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers.gpus import A100, B200, H100, JETSON_THOR, RTX_3090, RTX_5090, V100, lowered
from jax.sharding import AbstractMesh, use_abstract_mesh

from jax_paged.pallas_kernels import ops
from jax_paged.pallas_kernels.gpu import ragged_tile, tuning
from jax_paged.pallas_kernels.gpu.paged_decode import decode_config

pytestmark = pytest.mark.thorough


def lower(gpu, f, *specs, **options):
    """Returns the text of f, called with backend "pallas", lowered for a GPU."""
    return lowered(gpu, functools.partial(f, backend="pallas", **options), *specs)


def specs(heads, kv_heads, head_dim, page_size, dtype, *, num_seqs=8, num_pages=512, columns=64):
    """Returns the shapes of q, kv_pages, block_tables and context_lens."""
    return (
        jax.ShapeDtypeStruct((num_seqs, heads, head_dim), dtype),
        jax.ShapeDtypeStruct((num_pages, 2, kv_heads, page_size, head_dim), dtype),
        jax.ShapeDtypeStruct((num_seqs, columns), jnp.int32),
        jax.ShapeDtypeStruct((num_seqs,), jnp.int32),
    )


def kernels(text):
    return text.count("mosaic_gpu")


# A cp.async copy of a page of 16 x 80 has no swizzle that suits four warps: an error, tested below.
SHAPES = [(d, s) for d in tuning.HEAD_DIMS for s in tuning.PAGE_SIZES]
GPU_SHAPES = [(H100, *shape) for shape in SHAPES] + [(A100, *shape) for shape in SHAPES if shape != (80, 16)]
GPU_SHAPES += [(B200, d, s) for d, s in zip(tuning.HEAD_DIMS, (16, 16, 32, 16, 64), strict=True)]
GPU_SHAPES += [(RTX_5090, d, s) for d, s in ((80, 16), (128, 16), (256, 16))]


@pytest.mark.parametrize(("gpu", "head_dim", "page_size"), GPU_SHAPES)
def test_decode(gpu, head_dim, page_size):
    dtype = jnp.float16 if page_size == 32 else jnp.bfloat16
    args = specs(32, 8, head_dim, page_size, dtype)
    assert kernels(lower(gpu, ops.paged_decode, *args, scale=0.1)) >= 2


@pytest.mark.parametrize("gpu", [A100, H100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 1), (14, 2), (6, 3)])
def test_decode_of_groups_with_flags(gpu, heads, kv_heads):
    args = specs(heads, kv_heads, 128, 16, jnp.bfloat16)
    flags = {"window": 100, "soft_cap": 3.0, "sinks": jnp.zeros(heads)}
    assert kernels(lower(gpu, ops.paged_decode, *args, scale=0.1, **flags))


@pytest.mark.parametrize(("gpu", "head_dim", "page_size"), GPU_SHAPES)
def test_ragged(gpu, head_dim, page_size):
    _, pool, tables, lens = specs(32, 8, head_dim, page_size, jnp.bfloat16)
    q = jax.ShapeDtypeStruct((256, 32, head_dim), jnp.bfloat16)
    start = jax.ShapeDtypeStruct((9,), jnp.int32)
    assert kernels(lower(gpu, ops.ragged_attention, q, pool, tables, lens, start, scale=0.1))


@pytest.mark.parametrize("gpu", [A100, H100])
@pytest.mark.parametrize(
    ("head_dim", "page_size"),
    [
        (64, 16),
        (128, 32),
        *(pytest.param(*s, marks=pytest.mark.slow) for s in [(80, 16), (96, 64), (256, 16)]),
    ],
)
@pytest.mark.parametrize("kind", [jnp.int8, jnp.uint8])
def test_quantised_pools_and_biases(gpu, head_dim, page_size, kind):
    q, _, tables, lens = specs(16, 2, head_dim, page_size, jnp.bfloat16)
    pool = jax.ShapeDtypeStruct((512, 2, 2, page_size, head_dim + 1), kind)
    rows, start = jax.ShapeDtypeStruct((8, 2, head_dim), jnp.bfloat16), jax.ShapeDtypeStruct((9,), jnp.int32)
    options = {"scale": 0.1, "distance_bias": jnp.zeros((16, 40))}
    assert kernels(lower(gpu, ops.ragged_attention, q, pool, tables, lens, start, **options))
    assert kernels(lower(gpu, ops.write_kv, pool, rows, rows, lens))
    assert kernels(lower(gpu, ops.copy_blocks, pool, lens, lens))


@pytest.mark.quick
@pytest.mark.parametrize("gpu", [A100, H100])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (1, 64), (3, 80)])
def test_write_and_copy(gpu, dtype, kv_heads, head_dim):
    _, pool, _, ids = specs(kv_heads, kv_heads, head_dim, 16, dtype)
    rows = jax.ShapeDtypeStruct((8, kv_heads, head_dim), dtype)
    assert kernels(lower(gpu, ops.write_kv, pool, rows, rows, ids))
    assert kernels(lower(gpu, ops.copy_blocks, pool, ids, ids))


@pytest.mark.quick
def test_unsupported_shapes_are_errors():
    with pytest.raises(
        ValueError, match=r"dtype of .* must be one of bfloat16, float16 .*got float32\. Backend 'xla'"
    ):
        lower(H100, ops.paged_decode, *specs(8, 2, 64, 16, jnp.float32), scale=1.0)
    with pytest.raises(
        ValueError, match=r"page_size of .* must be one of 16, 32, 64.*with backend 'pallas', got 8"
    ):
        lower(H100, ops.paged_decode, *specs(8, 2, 64, 8, jnp.bfloat16), scale=1.0)
    with pytest.raises(ValueError, match=r"query heads per kv head of .* must be one of .*got 32"):
        lower(H100, ops.paged_decode, *specs(32, 1, 64, 16, jnp.bfloat16), scale=1.0)
    with pytest.raises(ValueError, match=r"page_size must be 32 or 64 .* head_dim 80 .*got 16"):
        lower(A100, ops.paged_decode, *specs(8, 2, 80, 16, jnp.bfloat16), scale=1.0)
    with pytest.raises(ValueError, match=r"must be at most 101376 bytes on compute capability 8.6, got \d+"):
        lower(RTX_3090, ops.paged_decode, *specs(8, 2, 256, 64, jnp.bfloat16), scale=1.0)
    for gpu in (V100, JETSON_THOR):
        with pytest.raises(ValueError, match=r"must be one of 8\.x, 9\.x, 10\.x, 12\.x with .*got \d+.0"):
            lower(gpu, ops.paged_decode, *specs(8, 2, 64, 16, jnp.bfloat16), scale=1.0)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("gpu", "has_tma", "has_wgmma", "smem_kib"),
    [
        (RTX_3090, False, False, 99),
        (A100, False, False, 163),
        (H100, True, True, 227),
        (B200, True, False, 227),
        (RTX_5090, True, False, 99),
    ],
)
def test_what_each_gpu_has(gpu, has_tma, has_wgmma, smem_kib):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        target = tuning.target()
    assert (target.has_tma, target.has_wgmma, target.smem_bytes) == (has_tma, has_wgmma, smem_kib * 1024)
    assert target.num_sms == gpu.num_cores
    config = ragged_tile.prefill_config(target, 128, 16, 2)
    assert (config.has_tma, config.has_wgmma, config.block_rows) == (
        has_tma,
        has_wgmma,
        128 if has_wgmma else 64,
    )


@pytest.mark.parametrize(("head_dim", "page_size"), SHAPES)
def test_two_blocks_share_a_multiprocessor(head_dim, page_size):
    gpu = tuning.Target((9, 0), 132, 227 * 1024)
    config = decode_config(gpu, (512, 2, 8, page_size, head_dim), jnp.bfloat16)
    stage_bytes = config.block_tokens * head_dim * 4
    assert config.block_tokens % page_size == 0
    assert config.num_stages >= 2
    # A block of 64 tokens of 256 does not leave room for two blocks of threads with two stages each.
    assert (head_dim, page_size) == (256, 64) or config.num_stages * stage_bytes < gpu.smem_bytes / 2

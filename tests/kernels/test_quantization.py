"""Quantised pools: the rows bit by bit against NumPy and ml_dtypes, and attention over them on every backend.

The oracle gets the numbers that the rows stand for. float32 and bfloat16 hold these exactly, so the native
backend must come to the same bits as with a pool of such floats.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import (
    POOL_DTYPES,
    TOLERANCE,
    make_case,
    paged_decode,
    quantized,
    ragged_attention,
    relative_error,
    tiled,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged.pallas_kernels import native, ops
from jax_paged.pallas_kernels.gpu import paged_decode as decode_kernel
from jax_paged.pallas_kernels.gpu import quantized_tile, ragged_prefill, ragged_tile, tuning
from jax_paged.pallas_kernels.native import attention
from jax_paged.pallas_kernels.quantization import dequantize, quantize

pytestmark = pytest.mark.thorough

KINDS = list(POOL_DTYPES)
NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
)
BACKENDS = ["reference", "xla", NATIVE]
GPU = pytest.param("pallas", marks=pytest.mark.gpu)


@functools.partial(jax.jit, static_argnames=("op", "scale", "window", "soft_cap", "backend"))
def jitted(op, *args, **options):
    return getattr(ops, op)(*args, **options)


def hard_rows():
    """Rows of every size, with ties, zeros, and what is no number."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(400, 64)) * 2.0 ** rng.integers(-90, 120, (400, 1))
    ties = rng.integers(-255, 256, (100, 64)) / 2 * 2.0 ** rng.integers(-20, 20, (100, 1))
    few_bits = rng.integers(-31, 32, (100, 64)) * 2.0 ** rng.integers(-24, 8, (100, 64))
    edges = np.zeros((8, 64))
    edges[1, 0], edges[2, :3], edges[3, :3] = 127.5, (127.75, -127.75, 1), (128, -128, 0.5)
    edges[4, :2], edges[5, 5], edges[6, 7], edges[7, :2] = (255.9, 1e-3), np.nan, -np.inf, (3e38, -1e37)
    return np.concatenate([rows, ties, few_bits, edges]).astype(np.float32)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_numpys(kind, dtype):
    with np.errstate(over="ignore"):
        x = hard_rows().astype(jnp.dtype(dtype))
    want, numbers = quantized(x, kind)
    got = jax.jit(quantize, static_argnums=1)(x, want.dtype)
    np.testing.assert_array_equal(np.asarray(got), want)
    for result in ("float32", "bfloat16"):
        held = np.asarray(jax.jit(dequantize, static_argnums=1)(got, jnp.dtype(result)))
        np.testing.assert_array_equal(held.astype(np.float64), numbers)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_as_small_as_promised(kind):
    x = hard_rows()[:600]
    error = np.abs(quantized(x, kind)[1] - x)
    largest = np.abs(x).max(-1, keepdims=True)
    assert (error <= (largest / 64 if kind == "int8" else np.maximum(np.abs(x) / 16, largest / 2**14))).all()
    if kind == "int8":
        assert (np.median(error / largest, -1) <= 1 / 128).all()


def test_numbers_too_small_for_a_scale_are_zero():
    for dtype in POOL_DTYPES.values():
        rows = quantize(jnp.full((1, 8), 2.0**-125), jnp.dtype(dtype))
        assert (np.asarray(dequantize(rows, jnp.dtype("float32"))) == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [*BACKENDS, "pallas_interpret", GPU])
def test_a_slot_depends_on_its_token_alone(backend, kind):
    """Tokens written one by one, or all at once in another order, leave the same bytes; padding none."""
    rng = np.random.default_rng(1)
    k, v = (rng.normal(size=(2, 37, 3, 48)) * 2.0 ** rng.integers(-6, 6, (2, 37, 3, 1))).astype(jnp.bfloat16)
    slots = rng.permutation(5 * 16)[:37].astype(np.int32)
    slots[7] = 5 * 16
    want = np.full((5, 2, 3, 16, 49), 77, POOL_DTYPES[kind])
    for t, slot in enumerate(slots):
        if slot < 5 * 16:
            want[slot // 16, :, :, slot % 16] = quantized(np.stack([k[t], v[t]]), kind)[0]
    want = tiled(want)
    write = jax.jit(functools.partial(ops.write_kv, backend=backend))
    empty = jnp.full(want.shape, 77, want.dtype)
    np.testing.assert_array_equal(np.asarray(write(empty, k, v, slots)), want)
    pool = empty
    for t in range(len(slots)):
        pool = write(pool, k[t : t + 1], v[t : t + 1], slots[t : t + 1])
    np.testing.assert_array_equal(np.asarray(pool), want)
    src, dst = np.array([1, 2, 9], np.int32), np.array([4, 0, 3], np.int32)
    want[[4, 0]] = want[[1, 2]]
    got = jax.jit(functools.partial(ops.copy_blocks, backend=backend))(pool, src, dst)
    np.testing.assert_array_equal(np.asarray(got), want)


SINKS = np.array([0.5, -3.0, 60.0, -np.inf], np.float32)
BIAS = np.random.default_rng(0).normal(size=(4, 20)).astype(np.float32)
LENS, QUERIES = [1, 40, 130, 260, 17, 0, 700], [1, 40, 65, 1, 3, 0, 1]
FLAGS = [
    {},
    {"window": 33, "soft_cap": 2.0},
    {"window": 100, "sinks": SINKS},
    {"distance_bias": BIAS},
]


def make_pools(kind, *, lens=LENS, query_lens=QUERIES, **shape):
    """Returns queries, a quantised pool, what it stands for in float64, tables, lens and starts.

    The bytes of dead slots are 255: the scale is infinite, and so are the numbers, or NaN.
    """
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "float32", **shape}
    q, pool, *rest = make_case(lens, query_lens=query_lens, **shape)
    rows, numbers = quantized(pool, kind)
    rows = np.where(np.isnan(numbers).any(-1, keepdims=True), np.uint8(255).view(rows.dtype), rows)
    return q, tiled(rows), numbers, *rest


def arrays(options):
    return {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_matches_oracle(backend, kind, dtype, flags):
    q, rows, numbers, tables, lens, start = make_pools(kind, dtype=dtype)
    options = {"scale": 0.125, **flags}
    padded = jnp.concatenate([q, jnp.full((3, *q.shape[1:]), jnp.nan, q.dtype)])
    got = jitted(
        "ragged_attention",
        padded,
        rows,
        tables,
        lens,
        jnp.asarray(start),
        backend=backend,
        **arrays(options),
    )
    assert got.dtype == q.dtype
    want = ragged_attention(q, numbers, tables, lens, start, **options)
    assert relative_error(got[: start[-1]], want) < TOLERANCE[dtype]
    assert (np.asarray(got)[start[-1] :] == 0).all()
    q = q[: len(LENS)]
    got = jitted("paged_decode", q, rows, tables, lens, backend=backend, **arrays(options))
    assert relative_error(got, paged_decode(q, numbers, tables, lens, **options)) < TOLERANCE[dtype]


# Several pages to a block, and several blocks; a group that fills no tile.
KERNEL_SHAPES = [
    {},
    {"head_dim": 80, "page_size": 32},
    {"head_dim": 128, "heads": 12, "kv_heads": 4},
    {"head_dim": 96, "page_size": 64, "heads": 4, "kv_heads": 1},
    {"head_dim": 256},
]


def kernel_cases():
    """A few for the interpreter, which is slow, and all for a GPU, which has no float32."""
    yield "pallas_interpret", "int8", "bfloat16", {}, KERNEL_SHAPES[2]
    yield "pallas_interpret", "fp8_e4m3", "float32", FLAGS[1], KERNEL_SHAPES[1]
    yield "pallas_interpret", "int8", "float16", FLAGS[3], KERNEL_SHAPES[0]
    for kind in KINDS:
        for dtype, flags, shape in [
            *(("bfloat16", flags, {}) for flags in FLAGS),
            *(("float16" if kind == "int8" else "bfloat16", {}, shape) for shape in KERNEL_SHAPES[1:]),
        ]:
            yield pytest.param("pallas", kind, dtype, flags, shape, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("backend", "kind", "dtype", "flags", "shape"), kernel_cases())
def test_attention_of_the_kernels(backend, kind, dtype, flags, shape):
    lens, queries = ([40, 130, 60], [40, 20, 1]) if backend == "pallas_interpret" else (LENS, QUERIES)
    q, rows, numbers, tables, lens, start = make_pools(
        kind, dtype=dtype, lens=lens, query_lens=queries, **shape
    )
    options = {"scale": 0.125, **flags}
    args = q, rows, tables, lens, jnp.asarray(start)
    got = jitted("ragged_attention", *args, backend=backend, **arrays(options))
    want = ragged_attention(q, numbers, tables, lens, start, **options)
    assert relative_error(got, want) < TOLERANCE[dtype]
    q = q[: len(lens)]
    got = jitted("paged_decode", q, rows, tables, lens, backend=backend, **arrays(options))
    assert relative_error(got, paged_decode(q, numbers, tables, lens, **options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_the_path_of_sm_80(kind, monkeypatch):
    """The interpreter knows no cp.async: this tells nothing about where warps meet."""
    monkeypatch.setattr(tuning, "sync_warps", lambda _: None)
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda _: None)
    case = make_pools(kind, dtype="bfloat16", lens=[70, 0, 200], query_lens=[20, 0, 60])
    q, rows, numbers, tables, lens, start = case
    args, gpu = (jnp.asarray(rows), tables, lens), tuning.Target((8, 0), 4, 163 * 1024)
    config = ragged_tile.prefill_config(gpu, 64, 16, itemsize=2, is_quantized=True)
    options = {"scale": 0.125, "window": 90}
    got = ragged_prefill.ragged_attention(
        q, *args, jnp.asarray(start), config=config, interpret=True, **options
    )
    want = ragged_attention(q, numbers, tables, lens, start, **options)
    assert relative_error(got, want) < TOLERANCE["bfloat16"]
    config = decode_kernel.decode_config(gpu, rows.shape, rows.dtype)
    got = decode_kernel.paged_decode(q[:3], *args, config=config, interpret=True, **options)
    assert relative_error(got, paged_decode(q[:3], numbers, tables, lens, **options)) < TOLERANCE["bfloat16"]


def wrong_scale_row(load, *args):
    return [(numbers, jnp.roll(scales, 1)) for numbers, scales in load(*args)]


def wrong_sign(load, *args):
    return [(jnp.abs(numbers), scales) for numbers, scales in load(*args)]


def stale_page(load, pages, which, ids):
    return load(pages, which, [ids[0], *ids[:-1]])


@pytest.mark.parametrize("bug", [wrong_scale_row, wrong_sign, stale_page])
def test_planted_bugs_are_seen(bug, monkeypatch):
    """A test of the tests: the oracle's tolerance is narrow enough for what a load can get wrong."""
    case = make_pools("int8", dtype="bfloat16", lens=[140, 5], query_lens=[1, 1])
    q, rows, numbers, tables, lens, _ = case
    load = quantized_tile.Pages.load
    monkeypatch.setattr(quantized_tile.Pages, "load", lambda *args: bug(load, *args))
    decode_kernel.attend_with_stats.clear_cache()
    try:
        args = q, rows, tables, lens
        got = ops.paged_decode(*args, scale=0.125, backend="pallas_interpret")
    finally:
        decode_kernel.attend_with_stats.clear_cache()
    want = paged_decode(q, numbers, tables, lens, scale=0.125)
    got = np.asarray(got).astype(np.float64)
    assert not np.linalg.norm(got - want) < 2 * TOLERANCE["bfloat16"] * np.linalg.norm(want)


SHAPES = [(4, 4, 64, 16), (8, 2, 48, 3), (16, 1, 128, 32), (6, 3, 80, 16), (8, 1, 256, 64), (2, 1, 10, 1)]


@pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
@pytest.mark.parametrize("width", [256, 32, 16, 8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_native_comes_to_the_bits_of_a_pool_of_floats(kind, dtype, width):
    for seed, (heads, kv_heads, head_dim, page_size) in enumerate(SHAPES):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
        window = {"window": 50} if seed % 2 else {}
        q, rows, numbers, tables, lens, start = make_pools(kind, dtype=dtype, seed=seed, **shape)
        floats = numbers.astype(np.float32).astype(q.dtype)
        options = {"scale": head_dim**-0.5, "max_width": width, **window}
        for op, queries, rest in (
            (attention.ragged_attention, q, (tables, lens, start)),
            (attention.paged_decode, q[: len(LENS)], (tables, lens)),
        ):
            got, want = (np.asarray(op(queries, pool, *rest, **options)) for pool in (rows, floats))
            np.testing.assert_array_equal(got, want)


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_sequence_with_nan_leaves_the_others_alone(backend, kind):
    q, rows, numbers, tables, lens, start = make_pools(kind, lens=[40, 50, 60], query_lens=[1, 20, 30])
    want = ragged_attention(q, numbers, tables, lens, start, scale=0.25)
    nan = quantize(jnp.full(64, jnp.nan), rows.dtype)
    tiles = rows[int(tables[1, 0])].reshape(2, 2, -1)
    tiles[:, :, 3 * 64 : 4 * 64], tiles[:, :, 16 * 64 + 3] = nan[:-1], nan[-1]
    got = jitted("ragged_attention", q, rows, tables, lens, jnp.asarray(start), scale=0.25, backend=backend)
    assert np.isnan(np.asarray(got)[1:21]).all()
    rest = np.r_[0:1, 21:51]
    assert relative_error(np.asarray(got)[rest], want[rest]) < TOLERANCE["float32"]


@pytest.mark.quick
def test_what_is_not_supported_is_an_error():
    q, rows, _, tables, lens, _ = make_pools("int8", lens=[5], query_lens=[1])
    decode = functools.partial(ops.paged_decode, scale=1.0)
    with pytest.raises(ValueError, match=r"the shape of `q` must be .*got \(1, 4, 65\)"):
        decode(jnp.pad(q, ((0, 0), (0, 0), (0, 1))), rows, tables, lens)
    with pytest.raises(
        ValueError, match=r"the dtype of `q` must be one of float32, bfloat16, float16 .*, got int8"
    ):
        decode(q.astype(jnp.int8), rows, tables, lens)
    with pytest.raises(ValueError, match=r"the shape of `k` must be \(1, 2, 64\) .*got \(1, 2, 65\)"):
        ops.write_kv(jnp.asarray(rows), jnp.zeros((1, 2, 65)), jnp.zeros((1, 2, 65)), jnp.zeros(1, jnp.int32))

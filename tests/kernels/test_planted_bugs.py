"""Tests of the emulator: bugs planted in the kernels that it must find, and none where there is none.

They need a compiler for GPUs (make kernels-emulate), and no GPU.
"""

import dataclasses
import importlib.util
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import (
    TOLERANCE,
    make_case,
    paged_decode,
    quantized,
    ragged_attention,
    relative_error,
    tiled,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import attention_mgpu

from jax_paged.pallas_kernels import ops
from jax_paged.pallas_kernels.gpu import grouped_wgmma, tuning
from jax_paged.pallas_kernels.gpu import paged_decode as decode_kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="needs jax[cuda13]: make kernels-emulate",
    ),
]
# Long enough for stages to come around again in two parts, one of which has both sequences; with dead slots.
DECODE = make_case([900, 5], heads=2, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16")[:4]
RAGGED = make_case([1000], heads=2, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16", query_lens=[70])
# Rows of two groups in a tile of two warpgroups, and seven steps through three stages.
SIZES, TILES = [10, 0, 130], grouped_wgmma.Tiles(128, 64, 64, 3)
ROWS, KERNELS = (
    np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16) for shape in ((140, 448), (3, 448, 64))
)


def is_wrong(gpu, op):
    """Runs an op in the emulator; returns whether it finds an error, or the result is wrong."""
    from ptx_emulator.gpu import emulated_gpu
    from ptx_emulator.memory import KernelError

    options = {"scale": 0.1}
    q, pool, *rest = DECODE if op.startswith("decode") else RAGGED
    numbers = pool
    if op.endswith("bytes"):
        rows, numbers = quantized(pool, "int8")
        pool = jnp.asarray(tiled(rows))
    try:
        with emulated_gpu(gpu).installed():
            if op.startswith("decode"):
                want = paged_decode(q, numbers, *rest, **options)
                config = decode_kernel.decode_config(tuning.target(), pool.shape, pool.dtype)
                config = dataclasses.replace(config, num_parts=2)
                got = decode_kernel.paged_decode(q, pool, *rest, config=config, **options)
            elif op == "experts":
                rows = np.split(ROWS.astype(np.float64), np.cumsum(SIZES)[:-1])
                want = np.concatenate([x @ w for x, w in zip(rows, KERNELS.astype(np.float64), strict=True)])
                args = map(jnp.asarray, (ROWS, KERNELS, np.array(SIZES, np.int32)))
                got = grouped_wgmma.grouped_matmul(*args, tiles=TILES)
            else:
                want = ragged_attention(q, numbers, *rest, **options)
                rest[-1] = jnp.asarray(rest[-1])
                got = ops.ragged_attention(q, pool, *rest, backend="pallas", **options)
    except KernelError as error:
        print(error)
        return True
    return not jnp.isfinite(got).all() or relative_error(got, want) > TOLERANCE["bfloat16"]


def leave_out(monkeypatch, owner, name, number):
    """Leaves out one call, by its number in the order in which the kernel is traced; returns the calls."""
    original, calls = getattr(owner, name), []

    def call(*args):
        calls.append(args)
        if len(calls) - 1 != number:
            original(*args)

    monkeypatch.setattr(owner, name, call)
    return calls


ATTENTION = [f"{op}{pool}" for op in ("decode", "ragged") for pool in ("", " bytes")]


@pytest.mark.parametrize(
    ("gpu", "op"),
    [*itertools.product(("h100", "a100"), ATTENTION), ("h100", "experts")],
)
def test_nothing_planted(gpu, op, monkeypatch):
    from ptx_emulator.gpu import emulated_gpu

    monkeypatch.setattr(emulated_gpu(gpu), "num_schedules", 2)
    assert not is_wrong(gpu, op)


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_kernel_known_to_be_right(takes_turns):
    """JAX's own attention for Hopper, which its authors run on GPUs, is right in the emulator too."""
    from ptx_emulator.gpu import emulated_gpu

    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 256, 1, 64)).astype(np.float16)
    config = attention_mgpu.TuningConfig(
        block_q=64, block_kv=64, max_concurrent_steps=2, causal=True, use_schedule_barrier=takes_turns
    )
    with emulated_gpu("h100").installed():
        got = attention_mgpu.attention(*map(jnp.asarray, (q, k, v)), config)
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k.astype(np.float64))
    probs = np.exp(np.where(np.tri(256, dtype=bool), scores, -np.inf))
    want = np.einsum("bhqk,bkhd->bqhd", probs / probs.sum(-1, keepdims=True), v.astype(np.float64))
    assert relative_error(got, want) < TOLERANCE["float16"]


def test_why_the_grouped_matmul_of_jax_is_not_used():
    """Its loop fills a stage that wgmma may still read; once this fails, theirs may do."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu  # which imports JAX's tests
    from ptx_emulator.gpu import emulated_gpu
    from ptx_emulator.memory import KernelError

    args = jnp.asarray(ROWS[:64]), jnp.asarray(KERNELS)
    options = {"block_m": 64, "block_n": 64, "block_k": 64, "max_concurrent_steps": 2, "grid_block_n": 1}
    sizes = jnp.array([10, 0, 54], jnp.int32)
    with (
        emulated_gpu("h100").installed(),
        pytest.raises(KernelError, match="a TMA load writes what wgmma of warp"),
    ):
        ragged_dot_mgpu.ragged_dot(*args, group_sizes=sizes, **options)


# In the order in which the kernels are traced: of the ragged one, those of the copies come first.
RAGGED_WAITS = [
    *("free keys", "free values", "last free keys", "last free values"),
    *("queries", "keys", "values", "values to clean", "clean", "keys of masked steps"),
]
HARMLESS = ("last free keys", "last free values")


@pytest.mark.parametrize(
    ("op", "number"),
    [
        *(("decode", i) for i in range(4)),  # keys and values, of full and of masked blocks
        *(("ragged", i) for i, name in enumerate(RAGGED_WAITS) if name not in HARMLESS),
    ],
)
def test_a_missing_wait(op, number, monkeypatch):
    calls = leave_out(monkeypatch, plgpu, "barrier_wait", number)
    assert is_wrong("h100", op)
    assert len(calls) == (4 if op == "decode" else len(RAGGED_WAITS))


@pytest.mark.parametrize(
    ("name", "number", "num_calls"),
    [
        ("barrier_wait", 0, 3),  # for a free stage; 1 is the one at the end, which nobody needs
        ("barrier_wait", 2, 3),  # for a stage that is loaded
        ("wgmma_wait", 0, 1),
        ("barrier_arrive", 0, 2),
        ("barrier_arrive", 1, 2),
        ("commit_smem", 0, 1),
    ],
)
def test_what_experts_miss(name, number, num_calls, monkeypatch):
    calls = leave_out(monkeypatch, plgpu, name, number)
    assert is_wrong("h100", "experts")
    assert len(calls) == num_calls


@pytest.mark.parametrize("change", ["last row", "first row", "group"])
def test_experts_with_a_wrong_work_list(change, monkeypatch):
    right = grouped_wgmma.work_list

    def work_list(*args):
        column, step = {"last row": (3, -1), "first row": (2, 1), "group": (0, -1)}[change]
        return right(*args).at[1, column].add(step)

    monkeypatch.setattr(grouped_wgmma, "work_list", work_list)
    assert is_wrong("h100", "experts")


# In the order in which the kernels are traced.
FENCES = {
    "decode": ("weights of full blocks", "weights of masked blocks", "result"),
    "decode bytes": (
        *("keys of full blocks", "weights of full blocks"),
        *("keys of masked blocks", "weights of masked blocks", "result"),
    ),
    "ragged": ("cleaned values", "queries", "result"),
    "ragged bytes": ("keys", "values", "cleaned values", "queries", "result"),
}


@pytest.mark.parametrize(
    ("op", "number"),
    [(op, i) for op, names in FENCES.items() for i, name in enumerate(names) if name != "queries"],
)
def test_a_missing_fence(op, number, monkeypatch):
    calls = leave_out(monkeypatch, plgpu, "commit_smem", number)
    assert is_wrong("h100", op)
    assert len(calls) == len(FENCES[op])


@pytest.mark.parametrize(
    "number", range(5)
)  # keys and values of full steps; clean, keys and values of others
def test_a_missing_arrival(number, monkeypatch):
    calls = leave_out(monkeypatch, plgpu, "barrier_arrive", number)
    assert is_wrong("h100", "ragged")
    assert len(calls) == 5


@pytest.mark.parametrize("op", ["decode", "ragged"])
def test_one_copy_too_many_in_flight(op, monkeypatch):
    wait = plgpu.wait_gmem_to_smem
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda in_flight: wait(in_flight + 1))
    assert is_wrong("a100", op)


@pytest.mark.parametrize(("gpu", "op"), [("h100", "decode"), ("a100", "decode"), ("a100", "ragged")])
def test_an_index_that_jax_counts_wrongly(gpu, op, monkeypatch):
    """tuning.iota says how: NaN of dead slots gets through at odd lengths."""

    def iota(shape, dimension, layout):
        return plgpu.broadcasted_iota(jnp.int32, shape, dimension, layout=layout)

    monkeypatch.setattr(tuning, "iota", iota)
    lens = [71, 5] if op == "decode" else [71]
    case = make_case(lens, heads=2, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16", query_lens=lens)
    monkeypatch.setitem(globals(), op.upper(), case if op == "ragged" else (case[0][:2], *case[1:4]))
    assert is_wrong(gpu, op)

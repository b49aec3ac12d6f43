"""The parts of the decode kernel: its work list, and that a missing wait does not go unseen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import OUT_OF_POOL, TOLERANCE, make_case, paged_decode, relative_error
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged.pallas_kernels import ops
from jax_paged.pallas_kernels.gpu import paged_decode as kernel
from jax_paged.pallas_kernels.gpu import tuning
from jax_paged.pallas_kernels.gpu.paged_decode import work_list

BLOCK = 64
RACE = "RACE DETECTED"


def items_of(work):
    """Walks the work list as the kernel does; yields the number, sequence and blocks of each item."""
    parts, runs, _ = map(np.asarray, work)
    for part, (first_seq, end_seq, begin, end) in enumerate(parts):
        for seq in range(first_seq, end_seq):
            run_begin, run_end, offset = runs[seq]
            blocks = np.arange(max(begin, run_begin), min(end, run_end)) - offset
            if len(blocks):
                yield part + seq, seq, blocks


@pytest.mark.parametrize("window", [None, 100, 4096])
@pytest.mark.parametrize("num_seqs", [1, 7, 64, 256])
def test_work_list_covers_every_live_block_once(num_seqs, window):
    rng = np.random.default_rng(num_seqs)
    num_parts = 66
    plan = jax.jit(functools.partial(work_list, num_parts=num_parts, block_tokens=BLOCK, window=window))
    for _ in range(20):
        lens = rng.zipf(1.3, size=num_seqs).clip(0, 32768) * (rng.random(num_seqs) < 0.9)
        work = plan(jnp.asarray(lens, jnp.int32))
        begins = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // BLOCK
        ends = -(-lens // BLOCK)
        mine = {seq: [np.arange(0)] for seq in range(num_seqs)}
        numbers = {seq: [] for seq in range(num_seqs)}
        for item, seq, blocks in items_of(work):
            mine[seq].append(blocks)
            numbers[seq].append(item)
        for seq, (first, count) in enumerate(np.asarray(work.item_ranges)):
            assert numbers[seq] == list(range(first, first + count))
            np.testing.assert_array_equal(np.concatenate(mine[seq]), np.arange(begins[seq], ends[seq]))
        every = [number for mine in numbers.values() for number in mine]
        assert len(set(every)) == len(every)
        assert max(every, default=0) < num_parts + num_seqs - 1
        sizes = np.diff(np.asarray(work.parts)[:, 2:])[:, 0]
        sizes, total = sizes[sizes > 0], (ends - begins).sum()
        assert len(sizes) == min(total, num_parts)
        assert sizes.max(initial=0) - sizes.min(initial=sizes.max(initial=0)) <= 1


@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_every_batch_fills_the_gpu(kv_heads):
    """No multiprocessor waits for others at any number of equal contexts, nor at skewed ones."""
    gpu = tuning.Target((9, 0), 132, 227 * 1024)
    num_parts = kernel.decode_config(gpu, (512, 2, kv_heads, 16, 128), jnp.bfloat16).num_parts
    assert 0.95 * 264 < num_parts * kv_heads <= 264
    rng = np.random.default_rng(0)
    batches = [np.full(n, 8192) for n in (33, 34, 65)] + [rng.zipf(1.3, 65).clip(4096, 65536)]
    for lens in batches:
        work = work_list(jnp.asarray(lens, jnp.int32), num_parts, BLOCK, None)
        sizes = np.diff(np.asarray(work.parts)[:, 2:])
        assert sizes.mean() > 0.93 * sizes.max()


# The waits for keys and for values, of full blocks and of masked ones.
@pytest.mark.thorough
@pytest.mark.parametrize("missing", range(4))
def test_a_missing_wait_is_caught(monkeypatch, capsys, missing):
    """A test of the tests: the interpreter must see a kernel that reads a stage before its copy is there."""
    q, pool, tables, lens, _ = make_case(
        [140, 5], heads=2, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16"
    )
    decode = functools.partial(ops.paged_decode, scale=0.1, backend="pallas_interpret")
    decode(q, pool, tables, lens)
    barrier_wait, calls = plgpu.barrier_wait, []

    def all_waits_but_one(barrier):
        if len(calls) != missing:
            barrier_wait(barrier)
        calls.append(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", all_waits_but_one)
    kernel.attend_with_stats.clear_cache()  # so that it is traced anew, and not left behind
    is_caught = False
    try:
        jax.block_until_ready(decode(q, pool, tables, lens))
    except jax.errors.JaxRuntimeError as error:
        is_caught = RACE in str(error)
    finally:
        kernel.attend_with_stats.clear_cache()
        reset_gpu_interpret_mode_state()
    assert len(calls) == 4
    assert is_caught or RACE in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("backend", ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)])
def test_items_of_many_blocks(backend, window):
    """Elsewhere a GPU's many multiprocessors get one block per item: here stages are used again."""
    interpret = backend == "pallas_interpret"
    lens = [700, 5, 0, 300] if interpret else [3000, 5, 0, 1000]
    case = make_case(lens, heads=8, kv_heads=2, head_dim=128, page_size=16, dtype="bfloat16")[:4]
    pool = case[1]
    config = kernel.decode_config(tuning.target(interpret=interpret), pool.shape, pool.dtype)
    config = dataclasses.replace(config, num_parts=2)
    options = {"scale": 0.1, "window": window}
    got = kernel.paged_decode(*case, config=config, interpret=interpret, **options)
    assert relative_error(got, paged_decode(*case, **options)) < TOLERANCE["bfloat16"]


@pytest.mark.thorough
@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_path_of_sm_80_with_copies_that_take_no_time(monkeypatch, num_stages):
    """The interpreter has no cp.async: plain copies check everything but the waits."""

    def copy(source, target, barrier):
        assert barrier is None
        target[...] = source[...]

    monkeypatch.setattr(tuning, "copy_to_smem", copy)
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda _: None)
    case = make_case([300, 0, 40], heads=4, kv_heads=2, head_dim=80, page_size=32, dtype="float16")[:4]
    config = tuning.KernelConfig(16, 64, num_stages, num_parts=3, has_tma=False)
    options = {"scale": 0.1, "window": 250}
    want = paged_decode(*case, **options)
    q, pool, tables, lens = case
    # The first page of the first block is before the window: no id of it may be used.
    pool, tables = pool.at[tables[0, 0]].set(jnp.nan), tables.at[0, 0].set(OUT_OF_POOL)
    got = kernel.paged_decode(q, pool, tables, lens, config=config, interpret=True, **options)
    assert relative_error(got, want) < TOLERANCE["float16"]

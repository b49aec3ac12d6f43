"""The parts of the decode kernel: its work list, and that a missing wait does not go unseen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from oracle import make_case

from jax_paged.pallas_kernels import ops
from jax_paged.pallas_kernels.paged_decode import work_list

BLOCK = 64
RACE = "RACE DETECTED"


@pytest.mark.parametrize("window", [None, 100, 4096])
@pytest.mark.parametrize("num_seqs", [1, 7, 64, 256])
def test_work_list_covers_every_live_block_once(num_seqs, window):
    rng = np.random.default_rng(num_seqs)
    num_items = num_seqs + 66
    plan = jax.jit(functools.partial(work_list, num_items=num_items, block_tokens=BLOCK, window=window))
    for _ in range(20):
        lens = rng.zipf(1.3, size=num_seqs).clip(0, 32768) * (rng.random(num_seqs) < 0.9)
        items, spans = map(np.asarray, plan(jnp.asarray(lens, jnp.int32)))
        begins = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0) // BLOCK
        ends = -(-lens // BLOCK)
        used = spans[:, 1].sum()
        assert used <= num_items
        assert (items[used:, 1] >= items[used:, 2]).all()
        for b, (first, count) in enumerate(spans):
            mine = items[first : first + count]
            assert (mine[:, 0] == b).all()
            blocks = np.concatenate([np.arange(lo, hi) for _, lo, hi in mine] or [np.zeros(0)])
            np.testing.assert_array_equal(blocks, np.arange(begins[b], ends[b]))
        sizes = items[:used, 2] - items[:used, 1]
        assert sizes.max(initial=0) <= max(1, -(-(ends - begins).sum() // (num_items - num_seqs)))


@pytest.mark.parametrize("missing", [0, 1])  # the wait for the first keys, and for the first values
def test_a_missing_wait_is_caught(monkeypatch, capsys, missing):
    """A test of the tests: the interpreter must see a kernel that reads a stage before its copy is there."""
    q, pool, tables, lens, _ = make_case(
        [70, 5], heads=2, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16"
    )
    decode = functools.partial(ops.paged_decode, scale=0.1, backend="pallas_interpret")
    decode(q, pool, tables, lens)
    barrier_wait, calls = plgpu.barrier_wait, []

    def all_waits_but_one(barrier):
        if len(calls) != missing:
            barrier_wait(barrier)
        calls.append(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", all_waits_but_one)
    is_caught = False
    try:
        jax.block_until_ready(decode(q, pool, tables, lens))
    except jax.errors.JaxRuntimeError as error:
        is_caught = RACE in str(error)
    finally:
        reset_gpu_interpret_mode_state()
    assert len(calls) > missing
    assert is_caught or RACE in capsys.readouterr().out

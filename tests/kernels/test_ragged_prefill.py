"""The parts of the ragged kernel: its work list, both ways to multiply, and that missing waits are seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import OUT_OF_POOL, TOLERANCE, make_case, ragged_attention, relative_error
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu

from jax_paged.pallas_kernels.gpu import ragged_prefill, ragged_tile, tuning
from jax_paged.pallas_kernels.gpu.paged_decode import paged_decode

RACE = "RACE DETECTED"
A100 = tuning.Target((8, 0), 108, 163 * 1024)
B200 = tuning.Target((10, 0), 148, 227 * 1024)
LENS, QUERIES = [70, 0, 200], [20, 0, 1]


@pytest.mark.parametrize("queries", [1, 7, 16, 128])
@pytest.mark.parametrize("num_seqs", [1, 3, 64])
def test_tiles_cover_every_query_once(queries, num_seqs):
    rng = np.random.default_rng(num_seqs)
    num_tokens = 800
    num_tiles = num_tokens // queries + num_seqs
    plan = jax.jit(functools.partial(ragged_tile.plan_tiles, num_tiles=num_tiles, queries=queries))
    for _ in range(20):
        lens = rng.zipf(1.4, size=num_seqs).clip(0, 800 // num_seqs) * (rng.random(num_seqs) < 0.9)
        contexts = lens + rng.integers(0, 100, num_seqs) * (lens > 0)
        start = np.concatenate([[0], np.cumsum(lens)])
        tiles, rows = plan(jnp.asarray(contexts, jnp.int32), jnp.asarray(start, jnp.int32))
        seen = []
        for (seq, first, last, context_len), row in zip(np.asarray(tiles), np.asarray(rows), strict=True):
            assert 0 <= last - first <= queries or last == 0
            if last == 0:
                continue
            assert context_len == contexts[seq]
            # The tile that a token of the way back looks for.
            assert (tiles[start[seq] // queries + seq + (row - start[seq]) // queries, 1] == first).all()
            seen += [(seq, position) for position in range(first, last)]
        want = [(b, n - m + i) for b, (n, m) in enumerate(zip(contexts, lens, strict=True)) for i in range(m)]
        assert seen == want


def use_cp_async(monkeypatch):
    """The interpreter knows no cp.async: copies are made at once, so this tells nothing about waits."""
    by_tma = tuning.copy_to_smem

    def copy(source, target, barrier):
        if barrier is None:
            target[...] = source[...]
        else:  # of paged_decode
            by_tma(source, target, barrier)

    monkeypatch.setattr(tuning, "copy_to_smem", copy)
    monkeypatch.setattr(plgpu, "wait_gmem_to_smem", lambda _: None)


def run(q, pool, tables, lens, start, config=None, **options):
    attend = functools.partial(ragged_prefill.ragged_attention, interpret=True, config=config, **options)
    return np.asarray(attend(q, pool, tables, lens, jnp.asarray(start)))


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", [None, A100, B200], ids=["sm_90", "sm_80", "sm_100"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [(3, 1, 64, 64, "float16"), (16, 1, 80, 32, "bfloat16"), (2, 1, 256, 16, "bfloat16")],
)
def test_groups_head_dims_and_pages(gpu, heads, kv_heads, head_dim, page_size, dtype, monkeypatch):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    case = make_case(LENS, dtype=dtype, query_lens=QUERIES, **shape)
    config = None
    if gpu is not None:
        use_cp_async(monkeypatch)
        config = ragged_tile.prefill_config(gpu, head_dim, page_size, itemsize=2)
    got = run(*case, config, scale=head_dim**-0.5)
    assert relative_error(got, ragged_attention(*case, scale=head_dim**-0.5)) < TOLERANCE[dtype]


@pytest.mark.thorough
@pytest.mark.parametrize("gpu", [None, A100, B200], ids=["sm_90", "sm_80", "sm_100"])
@pytest.mark.parametrize("flags", [{"window": 33}, {"window": 90, "soft_cap": 2.0}])
def test_pages_before_the_window_may_be_gone(gpu, flags, monkeypatch):
    shape = {"heads": 4, "kv_heads": 1, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"}
    # A sink of -inf is none; the last rows of a tile see nothing of its first step.
    sinks = np.array([1.0, -2.0, 30.0, -np.inf], np.float32)
    queries = [20, 0, 60]
    q, pool, tables, lens, start = make_case(LENS, query_lens=queries, **shape)
    want = ragged_attention(q, pool, tables, lens, start, scale=0.2, sinks=sinks, **flags)
    for b, (n, m) in enumerate(zip(LENS, queries, strict=True)):
        gone = max(0, n - m + 1 - flags["window"]) // 16
        pool = pool.at[tables[b, :gone]].set(jnp.nan)
        tables = tables.at[b, :gone].set(OUT_OF_POOL)
    config = None
    if gpu is not None:
        use_cp_async(monkeypatch)
        config = ragged_tile.prefill_config(gpu, 64, 16, itemsize=2)
    got = run(q, pool, tables, lens, start, config, scale=0.2, sinks=jnp.asarray(sinks), **flags)
    assert relative_error(got, want) < TOLERANCE["bfloat16"]


@pytest.mark.thorough
def test_single_queries_are_those_of_paged_decode():
    """They are the same to the last bit, whatever runs beside them."""
    shape = {"heads": 2, "kv_heads": 1, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"}
    q, pool, tables, lens, start = case = make_case([70, 90, 33], query_lens=[20, 1, 1], **shape)
    got = run(*case, scale=0.2)
    assert relative_error(got, ragged_attention(*case, scale=0.2)) < TOLERANCE["bfloat16"]
    single = lens.at[0].set(0)
    want = paged_decode(q[jnp.asarray(start[:-1])], pool, tables, single, scale=0.2, interpret=True)
    np.testing.assert_array_equal(got[20:], np.asarray(want)[1:])


# In the order in which the kernel is traced: first the loop without masks, then the one with them. Some go
# unseen, as the interpreter has no clock of its own for what wgmma reads: those for the queries, whose copy
# comes before that of the keys, and for cleaned values.
FREE = ["free keys", "free values"]
WAITS = [*FREE, *FREE, "queries", "keys", "values", "values", "clean", "keys"]


@pytest.mark.parametrize("planted", [0, 5])
def test_a_missing_wait_is_caught(planted, monkeypatch, capsys):
    """A test of the tests: the interpreter must see each kind of wait that a change could lose."""
    case = make_case([700], heads=2, kv_heads=1, head_dim=64, page_size=16, dtype="bfloat16", query_lens=[2])
    config = tuning.KernelConfig(128, 128, num_stages=2, num_parts=0, has_tma=True, has_wgmma=True)
    barrier_wait, calls = plgpu.barrier_wait, []

    def wait_but_for_one(barrier):
        calls.append(barrier)
        if len(calls) - 1 != planted:
            barrier_wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait_but_for_one)
    jax.clear_caches()  # what was traced with all waits
    is_caught = False
    try:
        run(*case, config, scale=0.1)
    except jax.errors.JaxRuntimeError as error:
        is_caught = RACE in str(error) or "no threads observed phase" in str(error)
    finally:
        jax.clear_caches()
        reset_gpu_interpret_mode_state()
    out = capsys.readouterr().out
    assert len(calls) == len(WAITS)
    assert is_caught or RACE in out


def test_shapes_that_do_not_fit_are_errors():
    case = make_case([5], heads=2, kv_heads=1, head_dim=256, page_size=16, dtype="float16", query_lens=[5])
    config = tuning.KernelConfig(128, 128, num_stages=4, num_parts=0, has_tma=True, has_wgmma=True)
    with pytest.raises(
        ValueError,
        match=r"shared memory of ragged_attention with head_dim 256 .* at most 232448 .*, got 589824",
    ):
        run(*case, config, scale=1.0)

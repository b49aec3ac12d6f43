"""The public ops on every backend against a float64 oracle: permuted tables, NaN in dead slots, skew.

The interpreter is slow, so it gets the small cases; it raises at a race. pytest -m gpu runs the full grid on
a GPU. What only the native backend can get wrong is in test_native.py.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import OUT_OF_POOL, TOLERANCE, make_case, paged_decode, ragged_attention, relative_error

from jax_paged.pallas_kernels import native, ops, reference
from jax_paged.pallas_kernels.gpu import tuning
from jax_paged.pallas_kernels.native.sources import digest

pytestmark = pytest.mark.thorough

S = 16
EDGE_LENS = [1, S - 1, S, S + 1, 2 * S, 63, 64, 65, 127, 128, 129, 300, 0, 1000, 3000, 0, 5]
FEW_LENS = [S + 1, 0, 150, 1]
GPU = [pytest.param("pallas", marks=pytest.mark.gpu)]
IF_BUILT = pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
NATIVE = [pytest.param("native", marks=IF_BUILT)]


def cases(everywhere, interpreted=(), on_gpu=None):
    """Parameters: `everywhere` for xla, native and a GPU (`on_gpu` if given, float32 never); `interpreted`.

    float16 is to xla what bfloat16 is, so its cases in float16 are slow ones.
    """
    for case in everywhere:
        yield pytest.param("xla", *case, marks=[pytest.mark.slow] if case[0] == "float16" else [])
        yield pytest.param("native", *case, marks=IF_BUILT)
    for case in on_gpu or everywhere:
        if case[0] != "float32":
            yield pytest.param("pallas", *case, marks=pytest.mark.gpu)
    for case in interpreted:
        yield pytest.param("pallas_interpret", *case)


def skip_what_this_gpu_lacks(backend, head_dim, page_size):
    if backend == "pallas" and (head_dim, page_size) == (80, 16) and tuning.target().capability < (9, 0):
        pytest.skip("head_dim 80 with page_size 16 needs TMA")


@functools.partial(jax.jit, static_argnames=("op", "scale", "window", "soft_cap", "backend"))
def jitted(op, *args, **options):
    return getattr(ops, op)(*args, **options)


def check_decode(q, pool, tables, lens, backend, **options):
    arrays = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    got = jitted("paged_decode", q, pool, tables, lens, backend=backend, **arrays)
    want = paged_decode(q, pool, tables, lens, **options)
    assert relative_error(got, want) < TOLERANCE[q.dtype.name]
    assert got.dtype == q.dtype
    assert (np.asarray(got)[np.asarray(lens) == 0] == 0).all()


def check_ragged(q, pool, tables, lens, start, backend, *, padding=0, **options):
    # Padding rows hold NaN: they come out 0 and disturb nobody.
    padded = jnp.concatenate([q, jnp.full((padding, *q.shape[1:]), jnp.nan, q.dtype)])
    arrays = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    got = jitted(
        "ragged_attention", padded, pool, tables, lens, jnp.asarray(start), backend=backend, **arrays
    )
    want = ragged_attention(q, pool, tables, lens, start, **options)
    assert relative_error(got[: start[-1]], want) < TOLERANCE[q.dtype.name]
    assert (np.asarray(got)[start[-1] :] == 0).all()


HEADS = [(4, 4, 64), (8, 2, 64), (16, 1, 128), (6, 3, 80), (4, 2, 96), (8, 1, 256)]


@pytest.mark.parametrize(
    ("backend", "dtype", "heads", "kv_heads", "head_dim"),
    cases(
        [(dtype, *heads) for dtype in TOLERANCE for heads in HEADS],
        [("bfloat16", 8, 2, 64), ("float32", 16, 1, 128), ("float16", 6, 3, 80), ("float32", 4, 2, 96)],
    ),
)
def test_decode_matches_oracle(backend, dtype, heads, kv_heads, head_dim):
    skip_what_this_gpu_lacks(backend, head_dim, S)
    lens = FEW_LENS if backend == "pallas_interpret" else EDGE_LENS
    q, pool, tables, lens, _ = make_case(
        lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, page_size=S, dtype=dtype
    )
    check_decode(q, pool, tables, lens, backend, scale=head_dim**-0.5)


@pytest.mark.thorough
@pytest.mark.quick
@pytest.mark.parametrize(("backend", "dtype"), cases([("float32",), ("bfloat16",)], [("float32",)]))
def test_decode_of_all_edge_lengths(backend, dtype):
    q, pool, tables, lens, _ = make_case(
        EDGE_LENS, heads=2, kv_heads=1, head_dim=64, page_size=S, dtype=dtype, seed=1
    )
    check_decode(q, pool, tables, lens, backend, scale=0.2)


BATCHES = [(n, page_size) for n in (1, 17, 2, 15, 16, 40) for page_size in (16, 32, 64)]
FEW_BATCHES = [BATCHES[0], *BATCHES[3:6]]


@pytest.mark.parametrize(
    ("backend", "dtype", "num_seqs", "page_size"),
    [
        *cases(
            [("float32", *batch) for batch in FEW_BATCHES],
            [("bfloat16", 17, 32), ("float32", 3, 64)],
            on_gpu=[("bfloat16", *batch) for batch in BATCHES],
        ),
        *(
            pytest.param(backend, "float32", *batch, marks=[pytest.mark.slow, *marks])
            for backend, marks in (("xla", []), ("native", [IF_BUILT]))
            for batch in BATCHES
            if batch not in FEW_BATCHES
        ),
    ],
)
def test_decode_of_any_batch_and_page_size(backend, dtype, num_seqs, page_size):
    lens = np.random.default_rng(num_seqs).zipf(1.3, size=num_seqs).clip(1, 700).tolist()
    q, pool, tables, lens, _ = make_case(
        lens, heads=4, kv_heads=2, head_dim=64, page_size=page_size, dtype=dtype
    )
    check_decode(q, pool, tables, lens, backend, scale=0.2)


SINKS = np.array([0.5, -3.0, 60.0, 4.0], np.float32)
NO_SINKS = np.array([-np.inf, 0.5, -np.inf, -1e35], np.float32)
FLAGS = [
    {"soft_cap": 5.0},
    {"window": 7},
    {"window": 100, "sinks": SINKS},
    {"window": 33, "soft_cap": 2.0},
    {"sinks": SINKS},
    {"window": 20, "sinks": NO_SINKS},
]
FLAG_LENS, FLAG_QUERIES = [1, 40, 130, 260, 17], [1, 40, 65, 1, 3]
EVERYWHERE = [(dtype, flags) for dtype in ("float32", "float16") for flags in FLAGS]
INTERPRETED = [("float32", FLAGS[2]), ("float32", FLAGS[3])]


@pytest.mark.parametrize(("backend", "dtype", "flags"), cases(EVERYWHERE, INTERPRETED))
def test_flags_of_decode(backend, dtype, flags):
    q, pool, tables, lens, _ = make_case(
        FLAG_LENS, heads=4, kv_heads=2, head_dim=64, page_size=S, dtype=dtype
    )
    check_decode(q, pool, tables, lens, backend, scale=0.5, **flags)


@pytest.mark.parametrize(("backend", "dtype", "flags"), cases(EVERYWHERE, INTERPRETED))
def test_flags_of_ragged(backend, dtype, flags):
    q, pool, tables, lens, start = make_case(
        FLAG_LENS, heads=4, kv_heads=2, head_dim=64, page_size=S, dtype=dtype, query_lens=FLAG_QUERIES
    )
    check_ragged(q, pool, tables, lens, start, backend, scale=0.5, **flags)


def give_away(pool, tables, counts):
    """Overwrites the first pages of each sequence, and lets the tables say what they like about them."""
    for b, count in enumerate(counts):
        pool = pool.at[tables[b, :count]].set(jnp.nan)
        tables = tables.at[b, :count].set(jnp.where(jnp.arange(count) % 2, 0, OUT_OF_POOL))
    return pool, tables


@pytest.mark.parametrize(("backend", "window"), [*cases([(33,)], [(33,)], on_gpu=[(7,), (33,), (100,)])])
def test_pages_before_the_window_may_be_gone(backend, window):
    options = {"scale": 0.5, "window": window, "sinks": NO_SINKS}
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": S, "dtype": "float16"}
    q, pool, tables, lens, _ = make_case(FLAG_LENS, **shape)
    want = paged_decode(q, pool, tables, lens, **options)
    options["sinks"] = jnp.asarray(NO_SINKS)
    pool, tables = give_away(pool, tables, [max(0, n - window) // S for n in FLAG_LENS])
    got = jitted("paged_decode", q, pool, tables, lens, backend=backend, **options)
    assert relative_error(got, want) < TOLERANCE["float16"]


@pytest.mark.parametrize(("backend", "dtype"), cases([("float32",), ("float16",)], [("float32",)]))
def test_soft_cap_of_large_scores(backend, dtype):
    """A tanh of few bits shows here, where the cap is large and the scores reach it."""
    options = {"scale": 4.0, "soft_cap": 50.0}
    q, pool, tables, lens, start = make_case(
        [90, 33], heads=4, kv_heads=2, head_dim=64, page_size=S, dtype=dtype, query_lens=[1, 1]
    )
    check_decode(q, pool, tables, lens, backend, **options)
    check_ragged(q, pool, tables, lens, start, backend, **options)


BIAS = np.random.default_rng(0).normal(size=(4, 20)).astype(np.float32)


@pytest.mark.parametrize("flags", [{}, {"sinks": SINKS}, {"window": 33}])
@pytest.mark.parametrize(("backend", "dtype"), cases([("float32",)], [("float32",)], on_gpu=[("bfloat16",)]))
def test_distance_bias(backend, dtype, flags):
    options = {"scale": 0.5, "distance_bias": BIAS, **flags}
    q, pool, tables, lens, start = make_case(
        FLAG_LENS, heads=4, kv_heads=2, head_dim=64, page_size=S, dtype=dtype, query_lens=FLAG_QUERIES
    )
    check_ragged(q, pool, tables, lens, start, backend, **options)
    check_decode(q[:5], pool, tables, lens, backend, **options)


@pytest.mark.quick
@pytest.mark.parametrize("flags", [*FLAGS, {"distance_bias": BIAS}])
def test_plain_reference(flags):
    q, pool, tables, lens, start = make_case(
        [*FLAG_LENS, 0],
        heads=4,
        kv_heads=2,
        head_dim=64,
        page_size=S,
        dtype="float32",
        query_lens=[*FLAG_QUERIES, 0],
    )
    padded = jnp.concatenate([q, jnp.full((3, *q.shape[1:]), jnp.nan)])
    got = reference.ragged_attention(padded, pool, tables, lens, jnp.asarray(start), scale=0.5, **flags)
    want = ragged_attention(q, pool, tables, lens, start, scale=0.5, **flags)
    assert relative_error(got[: start[-1]], want) < TOLERANCE["float32"]
    assert (np.asarray(got)[start[-1] :] == 0).all()
    got = reference.paged_decode(q[:6], pool, tables, lens, scale=0.5, **flags)
    assert relative_error(got, paged_decode(q[:6], pool, tables, lens, scale=0.5, **flags)) < 1e-5


LENS = [1, 1, 77, 16, 64, 65, 128, 300, 1000, 0, 33, 2]
QUERIES = [1, 1, 1, 16, 64, 65, 63, 130, 10, 0, 33, 2]


@pytest.mark.parametrize(
    ("backend", "dtype", "heads", "kv_heads", "head_dim", "padding"),
    cases(
        [(dtype, *heads, 29) for dtype in TOLERANCE for heads in HEADS[:4]] + [("bfloat16", *HEADS[1], 0)],
        [("bfloat16", 4, 2, 128, 5), ("float32", 4, 1, 64, 0)],
    ),
)
def test_ragged_matches_oracle(backend, dtype, heads, kv_heads, head_dim, padding):
    skip_what_this_gpu_lacks(backend, head_dim, S)
    few = slice(-2, None) if backend == "pallas_interpret" else slice(None)
    q, pool, tables, lens, start = make_case(
        LENS[few],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=S,
        dtype=dtype,
        query_lens=QUERIES[few],
    )
    check_ragged(q, pool, tables, lens, start, backend, padding=padding, scale=head_dim**-0.5)


@pytest.mark.quick
@pytest.mark.parametrize(("backend", "dtype"), cases([("float32",), ("bfloat16",)]))
def test_ragged_of_random_batches(backend, dtype):
    rng = np.random.default_rng(3)
    for seed in range(6):
        lens = rng.integers(0, 200, 8)
        query_lens = [int(rng.integers(0, n + 1)) if rng.random() < 0.7 else min(n, 1) for n in lens]
        # The last sequence is as long as it takes to have the same shapes, compiled once.
        lens[-1], query_lens[-1] = 1000, 1000 - sum(query_lens[:-1])
        shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": S, "dtype": dtype}
        q, pool, *rest = make_case(lens.tolist(), query_lens=query_lens, seed=seed, **shape)
        pool = jnp.concatenate([pool, jnp.full((200 - len(pool), *pool.shape[1:]), jnp.nan, pool.dtype)])
        check_ragged(q, pool, *rest, backend, scale=0.25)


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["xla", *NATIVE, *GPU])
def test_one_sequence_with_nan_leaves_the_others_alone(backend):
    q, pool, tables, lens, start = make_case(
        [40, 50, 60], heads=4, kv_heads=2, head_dim=64, page_size=S, dtype="bfloat16", query_lens=[1, 20, 30]
    )
    want = ragged_attention(q, pool, tables, lens, start, scale=0.25)
    pool = pool.at[tables[1, 0]].set(jnp.nan)
    got = np.asarray(
        jitted("ragged_attention", q, pool, tables, lens, jnp.asarray(start), scale=0.25, backend=backend)
    )
    assert np.isnan(got[1:21].astype(np.float32)).all()
    rest = np.r_[0:1, 21:51]
    assert relative_error(got[rest], want[rest]) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("backend", ["xla", *NATIVE, "pallas_interpret", *GPU])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (3, 80), (1, 64)])
def test_write_kv_is_exact_and_drops_padding(backend, kv_heads, head_dim):
    rng = np.random.default_rng(0)
    num_pages = 6
    pool = rng.normal(size=(num_pages, 2, kv_heads, S, head_dim)).astype(jnp.bfloat16)
    k, v = rng.normal(size=(2, 7, kv_heads, head_dim)).astype(jnp.bfloat16)
    slots = np.array([5, 0, num_pages * S - 1, num_pages * S, 11, 10**6, S], np.int32)
    want = pool.copy()
    for t, slot in enumerate(slots):
        if slot < num_pages * S:
            want[slot // S, 0, :, slot % S], want[slot // S, 1, :, slot % S] = k[t], v[t]
    write = jax.jit(functools.partial(ops.write_kv, backend=backend), donate_argnums=0)
    np.testing.assert_array_equal(np.asarray(write(jnp.asarray(pool), k, v, slots)), want)
    np.testing.assert_array_equal(reference.write_kv(jnp.asarray(pool), k, v, slots), want)


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["xla", *NATIVE, "pallas_interpret", *GPU])
def test_copy_blocks_skips_padding(backend):
    pool = np.random.default_rng(0).normal(size=(6, 2, 3, S, 64)).astype(np.float32)
    src, dst = np.array([1, 2, 6, 3, 1], np.int32), np.array([4, 5, 0, 6, 0], np.int32)
    want = pool.copy()
    want[4], want[5], want[0] = pool[1], pool[2], pool[1]
    copy = jax.jit(functools.partial(ops.copy_blocks, backend=backend), donate_argnums=0)
    np.testing.assert_array_equal(np.asarray(copy(jnp.asarray(pool), src, dst)), want)
    np.testing.assert_array_equal(reference.copy_blocks(jnp.asarray(pool), src, dst), want)


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["xla", *NATIVE])
def test_copy_blocks_reads_before_it_writes(backend):
    pool = np.arange(6 * 2 * 1 * 2 * 2, dtype=np.float32).reshape(6, 2, 1, 2, 2)
    got = ops.copy_blocks(jnp.asarray(pool), jnp.asarray([1, 2]), jnp.asarray([2, 3]), backend=backend)
    want = pool.copy()
    want[2], want[3] = pool[1], pool[2]
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.quick
def test_errors_name_what_is_wrong():
    q, pool, tables, lens, _ = make_case([5], heads=4, kv_heads=2, head_dim=16, page_size=8, dtype="float32")
    decode = functools.partial(ops.paged_decode, scale=1.0)
    with pytest.raises(ValueError, match=r"`backend` must be .*got 'cuda'"):
        decode(q, pool, tables, lens, backend="cuda")
    with pytest.raises(ValueError, match=r"the shape of `q` must be .*got \(1, 3, 16\)"):
        decode(q[:, :3], pool, tables, lens)
    with pytest.raises(
        ValueError, match="the dtype of `q` must be float32 with `kv_pages` of float32, got bfloat16"
    ):
        decode(q.astype(jnp.bfloat16), pool, tables, lens)
    with pytest.raises(ValueError, match=r"the shape of `query_start_loc` must be .*got \(3,\)"):
        ops.ragged_attention(q, pool, tables, lens, jnp.zeros(3, jnp.int32), scale=1.0)
    with pytest.raises(ValueError, match=r"the dtype of `src` must be int32.*got float32"):
        ops.copy_blocks(pool, jnp.zeros(2), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="the shape of `kv_pages` must be"):
        ops.write_kv(pool[0], q, q, lens)
    with pytest.raises(ValueError, match=r"the shape of `sinks` must be \(4,\) .*got \(3,\)"):
        decode(q, pool, tables, lens, sinks=jnp.zeros(3))
    with pytest.raises(ValueError, match=r"the shape of `distance_bias` must be .*got \(4,\)"):
        decode(q, pool, tables, lens, distance_bias=jnp.zeros(4))
    with pytest.raises(ValueError, match=r"`soft_cap` must be None with `distance_bias`, got 2.0"):
        decode(q, pool, tables, lens, distance_bias=jnp.zeros((4, 2)), soft_cap=2.0)
    with pytest.raises(ValueError, match=r"head_dim of .* must be one of 64, 80.*got 16"):
        decode(q, pool, tables, lens, backend="pallas_interpret")


@pytest.mark.quick
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="is about a CPU")
def test_without_the_native_library_auto_is_xla(monkeypatch):
    monkeypatch.setattr(native, "_load", lambda: "there was no compiler")
    assert not native.is_built()
    assert ops.resolve_backend("auto") == "xla"
    message = "`attention_backend` must be 'auto' or 'xla' .*got 'native', .* there was no compiler"
    with pytest.raises(ValueError, match=message):
        ops.resolve_backend("native", name="attention_backend")


def test_a_library_of_other_sources_is_not_used(monkeypatch, tmp_path):
    folder = pathlib.Path(native.__file__).parent
    found = {digest(folder)}
    for name in ("a.cc", "a.h", "b.h"):
        (tmp_path / name).write_text(name)
        found.add(digest(tmp_path))
    assert len(found) == 4
    if native.is_built():
        monkeypatch.setattr(native, "digest", lambda folder: digest(tmp_path))
        assert "out of date" in str(native._load.__wrapped__())
        monkeypatch.setattr(native, "digest", lambda folder: None)  # none are beside it
        assert not isinstance(native._load.__wrapped__(), str)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="is about a machine without a GPU")
def test_pallas_without_a_gpu_is_an_error():
    q, pool, tables, lens, _ = make_case([5], heads=4, kv_heads=2, head_dim=64, page_size=16, dtype="float32")
    with pytest.raises(
        ValueError, match=r"`attention_backend` must be .* this machine, whose device is 'cpu', got 'pallas'"
    ):
        ops.resolve_backend("pallas", name="attention_backend")
    with pytest.raises(
        ValueError, match=r"`backend` must be .* this machine, whose device is 'cpu', got 'pallas'"
    ):
        ops.paged_decode(q, pool, tables, lens, scale=1.0, backend="pallas")
    assert ops.resolve_backend("auto") == ("native" if native.is_built() else "xla")
    assert ops.resolve_backend("pallas_interpret") == "pallas_interpret"


CHECKED = {
    "block_tables": np.array([[1, 2], [3, 0]]),
    "context_lens": np.array([20, 5]),
    "query_start_loc": np.array([0, 1, 4]),
    "slot_mapping": np.array([35, 48, 49, 50, 64, 64]),
    "src": np.array([1, 4]),
    "dst": np.array([2, 4]),
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_tables", [[1, 4], [3, 0]], "a page in a block table is outside of the pool"),
        ("block_tables", [[1, -1], [3, 0]], "a page in a block table is outside of the pool"),
        ("context_lens", [33, 5], "longer than its block table"),
        ("context_lens", [20, 2], "more queries than tokens"),
        ("query_start_loc", [0, 3, 2], "decreases"),
        ("slot_mapping", [35, 35], "a slot is written twice"),
        ("slot_mapping", [-1], "a slot is negative"),
        ("dst", [1, 4], "both read and written"),
        ("dst", [-1, 4], "a page to copy is negative"),
    ],
)
def test_check_inputs(name, value, message):
    ops.check_inputs(4, 16, **CHECKED)
    with pytest.raises(AssertionError, match=message):
        ops.check_inputs(4, 16, **{**CHECKED, name: np.array(value)})


def bad_calls():
    """What each op refuses when it is called with arrays; a change of a call that is right."""
    nan, inf = float("nan"), float("inf")
    for name, values in {
        "scale": [nan, inf],
        "window": [0, -1, 2.5],
        "soft_cap": [0.0, -5.0, nan, inf],
        "context_lens": [[-1, 5], [33, 5]],
        "block_tables": [[[1, 4], [3, 0]], [[-1, 2], [3, 0]]],
        "query_start_loc": [[0, 3, 2], [-1, 1, 4], [0, 1, 9]],
        "kv_pages": [np.zeros((4, 2, 0, 16, 32)), np.zeros((4, 2, 2, 16, 32), np.int16)],
        "slot_mapping": [[-1, 5], [5, 5]],
        "src": [[-1, 1]],
        "dst": [[2, -3], [2, 2]],
    }.items():
        for value in values:
            yield name, value
    yield "block_tables", np.zeros((2, 0), np.int32)


@pytest.mark.thorough
@pytest.mark.quick
@pytest.mark.parametrize("backend", ["xla", "native", "reference"])
@pytest.mark.parametrize(("name", "value"), bad_calls())
def test_arguments_that_no_backend_takes(name, value, backend):
    if backend == "native" and not native.is_built():
        pytest.skip(str(native.problem()))
    pool = np.zeros((4, 2, 2, 16, 32), np.float32)
    attention = {
        "kv_pages": pool,
        "block_tables": [[1, 2], [3, 0]],
        "context_lens": [20, 5],
        "scale": 0.2,
        "window": None,
        "soft_cap": None,
    }
    calls = {
        ops.ragged_attention: attention | {"q": np.zeros((6, 4, 32)), "query_start_loc": [0, 1, 4]},
        ops.paged_decode: attention | {"q": np.zeros((2, 4, 32))},
        ops.write_kv: {
            "kv_pages": pool,
            "k": np.zeros((2, 2, 32)),
            "v": np.zeros((2, 2, 32)),
            "slot_mapping": [5, 64],
        },
        ops.copy_blocks: {"kv_pages": pool, "src": [1, 2], "dst": [2, 3]},
    }
    num_refused = 0
    for op, right in calls.items():
        if name not in right:
            continue

        def call(args, op=op):
            kinds = {list: np.int32, np.ndarray: None}
            arrays = {k: jnp.asarray(x, kinds[type(x)]) if type(x) in kinds else x for k, x in args.items()}
            arrays |= {k: arrays[k].astype("float32") for k in ("q", "k", "v") if k in arrays}
            return op(**arrays, backend=backend)

        call(right)
        with pytest.raises(ValueError, match=rf"{name}.* must .*got "):
            call(right | {name: value})
        num_refused += 1
    assert num_refused >= 1


def test_entries_that_nobody_reads_may_be_anything():
    q, pool, tables = jnp.zeros((2, 4, 32)), jnp.zeros((4, 2, 2, 16, 32)), jnp.array([[-9, 2], [3, 99]])
    ops.paged_decode(q, pool, tables, jnp.array([32, 16]), scale=1.0, window=16, backend="xla")


@pytest.mark.parametrize("kind", ["int8", "uint8"])
def test_numbers_beyond_the_range_of_float16(kind):
    """A quantised pool holds them, whatever the dtype of the queries."""
    pool = jnp.zeros((2, 2, 1, 16, 33), kind)
    k = jnp.full((1, 1, 32), -65400, jnp.float16)
    pool = ops.write_kv(pool, k, jnp.ones_like(k), jnp.array([16]), backend="xla")
    args = jnp.ones((1, 1, 32), jnp.float16), pool, jnp.array([[1]]), jnp.array([1])
    for backend in ("xla", "reference"):
        assert np.all(np.asarray(ops.paged_decode(*args, scale=0.1, backend=backend)) == 1), backend

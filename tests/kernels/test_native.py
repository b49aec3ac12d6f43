"""What only the native backend can get wrong: odd shapes, joined splits, threads, indices out of range."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import OUT_OF_POOL, TOLERANCE, make_case, paged_decode, ragged_attention, relative_error

from jax_paged.pallas_kernels import native, ops
from jax_paged.pallas_kernels.native import attention

pytestmark = pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")

WIDTHS = (256, 32, 16, 8, 4)


def random_case(seed):
    """Returns the arguments of make_case and of an op, and the widest vectors to use."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.choice([1, 1, 2, 3, 4])), int(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16]))
    head_dim = int(rng.choice([2, 8, 10, 16, 32, 48, 64, 80, 96, 100, 128, 256]))
    num_seqs = int(rng.integers(1, 7))
    longest = int(rng.choice([8, 70, 200, 600], p=[0.3, 0.4, 0.25, 0.05]))
    lens = (rng.integers(1, longest + 1, num_seqs) * (rng.random(num_seqs) < 0.9)).tolist()
    kind = rng.random(num_seqs)
    queries = [
        int(rng.integers(0, n + 1)) if x < 0.5 else min(n, 1 if x < 0.8 else 2)
        for n, x in zip(lens, kind, strict=True)
    ]
    shape = {
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": int(rng.choice([1, 3, 8, 16, 16, 16, 32, 64, 128])),
        "dtype": str(rng.choice(list(TOLERANCE), p=[0.6, 0.3, 0.1])),
        "seed": seed,
    }
    options = {"scale": float(rng.choice([head_dim**-0.5, 1.0, 0.05]))}
    if rng.random() < 0.4:
        options["window"] = int(rng.integers(1, longest + 2))
    if rng.random() < 0.3:
        options["soft_cap"] = float(rng.choice([1.0, 5.0, 50.0]))
    elif rng.random() < 0.3:
        size = (kv_heads * group, int(rng.integers(1, longest + 2)))
        options["distance_bias"] = rng.normal(size=size).astype(np.float32)
    if rng.random() < 0.3:
        sinks = rng.normal(size=kv_heads * group) * 5
        options["sinks"] = np.where(rng.random(len(sinks)) < 0.3, -np.inf, sinks).astype(np.float32)
    if rng.random() < 0.25:
        shape["parts"], options["value_dim"] = 1, int(rng.integers(1, head_dim + 1))
    return lens, queries, shape, options, int(rng.choice(WIDTHS))


def check(seed):
    """Checks a random batch, as a decode or as a ragged one, with nothing but NaN where nobody looks."""
    lens, queries, shape, options, width = random_case(seed)
    rng = np.random.default_rng([seed, 1])
    is_decode = seed % 3 == 0
    if is_decode:
        queries = [1] * len(lens)
    q, pool, tables, lens_array, start = make_case(lens, query_lens=queries, **shape)
    pool, tables = np.array(pool), np.array(tables)
    for b, (n, m) in enumerate(zip(lens, queries, strict=True)):
        gone = max(0, n - m + 1 - options.get("window", n + 1)) // shape["page_size"]
        pool[tables[b, :gone]] = np.nan
        tables[b, :gone] = rng.choice([-1, 0, OUT_OF_POOL], gone)
    # Outside the window and in rows that no sequence has, the oracle must not look either.
    safe = np.where((tables < 0) | (tables >= len(pool)), 0, tables)
    oracle = paged_decode if is_decode else ragged_attention
    rest = () if is_decode else (start,)
    want = oracle(q, pool, safe, lens, *rest, **options)
    if is_decode:
        got = attention.paged_decode(q, pool, tables, lens_array, max_width=width, **options)
    else:
        padded = np.concatenate([q, np.full((5, *q.shape[1:]), np.nan, q.dtype)])
        got = attention.ragged_attention(padded, pool, tables, lens_array, start, max_width=width, **options)
        got = np.asarray(got)
        assert (got[start[-1] :] == 0).all()
        got = got[: start[-1]]
    if want.size:
        tolerance = TOLERANCE[shape["dtype"]]
        assert relative_error(got, want) < tolerance, (lens, queries, shape, options, width)


def jax_arrays(options):
    return {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(4))
def test_random_batches(part):
    for seed in range(part * 40, part * 40 + 40):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_batches(part):
    for seed in range(part * 500, part * 500 + 500):
        check(seed)
        if seed % 50 == 0:
            jax.clear_caches()  # every shape is compiled anew


@functools.partial(jax.jit, static_argnames=("op", "scale", "window", "soft_cap", "max_width"))
def jitted(op, *args, **options):
    return getattr(attention, op)(*args, **options)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("flags", [{}, {"window": 1500, "sinks": np.array([1.0, -3.0, -np.inf, 9.0])}])
def test_splits_are_joined(width, flags):
    """Contexts of several splits, in decode and in prefill; one ends where a split does."""
    lens, queries = [5000, 1024, 513, 4096], [1, 1, 1, 70]
    q, pool, tables, lens_array, start = make_case(
        lens, heads=4, kv_heads=2, head_dim=32, page_size=16, dtype="float32", query_lens=queries
    )
    arrays = jax_arrays(flags)
    got = jitted("ragged_attention", q, pool, tables, lens_array, start, scale=0.3, max_width=width, **arrays)
    want = ragged_attention(q, pool, tables, lens, start, scale=0.3, **flags)
    assert relative_error(got, want) < TOLERANCE["float32"]


def check_prefill(lens, queries, shape, change=None, **options):
    """Checks a prefill in bfloat16, which goes by tiles where the processor has them.

    Args:
        change: Changes the keys of a sequence [context, kv_heads, head_dim] in place.
    """
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16", **shape}
    q, pool, tables, lens_array, start = make_case(lens, query_lens=queries, **shape)
    if change is not None:
        pool, size = np.array(pool), shape["page_size"]
        for table, n in zip(np.array(tables), lens, strict=True):
            slots = table[np.arange(n) // size], 0, slice(None), np.arange(n) % size
            keys = pool[slots].astype(np.float32)
            change(keys)
            pool[slots] = keys.astype(pool.dtype)
    got = attention.ragged_attention(q, pool, tables, lens_array, start, **jax_arrays(options))
    want = ragged_attention(q, pool, tables, lens, start, **options)
    assert relative_error(got, want) < TOLERANCE["bfloat16"], options


@pytest.mark.parametrize("page_size", [16, 128])
def test_windows_begin_anywhere_in_a_tile(page_size):
    """The first block of a window ends where others do, and has any number of tokens."""
    for window in (1, 15, 34, 47, 50, 63, 80, 98):
        check_prefill([300, 90, 2080], [40, 90, 50], {"page_size": page_size}, scale=1.0, window=window)


def grow(factor):
    def change(keys):
        keys *= factor(np.arange(len(keys), dtype=np.float32))[:, None, None]

    return change


# The largest score of a lane grows with these: by less than is worth a rescaling each time, by jumps at the
# begin, in the middle and at the end of blocks, in both directions, and beyond what exp(score) could hold.
GROWTH = {
    "slowly": lambda t: 0.2 + t / 400,
    "by jumps": lambda t: np.where(t < 64, 0.01, np.where(t < 127, 3, np.where(t < 128, 60, 0.5))),
    "falling": lambda t: 60 / (1 + t),
    "in waves": lambda t: 1 + 20 * np.sin(t / 30) ** 2,
    "far": lambda t: 10.0 ** (t // 64 % 4),
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("flags", [{}, {"window": 150}, {"soft_cap": 30.0}])
def test_scores_grow(growth, flags):
    """Sums are brought to a larger score rarely, and then they must be."""
    check_prefill([700, 65, 2300], [200, 65, 50], {}, grow(GROWTH[growth]), scale=0.5, **flags)


@pytest.mark.parametrize("group", [1, 7, 16])
@pytest.mark.parametrize("flags", [{}, {"window": 77, "soft_cap": 5.0}, {"distance_bias": 90}])
def test_items_of_many_lanes(group, flags):
    """Rows fill items of 256 lanes, or leave some of a column, or some columns of four."""
    rng = np.random.default_rng(group)
    if "distance_bias" in flags:
        flags = {"distance_bias": rng.normal(size=(2 * group, 90)).astype(np.float32)}
    sinks = np.where(np.arange(2 * group) % 3 == 1, -np.inf, rng.normal(size=2 * group)).astype(np.float32)
    most = 256 // group
    for rows in {2, 80 // group + 1, most, most + 3}:
        shape = {"heads": 2 * group, "head_dim": 96}
        check_prefill([rows, rows + 300], [rows] * 2, shape, scale=0.3, sinks=sinks, **flags)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (16, 1, 32), (6, 2, 40)])
def test_a_row_is_the_same_in_every_batch(heads, kv_heads, head_dim, width):
    """To the bit: alone or among others, whole or in chunks, and every time."""
    lens, queries = [700, 90, 1100, 20, 2300], [1, 90, 1, 20, 200]
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": 16, "dtype": "float32"}
    q, pool, tables, lens_array, start = make_case(lens, query_lens=queries, **shape)

    def attend(q, tables, lens, start):
        start = jnp.asarray(start, jnp.int32)
        return np.asarray(
            attention.ragged_attention(q, pool, tables, lens, start, scale=0.2, window=2200, max_width=width)
        )

    together = attend(q, tables, lens_array, start)
    for _ in range(5):
        np.testing.assert_array_equal(attend(q, tables, lens_array, start), together)
    for b, (n, m) in enumerate(zip(lens, queries, strict=True)):
        mine = slice(int(start[b]), int(start[b]) + m)
        alone = attend(q[mine], tables[b : b + 1], lens_array[b : b + 1], [0, m])
        np.testing.assert_array_equal(alone, together[mine])
        if m > 1:
            cut = m // 3 + 1
            chunk = attend(q[mine][:cut], tables[b : b + 1], jnp.asarray([n - m + cut], jnp.int32), [0, cut])
            np.testing.assert_array_equal(chunk, together[mine][:cut])
            chunk = attend(q[mine][cut:], tables[b : b + 1], lens_array[b : b + 1], [0, m - cut])
            np.testing.assert_array_equal(chunk, together[mine][cut:])


def test_no_backend_is_more_exact():
    """Scores of all sizes, long sums: the error is no larger than XLA's."""
    lens = [3000, 900]
    q, pool, tables, lens_array, start = make_case(
        lens, heads=4, kv_heads=2, head_dim=128, page_size=16, dtype="float32", query_lens=[1, 40]
    )
    want = ragged_attention(q, pool, tables, lens, start, scale=1.0)
    error = {
        backend: relative_error(
            ops.ragged_attention(q, pool, tables, lens_array, jnp.asarray(start), scale=1.0, backend=backend),
            want,
        )
        for backend in ("native", "xla")
    }
    assert error["native"] < 1.5 * error["xla"]


def test_the_pool_stays_where_it_is():
    def step(pool, k, slots, src, dst):
        pool = ops.write_kv(pool, k, k, slots, backend="native")
        return ops.copy_blocks(pool, src, dst, backend="native")

    pool = jnp.zeros((40, 2, 2, 16, 64))
    k, page = jnp.ones((3, 2, 64)), jnp.asarray([1], jnp.int32)
    args = (k, jnp.asarray([16, 17, 10**6], jnp.int32), page, page + 1)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, *args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes / 10
    where = pool.unsafe_buffer_pointer()
    pool = compiled(pool, *args)
    assert pool.unsafe_buffer_pointer() == where
    assert pool.sum() == 2 * 2 * 2 * 2 * 64


def test_a_pool_that_is_kept_is_not_written_to():
    pool = jnp.zeros((4, 2, 1, 16, 8))
    k = jnp.ones((1, 1, 8))
    write = jax.jit(functools.partial(ops.write_kv, backend="native"))
    assert write(pool, k, k, jnp.asarray([20], jnp.int32)).sum() == 16
    assert pool.sum() == 0


BATCH = {
    "tables": np.array([[1, 2], [3, OUT_OF_POOL]]),
    "lens": np.array([20, 5]),
    "starts": np.array([0, 1, 4]),
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tables", [[1, 2], [4, 0]], "block_tables has page 4 in sequence 1; the pool has 4"),
        ("tables", [[1, -1], [3, 0]], "block_tables has page -1 in sequence 0"),
        ("tables", [[2**31 - 1, 2], [3, 0]], "block_tables has page 2147483647"),
        ("lens", [33, 5], "longer than the block table of sequence 0"),
        ("lens", [20, -5], "context_lens is negative at sequence 1"),
        ("lens", [20, 2], "more queries than tokens in sequence 1"),
        ("starts", [0, 3, 2], "query_start_loc decreases at sequence 1"),
        ("starts", [-1, 1, 2], "query_start_loc leaves the rows of q"),
        ("starts", [0, 1, 9], "query_start_loc leaves the rows of q"),
    ],
)
def test_an_index_out_of_range_is_an_error_and_no_crash(name, value, message):
    pool, q = jnp.ones((4, 2, 1, 16, 8)), jnp.ones((4, 2, 8))

    # Outside of a trace the op would look at them itself.
    op = jax.jit(functools.partial(ops.ragged_attention, scale=1.0, window=19, backend="native"))

    def attend(tables, lens, starts):
        return jax.block_until_ready(
            op(q, pool, *(jnp.asarray(x, jnp.int32) for x in (tables, lens, starts)))
        )

    np.testing.assert_allclose(attend(**BATCH), 1)
    with pytest.raises(Exception, match=message):
        attend(**{**BATCH, name: value})
    np.testing.assert_allclose(attend(**BATCH), 1)


def test_slots_and_pages_out_of_range_are_errors():
    pool, k = jnp.ones((4, 2, 1, 16, 8)), jnp.ones((1, 1, 8))
    write, copy = (jax.jit(functools.partial(op, backend="native")) for op in (ops.write_kv, ops.copy_blocks))
    with pytest.raises(Exception, match="slot_mapping has a negative slot"):
        jax.block_until_ready(write(pool, k, k, jnp.asarray([-1], jnp.int32)))
    pages = jnp.asarray([-1], jnp.int32), jnp.asarray([2], jnp.int32)
    for src, dst in (pages, pages[::-1]):
        with pytest.raises(Exception, match="a page to copy is negative"):
            jax.block_until_ready(copy(pool, src, dst))


def test_other_dtypes_are_errors():
    pool, index = jnp.ones((4, 2, 1, 16, 8), jnp.int16), jnp.asarray([1], jnp.int32)
    with pytest.raises(ValueError, match=r"the dtype of `kv_pages` must be one of float32, .*got int16"):
        ops.copy_blocks(pool, index, index, backend="native")

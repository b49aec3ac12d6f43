"""The public ops against a float64 oracle: permuted tables, NaN in everything dead, skewed lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import paged_decode, ragged_attention

from jax_paged.pallas_kernels import ops

# Relative norm error: a few units in the last place of the dtype, times the square root of the sums' length.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 5e-3}


def make_case(lens, *, heads, kv_heads, head_dim, page_size, dtype, query_lens=None, seed=0):
    """Makes a pool whose every dead slot is NaN, block tables over permuted pages, and queries."""
    rng = np.random.default_rng(seed)
    columns = max(1, -(-max(lens) // page_size) + 2)
    needed = sum(-(-n // page_size) for n in lens)
    num_pages = needed + 5
    pool = np.full((num_pages, 2, kv_heads, page_size, head_dim), np.nan, np.float32)
    pages = iter(1 + rng.permutation(num_pages - 1))
    tables = np.zeros((len(lens), columns), np.int32)
    for b, n in enumerate(lens):
        for column in range(-(-n // page_size)):
            page = tables[b, column] = next(pages)
            used = min(page_size, n - column * page_size)
            pool[page, :, :, :used] = rng.normal(size=(2, kv_heads, used, head_dim))
    query_lens = [1] * len(lens) if query_lens is None else query_lens
    start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = rng.normal(size=(int(start[-1]), heads, head_dim))
    q, pool = jnp.asarray(q, dtype), jnp.asarray(pool, dtype)
    return q, pool, jnp.asarray(tables), jnp.asarray(lens, jnp.int32), start


def relative_error(got, want):
    got = np.asarray(got).astype(np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


S = 16
EDGE_LENS = [1, S - 1, S, S + 1, 2 * S, 63, 64, 65, 127, 128, 129, 300, 0, 1000, 3000, 0, 5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 64), (16, 1, 128), (6, 3, 80)]
)
def test_decode_matches_oracle(dtype, heads, kv_heads, head_dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": S}
    q, pool, tables, lens, _ = make_case(EDGE_LENS, dtype=dtype, **shape)
    got = jax.jit(ops.paged_decode, static_argnames="scale")(q, pool, tables, lens, scale=head_dim**-0.5)
    want = paged_decode(q, pool, tables, lens, scale=head_dim**-0.5)
    assert relative_error(got, want) < TOLERANCE[dtype]
    assert got.dtype == jnp.dtype(dtype)
    assert (np.asarray(got)[np.asarray(lens) == 0] == 0).all()


@pytest.mark.parametrize("num_seqs", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("page_size", [4, 16, 32, 64])
def test_decode_of_any_batch_and_page_size(num_seqs, page_size):
    lens = np.random.default_rng(num_seqs).zipf(1.3, size=num_seqs).clip(1, 700).tolist()
    q, pool, tables, lens, _ = make_case(
        lens, heads=4, kv_heads=2, head_dim=32, page_size=page_size, dtype="float32"
    )
    got = ops.paged_decode(q, pool, tables, lens, scale=0.2)
    assert relative_error(got, paged_decode(q, pool, tables, lens, scale=0.2)) < 1e-5


@pytest.mark.parametrize(("window", "soft_cap"), [(None, 5.0), (7, None), (100, None), (33, 2.0)])
def test_window_and_soft_cap(window, soft_cap):
    lens, query_lens = [1, 40, 130, 260, 17], [1, 40, 65, 1, 3]
    q, pool, tables, lens, start = make_case(
        lens, heads=4, kv_heads=2, head_dim=32, page_size=S, dtype="float32", query_lens=query_lens
    )
    flags = {"scale": 1.0, "window": window, "soft_cap": soft_cap}
    got = ops.ragged_attention(q, pool, tables, lens, jnp.asarray(start), **flags)
    assert relative_error(got, ragged_attention(q, pool, tables, lens, start, **flags)) < 1e-5
    got = ops.paged_decode(q[:5], pool, tables, lens, **flags)
    assert relative_error(got, paged_decode(q[:5], pool, tables, lens, **flags)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("padding", [0, 29])
def test_ragged_matches_oracle(dtype, padding):
    lens = [1, 1, 77, 16, 64, 65, 128, 300, 1000, 0, 33, 2]
    query_lens = [1, 1, 1, 16, 64, 65, 63, 130, 10, 0, 33, 2]
    q, pool, tables, lens, start = make_case(
        lens, heads=8, kv_heads=2, head_dim=64, page_size=S, dtype=dtype, query_lens=query_lens
    )
    # Padding rows hold NaN: they come out 0 and disturb nobody.
    q = jnp.concatenate([q, jnp.full((padding, *q.shape[1:]), jnp.nan, q.dtype)])
    got = jax.jit(ops.ragged_attention, static_argnames="scale")(
        q, pool, tables, lens, jnp.asarray(start), scale=0.125
    )
    want = ragged_attention(q[: start[-1]], pool, tables, lens, start, scale=0.125)
    assert relative_error(got[: start[-1]], want) < TOLERANCE[dtype]
    assert (np.asarray(got)[start[-1] :] == 0).all()


def test_ragged_of_random_batches():
    rng = np.random.default_rng(3)
    for seed in range(12):
        num_seqs = int(rng.integers(1, 9))
        lens = rng.integers(1, 200, num_seqs)
        query_lens = [int(rng.integers(1, n + 1)) if rng.random() < 0.7 else 1 for n in lens]
        q, pool, tables, lens, start = make_case(
            lens.tolist(), heads=4, kv_heads=2, head_dim=16, page_size=8, dtype="float32",
            query_lens=query_lens, seed=seed,
        )  # fmt: skip
        got = ops.ragged_attention(q, pool, tables, lens, jnp.asarray(start), scale=0.25)
        assert relative_error(got, ragged_attention(q, pool, tables, lens, start, scale=0.25)) < 1e-5


def test_one_sequence_with_nan_leaves_the_others_alone():
    q, pool, tables, lens, start = make_case(
        [40, 50, 60], heads=4, kv_heads=2, head_dim=16, page_size=8, dtype="float32", query_lens=[1, 20, 30]
    )
    want = ragged_attention(q, pool, tables, lens, start, scale=0.25)
    pool = pool.at[tables[1, 0]].set(jnp.nan)
    got = np.asarray(ops.ragged_attention(q, pool, tables, lens, jnp.asarray(start), scale=0.25))
    assert np.isnan(got[1:21]).all()
    rest = np.r_[0:1, 21:51]
    assert relative_error(got[rest], want[rest]) < 1e-5


def test_write_kv_is_exact_and_drops_padding():
    rng = np.random.default_rng(0)
    pages, kv_heads, page_size, head_dim = 6, 3, 4, 8
    pool = rng.normal(size=(pages, 2, kv_heads, page_size, head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, 7, kv_heads, head_dim)).astype(np.float32)
    slots = np.array([5, 0, 23, pages * page_size, 11, 10**6, 8], np.int32)
    want = pool.copy()
    for t, slot in enumerate(slots):
        if slot < pages * page_size:
            want[slot // page_size, 0, :, slot % page_size] = k[t]
            want[slot // page_size, 1, :, slot % page_size] = v[t]
    got = jax.jit(ops.write_kv, donate_argnums=0)(jnp.asarray(pool), k, v, slots)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_copy_blocks_reads_before_it_writes_and_skips_padding():
    pool = np.arange(6 * 2 * 1 * 2 * 2, dtype=np.float32).reshape(6, 2, 1, 2, 2)
    src, dst = np.array([1, 2, 6, 3], np.int32), np.array([2, 3, 4, 6], np.int32)
    want = pool.copy()
    want[2], want[3] = pool[1], pool[2]
    got = ops.copy_blocks(jnp.asarray(pool), jnp.asarray(src), jnp.asarray(dst))
    np.testing.assert_array_equal(np.asarray(got), want)


def test_errors_name_what_is_wrong():
    q, pool, tables, lens, _ = make_case([5], heads=4, kv_heads=2, head_dim=16, page_size=8, dtype="float32")
    with pytest.raises(ValueError, match=r"backend is 'cuda'; allowed"):
        ops.paged_decode(q, pool, tables, lens, scale=1.0, backend="cuda")  # pyright: ignore
    with pytest.raises(ValueError, match=r"q has shape \(1, 3, 16\)"):
        ops.paged_decode(q[:, :3], pool, tables, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"q has dtype bfloat16"):
        ops.paged_decode(q.astype(jnp.bfloat16), pool, tables, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"query_start_loc has shape \(3,\)"):
        ops.ragged_attention(q, pool, tables, lens, jnp.zeros(3, jnp.int32), scale=1.0)
    with pytest.raises(ValueError, match=r"kv_pages has shape"):
        ops.write_kv(pool[0], q, q, lens)

"""Sequences that attend to their leading pages together, on every backend against the float64 oracle."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import (
    POOL_DTYPES,
    TOLERANCE,
    make_case,
    quantized,
    ragged_attention,
    relative_error,
    tiled,
)

from jax_paged.pallas_kernels import native, ops
from jax_paged.pallas_kernels.gpu.shared_tiles import shared_tiles
from jax_paged.pallas_kernels.native import attention

pytestmark = pytest.mark.thorough

IF_BUILT = pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
# Of the native backend, those of every variant: tiles, AVX-512 with bfloat16 and without, AVX2, and any
# processor's.
WIDTHS = (256, 32, 16, 8, 4)
NATIVE = [pytest.param(f"native {width}", marks=IF_BUILT) for width in WIDTHS]
S = 16
SINKS = np.array([0.5, -3.0, 60.0, -np.inf, 4.0, 0, 1, 2], np.float32)
BIAS = np.random.default_rng(0).normal(size=(8, 700)).astype(np.float32)
FLAGS: list[dict[str, Any]] = [{}, {"soft_cap": 3.0, "sinks": SINKS}, {"distance_bias": BIAS, "sinks": SINKS}]


@functools.partial(jax.jit, static_argnames=("backend", "scale", "soft_cap"))
def attend(backend: str, q, pool, tables, lens, start, shared, **options):
    """Attends as a decode if `start` is None."""
    name, _, width = backend.partition(" ")
    if width:
        options["max_width"] = int(width)
    else:
        options["backend"] = name
    module = attention if width else ops
    rest = () if start is None else (start,)
    op = module.paged_decode if start is None else module.ragged_attention
    return op(q, pool, tables, lens, *rest, shared_blocks=shared, **options)


def share(tables: np.ndarray, prefixes: list[tuple[int, list[int]]]) -> np.ndarray:
    """Lets sequences begin with the pages of the first of them, in place; returns shared_blocks."""
    shared = np.zeros(len(tables), np.int32)
    for num_pages, seqs in prefixes:
        tables[seqs, :num_pages] = tables[seqs[0], :num_pages]
        shared[seqs] = num_pages
    return shared


def check(
    backend: str,
    lens: list[int],
    prefixes: list[tuple[int, list[int]]],
    *,
    query_lens: list[int] | None = None,
    ended: tuple[int, ...] = (),
    kind: str | None = None,
    flags: dict[str, Any] | None = None,
    **shape: Any,
) -> None:
    """Checks a batch.

    Args:
        lens: Contexts.
        prefixes: How many pages which sequences share.
        query_lens: Queries; None for a decode.
        ended: Sequences without a context, though they share.
        kind: What the pool is quantised to.
        flags: Options of the op.
        shape: Of the case.
    """
    shape = {"heads": 8, "kv_heads": 4, "head_dim": 64, "page_size": S, "dtype": "float32"} | shape
    q, pool, tables, lens_array, start = make_case(lens, query_lens=query_lens, **shape)
    tables, lens_array = np.array(tables), np.array(lens_array)
    shared = share(tables, prefixes)
    lens_array[list(ended)] = 0
    safe = np.where(tables >= len(pool), 0, tables)
    held = pool
    if kind is not None:
        rows, held = quantized(np.asarray(pool).astype(np.float32), kind)
        pool = jnp.asarray(tiled(rows))
    options = {"scale": 0.3, **(flags or {})}
    want = ragged_attention(q, held, safe, lens_array, start, **options)
    arrays = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    starts = None if query_lens is None else jnp.asarray(start)
    got = attend(
        backend, q, pool, jnp.asarray(tables), jnp.asarray(lens_array), starts, jnp.asarray(shared), **arrays
    )
    assert got.dtype == q.dtype
    # Each row by itself: one that is wrong among many would hardly show in the norm of all.
    for row in range(len(want)):
        assert relative_error(got[row], want[row]) < 3 * TOLERANCE[q.dtype.name], row


def lens_of(num_pages: int, count: int, seed: int = 0) -> list[int]:
    return [num_pages * S + int(n) for n in np.random.default_rng(seed).integers(1, 60, count)]


BACKENDS = ["reference", "xla", *NATIVE]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode(backend: str, dtype: str, flags: dict[str, Any]) -> None:
    """Two prefixes and sequences of their own; of one prefix a sequence has ended, of one all but one."""
    prefixes = [(9, [0, 3, 4, 8, 9, 5]), (7, [1, 6, 7]), (2, [2, 10])]
    check(backend, lens_of(9, 13), prefixes, ended=(4, 10, 12), dtype=dtype, flags=flags)


PALLAS = ["pallas_interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("heads", "flags"), [((4, 2, 64), FLAGS[0]), ((8, 1, 64), FLAGS[1])])
@pytest.mark.parametrize("backend", PALLAS)
def test_decode_in_pallas(backend: str, heads: tuple[int, int, int], flags: dict[str, Any]) -> None:
    """More rows than the kernel has for one sequence; some share, one has ended, some are by themselves."""
    shape = dict(zip(("heads", "kv_heads", "head_dim"), heads, strict=True), dtype="bfloat16")
    prefixes = [(4, [0, 2, 3, 5, 6, 8, 9, 10, 11, 12]), (2, [1, 4, 13])]
    check(backend, lens_of(4, 14), prefixes, ended=(3, 7), flags=flags, **shape)


@pytest.mark.quick
@pytest.mark.parametrize("backend", BACKENDS)
def test_decodes_of_a_mixed_step(backend: str) -> None:
    """A sequence that has several queries beside those that share takes no part, whatever it shares."""
    query_lens = [1, 5, 1, 1, 0, 1, 30, 1]
    check(backend, lens_of(6, 8), [(6, [0, 2, 3, 5, 7])], query_lens=query_lens, flags=FLAGS[1])


@pytest.mark.parametrize("backend", NATIVE)
def test_a_row_with_several_queries_is_not_looked_at(backend: str) -> None:
    check(backend, lens_of(6, 6), [(6, [0, 1, 2, 3, 4, 5])], query_lens=[1, 7, 1, 1, 0, 1])


@pytest.mark.parametrize("kind", POOL_DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised_pools(backend: str, kind: str) -> None:
    check(backend, lens_of(9, 8), [(9, [0, 3, 4, 6, 7])], kind=kind, flags=FLAGS[1])
    if backend.startswith("native"):
        check(backend, lens_of(9, 8), [(9, [0, 3, 4, 6, 7])], kind=kind, dtype="bfloat16")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 32), (8, 1, 80), (12, 3, 100), (16, 1, 128)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads(backend: str, heads: int, kv_heads: int, head_dim: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(backend, lens_of(5, 7), [(5, [6, 0, 1, 2]), (5, [3, 4])], **shape)


@pytest.mark.parametrize("count", [2, 17, 33, 65])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_rows(backend: str, count: int) -> None:
    """As many as fill tiles, and one more."""
    check(backend, lens_of(3, count), [(3, list(range(count)))], heads=4, kv_heads=2, head_dim=32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_pages(backend: str, dtype: str) -> None:
    """Parts that end where a block of the softmax, an item, or a split does, and beside it."""
    # Each number is a program of its own.
    for num_pages in (1, 3, 4, 5, 31, 32, 33, 65) if backend.startswith("native") else (3, 65):
        check(
            backend, [num_pages * S + n for n in (1, 600, 16, 17)], [(num_pages, [0, 1, 2, 3])], dtype=dtype
        )


@pytest.mark.parametrize("page_size", [1, 4, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_page_sizes(backend: str, page_size: int) -> None:
    lens = [3 * page_size + n for n in (1, 70, 5, 33, 9)]
    check(backend, lens, [(3, [4, 1, 2]), (2, [0, 3])], page_size=page_size)


@pytest.mark.parametrize("backend", ["xla", *NATIVE[:1]])
def test_without_prefixes_nothing_changes(backend: str) -> None:
    q, pool, tables, lens, _ = make_case(
        lens_of(5, 6), heads=8, kv_heads=4, head_dim=64, page_size=S, dtype="float32"
    )
    nothing = jnp.zeros(6, jnp.int32)
    got, want = (attend(backend, q, pool, tables, lens, None, x, scale=0.2) for x in (nothing, None))
    np.testing.assert_array_equal(got, want)
    # A sequence whose prefix nobody has is by itself too.
    alone = attend(
        backend, q, pool, tables, lens, None, nothing.at[jnp.array([1, 4])].set(jnp.array([5, 3])), scale=0.2
    )
    np.testing.assert_array_equal(alone, want)


@pytest.mark.quick
@pytest.mark.parametrize("backend", ["xla", *NATIVE])
def test_nan_in_one_row_stays_there(backend: str) -> None:
    q, pool, tables, lens, _ = make_case(
        lens_of(5, 6), heads=8, kv_heads=4, head_dim=64, page_size=S, dtype="bfloat16"
    )
    tables = np.array(tables)
    shared = share(tables, [(5, [0, 1, 2, 3, 4])])
    args = jnp.asarray(tables), lens, None, jnp.asarray(shared)
    want = np.asarray(attend(backend, q, pool, *args, scale=0.2), np.float32)
    got = np.asarray(attend(backend, q.at[2].set(jnp.nan), pool, *args, scale=0.2), np.float32)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))
    # A page of one row alone.
    got = np.asarray(attend(backend, q, pool.at[tables[3, 5]].set(jnp.nan), *args, scale=0.2), np.float32)
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(want, 3, 0))


@pytest.mark.quick
@pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
def test_native_threads_and_heads_in_parts() -> None:
    """Few rows are cut by heads: each part waits for the shared items of its heads."""
    check("native 256", lens_of(40, 2), [(40, [0, 1])], heads=16, kv_heads=8)
    check("native 256", lens_of(40, 3), [(40, [0, 2])], heads=6, kv_heads=3, dtype="bfloat16")


@pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
@pytest.mark.parametrize(
    ("value", "message"), [(-1, "shared_blocks is negative at sequence 1"), (5, "no token to sequence 1")]
)
def test_native_finds_numbers_that_are_out_of_range(value: int, message: str) -> None:
    q, pool, tables, lens, _ = make_case(
        [80] * 3, heads=2, kv_heads=1, head_dim=8, page_size=S, dtype="float32"
    )
    shared = jnp.array([4, value, 0], jnp.int32)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(attend("native 16", q, pool, tables, lens, None, shared, scale=1.0))


@pytest.mark.quick
def test_tiles() -> None:
    """The picture in shared_tiles.py; sequence f shares with one that has ended."""
    tables = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 3], [1, 2, 3], [4, 5, 8], [7, 9, 9], [7, 9, 9]])
    shared, lens = np.array([3, 2, 3, 3, 2, 1, 1]), np.array([9, 9, 9, 9, 9, 9, 0])
    tiles = shared_tiles(*(jnp.asarray(x, jnp.int32) for x in (tables, lens, shared)), 2, 2)
    assert tiles.num_tokens.tolist() == [6, 4, 6, 6, 4, 0, 0]
    assert tiles.context_lens.tolist()[:3] == [6, 6, 4] or tiles.context_lens.tolist()[:3] == [6, 4, 6]
    assert not tiles.context_lens[3:].any()
    flat = tiles.members.reshape(-1)
    assert [int(flat[place]) for place in tiles.row_index[:5]] == [0, 1, 2, 3, 4]
    assert (tiles.row_index[5:] == flat.size).all()


@pytest.mark.quick
def test_errors() -> None:
    q, pool, tables, lens, _ = make_case(
        [80] * 3, heads=2, kv_heads=1, head_dim=8, page_size=S, dtype="float32"
    )
    decode = functools.partial(ops.paged_decode, q, pool, tables, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"the shape of `shared_blocks` must be \(3,\) .*got \(2,\)"):
        decode(shared_blocks=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"the dtype of `shared_blocks` must be int32.*got float32"):
        decode(shared_blocks=jnp.zeros(3))
    with pytest.raises(
        ValueError, match="`shared_blocks` must be None with backend 'pallas_interpret', got shape"
    ):
        ops.ragged_attention(
            q, pool, tables, lens, jnp.arange(4), scale=1.0, backend="pallas_interpret", shared_blocks=lens
        )
    with pytest.raises(ValueError, match=r"`window` must be None with `shared_blocks`, got 5"):
        decode(shared_blocks=jnp.zeros(3, jnp.int32), window=5)

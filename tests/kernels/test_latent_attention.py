"""The ops over latents, [P, 1, K, S, D]: a token's value is the first numbers of its key."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import (
    OUT_OF_POOL,
    POOL_DTYPES,
    TOLERANCE,
    make_case,
    paged_decode,
    quantized,
    ragged_attention,
    relative_error,
    tiled,
)

from jax_paged.pallas_kernels import native, ops

pytestmark = pytest.mark.thorough

NATIVE = [
    pytest.param("native", marks=pytest.mark.skipif(not native.is_built(), reason=f"{native.problem()}"))
]
BACKENDS = ["xla", *NATIVE]
# Heads, kv heads, numbers of a latent and of its value: DeepSeek's, and those that fit no vector.
SHAPES = [
    (5, 1, 36, 20),
    *(
        pytest.param(x, marks=pytest.mark.slow)
        for x in [(16, 1, 576, 512), (128, 1, 576, 512), (3, 3, 24, 24), (8, 2, 17, 1)]
    ),
]
LENS = [0, 1, 16, 17, 700, 64, 130]
QUERIES = [0, 1, 3, 17, 1, 20, 2]


@functools.partial(jax.jit, static_argnames=("op", "scale", "value_dim", "window", "backend"))
def jitted(op: str, *args: Any, **options: Any) -> Any:
    return getattr(ops, op)(*args, **options)


def case_of(shape: tuple[int, int, int, int], dtype: str, queries: list[int] | None) -> tuple[Any, ...]:
    heads, kv_heads, head_dim, _ = shape
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": 16, "parts": 1}
    return make_case(LENS, dtype=dtype, query_lens=queries, **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_matches_oracle(backend: str, shape: tuple[int, int, int, int], dtype: str) -> None:
    q, pool, tables, lens, _ = case_of(shape, dtype, None)
    options = {"scale": shape[2] ** -0.5, "value_dim": shape[3]}
    got = jitted("paged_decode", q, pool, tables, lens, backend=backend, **options)
    assert got.shape == (*q.shape[:2], shape[3])
    assert relative_error(got, paged_decode(q, pool, tables, lens, **options)) < TOLERANCE[dtype]
    assert (np.asarray(got)[0] == 0).all()
    plain = jitted("paged_decode", q, pool, tables, lens, backend="reference", **options)
    assert relative_error(got, np.asarray(plain, np.float64)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, pytest.param(33, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_ragged_matches_oracle(
    backend: str, shape: tuple[int, int, int, int], dtype: str, window: int | None
) -> None:
    q, pool, tables, lens, start = case_of(shape, dtype, QUERIES)
    padded = jnp.concatenate([q, jnp.full((5, *q.shape[1:]), jnp.nan, q.dtype)])
    options = {"scale": shape[2] ** -0.5, "value_dim": shape[3], "window": window}
    got = jitted("ragged_attention", padded, pool, tables, lens, start, backend=backend, **options)
    want = ragged_attention(q, pool, tables, lens, start, **options)
    assert relative_error(got[: start[-1]], want) < TOLERANCE[dtype]
    assert (np.asarray(got)[start[-1] :] == 0).all()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_blocks(backend: str, dtype: str) -> None:
    """Sequences that share 40 pages attend to them together."""
    lens = [641 + 30 * i for i in range(5)]
    sizes = {"heads": 16, "kv_heads": 1, "head_dim": 72, "page_size": 16, "parts": 1}
    q, pool, tables, lens_array, _ = make_case(lens, dtype=dtype, **sizes)
    tables = np.array(tables)
    tables[[0, 1, 3, 4], :40] = tables[0, :40]
    shared = jnp.asarray([40, 40, 0, 40, 40], jnp.int32)
    options = {"scale": 0.2, "value_dim": 64}
    args = q, pool, jnp.asarray(tables), lens_array
    got = jitted("paged_decode", *args, shared_blocks=shared, backend=backend, **options)
    assert relative_error(got, paged_decode(q, pool, tables, lens, **options)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", POOL_DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_quantised(backend: str, kind: str) -> None:
    """What is written is what the oracle quantises, and attention is to the numbers that it stands for."""
    q, pool, tables, lens, start = case_of((16, 1, 72, 64), "float32", QUERIES)
    rows, numbers = quantized(pool, kind)
    options = {"scale": 0.2, "value_dim": 64}
    stored = jnp.asarray(tiled(rows))
    got = jitted("ragged_attention", q, stored, tables, lens, start, backend=backend, **options)
    want = ragged_attention(q, numbers, tables, lens, start, **options)
    assert relative_error(got, want) < TOLERANCE["float32"]
    empty = jnp.zeros(stored.shape, stored.dtype)
    tokens = jnp.asarray(np.array(pool)[:, 0, 0].reshape(-1, 1, 72))
    written = jitted("write_kv", empty, tokens, None, jnp.arange(len(tokens)), backend=backend)
    np.testing.assert_array_equal(written, stored)


@pytest.mark.quick
@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_writes_and_copies_move_whole_latents(backend: str) -> None:
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(6, 1, 1, 8, 40)).astype(np.float32)
    tokens, slots = rng.normal(size=(4, 1, 40)).astype(np.float32), np.array([9, 48, 0, 47], np.int32)
    got = jitted("write_kv", jnp.asarray(pool), jnp.asarray(tokens), None, slots, backend=backend)
    want = pool.copy().reshape(48, 40)
    want[[9, 0, 47]] = tokens[[0, 2, 3], 0]
    np.testing.assert_array_equal(np.asarray(got).reshape(48, 40), want)
    src, dst = np.array([1, 7, 3], np.int32), np.array([4, 2, 5], np.int32)
    got = jitted("copy_blocks", jnp.asarray(pool), src, dst, backend=backend)
    want = pool.copy()
    want[[4, 5]] = pool[[1, 3]]
    np.testing.assert_array_equal(got, want)


@pytest.mark.quick
def test_arguments_that_do_not_fit() -> None:
    latents, both = jnp.zeros((2, 1, 1, 4, 8)), jnp.zeros((2, 2, 1, 4, 8))
    q, k = jnp.zeros((1, 2, 8)), jnp.zeros((1, 1, 8))
    table, one = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
    attend = functools.partial(ops.paged_decode, scale=1.0)
    for pool, value_dim, allowed in (
        (latents, None, r"an integer in \[1, 8\]"),
        (latents, 9, r"an integer in \[1, 8\]"),
        (both, 4, "None"),
    ):
        with pytest.raises(ValueError, match=f"`value_dim` must be {allowed}.*got {value_dim}"):
            attend(q, pool, table, one, value_dim=value_dim)
    with pytest.raises(ValueError, match=r"`v` must be None .*got an array \(1, 1, 8\)"):
        ops.write_kv(latents, k, k, one)
    with pytest.raises(ValueError, match=r"`v` must be an array .*got None"):
        ops.write_kv(both, k, None, one)
    message = (
        "with backend 'pallas_interpret', got .* of a pool of latents; backends 'xla' and 'native' "
        "support latents"
    )
    for call in (
        lambda backend: attend(q, latents, table, one, value_dim=4, backend=backend),
        lambda backend: ops.write_kv(latents, k, None, one, backend=backend),
        lambda backend: ops.copy_blocks(latents, one, one - 1, backend=backend),
        lambda backend: ops.ragged_attention(
            q, latents, table, one, jnp.arange(2), scale=1.0, value_dim=4, backend=backend
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call("pallas_interpret")


@pytest.mark.skipif(not native.is_built(), reason=f"native: {native.problem()}")
@pytest.mark.parametrize("page", [4, -1, OUT_OF_POOL])
def test_a_page_out_of_range_is_an_error_and_no_crash(page: int) -> None:
    pool, q = jnp.ones((4, 1, 1, 16, 24)), jnp.ones((2, 3, 24))
    # Outside of a trace the op would look at it itself.
    op = jax.jit(functools.partial(ops.paged_decode, scale=1.0, value_dim=16, backend="native"))
    tables, lens = jnp.asarray([[1, 2], [3, page]], jnp.int32), jnp.asarray([20, 17], jnp.int32)
    with pytest.raises(Exception, match=f"block_tables has page {page} in sequence 1; the pool has 4"):
        jax.block_until_ready(op(q, pool, tables, lens))

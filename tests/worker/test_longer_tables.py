"""A block table may hold more blocks than the context: a prompt has all of its blocks from the start."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import make_case

from jax_paged.pallas_kernels import ops

LENS, QUERY_LENS = [3, 40], [1, 9]
SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": jnp.bfloat16}


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["auto", "xla", "pallas_interpret"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kind", ["decode", "ragged"])
def test_blocks_past_the_context_are_not_read(backend: str, window: int | None, kind: str) -> None:
    query_lens = None if kind == "decode" else QUERY_LENS
    q, pool, tables, lens, start = make_case(LENS, query_lens=query_lens, **SHAPE)
    longer = np.array(tables)
    for row, n in zip(longer, LENS, strict=True):
        columns = -(-n // SHAPE["page_size"])
        # Pages of other sequences, and pages that nobody has written: NaN in every slot.
        row[columns:] = np.arange(len(row) - columns) + pool.shape[0] - len(row)
    options = {"scale": 0.25, "window": window, "backend": backend}
    if kind == "decode":
        attend = functools.partial(ops.paged_decode, **options)
        args = ()
    else:
        attend = functools.partial(ops.ragged_attention, **options)
        args = (jnp.asarray(start),)
    want, got = (np.asarray(attend(q, pool, jnp.asarray(t), lens, *args)) for t in (tables, longer))
    assert np.isfinite(want).all()
    assert np.array_equal(got, want)
    start = start if kind == "ragged" else np.arange(len(LENS) + 1)
    empty = np.empty(0, np.int32)
    ops.check_inputs(pool.shape[0], SHAPE["page_size"], longer, np.array(LENS), start, empty, empty, empty)

"""The backend "xla" adds up a sequence in the same way wherever its chunks begin."""

import jax.numpy as jnp
import numpy as np
from helpers.oracle import make_case

from jax_paged.pallas_kernels import ops, xla


def test_the_sums_of_a_sequence_do_not_depend_on_where_chunks_begin(monkeypatch):
    monkeypatch.setattr(xla, "CHUNK_BYTES", 3 * xla.ITEM_TOKENS * 2 * 64 * 4)  # three items
    q, pool, tables, lens, _ = make_case(
        [300, 1, 64, 65, 190, 0, 128, 700], heads=4, kv_heads=2, head_dim=64, page_size=16, dtype="float32"
    )
    outs = []
    for first in (300, 0, 100):
        others = lens.at[0].set(first)
        outs.append(np.asarray(ops.paged_decode(q * 20, pool, tables, others, scale=0.1, backend="xla"))[1:])
    np.testing.assert_array_equal(outs[1], outs[0])
    np.testing.assert_array_equal(outs[2], outs[0])
    assert jnp.isfinite(outs[0]).all()

"""The public ops, called in a program that has enabled 64-bit types, are traced as they are without."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import make_case

from jax_paged.pallas_kernels import ops
from jax_paged.pallas_kernels.grouped_matmul import grouped_matmul

pytestmark = pytest.mark.thorough

BACKENDS: list[Any] = ["xla", "native", "reference", "pallas_interpret"]


def programs(backend: Any) -> list[str]:
    """Returns the traced ops; nothing is compiled."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "page_size": 16, "dtype": "float32"}
    q, pool, tables, lens, start = make_case([17, 0, 50, 1], query_lens=[3, 0, 5, 1], **sizes)  # pyright: ignore
    tables, lens, start = (jnp.asarray(x, jnp.int32) for x in (tables, lens, start))
    slots, pages = jnp.arange(20, 20 + len(q), dtype=jnp.int32), jnp.arange(1, 3, dtype=jnp.int32)
    how: dict[str, Any] = {"scale": 0.2, "backend": backend, "window": 20, "soft_cap": 5.0}
    how["sinks"] = jnp.asarray(np.array([0.5, -3, 60, 4], np.float32))
    x, kernels = jnp.ones((10, 64), jnp.float32), jnp.ones((3, 64, 128), jnp.float32)
    counts = jnp.array([4, 0, 6], jnp.int32)
    rows: Any = {"xla": "xla", "reference": "reference"}.get(backend, "auto")
    calls = [
        jax.make_jaxpr(lambda *a: ops.paged_decode(*a, **how))(q[:4], pool, tables, lens),
        jax.make_jaxpr(lambda *a: ops.ragged_attention(*a, **how))(q, pool, tables, lens, start),
        jax.make_jaxpr(lambda *a: ops.write_kv(*a, backend=backend))(pool, q[:, :2], q[:, 2:], slots),
        jax.make_jaxpr(lambda *a: ops.copy_blocks(*a, backend=backend))(pool, pages, pages + 2),
        jax.make_jaxpr(lambda *a: grouped_matmul(*a, backend=rows))(x, kernels, counts),
    ]
    return [str(call) for call in calls]


@pytest.mark.parametrize("backend", BACKENDS)
def test_64_bit_types_change_no_program(backend: Any) -> None:
    with jax.enable_x64(True):
        traced = programs(backend)
    for program in traced:
        for dtype in ("f64[", "i64[", "u64["):
            assert dtype not in program

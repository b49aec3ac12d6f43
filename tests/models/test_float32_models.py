"""Models that are loaded and called in a program that has enabled 64-bit types stay in float32."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.weights import load_model

FIXTURES = Path(__file__).parent / "fixtures"
EVERY_DAY = {"deepseek_v3_groups", "gemma2", "ministral3", "qwen3_5_two_layers", "t5_tied"}


def cases() -> Iterator[Any]:
    for folder in sorted(FIXTURES.iterdir()):
        marks = [] if folder.name in EVERY_DAY else [pytest.mark.slow]
        yield pytest.param(folder, marks=marks, id=folder.name)


@contextlib.contextmanager
def enabled_in_all_threads() -> Iterator[None]:
    """Enables 64-bit types in the threads that read weights, too."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("folder", cases())
def test_weights_and_logits_are_float32(folder: Path) -> None:
    with enabled_in_all_threads():
        model = load_model(folder, "float32").model
        graphdef, state = nnx.split(model)
        dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state)}
        assert "float64" not in dtypes
        if isinstance(model, CausalLM):
            call = jax.make_jaxpr(lambda state, tokens: nnx.merge(graphdef, state)(tokens))
            traced = call(state, jnp.zeros((2, 20), jnp.int32))
            (logits,) = traced.out_avals
            assert str(logits).startswith("float32[")
            # Python's numbers are float64 scalars in it, which make nothing else float64.
            assert re.findall(r"f64\[\d.*", str(traced)) == []

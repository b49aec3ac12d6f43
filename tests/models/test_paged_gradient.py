"""A paged forward pass can be differentiated, and its gradient is that of the dense call."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_paged import paged_inputs
from jax_paged.models.weights import random_model

FIXTURES = Path(__file__).parent / "fixtures"
# Families with fewer kv heads than heads, or windows, or soft caps.
NAMES = ["mistral", "qwen2_window", "qwen3_bias_window", "phi3_window", "gemma2_variants", "mixtral"]
TEXTS = [np.random.default_rng(n).integers(0, 200, n).tolist() for n in (19, 1, 33, 16)]


def loss_of(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """The summed loss of every token but the first of a text."""
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits[:-1], tokens[1:]))


def tolerance_of(config: Any, num_tokens: int) -> float:
    """Returns how far two gradients may be apart, relative to their largest number.

    Two float32 sums of n terms in other orders differ by about sqrt(n) roundings of 2**-24; a gradient passes
    some ten of them in each layer, forth and back.
    """
    n = max(config.intermediate_size, config.hidden_size, num_tokens)
    return 2 * 10 * config.num_hidden_layers * n**0.5 * 2**-24


@pytest.mark.parametrize("name", [*NAMES, pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_the_dense_call(name: str) -> None:
    config = json.loads((FIXTURES / name / "config.json").read_text())
    model = random_model(config, "float32").model
    graph, state = nnx.split(model)
    inputs = paged_inputs(model, TEXTS, block_size=8)
    ends = np.cumsum([len(text) for text in TEXTS]).tolist()

    def dense(state: nnx.State) -> jax.Array:
        model = nnx.merge(graph, state)
        return sum((loss_of(model(t[None])[0], t) for t in map(jnp.asarray, TEXTS)), jnp.float32(0))

    @jax.jit
    def paged(state: nnx.State) -> jax.Array:
        model = nnx.merge(graph, state)
        hidden, _ = model.paged(*inputs)
        parts = zip(jnp.split(model.logits(hidden), ends[:-1]), map(jnp.asarray, TEXTS), strict=True)
        return sum((loss_of(logits, text) for logits, text in parts), jnp.float32(0))

    want, want_grads = jax.value_and_grad(dense)(state)
    got, grads = jax.value_and_grad(paged)(state)
    tolerance = tolerance_of(model.config, ends[-1])
    np.testing.assert_allclose(got, want, rtol=tolerance)
    for (path, g), (_, w) in zip(*map(nnx.to_flat_state, (grads, want_grads)), strict=True):
        g, w = np.asarray(g[...]), np.asarray(w[...])
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * np.abs(w).max(), err_msg=str(path))


def test_rows_of_padding_have_no_gradient_that_is_not_finite() -> None:
    config = json.loads((FIXTURES / "mistral" / "config.json").read_text())
    model = random_model(config, "float32").model
    tokens, kv_cache, metadata = paged_inputs(model, TEXTS)
    graph, state = nnx.split(model)
    num_tokens, slots = len(tokens), metadata.slot_mapping
    padded = type(metadata)(
        positions=jnp.pad(metadata.positions, (0, 5)),
        slot_mapping=jnp.pad(slots, ((0, 0), (0, 5)), constant_values=kv_cache[0].shape[0] * 16),
        block_tables=metadata.block_tables,
        context_lens=metadata.context_lens,
        query_start_loc=metadata.query_start_loc,
        is_decode=False,
        backend="reference",
        kv_locations=metadata.kv_locations,
    )

    # Not the sum of squares: of normed rows it is nearly constant, and its gradient what rounding leaves.
    weights = np.random.default_rng(0).normal(size=(num_tokens, model.config.hidden_size))

    def loss(state: nnx.State, tokens: jax.Array, metadata: type(metadata)) -> jax.Array:
        hidden, _ = nnx.merge(graph, state).paged(tokens, kv_cache, metadata)
        return jnp.sum(hidden[:num_tokens] * weights)

    want = jax.grad(loss)(state, tokens, metadata)
    got = jax.grad(loss)(state, jnp.pad(tokens, (0, 5)), padded)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        tolerance = tolerance_of(model.config, num_tokens)
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * np.abs(w).max())


@pytest.mark.parametrize("texts", [[], [[]], [[1], []], [[1] * 10_000]])
def test_texts_that_no_model_computes(texts: list[list[int]]) -> None:
    config = json.loads((FIXTURES / "mistral" / "config.json").read_text())
    with pytest.raises(ValueError, match=r"the lengths of `token_lists` must be in \[1, .*got \["):
        paged_inputs(random_model(config, "float32").model, texts)

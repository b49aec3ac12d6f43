"""The Llama family: mistakes that the references must notice, gradients, how weights are split."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_references import FIXTURES, TOLERANCE, compare

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.parallel.sharding import Units, even, padded, repeated
from jax_paged.models.rope import Rope, base_frequencies
from jax_paged.models.weights import load_model

FOLDER = next(f for f in FIXTURES if f.name == "llama3_tied_biases_old_config")


def _with_config(model: Any, **changes: Any) -> Any:
    config = dataclasses.replace(model.config, **changes)
    other = LlamaForCausalLM(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    nnx.update(other, nnx.state(model))
    return other


def _without_bias(model: Any, module: str, name: str) -> Any:
    for layer in model.layers:
        param = getattr(getattr(layer, module), name).bias
        param[...] = jnp.zeros_like(param[...])
    return model


def _swapped(model: Any) -> Any:
    for layer in model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj
    return model


MISTAKES: dict[str, Callable[[Any], Any]] = {
    "no rope scaling": functools.partial(_with_config, rope=Rope(base_frequencies(8, 500000.0))),
    "other epsilon": functools.partial(_with_config, rms_norm_eps=1e-3),
    "other magnitude": lambda model: _with_config(
        model, rope=dataclasses.replace(model.config.rope, magnitude=1.1)
    ),
    "a window": functools.partial(_with_config, windows=(None, 90)),
    "no q bias": functools.partial(_without_bias, module="self_attn", name="q_proj"),
    "no o bias": functools.partial(_without_bias, module="self_attn", name="o_proj"),
    "no down bias": functools.partial(_without_bias, module="mlp", name="down_proj"),
    "gate and up swapped": _swapped,
}


def test_rotations_are_computed_once() -> None:
    """Not for each layer, nor for queries and keys apart."""
    model = load_model(FOLDER).model
    graph, state = nnx.split(model)
    step = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    program = step.lower(state, jnp.zeros((1, 300), jnp.int32)).compile().as_text()
    assert len(model.layers) > 1
    assert program.count(" cosine(") == program.count(" sine(") == 1


@pytest.mark.parametrize("mistake", MISTAKES)
def test_references_notice_a_mistake(mistake: str) -> None:
    _, error = compare(MISTAKES[mistake](load_model(FOLDER).model), FOLDER)
    assert error > 10 * TOLERANCE


def test_gradient_is_that_of_the_served_model() -> None:
    graph, state = nnx.split(load_model(FOLDER).model)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 32)))

    def loss(state: nnx.State) -> jax.Array:
        logprobs = jax.nn.log_softmax(nnx.merge(graph, state)(tokens[:, :-1]))
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    _, gradient = loss_and_gradient(state)
    for path, leaf in nnx.to_flat_state(gradient):
        assert float(jnp.abs(leaf[...]).max()) > 1e-4, path

    # The central difference along the gradient is its norm, up to O(step^2) and rounding divided by the step.
    norm = float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))))
    step = 5e-4

    def moved(sign: float) -> float:
        stepped = jax.tree.map(lambda p, g: p + sign * step * g / norm, state, gradient)
        return float(loss_and_gradient(stepped)[0])

    assert (moved(1) - moved(-1)) / (2 * step) == pytest.approx(norm, rel=1e-2)


def test_every_weight_says_how_it_is_split() -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        rope=Rope(base_frequencies(4, 10000.0)),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    model = nnx.eval_shape(lambda: LlamaForCausalLM(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0)))
    heads, kv_heads, inner = even(4, 4), repeated(2, 4), even(24)
    expected: dict[str, tuple[tuple[Units, ...] | None, ...]] = {
        "q_proj": (None, heads),
        "k_proj": (None, kv_heads),
        "v_proj": (None, kv_heads),
        "o_proj": (heads, None),
        "gate_proj": (None, inner),
        "up_proj": (None, inner),
        "down_proj": (inner, None),
        "embed_tokens": (padded(config.vocab_size), None),
        "lm_head": (None, padded(config.vocab_size)),
    }
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    assert len(params) == 1 + 2 * 7 + 2 + 1 + 1
    for path, param in params:
        split = param.get_metadata()["split"]
        assert len(split) == param.ndim, path
        whole = expected.get(str(path[-2]), (None, None))
        assert split == (whole if param.ndim == 2 else whole[1:]), path

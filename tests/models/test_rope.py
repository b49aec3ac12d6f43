"""Rope scaling: the maximum length of a text for each type, and texts of that length in both passes."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from paged_batch import paged_batch

from jax_paged.models.registry import MODELS, get_model_class
from jax_paged.models.weights import load_model, random_model

FIXTURES = Path(__file__).parent / "fixtures"
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1] * 8, "long_factor": [2] * 8}
# (rotary values, maximum tokens of a text) of a model with max_position_embeddings 64.
TYPES: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({"rope_type": "default"}, 64),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 256),
    "linear, fraction": ({"rope_type": "linear", "factor": 1.3}, 83),
    # As Qwen2.5 states it: max_position_embeddings is the context before the scaling.
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn, original left out": ({"rope_type": "yarn", "factor": 4.0}, 256),
    # As Qwen3 states it: max_position_embeddings is some other length.
    "yarn, shorter original": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        128,
    ),
    # As transformers saves it: max_position_embeddings is the context after the scaling.
    "yarn, after the scaling": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        64,
    ),
    "yarn, factor left out": ({"rope_type": "yarn", "original_max_position_embeddings": 16}, 64),
    # Llama 3.1's max_position_embeddings already includes the scaling.
    "llama3": (LLAMA3 | {"original_max_position_embeddings": 8}, 64),
    # Here the frequencies change with the length of the text.
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 64),
}
FAMILIES = ("Gemma2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")


def maximum(family: str, **changes: Any) -> int:
    config = BASE | {"moe_intermediate_size": 32} | changes | {"architectures": [f"{family}ForCausalLM"]}
    return get_model_class(config)[1].config_class.from_hf(config).max_position_embeddings


@pytest.mark.parametrize("name", TYPES)
def test_maximum_length(name: str) -> None:
    values, expected = TYPES[name]
    older = {("type" if k == "rope_type" else k): v for k, v in values.items()}
    for family in FAMILIES:
        assert maximum(family, rope_parameters=values) == expected
        assert maximum(family, rope_scaling=values, rope_theta=500000.0) == expected
        assert maximum(family, rope_scaling=older) == expected


def test_original_context_outside_of_the_rotary_values() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert maximum("Llama", rope_parameters=yarn, original_max_position_embeddings=32) == 128


def test_families_with_another_rule() -> None:
    """Gemma 3 states its context after scaling, and Phi-3's longrope ends where its frequencies change."""
    linear = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert maximum("Gemma3", head_dim=16, rope_parameters={"full_attention": linear}) == 64
    assert maximum("Gemma3", head_dim=16, rope_scaling={"rope_type": "linear", "factor": 8.0}) == 64
    longrope = LONGROPE | {"original_max_position_embeddings": 48}
    phi3 = functools.partial(maximum, "Phi3", head_dim=16, num_attention_heads=2)
    assert phi3(rope_parameters=longrope, original_max_position_embeddings=48) == 48
    assert phi3(rope_scaling=LONGROPE | {"type": "longrope"}, original_max_position_embeddings=48) == 48
    assert phi3(rope_parameters=None) == 64


def test_the_families_here_are_all_with_rotary_positions() -> None:
    others = {"GPT2LMHeadModel", "OPTForCausalLM", "T5ForConditionalGeneration"}
    assert {f"{name}ForCausalLM" for name in (*FAMILIES, "Gemma3", "Phi3")} == MODELS.keys() - others


def test_fixtures() -> None:
    """What the loader tells the engine."""
    assert load_model(FIXTURES / "llama_linear_rope").max_model_len == 4 * 512
    for name, expected in (("qwen2_tied_yarn", 512), ("gemma3_linear_rope", 512), ("phi3_longrope", 128)):
        config = json.loads((FIXTURES / name / "config.json").read_text())
        assert get_model_class(config)[1].config_class.from_hf(config).max_position_embeddings == expected


@pytest.mark.parametrize("name", ["linear", "yarn"])
def test_both_passes_take_texts_of_the_maximum_length(name: str) -> None:
    values, limit = TYPES[name]
    config = BASE | {"architectures": ["LlamaForCausalLM"], "rope_parameters": values}
    model = random_model(config, "float32").model
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 128, limit), jnp.int32)

    @nnx.jit
    def paged(model: Any, tokens: jax.Array) -> jax.Array:
        metadata, kv_cache = paged_batch(model.kv_cache_specs(), [limit])
        return model.logits(model.paged(tokens, kv_cache, metadata)[0])

    dense = nnx.jit(lambda model, tokens: model(tokens[None])[0])(model, tokens)
    assert float(jnp.ptp(dense[-1])) > 0.1
    np.testing.assert_allclose(paged(model, tokens), dense, atol=1e-4)
    with pytest.raises(
        ValueError, match=f"tokens holds texts of {limit + 1} tokens; allowed: at most {limit}"
    ):
        model(jnp.zeros((1, limit + 1), jnp.int32))

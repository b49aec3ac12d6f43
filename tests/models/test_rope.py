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
from helpers.dynamic_rope import dynamic_checkpoint
from paged_batch import paged_batch

from jax_paged.models.registry import MODELS, get_model_class
from jax_paged.models.weights import load_model, random_model, save_model

FIXTURES = Path(__file__).parent / "fixtures"
# Float32 sums in another order move the log-probabilities of these models by up to 2e-5.
TOLERANCE = 1e-4
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "full_attention_interval": 1,
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
    # Longer only if asked for: the frequencies depend on the length of the text.
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 64),
}
FAMILIES = (
    *("Apertus", "Arcee", "Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma2", "Glm", "Glm4", "Granite"),
    *("Helium", "HunYuanDenseV1", "Lfm2", "Llama", "Ministral", "Mistral", "Mixtral", "Nemotron", "Olmo2"),
    *("Phi", "Qwen2", "Qwen3", "Qwen3Moe", "Qwen3_5", "SeedOss", "SmolLM3", "StableLm", "Starcoder2"),
)


def read(family: str, max_model_len: int | None = None, **changes: Any) -> Any:
    config = BASE | {"moe_intermediate_size": 32} | changes | {"architectures": [f"{family}ForCausalLM"]}
    return get_model_class(config)[1].config_class.from_hf(config, max_model_len)


def maximum(family: str, max_model_len: int | None = None, **changes: Any) -> int:
    return read(family, max_model_len, **changes).max_position_embeddings


@pytest.mark.parametrize("name", TYPES)
def test_maximum_length(name: str) -> None:
    values, expected = TYPES[name]
    older = {("type" if k == "rope_type" else k): v for k, v in values.items()}
    for family in FAMILIES:
        assert maximum(family, rope_parameters=values) == expected
        assert maximum(family, rope_scaling=values, rope_theta=500000.0) == expected
        assert maximum(family, rope_scaling=older) == expected


@pytest.mark.parametrize("name", TYPES)
def test_maximum_length_that_is_asked_for(name: str) -> None:
    """Only "dynamic" follows it, between its original context and `factor` times that."""
    values, usual = TYPES[name]
    for asked in (2, 63, 64, 65, 200, 256, 257, 10**6):
        expected = min(max(asked, 64), 256) if name == "dynamic" else usual
        for family in FAMILIES:
            assert maximum(family, asked, rope_parameters=values) == expected
    assert maximum("Llama", 100, rope_parameters={"rope_type": "dynamic", "factor": 1.3}) == 83
    # A Gemma 3 states its context after scaling, so its frequencies do not change either.
    dynamic = {"full_attention": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}
    gemma3 = read("Gemma3", 256, head_dim=16, rope_parameters=dynamic)
    assert gemma3.max_position_embeddings == 64
    assert gemma3.rope.frequencies == pytest.approx(1e4 ** (-np.arange(8) / 8), rel=1e-12)


def test_dynamic_frequencies() -> None:
    """Beside the formulas of transformers, _compute_dynamic_ntk_parameters, and of vLLM."""
    for theta, factor in ((10000.0, 4.0), (500000.0, 2.5)):
        values = {"rope_type": "dynamic", "factor": factor, "rope_theta": theta}
        for length in (65, 100, int(64 * factor)):
            base = np.float64(theta) * (factor * length / 64 - (factor - 1)) ** (16 / 14)
            expected = 1 / base ** (np.arange(0, 16, 2) / 16)
            for family in ("Llama", "Gemma2"):
                config = read(family, length, head_dim=16, rope_parameters=values)
                assert config.rope.frequencies == pytest.approx(expected, rel=1e-12)
        # vLLM's are those of the largest length, for texts of any length.
        vllm = theta * ((factor * (64 * factor) / 64) - (factor - 1)) ** (16 / 14)
        assert config.rope.frequencies[1] == pytest.approx(vllm ** (-2 / 16), rel=1e-12)
        assert config.window_rope == config.rope
        assert read("Llama", 64, rope_parameters=values) == read("Llama", rope_parameters=values)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({}, {}, "`rope_parameters.factor` must be a finite number of at least 1.0, but it is missing"),
        ({"factor": 0.5}, {}, "`rope_parameters.factor` must be a finite number of at least 1.0, got 0.5"),
        (
            {"factor": 4.0},
            {"head_dim": 2},
            "`rope_parameters.rope_type` must be a type other than 'dynamic' because heads "
            "have 2 dimensions, got 'dynamic'",
        ),
    ],
)
def test_dynamic_values_that_are_rejected(
    values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read("Llama", 256, rope_parameters={"rope_type": "dynamic"} | values, **changes)


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
    alpha = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    for name, asked in (("rope_parameters", None), ("rope_scaling", 256)):
        hunyuan = read("HunYuanDenseV1", asked, head_dim=16, **{name: alpha})
        assert hunyuan.max_position_embeddings == 64
        expected = (10000.0 * 1000.0 ** (16 / 14)) ** (-np.arange(8) / 8)
        assert hunyuan.rope.frequencies == pytest.approx(expected, rel=1e-12)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert maximum("Ministral3", rope_parameters=yarn | {"llama_4_scaling_beta": 0.1}) == 128
    assert maximum("Olmo3", rope_parameters={"full_attention": yarn}) == 128
    assert maximum("Olmo3", rope_scaling=yarn) == 128


def test_the_families_here_are_all_with_rotary_positions() -> None:
    own_rule = ("DeepseekV2", "DeepseekV3", "Gemma3", "Gemma4", "GptOss", "Ministral3", "Olmo3", "Phi3")
    # Those for images have the positions of their text models.
    names = {name.removesuffix("ForCausalLM") for name in MODELS if name.endswith("ForCausalLM")}
    assert {*FAMILIES, *own_rule} == names - {"OPT"}


def test_fixtures() -> None:
    """What the loader tells the engine."""
    assert load_model(FIXTURES / "llama_linear_rope").max_model_len == 4 * 512
    for name, expected in (("qwen2_tied_yarn", 512), ("gemma3_linear_rope", 512), ("phi3_longrope", 128)):
        config = json.loads((FIXTURES / name / "config.json").read_text())
        assert get_model_class(config)[1].config_class.from_hf(config).max_position_embeddings == expected


@pytest.mark.parametrize("length", [65, 128, 200, 256])
def test_dynamic_texts_equal_transformers(length: int, tmp_path: Path) -> None:
    """A text as long as the length that was asked for (make_references.py made dynamic_rope.json)."""
    cases = json.loads((Path(__file__).parent / "dynamic_rope.json").read_text())
    (case,) = (case for case in cases if len(case["token_ids"]) == length)
    folder = dynamic_checkpoint(tmp_path)
    loaded = load_model(folder, max_model_len=length)
    assert loaded.max_model_len == length
    dense = nnx.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens[None])[0]))

    def error(model: Any) -> float:
        logprobs = np.asarray(dense(model, jnp.asarray(case["token_ids"], jnp.int32)))[-24:]
        ours = np.take_along_axis(logprobs, np.array(case["top_token_ids"]), axis=1)
        return float(np.abs(ours - case["top_logprobs"]).max())

    assert error(loaded.model) < TOLERANCE
    if length < 256:  # the frequencies of another length are not nearly as close
        assert error(load_model(folder, max_model_len=256).model) > 10 * TOLERANCE
    config = json.loads((folder / "config.json").read_text())
    save_model(loaded.model, tmp_path / "saved", config)
    assert load_model(tmp_path / "saved", max_model_len=length).config == loaded.config


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
    with pytest.raises(ValueError, match=f"the length of `tokens` must be at most {limit}, got {limit + 1}"):
        model(jnp.zeros((1, limit + 1), jnp.int32))

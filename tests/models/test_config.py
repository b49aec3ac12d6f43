"""Reading config.json: both forms, and every problem in one message."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.registry import MODELS, get_model_class
from jax_paged.models.rope import Rope

MINIMAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_what_is_left_out_is_as_in_transformers() -> None:
    config = LlamaConfig.from_hf(MINIMAL)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.rms_norm_eps, config.initializer_range) == (1e-6, 0.02)
    assert config.rope == Rope(tuple(10000.0 ** (-i / 4) for i in range(4)))
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert not config.mlp_bias
    nulls = dict.fromkeys(("head_dim", "num_key_value_heads", "rope_scaling", "quantization_config"))
    assert LlamaConfig.from_hf(MINIMAL | nulls) == config


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {("type" if k == "rope_type" else k): LLAMA3[k] for k in LLAMA3}},
        {"rope_parameters": LLAMA3, "rope_theta": 5e5},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_theta": 1.0},
    ],
)
def test_both_forms_of_rope(older: dict[str, Any]) -> None:
    newer = LlamaConfig.from_hf(MINIMAL | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}})
    assert LlamaConfig.from_hf(MINIMAL | older) == newer
    other = LlamaConfig.from_hf(MINIMAL | {"rope_parameters": LLAMA3 | {"rope_theta": 4e5}})
    plain = LlamaConfig.from_hf(MINIMAL | {"rope_theta": 5e5})
    assert len({newer.rope, other.rope, plain.rope}) == 3


def test_llama3_scaling() -> None:
    # Wavelengths 6.3 (short: kept), 33 (between 16 and 64: blended), 167 (long: stretched).
    config = MINIMAL | {"head_dim": 6, "rope_parameters": LLAMA3 | {"rope_theta": 144.0}}
    base = 144.0 ** (-np.arange(3) / 3)
    smooth = (64 / (2 * math.pi / base[1]) - 1) / 3
    expected = (base[0], (1 - smooth) * base[1] / 8 + smooth * base[1], base[2] / 8)
    assert 0 < smooth < 1
    assert LlamaConfig.from_hf(config).rope.frequencies == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "`vocab_size` must be an integer of at least 1, got 0"),
        ({"vocab_size": True}, "`vocab_size` must be an integer of at least 1, got True"),
        ({"hidden_size": 32.0}, "`hidden_size` must be an integer of at least 1, got 32.0"),
        ({"hidden_size": None}, "`hidden_size` must be an integer of at least 1, but it is missing"),
        ({"hidden_size": 30}, "`hidden_size` must be a multiple of num_attention_heads, which is 4, got 30"),
        ({"num_hidden_layers": -1}, "`num_hidden_layers` must be an integer of at least 1, got -1"),
        (
            {"num_key_value_heads": 3},
            "`num_key_value_heads` must be a divisor of num_attention_heads, which is 4, got 3",
        ),
        (
            {"num_key_value_heads": 8},
            "`num_key_value_heads` must be a divisor of num_attention_heads, which is 4, got 8",
        ),
        ({"head_dim": 7}, "`head_dim` must be an even integer, got 7"),
        ({"hidden_act": "swiglu"}, "`hidden_act` must be one of 'silu', 'relu', 'gelu', 'gelu_new',"),
        ({"rms_norm_eps": 0}, "`rms_norm_eps` must be a finite number above 0.0, got 0"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a finite number above 0.0, got nan"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` must be False or True, got 'yes'"),
        ({"attention_bias": 1}, "`attention_bias` must be False or True, got 1"),
        (
            {"quantization_config": {"bits": 4}},
            "`quantization_config.quant_method` must be one of 'awq', 'compressed-tensors',",
        ),
        ({"rope_theta": -1.0}, "`rope_parameters.rope_theta` must be a finite number above 1.0, got -1.0"),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "`rope_scaling.rope_type` must be one of 'default', 'linear', 'dynamic',",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "`rope_scaling.factor` must be a finite number of at least 1.0, got 0.5",
        ),
        ({"rope_scaling": "yarn"}, "`rope_scaling` must be an object or null, got 'yarn'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            "must be the same rotary values for all layers",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "`rope_parameters.partial_rotary_factor` must be 1.0, got 0.5",
        ),
        (
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
            "`rope_parameters.high_freq_factor` must be a finite number above 1.0, got 1.0",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3"}},
            "`rope_parameters.factor` must be a finite number of at least 1.0, but it is missing",
        ),
    ],
)
def test_one_bad_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        LlamaConfig.from_hf(MINIMAL | changes)
    assert message in str(error.value)
    if "llama3" not in str(changes):
        assert str(error.value).count(" must be ") == 1


def test_all_problems_are_in_one_message() -> None:
    bad = {"vocab_size": -1, "num_attention_heads": 0, "num_key_value_heads": 3, "hidden_act": "swiglu"}
    bad |= {"rope_scaling": LLAMA3 | {"factor": 0.5, "low_freq_factor": None}}
    config = {k: v for k, v in (MINIMAL | bad).items() if k != "intermediate_size"}
    with pytest.raises(ValueError) as error:
        LlamaConfig.from_hf(config)
    lines = str(error.value).splitlines()[1:]
    assert sorted(line.split("`")[1] for line in lines) == [
        "hidden_act",
        "intermediate_size",
        "num_attention_heads",
        "rope_scaling.factor",
        "rope_scaling.low_freq_factor",
        "vocab_size",
    ]


def test_the_fixtures_cover_both_forms() -> None:
    configs = [json.loads(f.read_text()) for f in (Path(__file__).parent / "fixtures").glob("*/config.json")]
    assert {"rope_parameters" in c for c in configs} == {True, False}
    assert {"dtype" in c for c in configs} == {True, False}
    assert {c.get("tie_word_embeddings") for c in configs} - {None} == {True, False}
    llamas = [c for c in configs if c["architectures"] == ["LlamaForCausalLM"]]
    assert {c["num_attention_heads"] // c["num_key_value_heads"] for c in llamas} == {1, 2, 4, 8}


def test_architectures() -> None:
    assert get_model_class(MINIMAL) == ("LlamaForCausalLM", LlamaForCausalLM)
    for name in MODELS:
        architecture, model_class = get_model_class({"architectures": ["MambaForCausalLM", name]})
        assert architecture == model_class.__name__ == name
    for bad in (["MambaForCausalLM"], [], None, "LlamaForCausalLM"):
        with pytest.raises(
            ValueError,
            match=r"`architectures` of config.json must be a list with one of ApertusForCausalLM,",
        ):
            get_model_class(MINIMAL | {"architectures": bad})

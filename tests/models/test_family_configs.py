"""The config.json of every family: defaults, rejected values, and all problems in one message."""

import json
from pathlib import Path
from typing import Any

import pytest

from jax_paged.models.registry import MODELS, get_model_class

FIXTURES = Path(__file__).parent / "fixtures"
# One fixture per family.
NAMES = {
    "DeepseekV2ForCausalLM": "deepseek_v2_yarn_groups",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_old_config",
    "GPT2LMHeadModel": "gpt2_without_prefix",
    "LlamaForCausalLM": "gqa2_tied",
    "MistralForCausalLM": "mistral_window",
    "MixtralForCausalLM": "mixtral",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3_longrope",
    "Qwen2ForCausalLM": "qwen2_window",
    "Qwen3ForCausalLM": "qwen3_tied",
    "Qwen3MoeForCausalLM": "qwen3_moe_and_mlps",
    "T5ForConditionalGeneration": "t5_tied",
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}


def read(name: str, **changes: Any) -> Any:
    """Returns the config of a fixture with changes; a value that is ... is left out."""
    values = json.loads((FIXTURES / name / "config.json").read_text()) | changes
    values = {k: v for k, v in values.items() if v is not ...}
    return get_model_class(values)[1].config_class.from_hf(values)


def test_every_family_is_here() -> None:
    assert NAMES.keys() == MODELS.keys()


@pytest.mark.parametrize("architecture", MODELS)
def test_all_problems_are_in_one_message(architecture: str) -> None:
    other = {"GPT2LMHeadModel": ("n_head", "n_embd"), "T5ForConditionalGeneration": ("num_heads", "d_model")}
    heads, size = other.get(architecture, ("num_attention_heads", "hidden_size"))
    bad: dict[str, Any] = {"vocab_size": 0, heads: -1, size: -1, "quantization_config": {"bits": 4}}
    activations = ("hidden_act", "activation_function", "hidden_activation", "feed_forward_proj")
    bad |= dict.fromkeys((*activations, "tie_word_embeddings"), "?")
    with pytest.raises(ValueError) as error:
        read(NAMES[architecture], **bad)
    lines = str(error.value).splitlines()[1:]
    named = {line.split()[0] for line in lines}
    assert {"vocab_size", heads, size, "quantization_config", "tie_word_embeddings"} <= named
    assert len(named & set(activations)) == 1
    assert all("; allowed: " in line for line in lines)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window is 0; allowed: an integer of at least 1"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "longrope"}},
            "rope_type is 'longrope'; allowed: 'default'",
        ),
        (
            "qwen2_window",
            {"layer_types": ["full_attention"]},
            "allowed: a list of num_hidden_layers, which is 2",
        ),
        ("qwen2_window", {"layer_types": ["chunked"] * 2}, "of 'full_attention' or 'sliding_attention'"),
        (
            "qwen2_window",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
            "'sliding_attention']; allowed: a list of num_hidden_layers, which is 2, of 'full_attention'",
        ),
        ("qwen3_tied", {"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "rope_scaling.factor is 0.5"),
        (
            "phi3_longrope",
            {"rope_parameters": {"rope_type": "llama3"}},
            "rope_type is 'llama3'; allowed: 'default'",
        ),
        (
            "phi3_longrope",
            {"rope_parameters": LONGROPE | {"short_factor": [1]}},
            "allowed: a list of 4 numbers",
        ),
        (
            "phi3_longrope",
            {"rope_parameters": LONGROPE | {"short_factor": [1, 1, 0, 1]}},
            "short_factor is [1, 1,",
        ),
        ("phi3_window", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "partial_rotary_factor is 0.4"),
        ("mixtral", {"num_experts_per_tok": 5}, "allowed: at most num_local_experts, which is 4"),
        ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; allowed: 'greedy'"),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob is True; allowed: False"),
        ("deepseek_v2_lite", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; allowed: an even integer"),
        ("deepseek_v2_lite", {"rope_parameters": {"rope_type": "linear"}}, "allowed: 'default' or 'yarn'"),
        ("deepseek_v2_lite", {"n_shared_experts": 0}, "n_shared_experts is 0; allowed: an integer of at"),
        ("deepseek_v2_yarn_groups", {"n_group": 5}, "allowed: a divisor of n_routed_experts, which is 12"),
        ("deepseek_v2_yarn_groups", {"topk_group": 5}, "topk_group is 5; allowed: 1 to n_group, which is 4"),
        ("deepseek_v2_yarn_groups", {"num_experts_per_tok": 7}, "topk_group is 2; allowed: 3 to n_group"),
        ("qwen3_moe_tied", {"mlp_only_layers": 3}, "mlp_only_layers is 3; allowed: a list of layers"),
        ("qwen3_moe_tied", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True; allowed: False",
        ),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0"),
        (
            "gemma3_old_config",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0; allowed: None",
        ),
        (
            "gemma3_old_config",
            {"rope_scaling": "linear"},
            "rope_scaling is 'linear'; allowed: an object or null",
        ),
        (
            "gemma3_linear_rope",
            {"rope_parameters": {"full_attention": {"rope_type": "ntk"}, "sliding_attention": 1}},
            "rope_parameters.full_attention.rope_type is 'ntk'",
        ),
        (
            "gemma3_linear_rope",
            {"rope_parameters": {"sliding_attention": 1}},
            "rope_parameters.sliding_attention is 1; allowed: an object or null",
        ),
        ("gpt2_variants", {"add_cross_attention": True}, "add_cross_attention is True; allowed: False"),
        ("gpt2_variants", {"n_embd": 30}, "n_embd is 30; allowed: a multiple of n_head, which is 4"),
        ("gpt2_variants", {"n_positions": ...}, "n_positions is missing"),
        (
            "t5_tied",
            {"feed_forward_proj": "gated-mish"},
            "feed_forward_proj is 'gated-mish'; allowed: 'silu'",
        ),
        ("t5_tied", {"decoder_start_token_id": 256}, "decoder_start_token_id is 256; allowed: an id below"),
        ("t5_tied", {"relative_attention_max_distance": 6}, "allowed: an integer of at least 7"),
        ("opt", {"hidden_size": 30}, "hidden_size is 30; allowed: a multiple of num_attention_heads"),
        ("opt", {"do_layer_norm_before": None, "enable_bias": 1}, "enable_bias is 1; allowed: False or True"),
    ],
)
def test_one_bad_value(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        read(name, **changes)
    assert message in str(error.value)


def test_what_is_left_out_is_as_in_transformers() -> None:
    mistral = {"num_key_value_heads": ..., "sliding_window": ..., "num_attention_heads": 8}
    assert read("mistral", **mistral).num_key_value_heads == 8
    assert read("mistral", **mistral).windows == (4096, 4096)
    assert read("mistral", sliding_window=None).windows == ()
    assert read("qwen2_window", layer_types=..., num_hidden_layers=4).windows == (None, 40, 40, 40)
    assert read("qwen2_window", layer_types=..., use_sliding_window=...).windows == (None, None)
    assert read("qwen3_tied", head_dim=...).head_dim == 128
    assert read("gemma2", layer_types=..., tie_word_embeddings=...).windows == (24, None, 24)
    assert read("gemma2", tie_word_embeddings=...).tie_word_embeddings
    assert read("gemma2", attn_logit_softcapping=...).attn_logit_softcapping == 50.0
    eight = read("gemma3_old_config", sliding_window_pattern=..., num_hidden_layers=8, rope_scaling=None)
    assert eight.windows == (24,) * 5 + (None, 24, 24)
    assert (eight.rope.frequencies[1], eight.window_rope.frequencies[1]) == pytest.approx(
        (50000.0**-0.125, 3000.0**-0.125), rel=1e-12
    )
    assert read("qwen3_moe_tied", num_hidden_layers=5, decoder_sparse_step=2).moe_layers == (1, 3)
    lite = read("deepseek_v2_lite", kv_lora_rank=..., qk_nope_head_dim=..., qk_rope_head_dim=...)
    assert (lite.kv_lora_rank, lite.head_dim, lite.qk_rope_head_dim, lite.scale) == (512, 192, 64, 192**-0.5)
    assert lite.moe_layers == (1,)
    assert read("deepseek_v2_lite", q_lora_rank=...).q_lora_rank == 1536
    assert read("gpt2_variants", n_inner=None).intermediate_size == 128
    assert read("opt", word_embed_proj_dim=...).word_embed_proj_dim == 32
    assert read("t5_tied", decoder_start_token_id=..., pad_token_id=5).decoder_start_token_id == 5
    assert [read(f"t5_{name}").scale_decoder_outputs for name in ("tied", "gated_untied")] == [True, False]
    assert read("opt", do_layer_norm_before=False).final_layer_norm is False


def test_longrope_ends_where_its_frequencies_change() -> None:
    assert read("phi3_longrope").max_position_embeddings == 128
    assert read("phi3_longrope", rope_parameters=None).max_position_embeddings == 512


def test_dynamic_rope_is_the_default_up_to_the_original_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    plain = read("mistral", rope_parameters=None)
    assert read("mistral", rope_parameters=dynamic) == plain

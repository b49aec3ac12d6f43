"""The config.json of every family: defaults, rejected values, and all problems in one message."""

import json
from pathlib import Path
from typing import Any

import pytest

from jax_paged.models.registry import MODELS, get_model_class

FIXTURES = Path(__file__).parent / "fixtures"
# One fixture per family.
NAMES = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "cohere_head_norms",
    "DeepseekV2ForCausalLM": "deepseek_v2_yarn_groups",
    "DeepseekV3ForCausalLM": "deepseek_v3_groups",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4_window",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_old_config",
    "Glm4ForCausalLM": "glm4",
    "GlmForCausalLM": "glm",
    "Gemma3ForConditionalGeneration": "gemma3_images",
    "Gemma4ForCausalLM": "gemma4_moe_capped",
    "Gemma4ForConditionalGeneration": "gemma4_hub_images",
    "GPT2LMHeadModel": "gpt2_without_prefix",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite_tied",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan_alpha",
    "Lfm2ForCausalLM": "lfm2",
    "LlamaForCausalLM": "gqa2_tied",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "ministral_windows",
    "MistralForCausalLM": "mistral_window",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3_longrope",
    "PhiForCausalLM": "phi",
    "Qwen2ForCausalLM": "qwen2_window",
    "Qwen3ForCausalLM": "qwen3_tied",
    "Qwen3MoeForCausalLM": "qwen3_moe_and_mlps",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_nested",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2_window",
    "T5ForConditionalGeneration": "t5_tied",
}
APERTUS_ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
APERTUS_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [2, 2, 2, 2]}


def read(name: str, **changes: Any) -> Any:
    """Returns the config of a fixture with changes; a value that is ... is left out."""
    values = json.loads((FIXTURES / name / "config.json").read_text())
    text = values.get("text_config", values)
    for k, v in changes.items():
        place = values if k in values else text
        place[k] = v
        if v is ...:
            del place[k]
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
    named = {line.split("`")[1].partition(".")[0] for line in lines}
    assert {"vocab_size", heads, size, "quantization_config", "tie_word_embeddings"} <= named
    assert len(named & set(activations)) == 1
    assert all("must be " in line for line in lines)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("mistral", {"sliding_window": 0}, "`sliding_window` must be an integer of at least 1, got 0"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "longrope"}},
            "`rope_parameters.rope_type` must be one of 'default', 'linear', 'dynamic',",
        ),
        (
            "qwen2_window",
            {"layer_types": ["full_attention"]},
            "must be a list of 2 items",
        ),
        (
            "qwen2_window",
            {"layer_types": ["chunked"] * 2},
            "`layer_types` must be a list of 2 items (num_hidden_layers), each",
        ),
        (
            "qwen2_window",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
            "must be a list of 2 items (num_hidden_layers), each 'full_attention'",
        ),
        (
            "qwen3_tied",
            {"rope_scaling": {"rope_type": "yarn", "factor": 0.5}},
            "`rope_scaling.factor` must be a finite number of at least 1.0, got 0.5",
        ),
        (
            "phi3_longrope",
            {"rope_parameters": {"rope_type": "llama3"}},
            "`rope_parameters.rope_type` must be one of 'default', 'longrope', 'su', 'yarn', got 'llama3'",
        ),
        (
            "phi3_longrope",
            {"rope_parameters": LONGROPE | {"short_factor": [1]}},
            "must be a list of 4 numbers",
        ),
        (
            "phi3_longrope",
            {"rope_parameters": LONGROPE | {"short_factor": [1, 1, 0, 1]}},
            "`rope_parameters.short_factor` must be a list of 4 numbers above 0, got [1, 1, 0, 1]",
        ),
        (
            "phi3_window",
            {"rope_parameters": {"partial_rotary_factor": 0.4}},
            "`rope_parameters.partial_rotary_factor` must be a fraction of head_dim that gives an even",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, "must be at most num_local_experts, which is 4"),
        (
            "lfm2",
            {"layer_types": ["conv"] * 3},
            "`layer_types` must be a list of 3 items (num_hidden_layers), each",
        ),
        ("lfm2", {"conv_L_cache": 1}, "`conv_L_cache` must be an integer of at least 2, got 1"),
        (
            "lfm2",
            {"layer_types": ..., "full_attn_idxs": 2},
            "`full_attn_idxs` must be a list of layer indices, got 2",
        ),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "must be a list of 3 items"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads, which is 2"),
        (
            "qwen3_5",
            {"rope_parameters": {"partial_rotary_factor": 0.05}},
            "`rope_parameters.partial_rotary_factor` must be a fraction of head_dim that gives an even",
        ),
        ("qwen3_5_nested", {"text_config": 3}, "`text_config` of config.json must be an object, got 3"),
        (
            "deepseek_v2_lite",
            {"topk_method": "noaux_tc"},
            "`topk_method` must be 'greedy' or 'group_limited_greedy', got 'noaux_tc'",
        ),
        ("deepseek_v2_lite", {"norm_topk_prob": True}, "`norm_topk_prob` must be False, got True"),
        ("deepseek_v2_lite", {"qk_rope_head_dim": 7}, "`qk_rope_head_dim` must be an even integer, got 7"),
        ("deepseek_v2_lite", {"rope_parameters": {"rope_type": "linear"}}, "must be 'default' or 'yarn'"),
        (
            "deepseek_v2_lite",
            {"n_shared_experts": 0},
            "`n_shared_experts` must be an integer of at least 1, got 0",
        ),
        ("deepseek_v3_flat", {"scoring_func": "softmax"}, "`scoring_func` must be 'sigmoid', got 'softmax'"),
        ("deepseek_v3_flat", {"topk_method": "greedy"}, "`topk_method` must be 'noaux_tc', got 'greedy'"),
        ("deepseek_v3_flat", {"rope_interleave": 1}, "`rope_interleave` must be False or True, got 1"),
        (
            "deepseek_v3_groups",
            {"n_group": 12, "topk_group": 12},
            "`n_group` must be at most half of n_routed_experts, which is 12, got 12",
        ),
        ("deepseek_v2_yarn_groups", {"n_group": 5}, "must be a divisor of n_routed_experts, which is 12"),
        (
            "deepseek_v2_yarn_groups",
            {"topk_group": 5},
            "`topk_group` must be in [1, 4] (enough groups for num_experts_per_tok experts, at most "
            "n_group), got 5",
        ),
        (
            "deepseek_v2_yarn_groups",
            {"num_experts_per_tok": 7},
            "`topk_group` must be in [3, 4] (enough groups for num_experts_per_tok experts, at most "
            "n_group), got 2",
        ),
        (
            "qwen3_moe_tied",
            {"mlp_only_layers": 3},
            "`mlp_only_layers` must be a list of layer indices, got 3",
        ),
        (
            "qwen3_moe_tied",
            {"decoder_sparse_step": 0},
            "`decoder_sparse_step` must be an integer of at least 1, got 0",
        ),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "`use_bidirectional_attention` must be False, got True",
        ),
        (
            "gemma2",
            {"final_logit_softcapping": -1.0},
            "`final_logit_softcapping` must be a finite number above 0.0, got -1.0",
        ),
        (
            "gemma3_old_config",
            {"attn_logit_softcapping": 50.0},
            "`attn_logit_softcapping` must be None, got 50.0",
        ),
        (
            "gemma3_old_config",
            {"rope_scaling": "linear"},
            "`rope_scaling` must be an object or null, got 'linear'",
        ),
        (
            "gemma3_linear_rope",
            {"rope_parameters": {"full_attention": {"rope_type": "ntk"}, "sliding_attention": 1}},
            "`rope_parameters.full_attention.rope_type` must be one of 'default', 'linear',",
        ),
        (
            "gemma3_linear_rope",
            {"rope_parameters": {"sliding_attention": 1}},
            "`rope_parameters.sliding_attention` must be an object or null, got 1",
        ),
        ("gpt_oss", {"num_experts_per_tok": 5}, "must be at most num_local_experts, which is 4"),
        ("gpt_oss", {"swiglu_limit": 0}, "`swiglu_limit` must be a finite number above 0.0, got 0"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            "`quantization_config.quant_method` must be 'mxfp4', got 'awq'",
        ),
        (
            "gemma3_images",
            {"final_logit_softcapping": 8.0},
            "`final_logit_softcapping` must be None, got 8.0",
        ),
        ("gemma3_images", {"text_config": None}, "`text_config` of config.json must be an object, got None"),
        (
            "gemma4_shared",
            {"num_kv_shared_layers": 3},
            "`num_kv_shared_layers` must be small enough that the first 5 - num_kv_shared_layers",
        ),
        (
            "gemma4_shared",
            {"num_kv_shared_layers": 8},
            "`num_kv_shared_layers` must be small enough that the first 5 - num_kv_shared_layers",
        ),
        (
            "gemma4_shared",
            {"vocab_size_per_layer_input": 255},
            "`vocab_size_per_layer_input` must be at least vocab_size, which is 256, got 255",
        ),
        (
            "gemma4_shared",
            {"per_layer_config": {"2": {"head_dim": 16}}},
            "must be the same head_dim and num_key_value_heads for each of the layers 2, 4",
        ),
        (
            "gemma4_shared",
            {"per_layer_config": {"2": 1, "4": 1}},
            "`per_layer_config` must be the same head_dim and num_key_value_heads for each",
        ),
        (
            "gemma4_hub_images",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "`num_global_key_value_heads` must be a divisor of num_attention_heads, which is 4, got 3",
        ),
        (
            "gemma4_hub_images",
            {"use_bidirectional_attention": "all"},
            "`use_bidirectional_attention` must be None or 'vision', got 'all'",
        ),
        (
            "gemma4_moe_capped",
            {"top_k_experts": 7},
            "`top_k_experts` must be at most num_experts, which is 6, got 7",
        ),
        (
            "gemma4_moe_capped",
            {"hidden_size_per_layer_input": 4},
            "`hidden_size_per_layer_input` must be 0 because enable_moe_block is true, got 4",
        ),
        (
            "gemma4_moe_capped",
            {"rope_parameters": {"full_attention": {"rope_type": "ntk"}}},
            "`rope_parameters.full_attention.rope_type` must be one of 'default', 'linear',",
        ),
        ("gpt2_variants", {"add_cross_attention": True}, "`add_cross_attention` must be False, got True"),
        ("gpt2_variants", {"n_embd": 30}, "`n_embd` must be a multiple of n_head, which is 4, got 30"),
        (
            "gpt2_variants",
            {"n_positions": ...},
            "`n_positions` must be an integer of at least 1, but it is missing",
        ),
        (
            "t5_tied",
            {"feed_forward_proj": "gated-mish"},
            "`feed_forward_proj` must be one of 'silu', 'relu', 'gelu', 'gelu_new',",
        ),
        (
            "t5_tied",
            {"decoder_start_token_id": 256},
            "`decoder_start_token_id` must be an id below vocab_size, got 256",
        ),
        ("t5_tied", {"relative_attention_max_distance": 6}, "must be an integer of at least 7"),
        (
            "opt",
            {"hidden_size": 30},
            "`hidden_size` must be a multiple of num_attention_heads, which is 4, got 30",
        ),
        (
            "opt",
            {"do_layer_norm_before": None, "enable_bias": 1},
            "`enable_bias` must be False or True, got 1",
        ),
        ("apertus", {"hidden_act": "silu"}, "`hidden_act` must be 'xielu', got 'silu'"),
        ("cohere_own_head", {"use_qk_norm": 1}, "`use_qk_norm` must be False or True, got 1"),
        ("cohere2", {"use_qk_norm": True}, "`use_qk_norm` must be False, got True"),
        (
            "cohere2",
            {"sliding_window": None},
            "`sliding_window` must be an integer of at least 1, but it is missing",
        ),
        (
            "cohere2",
            {"layer_types": ..., "sliding_window_pattern": 0},
            "`sliding_window_pattern` must be an integer of at least 1, got 0",
        ),
        ("ernie4_5", {"use_bias": "yes"}, "`use_bias` must be False or True, got 'yes'"),
        (
            "exaone4_window",
            {"layer_types": ..., "sliding_window_pattern": "LLLG"},
            "`sliding_window_pattern` must be an integer of at least 1, got 'LLLG'",
        ),
        (
            "exaone4_window",
            {"sliding_window": None},
            "must be a list of 2 items (num_hidden_layers), each 'full_attention'",
        ),
        (
            "glm4",
            {"rope_parameters": {"partial_rotary_factor": 0.05}},
            "`rope_parameters.partial_rotary_factor` must be a fraction of head_dim that gives an even",
        ),
        (
            "granite_tied",
            {"residual_multiplier": 0},
            "`residual_multiplier` must be a finite number above 0.0, got 0",
        ),
        ("hunyuan_alpha", {"use_qk_norm": False}, "`use_qk_norm` must be True, got False"),
        (
            "hunyuan_alpha",
            {"head_dim": 2},
            "`head_dim` must be more than 2 with rope_type 'dynamic', got 2",
        ),
        (
            "hunyuan_bias",
            {"rope_scaling": {"type": "dynamic"}},
            "`rope_scaling.factor` must be a finite number of at least 1.0, but it is missing",
        ),
        (
            "ministral3",
            {"rope_parameters": {"rope_type": "default"}},
            "`rope_parameters.llama_4_scaling_beta` must be a finite number of at least 0.0,",
        ),
        (
            "ministral_windows",
            {"sliding_window": None},
            "`sliding_window` must be an integer of at least 1, but it is missing",
        ),
        (
            "olmo3",
            {"rope_parameters": {"rope_theta": 1e4}},
            "must be an object whose keys are full_attention and",
        ),
        (
            "olmo3",
            {"rope_scaling": {"rope_type": "su"}},
            "`rope_parameters.full_attention.rope_type` must be one of 'default', 'linear',",
        ),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 0}}},
            "`rope_parameters.sliding_attention.factor` must be a finite number of at least 1.0, got 0",
        ),
        ("phi", {"qk_layernorm": True}, "`qk_layernorm` must be False, got True"),
        ("phi", {"tie_word_embeddings": True}, "`tie_word_embeddings` must be False, got True"),
        ("seed_oss", {"attention_out_bias": 0}, "`attention_out_bias` must be False or True, got 0"),
        ("smollm3", {"no_rope_layers": [1]}, "must be a list of at least 2 items"),
        (
            "smollm3",
            {"no_rope_layers": [1, 2]},
            "`no_rope_layers` must be a list of at least 2 items (num_hidden_layers), each 1",
        ),
        (
            "smollm3",
            {"no_rope_layers": ..., "no_rope_layer_interval": 0},
            "`no_rope_layer_interval` must be an integer of at least 1, got 0",
        ),
        (
            "smollm3_window",
            {"use_sliding_window": False},
            "`layer_types` must be a list of 2 items (num_hidden_layers), each",
        ),
        (
            "stablelm",
            {"use_parallel_residual": "x"},
            "`use_parallel_residual` must be False or True, got 'x'",
        ),
        (
            "stablelm",
            {"partial_rotary_factor": 3.0, "rope_parameters": None},
            "`rope_parameters.partial_rotary_factor` must be a fraction of head_dim that gives an even",
        ),
        (
            "starcoder2_window",
            {"sliding_window": -1},
            "`sliding_window` must be an integer of at least 1, got -1",
        ),
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
    twelve = read("gemma4_images", layer_types=..., per_layer_config=..., num_hidden_layers=11, head_dim=...)
    assert twelve.windows == (24,) * 5 + (None,) + (24,) * 4 + (None,)
    assert (twelve.head_dim, twelve.global_head_dim) == (256, 512)
    assert read("gemma4_images", rope_parameters=None).rope.frequencies == (1.0, 1e6**-0.125, *[0.0] * 6)
    assert read("qwen3_moe_tied", num_hidden_layers=5, decoder_sparse_step=2).moe_layers == (1, 3)
    lite = read("deepseek_v2_lite", kv_lora_rank=..., qk_nope_head_dim=..., qk_rope_head_dim=...)
    assert (lite.kv_lora_rank, lite.head_dim, lite.qk_rope_head_dim, lite.scale) == (512, 192, 64, 192**-0.5)
    assert lite.moe_layers == (1,)
    assert read("deepseek_v2_lite", q_lora_rank=...).q_lora_rank == 1536
    v3 = read("deepseek_v3_groups", n_shared_experts=..., routed_scaling_factor=..., norm_topk_prob=...)
    assert (v3.shared_intermediate_size, v3.routed_scaling_factor, v3.norm_topk_prob) == (8, 2.5, True)
    plain = read("deepseek_v3_flat", n_group=..., topk_group=..., n_routed_experts=..., rope_interleave=...)
    assert (plain.n_group, plain.topk_group, plain.num_experts) == (8, 4, 256)
    assert plain.rope.is_interleaved
    oss = read("gpt_oss", layer_types=..., num_hidden_layers=3, rope_parameters=..., head_dim=...)
    assert (oss.windows, oss.head_dim, oss.max_position_embeddings) == ((24, None, 24), 64, 131072)
    assert oss.rope.frequencies[1] == pytest.approx(150000.0 ** (-1 / 32))
    assert (read("gpt_oss", swiglu_alpha=...).swiglu_alpha, oss.output_bias) == (1.702, True)
    assert read("gpt2_variants", n_inner=None).intermediate_size == 128
    assert read("opt", word_embed_proj_dim=...).word_embed_proj_dim == 32
    assert read("t5_tied", decoder_start_token_id=..., pad_token_id=5).decoder_start_token_id == 5
    assert [read(f"t5_{name}").scale_decoder_outputs for name in ("tied", "gated_untied")] == [True, False]
    assert read("opt", do_layer_norm_before=False).final_layer_norm is False


def test_what_relatives_of_llama_leave_out_is_as_in_transformers() -> None:
    def rotated(config: Any) -> list[int]:
        return [len(config.rope_of(i).frequencies) for i in range(config.num_hidden_layers)]

    no_types: dict[str, Any] = {"layer_types": ..., "num_hidden_layers": 4}
    smollm3: dict[str, Any] = no_types | {"no_rope_layers": ..., "no_rope_layer_interval": ...}
    assert rotated(read("smollm3", **smollm3)) == [4, 4, 4, 0]
    assert rotated(read("smollm3", **smollm3 | {"no_rope_layer_interval": 2})) == [4, 0, 4, 0]
    window = {"use_sliding_window": True, "sliding_window": 9}
    assert read("smollm3", **smollm3, **window).windows == (None, None, None, 9)
    cohere2 = read("cohere2", **no_types, sliding_window=...)
    assert (cohere2.windows, rotated(cohere2)) == ((4096, 4096, 4096, None), [4, 4, 4, 0])
    assert read("cohere2", **no_types, sliding_window_pattern=2).windows == (24, None) * 2
    exaone4 = read("exaone4_window", **no_types, sliding_window_pattern=2)
    assert (exaone4.windows, rotated(exaone4)) == ((24, None) * 2, [4, 0] * 2)
    assert rotated(read("exaone4_tied_full")) == [4, 4]
    olmo3 = read("olmo3", **no_types, rope_parameters=...)
    assert olmo3.windows == (24, 24, 24, None)
    assert olmo3.rope == olmo3.window_rope
    assert olmo3.rope.frequencies[1] == pytest.approx(500000.0**-0.25, rel=1e-12)
    assert read("ministral_windows", **no_types).windows == (24,) * 4
    assert read("ministral_windows", sliding_window=...).windows == (4096, None)
    ministral3 = read("ministral3", rope_parameters=...)
    assert (ministral3.query_growth, ministral3.original_positions) == (0.1, 16384)
    assert ministral3.max_position_embeddings == 2**18
    sizes = {"head_dim": ..., "rope_parameters": ..., "rope_scaling": ...}
    wide = {"num_attention_heads": 128, "hidden_size": 128, "num_key_value_heads": ...}
    shapes = {"glm": (128, 2, 32), "glm4": (128, 2, 32), "seed_oss": (128, 8, 64), "ernie4_5": (128, 2, 64)}
    for name, expected in shapes.items():
        config = read(name, **sizes, **wide)
        found = config.head_dim, config.num_key_value_heads, len(config.rope.frequencies)
        assert found == expected, name
    assert read("stablelm", **sizes, hidden_size=128).rope.frequencies[1] == pytest.approx(10000.0**-0.25)
    assert read("apertus", **sizes).rope.frequencies == pytest.approx(
        read("apertus", rope_scaling=APERTUS_ROPE, rope_theta=12000000.0).rope.frequencies, rel=1e-12
    )
    granite = read("granite_tied", **dict.fromkeys(("attention_multiplier", "logits_scaling"), ...))
    assert (granite.attention_multiplier, granite.logits_scaling) == (1.0, 1.0)
    tied = {"cohere_head_norms", "cohere2", "ernie4_5", "lfm2", "smollm3", "starcoder2_window"}
    for name in NAMES.values():
        if not name.startswith(("gemma", "gpt2", "t5", "opt")):
            assert read(name, tie_word_embeddings=...).tie_word_embeddings == (name in tied), name


def test_longrope_ends_where_its_frequencies_change() -> None:
    assert read("phi3_longrope").max_position_embeddings == 128
    assert read("phi3_longrope", rope_parameters=None).max_position_embeddings == 512


def test_dynamic_rope_is_the_default_up_to_the_original_length() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    plain = read("mistral", rope_parameters=None)
    assert read("mistral", rope_parameters=dynamic) == plain

"""Makes the fixtures: tiny random checkpoints of every family, and transformers' outputs for them.

The tests need no torch; this script does. In an environment of its own (Python 3.11 has CPU builds):

    pip install torch==2.13.0 transformers==5.23.0
    python tests/models/make_references.py              # or with names of fixtures, to make only those

Every folder under tests/models/fixtures then holds config.json, one or several safetensors files, and
reference.json: {"cases": [{"prompt_token_ids", "token_ids", "logprobs", "top_token_ids", "top_logprobs"}]}
with, for each of the greedy output tokens, its log-probability and the five largest. By the name
"dynamic_rope", tests/models/dynamic_rope.json is made: [{"token_ids", "top_token_ids", "top_logprobs"}],
texts longer than the original context of a model with dynamic rotary positions, and for each of their last
tokens the most likely next ones.

A prompt is drawn again if at some step the two best tokens are too close, or at some router the last expert
that is chosen and the first that is not. So the greedy tokens depend on the model alone, and not on the order
of float32 sums.
"""

import json
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
PROMPT_LENS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 47, 64, 65, 79, 99, 100)
NUM_NEW_TOKENS = 24
NUM_TOP = 5
MIN_MARGIN = 1e-3
MIN_ROUTER_MARGIN = 1e-4
LAYER_SCALE = 2.0
# By their codes.
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
# A fixture, and what of its config.json is another for dynamic_rope.json.
DYNAMIC_ROPE = ("mha_old_config", 64, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0})
DYNAMIC_ROPE_LENS = (65, 128, 200, 256)

# The original context is shorter than the prompts, so that every branch of the scaling matters.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 64,
}
# 0.02 would give nearly the same token at every step.
COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BASE: dict[str, Any] = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": None,
}
QWEN3_MOE = {"head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24}
LFM2: dict[str, Any] = {
    "norm_eps": 1e-5,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "block_auto_adjust_ff_dim": False,
}
QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 3,
    "intermediate_size": 40,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "tie_word_embeddings": True,
}
GPT_OSS = {
    "intermediate_size": 16,
    "head_dim": 8,
    "sliding_window": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 2.0,
    "swiglu_alpha": 1.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 4,
    "patch_size": 2,
}
GEMMA3_OF_IMAGES = BASE | GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = BASE | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
GEMMA4_SHARED: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256,
}
GEMMA4_VISION = VISION | {"num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4}
GPT2 = COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
T5 = COMMON | {
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 40,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
OPT = COMMON | {
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "init_std": COMMON["initializer_range"],
}
OLMO3_ROPE = {
    "full_attention": YARN_ROPE | {"attention_factor": 1.2},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
MINISTRAL3_ROPE = YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
# The name of a fixture begins with that of its family, except for some Llamas.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha_old_config": ("LlamaConfig", BASE | {"num_key_value_heads": 4}),
    "gqa2_tied": ("LlamaConfig", BASE | {"tie_word_embeddings": True}),
    "gqa4_llama3": (
        "LlamaConfig",
        BASE | {"hidden_size": 64, "num_attention_heads": 8, "rope_parameters": LLAMA3_ROPE},
    ),
    "mqa8_attention_bias": (
        "LlamaConfig",
        BASE
        | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "wide_heads_mlp_bias_sharded": (
        "LlamaConfig",
        BASE | {"num_hidden_layers": 3, "head_dim": 16, "mlp_bias": True},
    ),
    "llama3_tied_biases_old_config": (
        "LlamaConfig",
        BASE
        | {
            "num_key_value_heads": 1,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama_linear_rope": ("LlamaConfig", BASE | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", BASE | {"sliding_window": None, "head_dim": 16}),
    "mistral_window": ("MistralConfig", BASE | {"sliding_window": 24}),
    "qwen2_tied_yarn": (
        "Qwen2Config",
        BASE | {"tie_word_embeddings": True, "rope_parameters": YARN_ROPE, "use_sliding_window": False},
    ),
    "qwen2_window": (
        "Qwen2Config",
        BASE | {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    ),
    "qwen3_tied": ("Qwen3Config", BASE | {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3_bias_window": (
        "Qwen3Config",
        BASE
        | {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": YARN_ROPE | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "phi3_window": ("Phi3Config", BASE | {"sliding_window": 31, "partial_rotary_factor": 0.75}),
    # The original context holds all prompts with their outputs.
    "phi3_longrope": (
        "Phi3Config",
        BASE
        | {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.25, 1.5, 2.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
        },
    ),
    "gemma2": (
        "Gemma2Config",
        BASE
        | GEMMA
        | {"num_hidden_layers": 3, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 8.0},
    ),
    "gemma2_variants": (
        "Gemma2Config",
        BASE
        | GEMMA
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_activation": "gelu",
        },
    ),
    "gemma3_linear_rope": (
        "Gemma3TextConfig",
        BASE
        | GEMMA
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "gemma3_old_config": (
        "Gemma3TextConfig",
        BASE
        | GEMMA
        | {
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3_images": (
        "Gemma3Config",
        {"text_config": GEMMA3_OF_IMAGES, "vision_config": VISION, "mm_tokens_per_image": 1},
    ),
    "gemma3_images_renamed": (
        "Gemma3Config",
        {
            "text_config": GEMMA3_OF_IMAGES
            | {
                "layer_types": ["full_attention", "sliding_attention"],
                "num_key_value_heads": 1,
                "query_pre_attn_scalar": 12,
            },
            "vision_config": VISION,
            "mm_tokens_per_image": 1,
        },
    ),
    "gemma4_shared": ("Gemma4TextConfig", GEMMA4 | GEMMA4_SHARED),
    # Layers without a window have half the numbers per token of the others.
    "gemma4_moe_capped": (
        "Gemma4TextConfig",
        GEMMA4
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_key_value_heads": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "final_logit_softcapping": 20.0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 50000.0,
                    "partial_rotary_factor": 0.75,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 3000.0},
            },
        },
    ),
    "gemma4_hub_images": (
        "Gemma4Config",
        {
            "text_config": GEMMA4 | GEMMA4_SHARED | {"pad_token_id": 0},
            "vision_config": GEMMA4_VISION,
            "audio_config": None,
        },
    ),
    # As many numbers per token in all layers, in other heads.
    "gemma4_images": (
        "Gemma4Config",
        {
            "text_config": GEMMA4
            | {
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "pad_token_id": 0,
                "use_bidirectional_attention": "vision",
                "hidden_activation": "gelu",
            },
            "vision_config": GEMMA4_VISION,
            "audio_config": None,
        },
    ),
    "mixtral": ("MixtralConfig", BASE | {"num_local_experts": 4}),
    "mixtral_window": (
        "MixtralConfig",
        BASE
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32, "sliding_window": 24},
    ),
    "qwen3_moe_tied": (
        "Qwen3MoeConfig",
        BASE | QWEN3_MOE | {"norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "qwen3_moe_and_mlps": (
        "Qwen3MoeConfig",
        BASE
        | QWEN3_MOE
        | {
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 33,
        },
    ),
    # As the hub's DeepSeek-V2-Lite.
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        BASE | DEEPSEEK | {"q_lora_rank": None, "n_routed_experts": 6, "n_shared_experts": 2},
    ),
    "deepseek_v2_yarn_groups": (
        "DeepseekV2Config",
        BASE
        | DEEPSEEK
        | {
            "q_lora_rank": 20,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "n_routed_experts": 12,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    # As the hub's Moonlight and Kimi K2: one group.
    "deepseek_v3_flat": (
        "DeepseekV3Config",
        BASE
        | DEEPSEEK
        | {
            "q_lora_rank": None,
            "attention_bias": True,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
    ),
    # As the hub's DeepSeek-V3.
    "deepseek_v3_groups": (
        "DeepseekV3Config",
        BASE
        | DEEPSEEK
        | {
            "q_lora_rank": 20,
            "n_routed_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "tie_word_embeddings": True,
            "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss": ("GptOssConfig", BASE | GPT_OSS),
    # Its experts are stored in four bits, as the hub's are.
    "gpt_oss_mxfp4": (
        "GptOssConfig",
        BASE | GPT_OSS | {"intermediate_size": 64, "head_dim": 16, "vocab_size": 128},
    ),
    "gpt_oss_old_config": (
        "GptOssConfig",
        BASE
        | GPT_OSS
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "sliding_attention"],
            "swiglu_alpha": 1.702,
            "swiglu_limit": 1.0,
            "rope_parameters": YARN_ROPE | {"truncate": False},
        },
    ),
    "t5_tied": ("T5Config", T5 | {"relative_attention_num_buckets": 12}),
    # As the hub's flan-t5 and t5-v1_1.
    "t5_gated_untied": (
        "T5Config",
        T5
        | {
            "feed_forward_proj": "gated-gelu",
            "num_layers": 3,
            "num_decoder_layers": 2,
            "tie_word_embeddings": False,
        },
    ),
    # Keys as the hub's gpt2 has them.
    "gpt2_without_prefix": ("GPT2Config", GPT2),
    "gpt2_variants": (
        "GPT2Config",
        GPT2
        | {
            "n_inner": 48,
            "n_layer": 3,
            "activation_function": "gelu",
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": ("Lfm2Config", BASE | LFM2),
    # Keys of config.json as the hub's LFM2-1.2B has them.
    "lfm2_biases_old_config": (
        "Lfm2Config",
        BASE
        | LFM2
        | {
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.1,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", BASE | QWEN3_5),
    "qwen3_5_two_layers": (
        "Qwen3_5TextConfig",
        BASE
        | QWEN3_5
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 4,
            "head_dim": 8,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "tie_word_embeddings": False,
        },
    ),
    # As the hub has it: within a model that sees.
    "qwen3_5_nested": (
        "Qwen3_5TextConfig",
        BASE
        | QWEN3_5
        | {
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "linear_attention"],
            "attention_bias": True,
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5_nested_tied": (
        "Qwen3_5TextConfig",
        BASE
        | QWEN3_5
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "num_key_value_heads": 1,
        },
    ),
    "opt": ("OPTConfig", OPT),
    "opt_post_norm_projected": (
        "OPTConfig",
        OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16, "initializer_range": 0.25},
    ),
    "opt_without_biases": (
        "OPTConfig",
        OPT
        | {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "_remove_final_layer_norm": True,
            "activation_function": "gelu_new",
        },
    ),
    "apertus": ("ApertusConfig", BASE | {"rope_parameters": LLAMA3_ROPE}),
    "apertus_bias": ("ApertusConfig", BASE | {"attention_bias": True}),
    "arcee": ("ArceeConfig", BASE),
    "arcee_biases_yarn": (
        "ArceeConfig",
        BASE | {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN_ROPE},
    ),
    "cohere_head_norms": ("CohereConfig", BASE | {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere_own_head": (
        "CohereConfig",
        BASE | {"attention_bias": True, "layer_norm_eps": 1e-2, "tie_word_embeddings": False},
    ),
    "cohere2": (
        "Cohere2Config",
        BASE | {"sliding_window": 24, "sliding_window_pattern": 2, "logit_scale": 0.5},
    ),
    "cohere2_own_head": (
        "Cohere2Config",
        BASE
        | {
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 17,
            "tie_word_embeddings": False,
        },
    ),
    "ernie4_5": ("Ernie4_5Config", BASE | {"head_dim": 16}),
    "ernie4_5_biases": (
        "Ernie4_5Config",
        BASE | {"head_dim": None, "use_bias": True, "tie_word_embeddings": False},
    ),
    "exaone4_window": (
        "Exaone4Config",
        BASE
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "exaone4_tied_full": (
        "Exaone4Config",
        BASE | {"layer_types": ["full_attention"] * 2, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "glm": ("GlmConfig", BASE | {"head_dim": 16}),
    "glm_tied": (
        "GlmConfig",
        BASE
        | {
            "head_dim": 8,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.75},
        },
    ),
    "glm4": ("Glm4Config", BASE | {"head_dim": 16}),
    "glm4_tied": (
        "Glm4Config",
        BASE | {"head_dim": 8, "attention_bias": False, "tie_word_embeddings": True},
    ),
    "granite_tied": (
        "GraniteConfig",
        BASE
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "granite_biases": (
        "GraniteConfig",
        BASE | {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.5, "logits_scaling": 2},
    ),
    "helium": ("HeliumConfig", BASE | {"head_dim": 8}),
    "helium_tied_biases": (
        "HeliumConfig",
        BASE | {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan_alpha": (
        "HunYuanDenseV1Config",
        BASE
        | {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan_bias": ("HunYuanDenseV1Config", BASE | {"head_dim": 8, "attention_bias": True}),
    "ministral_tied": (
        "MinistralConfig",
        BASE
        | {
            "head_dim": 8,
            "layer_types": ["full_attention"] * 2,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "ministral_windows": (
        "MinistralConfig",
        BASE | {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    ),
    "ministral3": ("Ministral3Config", BASE | {"head_dim": 16, "rope_parameters": MINISTRAL3_ROPE}),
    "ministral3_window": (
        "Ministral3Config",
        BASE
        | {
            "head_dim": 8,
            "sliding_window": 24,
            "tie_word_embeddings": True,
            "rope_parameters": MINISTRAL3_ROPE | {"original_max_position_embeddings": 16},
        },
    ),
    "nemotron": ("NemotronConfig", BASE | {"head_dim": 16}),
    "nemotron_tied_biases": (
        "NemotronConfig",
        BASE
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "norm_eps": 1e-2,
            "partial_rotary_factor": 0.25,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2Config", BASE),
    "olmo2_bias": (
        "Olmo2Config",
        BASE | {"num_key_value_heads": 4, "attention_bias": True},
    ),
    "olmo3": (
        "Olmo3Config",
        BASE
        | {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "rope_parameters": OLMO3_ROPE,
        },
    ),
    "olmo3_old_config": (
        "Olmo3Config",
        BASE
        | {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 17,
            "rope_parameters": OLMO3_ROPE,
        },
    ),
    "phi": (
        "PhiConfig",
        BASE | {"num_hidden_layers": 3, "num_key_value_heads": 4, "partial_rotary_factor": 0.25},
    ),
    "phi_gelu": (
        "PhiConfig",
        BASE | {"layer_norm_eps": 1e-2, "hidden_act": "gelu"},
    ),
    "seed_oss": ("SeedOssConfig", BASE | {"head_dim": 16}),
    "seed_oss_tied_biases": (
        "SeedOssConfig",
        BASE
        | {
            "attention_out_bias": True,
            "attention_bias": False,
            "head_dim": 8,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": ("SmolLM3Config", BASE | {"no_rope_layer_interval": 2}),
    "smollm3_window": (
        "SmolLM3Config",
        BASE
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [0, 1],
            "use_sliding_window": True,
            "sliding_window": 24,
            "tie_word_embeddings": False,
        },
    ),
    "stablelm": ("StableLmConfig", BASE | {"use_qkv_bias": True, "tie_word_embeddings": True}),
    "stablelm_parallel_head_norms": (
        "StableLmConfig",
        BASE
        | {
            "layer_norm_eps": 1e-2,
            "partial_rotary_factor": 0.75,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        },
    ),
    "starcoder2_window": ("Starcoder2Config", BASE | {"sliding_window": 24}),
    "starcoder2_without_biases": (
        "Starcoder2Config",
        BASE | {"hidden_act": "relu2", "norm_epsilon": 1e-2, "tie_word_embeddings": False, "use_bias": False},
    ),
}


def make_model(name: str) -> Any:
    """Returns a random model.

    Its biases and norms are random too, because zeros and ones would hide mistakes. Its layers outweigh the
    embedding, because otherwise a tied model would repeat the last token.
    """
    config_class, values = CONFIGS[name]
    config = getattr(transformers, config_class)(**values)
    config._attn_implementation = "eager"
    config.eos_token_id = None  # GLM has one in place of None
    kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        if "untied" in name:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.15)
        for module in model.modules():
            if "gemma4" in name and isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                # A prompt that begins with zeros would make all tokens equally likely.
                module.weight[module.padding_idx].normal_(0, COMMON["initializer_range"])
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.normal_(-2.5, 1.0)  # from hardly any decay to much
            elif parameter.ndim == 1 or "norm" in key:
                # Norms start at 1, Gemma's and biases at 0.
                parameter.normal_(parameter.mean().item(), 0.2)
                if "gemma4" in name and "q_norm" in key:
                    # Its scores have no other scale, and large ones amplify rounding.
                    parameter.mul_(0.5)
            elif ".conv." in key:
                parameter.mul_(1.5)  # a convolution multiplies three parts of its projection
            elif ".layers." in key or ".h." in key:
                parameter.mul_(LAYER_SCALE)
            elif name.startswith("gemma") or "shared" in key:
                # Gemma's norms undo the scale of its layers, and T5's are large enough.
                parameter.mul_(0.3)
        for key, buffer in model.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.normal_(1, 0.2)
            elif key.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    return model


def make_mxfp4(model: Any) -> dict[str, torch.Tensor]:
    """Rounds the kernels of a model's experts to MXFP4, and returns them as a checkpoint stores them.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023.
    """
    stored = {}
    for key, parameter in model.named_parameters():
        if re.fullmatch(r".*\.experts\.(gate_up|down)_proj", key):
            groups = parameter.detach().transpose(1, 2).unflatten(2, (-1, 32))
            exponents = groups.abs().amax(-1).log2().floor() - 2
            scaled = groups / exponents.exp2()[..., None]
            codes = (scaled[..., None] - torch.tensor(FP4_VALUES)).abs().argmin(-1)
            stored[f"{key}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            stored[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
            values = torch.tensor(FP4_VALUES)[codes] * exponents.exp2()[..., None]
            with torch.no_grad():
                parameter.copy_(values.flatten(2).transpose(1, 2))
    return stored


def save_mxfp4(model: Any, folder: Path, stored: dict[str, torch.Tensor]) -> None:
    """Puts experts in four bits into a checkpoint, and checks that transformers decodes the same."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {k: v for k, v in load_file(file).items() if f"{k}_blocks" not in stored}
    save_file(tensors | stored, file, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    values = json.loads(config.read_text()) | {"quantization_config": quantization}
    config.write_text(json.dumps(values, indent=2) + "\n")
    decode = transformers.Mxfp4Config(dequantize=True)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=decode, dtype=torch.float32
    )
    own = dict(model.named_parameters())
    assert all(torch.equal(p, own[k]) for k, p in again.named_parameters())


@contextmanager
def router_margins(model: Any) -> Iterator[list[float]]:
    """Collects the margins between the last expert that is chosen and the next one."""
    margins: list[float] = []

    def note(module: Any, _: Any, out: Any) -> None:
        top_k = module.config.top_k_experts if hasattr(module, "config") else module.top_k
        scores, num_ranked = out[0].float(), 1
        if hasattr(module, "e_score_correction_bias"):
            scores, num_ranked = scores.sigmoid() + module.e_score_correction_bias, 2
        if getattr(module, "topk_method", "greedy") != "greedy" or (num_ranked > 1 and module.num_group > 1):
            groups = scores.unflatten(-1, (module.num_group, -1))
            ranks = groups.topk(num_ranked).values.sum(-1)
            best = ranks.topk(module.topk_group + 1).values
            margins.append((best[..., -2] - best[..., -1]).min().item())
            is_best = ranks[..., None] >= best[..., -2, None, None]
            scores = torch.where(is_best, groups, -1e9).flatten(-2)
        best = scores.topk(top_k + 1).values
        margins.append((best[..., -2] - best[..., -1]).min().item())

    hooks = [m.register_forward_hook(note) for m in model.modules() if type(m).__name__.endswith("Router")]
    yield margins
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def run(model: Any, prompt: list[int]) -> tuple[dict[str, Any], bool]:
    """Returns the reference case of one prompt, and whether all margins are large enough."""
    with router_margins(model) as routers:
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    token_ids = out.sequences[0, -NUM_NEW_TOKENS:].tolist()
    assert len(token_ids) == NUM_NEW_TOKENS
    logprobs = torch.cat(out.logits).double().log_softmax(-1)
    top = logprobs.topk(NUM_TOP)
    assert top.indices[:, 0].tolist() == token_ids
    values = [[round(x, 6) for x in row] for row in top.values.tolist()]
    case = {
        "prompt_token_ids": prompt,
        "token_ids": token_ids,
        "logprobs": [row[0] for row in values],
        "top_token_ids": top.indices.tolist(),
        "top_logprobs": values,
    }
    margin = (top.values[:, 0] - top.values[:, 1]).min().item()
    return case, margin > MIN_MARGIN and min(routers, default=1.0) > MIN_ROUTER_MARGIN


def make_old_config(file: Path) -> None:
    """Rewrites a config.json as transformers 4 wrote it."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        if config["model_type"].startswith("gemma3"):
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            config["sliding_window_pattern"] = 1 + config.pop("layer_types").index("full_attention")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "lfm2":
        types = config.pop("layer_types")
        config["full_attn_idxs"] = [i for i, kind in enumerate(types) if kind == "full_attention"]
        config["block_ff_dim"] = config.pop("intermediate_size")
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    elif config.get("head_dim", 0) * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    config["transformers_version"] = "4.45.0"
    file.write_text(json.dumps(config, indent=2) + "\n")


def make_nested(folder: Path) -> None:
    """Makes a text model the part of a model that sees, with weights of parts that no text needs."""
    config, file = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    text = {k: v for k, v in config.items() if k not in ("architectures", "tie_word_embeddings")}
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }
    nested["tie_word_embeddings"] = config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(nested, indent=2) + "\n")
    weights = {k.replace("model.", "model.language_model."): v for k, v in load_file(file).items()}
    others = {name: torch.zeros(1) for name in ("model.visual.pos_embed.weight", "mtp.norm.weight")}
    save_file(weights | others, file)


def make_hub_gemma4(folder: Path) -> None:
    """Rewrites a checkpoint of Gemma 4 as those on the hub are: heads in another form, and more weights."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    heads = next(iter(text.pop("per_layer_config").values()))
    text["global_head_dim"] = heads["head_dim"]
    text["num_global_key_value_heads"] = heads.get("num_key_value_heads")
    file.write_text(json.dumps(config, indent=2) + "\n")
    weights = load_file(folder / "model.safetensors")
    start = "model.language_model." if "text_config" in config else "model."
    for layer in range(text["num_hidden_layers"] - text["num_kv_shared_layers"], text["num_hidden_layers"]):
        names = (f"{start}layers.{layer}.self_attn.{x}.weight" for x in ("k_proj", "v_proj", "k_norm"))
        weights |= {name: torch.zeros(8) for name in names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def make_dynamic_rope() -> None:
    name, original, rope = DYNAMIC_ROPE
    config = transformers.AutoConfig.from_pretrained(FIXTURES / name)
    config.max_position_embeddings, config.rope_parameters = original, rope
    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / name, config=config).eval()
    cases = []
    for length in DYNAMIC_ROPE_LENS:
        tokens = torch.randint(COMMON["vocab_size"], (length,))
        logprobs = model(tokens[None]).logits[0, -NUM_NEW_TOKENS:].double().log_softmax(-1)
        top = logprobs.topk(NUM_TOP)
        values = [[round(x, 6) for x in row] for row in top.values.tolist()]
        case = {"token_ids": tokens.tolist(), "top_token_ids": top.indices.tolist(), "top_logprobs": values}
        cases.append(json.dumps(case, separators=(",", ":")))
    (FIXTURES.parent / "dynamic_rope.json").write_text("[\n" + ",\n".join(cases) + "\n]\n")


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or [*CONFIGS, "dynamic_rope"]:
        torch.manual_seed(zlib.crc32(name.encode()))
        if name == "dynamic_rope":
            make_dynamic_rope()
            continue
        model = make_model(name)
        experts = make_mxfp4(model) if "mxfp4" in name else {}
        cases = []
        for length in PROMPT_LENS:
            good = False
            while not good:
                prompt = torch.randint(model.config.vocab_size, (length,)).tolist()
                case, good = run(model, prompt)
            cases.append(case)
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, max_shard_size="60KB" if "sharded" in name else "1MB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        if experts:
            save_mxfp4(model, folder, experts)
        if "without_prefix" in name:
            file = folder / "model.safetensors"
            save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file)
        if "nested" in name:
            make_nested(folder)
        if "untied" in name:
            config = json.loads((folder / "config.json").read_text())
            config |= {"tie_word_embeddings": False}
            del config["scale_decoder_outputs"]
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if "gemma4_hub" in name:
            make_hub_gemma4(folder)
        if "renamed" in name:
            file = folder / "model.safetensors"
            old, new = "language_model.model.", "model.language_model."
            weights = {k.replace(old, new): v for k, v in load_file(file).items()}
            save_file(weights, file, {"format": "pt"})
        if "old_config" in name:
            make_old_config(folder / "config.json")
        rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        (folder / "reference.json").write_text(f'{{"cases":[\n{rows}\n]}}\n')
        distinct = sorted(len(set(case["token_ids"])) for case in cases)
        print(f"{name}: {len(cases)} prompts; distinct tokens of {NUM_NEW_TOKENS}: {distinct}")


if __name__ == "__main__":
    main()

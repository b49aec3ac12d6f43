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
}


def make_model(name: str) -> Any:
    """Returns a random model.

    Its biases and norms are random too, because zeros and ones would hide mistakes. Its layers outweigh the
    embedding, because otherwise a tied model would repeat the last token.
    """
    config_class, values = CONFIGS[name]
    config = getattr(transformers, config_class)(**values)
    config._attn_implementation = "eager"
    kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).to(torch.float32).eval()
    with torch.no_grad():
        if "untied" in name:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.15)
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                # Norms start at 1, Gemma's and biases at 0.
                parameter.normal_(parameter.mean().item(), 0.2)
            elif ".layers." in key or ".h." in key:
                parameter.mul_(LAYER_SCALE)
            elif name.startswith("gemma") or "shared" in key:
                # Gemma's norms undo the scale of its layers, and T5's are large enough.
                parameter.mul_(0.3)
    return model


@contextmanager
def router_margins(model: Any) -> Iterator[list[float]]:
    """Collects the margins between the last expert that is chosen and the next one."""
    margins: list[float] = []

    def note(module: Any, _: Any, out: Any) -> None:
        scores = out[0].float()
        if getattr(module, "topk_method", "greedy") != "greedy":
            groups = scores.unflatten(-1, (module.num_group, -1))
            best = groups.amax(-1).topk(module.topk_group + 1).values
            margins.append((best[..., -2] - best[..., -1]).min().item())
            is_best = groups.amax(-1, keepdim=True) >= best[..., -2, None, None]
            scores = torch.where(is_best, groups, -1e9).flatten(-2)
        best = scores.topk(module.top_k + 1).values
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
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        config["sliding_window_pattern"] = 1 + config.pop("layer_types").index("full_attention")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    config["transformers_version"] = "4.45.0"
    file.write_text(json.dumps(config, indent=2) + "\n")


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
        cases = []
        for length in PROMPT_LENS:
            good = False
            while not good:
                prompt = torch.randint(COMMON["vocab_size"], (length,)).tolist()
                case, good = run(model, prompt)
            cases.append(case)
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, max_shard_size="60KB" if "sharded" in name else "1MB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        if "without_prefix" in name:
            file = folder / "model.safetensors"
            save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file)
        if "untied" in name:
            config = json.loads((folder / "config.json").read_text())
            config |= {"tie_word_embeddings": False}
            del config["scale_decoder_outputs"]
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if "old_config" in name:
            make_old_config(folder / "config.json")
        rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        (folder / "reference.json").write_text(f'{{"cases":[\n{rows}\n]}}\n')
        distinct = sorted(len(set(case["token_ids"])) for case in cases)
        print(f"{name}: {len(cases)} prompts; distinct tokens of {NUM_NEW_TOKENS}: {distinct}")


if __name__ == "__main__":
    main()

"""Makes the fixtures: tiny random Llama checkpoints, and what transformers says of them.

The tests need no torch; this script does. In an environment of its own (Python 3.11 has CPU builds):

    pip install torch==2.13.0 transformers==5.23.0
    python tests/models/make_references.py

Every folder under tests/models/fixtures then holds config.json, one or several safetensors files, and
reference.json: {"cases": [{"prompt_token_ids", "token_ids", "logprobs", "top_token_ids", "top_logprobs"}]}
with, for each of the greedy output tokens, its log-probability and the five largest.

A prompt is drawn anew when at some step the two best tokens are closer than MIN_MARGIN: then the greedy
tokens depend on the model alone, and not on the order of float32 sums.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
PROMPT_LENS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 47, 64, 65, 79, 99, 100)
NUM_NEW_TOKENS = 24
NUM_TOP = 5
MIN_MARGIN = 1e-3
LAYER_SCALE = 2.0

# The original context is shorter than the prompts, so that every branch of the scaling is at work.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    # 0.02 would give nearly the same token at every step.
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mha_old_config": {"num_key_value_heads": 4},
    "gqa2_tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gqa4_llama3": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rope_parameters": LLAMA3_ROPE,
    },
    "mqa8_attention_bias": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "attention_bias": True,
    },
    "wide_heads_mlp_bias_sharded": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "mlp_bias": True,
    },
    "llama3_tied_biases_old_config": {
        "num_key_value_heads": 1,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
}


def make_model(name: str) -> LlamaForCausalLM:
    """Returns a random model.

    Its biases and norms are random too: what is 0 or 1 hides mistakes. Its layers outweigh the embedding:
    else a tied model repeats the last token.
    """
    config = LlamaConfig(**(BASE | CONFIGS[name]))
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                mean = 0.0 if key.endswith("bias") else 1.0
                parameter.normal_(mean, 0.2)
            elif ".layers." in key:
                parameter.mul_(LAYER_SCALE)
    return model


@torch.no_grad()
def run(model: LlamaForCausalLM, prompt: list[int]) -> tuple[dict[str, Any], float]:
    """Returns the case of one prompt, and the smallest margin between the two best tokens."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = out.sequences[0, len(prompt) :].tolist()
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
    return case, (top.values[:, 0] - top.values[:, 1]).min().item()


def make_old_config(file: Path) -> None:
    """Rewrites a config.json as transformers 4 wrote it."""
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    del config["head_dim"]
    config["transformers_version"] = "4.45.0"
    file.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    for seed, name in enumerate(CONFIGS):
        torch.manual_seed(seed)
        model = make_model(name)
        cases = []
        for length in PROMPT_LENS:
            margin = 0.0
            while margin < MIN_MARGIN:
                prompt = torch.randint(BASE["vocab_size"], (length,)).tolist()
                case, margin = run(model, prompt)
            cases.append(case)
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, max_shard_size="60KB" if "sharded" in name else "1MB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        if "old_config" in name:
            make_old_config(folder / "config.json")
        rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
        (folder / "reference.json").write_text(f'{{"cases":[\n{rows}\n]}}\n')
        distinct = sorted(len(set(case["token_ids"])) for case in cases)
        print(f"{name}: {len(cases)} prompts; distinct tokens of {NUM_NEW_TOKENS}: {distinct}")


if __name__ == "__main__":
    main()

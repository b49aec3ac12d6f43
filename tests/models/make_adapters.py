"""Makes the adapters of tests/models/adapters with PEFT, and PEFT's outputs for them.

The tests need neither torch nor PEFT; this script does. In an environment of its own:

    pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2
    python tests/models/make_adapters.py

Every folder then holds adapter_config.json, adapter_model.safetensors as PEFT saves them, and reference.json:
{"base": name of a folder of tests/models/fixtures, "cases": as make_references.py writes them}. The model
computes in float32, and the adapter is not merged into it. As there, a prompt is drawn again where two tokens
are close.
"""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from make_references import COMMON, FIXTURES, run

FOLDER = Path(__file__).parent / "adapters"
PROMPT_LENS = (1, 7, 16, 17, 40)
BASE = "gqa4_llama3"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
# Base, and PEFT's arguments. The ranks of the first eight differ, or where their ranks come from.
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "rank1": (BASE, {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"]}),
    "rank2_attention": (BASE, {"r": 2, "lora_alpha": 3, "target_modules": ATTENTION}),
    "rank3_mlp": (BASE, {"r": 3, "lora_alpha": 3, "target_modules": MLP}),
    "rank4_rslora": (
        BASE,
        {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": ATTENTION + MLP},
    ),
    "rank_pattern": (
        BASE,
        {
            "r": 5,
            "lora_alpha": 5,
            "target_modules": ATTENTION + MLP,
            "rank_pattern": {"down_proj": 2, "layers.0.self_attn.q_proj": 7},
            "alpha_pattern": {"^model.layers.1.mlp.up_proj": 9, "o_proj": 1},
        },
    ),
    "rank8_all_linear": (BASE, {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"}),
    "rank6_one_layer": (
        BASE,
        {"r": 6, "lora_alpha": 12, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
    ),
    "rslora_and_rank_pattern": (
        BASE,
        {
            "r": 2,
            "lora_alpha": 2,
            "use_rslora": True,
            "target_modules": r".*\.(k|up)_proj",
            "rank_pattern": {"k_proj": 9},
        },
    ),
    "phi3_fused": (
        "phi3_longrope",
        {"r": 3, "lora_alpha": 4, "target_modules": ["qkv_proj", "gate_up_proj"]},
    ),
    "gpt2_fan_in": (
        "gpt2_variants",
        {"r": 3, "lora_alpha": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    ),
    "moe_attention": ("qwen3_moe_tied", {"r": 2, "lora_alpha": 4, "target_modules": ATTENTION}),
    "soft_prompt": (BASE, {"num_virtual_tokens": 5}),
}


def make(name: str) -> None:
    base, options = ADAPTERS[name]
    torch.manual_seed(zlib.crc32(name.encode()))
    model = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / base, dtype=torch.float32).eval()
    is_prompt = "num_virtual_tokens" in options
    make_config = peft.PromptTuningConfig if is_prompt else peft.LoraConfig
    adapted = peft.get_peft_model(model, make_config(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.normal_(0, 0.2)
            elif "prompt_encoder" in key:
                parameter.normal_(0, 0.3)
    cases = []
    for length in PROMPT_LENS:
        good = False
        while not good:
            prompt = torch.randint(COMMON["vocab_size"], (length,)).tolist()
            case, good = run(adapted, prompt)
        cases.append(case)
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = base
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    (folder / "reference.json").write_text(f'{{"base":"{base}","cases":[\n{rows}\n]}}\n')
    distinct = sorted(len(set(case["token_ids"])) for case in cases)
    print(f"{name}: {len(cases)} prompts; distinct tokens of each: {distinct}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in ADAPTERS:
        make(name)

"""The model of the benchmarks: a Llama with 40M random parameters, which is written once."""

import json
from pathlib import Path
from typing import Any

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}


def write_checkpoint(folder: Path) -> None:
    """Writes the model in float32 and a tokenizer, unless the folder already contains them.

    The text of most tokens is their id, such as "w42", so that the text of an output shows its token ids.
    """
    done = folder / "tokenizer_config.json"
    if done.exists():
        return
    from tokenizers import Tokenizer, models, pre_tokenizers

    from jax_paged.models.weights import random_model, save_model

    save_model(random_model(HF_CONFIG, "float32").model, folder, HF_CONFIG)
    words = [*SPECIAL_TOKENS.values(), *(f"w{i}" for i in range(4, HF_CONFIG["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    done.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL_TOKENS}))

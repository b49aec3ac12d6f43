"""Writes the weights of a GGUF file as a bfloat16 checkpoint folder, for engines that read no GGUF.

    python -m serving.dequantize FILE FOLDER

It runs in OpenVINO's environment, because it needs torch, transformers and gguf.
"""

import argparse
import json
from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Writes config.json, one safetensors file and the tokenizer."""
    parser = argparse.ArgumentParser(prog="python -m serving.dequantize", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    source, name = str(args.file.parent), args.file.name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
    config = json.loads(model.config.to_json_string())
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    _set_pre_tokenizer(tokenizer, args.file)
    tokenizer.save_pretrained(args.folder)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    state = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
    save_file(state, args.folder / "model.safetensors", metadata={"format": "pt"})
    # Last, because its existence means that the folder is complete.
    (args.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def _set_pre_tokenizer(tokenizer: AutoTokenizer, file: Path) -> None:
    """Divides numbers into digits if the file says so, which transformers does not read."""
    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    if field is not None and field.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


if __name__ == "__main__":
    main()

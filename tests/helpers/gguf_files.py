"""Writes a checkpoint folder as a GGUF file, as llama.cpp's converter does.

The names of tensors are those of the gguf package, and the values are transformed as in conversion/*.py of
llama.cpp, so that this file shares nothing with the code that it tests.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GptOssForCausalLM": "gpt-oss",
}
# Types that the gguf package can quantize to.
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
# Byte at which each float16 of a block begins.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": ()},
}
TypeOf = Callable[[str, np.ndarray], str]


def random_blocks(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Returns random blocks of values of a type, uint8 [*shape, bytes], with small finite scales."""
    blocks = rng.integers(0, 256, (*shape, GGML_QUANT_SIZES[GGMLQuantizationType[name]][1]), np.uint8)
    for at in HALVES[name]:
        scales = rng.normal(size=(*shape, 1)).astype(np.float16) * np.float16(2.0 ** rng.integers(-12, 3))
        blocks[..., at : at + 2] = np.ascontiguousarray(scales).view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(110, 140, shape)
    return blocks


def write_gguf(
    file: Path,
    folder: Path,
    type_of: TypeOf = lambda key, value: "F32",
    metadata: Callable[[GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> None:
    """Writes the checkpoint in a folder as a GGUF file.

    Args:
        file: The file.
        folder: Holds config.json and model.safetensors with float32 weights.
        type_of: Returns the type of a matrix by its name in the file and its values.
        metadata: Adds metadata.
        **options: Options of GGUFWriter.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(file, architecture, **options)
    _write_sizes(writer, architecture, config)
    metadata(writer)
    names = gguf.get_tensor_name_map(_arch(architecture), config["num_hidden_layers"])
    stored = load_file(folder / "model.safetensors")
    for key, value in _converted(architecture, config, stored):
        name = names.get_name(key, (".weight", ".bias"))
        assert name is not None, key
        kind = GGMLQuantizationType[type_of(name, value) if value.ndim > 1 else "F32"]
        data = value.astype(np.float32)
        if name.endswith("weight") and kind != GGMLQuantizationType.F32:
            data = _quantized(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    for name, value in _factors(config):
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arch(name: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)


def _quantized(value: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind.name in (*QUANTIZABLE, "F16", "BF16"):
        return gguf.quants.quantize(value, kind)
    # The package cannot quantize to these types: any blocks will do.
    size = GGML_QUANT_SIZES[kind][0]
    rng = np.random.default_rng(abs(hash(value.tobytes())) % 2**32)
    blocks = random_blocks(kind.name, (*value.shape[:-1], value.shape[-1] // size), rng)
    return blocks.reshape(*value.shape[:-1], -1)


def _write_sizes(writer: GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden_size // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden_size)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta", 10000.0)} | rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(int(share * head_dim))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            getattr(writer, f"add_{name}")(config[name])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        size = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(size)


def _converted(
    architecture: str, config: dict[str, Any], stored: dict[str, np.ndarray]
) -> list[tuple[str, np.ndarray]]:
    """Returns the tensors by their names in transformers, with the values of the file."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    found, experts = list[tuple[str, np.ndarray]](), dict[str, list[np.ndarray]]()
    for key, value in stored.items():
        module = key.split(".")[-2]
        if architecture == "llama" and module in heads:
            shape = heads[module], 2, -1, *value.shape[1:]
            value = value.reshape(shape).swapaxes(1, 2).reshape(value.shape)
        elif architecture.startswith("gemma") and key.endswith("norm.weight"):
            value = value + 1
        if architecture == "qwen3moe" and ".experts." in key:
            start, _, rest = key.partition(".experts.")
            number, _, end = rest.partition(".")
            experts.setdefault(f"{start}.experts.{end}", [np.empty(0)] * config["num_local_experts"])
            experts[f"{start}.experts.{end}"][int(number)] = value
        elif architecture == "gpt-oss" and ".experts." in key:
            found += _gpt_oss_experts(key, value)
        else:
            found.append((f"{key}.weight" if key.endswith("sinks") else key, value))
    return found + [(key, np.stack(values)) for key, values in experts.items()]


def _gpt_oss_experts(key: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    end = ".bias" if key.endswith("_bias") else ".weight"
    value = value if end == ".bias" else value.swapaxes(1, 2)
    stem = key.removesuffix("_bias")
    if not stem.endswith("gate_up_proj"):
        return [(stem + end, value)]
    names = (stem.replace("gate_up", part) + end for part in ("gate", "up"))
    return list(zip(names, (value[:, ::2], value[:, 1::2]), strict=True))


def _factors(config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type")
    if kind == "longrope":
        return [
            (f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
            for length in ("short", "long")
        ]
    if kind != "llama3":
        return []
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta, old = rope.get("rope_theta", config.get("rope_theta")), rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        length = 2 * math.pi / frequency
        smooth = (old / length - low) / (high - low)
        is_between = old / high <= length <= old / low
        scaled = factor if length > old / low else 1.0
        factors.append(1 / ((1 - smooth) / factor + smooth) if is_between else scaled)
    return [("rope_freqs.weight", np.array(factors, np.float32))]

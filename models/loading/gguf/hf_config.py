"""The configuration of a GGUF file's model, in the form of config.json. Does not import JAX.

The metadata has the sizes and settings of the model under names such as "llama.block_count". Sizes that
determine how much memory is allocated are compared with the shapes of the tensors, which fit into the file.
"""

import math
import statistics
import sys
from array import array
from collections.abc import Callable
from typing import Any

from jax_paged.arguments.shown_values import one_of, shown
from jax_paged.models.loading.gguf.header import GgufHeader

# Types of tokens in tokenizer.ggml.token_type.
CONTROL, USER_DEFINED = 3, 4
# Tokens with these names end a sequence, as in llama.cpp. Files declare only some of them.
_END_TOKENS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<EOT>",
        "<｜end▁of▁sentence｜>",
    )
)
# In the format of gpt-oss, "<|end|>" ends a message, after which the model may write another one.
_HARMONY_TOKENS = frozenset(("<|return|>", "<|call|>"))
# Numbers of layers of the models Gemma 2 27B and Gemma 3 27B, whose attention scores have another factor.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
# Settings of Llama 3.1 to 3.3.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_LENGTH = 1.0, 4.0, 8192
# Recommended sampling parameters: keys in the metadata, by names in generation_config.json.
_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class _Fields:
    """The metadata of a model, with checked types.

    Args:
        header: The header of the file.
        architecture: Name of the architecture, which is the prefix of the keys.
    """

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.header, self.architecture = header, architecture

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of any type."""
        return self.header.metadata.get(f"{self.architecture}.{name}", default)

    def problem(self, name: str, allowed: str) -> ValueError:
        """Returns an error about a value."""
        key = f"{self.architecture}.{name}"
        got = shown(self.header.metadata[key]) if key in self.header.metadata else "no value"
        return ValueError(f"`{key}` of {self.header.file} must be {allowed}, got {got}")

    def integer(self, name: str, default: int | None = None) -> int:
        """Returns an integer of at least 1. An array of equal integers counts as one."""
        value = self.get(name, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or value < 1:
            raise self.problem(name, "an integer of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """Returns a number; None if it is missing and there is no default."""
        value = self.get(name, default)
        if value is not None and (type(value) not in (int, float) or not math.isfinite(value)):
            raise self.problem(name, "a number")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.header.file} must have the tensor {name}, got none")
        return tensor.shape

    def factors(self, name: str) -> list[float] | None:
        """Returns the values of a small float32 tensor; None if the file does not have it."""
        tensor = self.header.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1024:
            raise ValueError(
                f"{name} of {self.header.file} must be F32 with at most 1024 values, got {tensor.type.name} "
                f"{tensor.shape}"
            )
        values = array("f")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.offset)
            values.fromfile(stream, tensor.shape[0])
        if sys.byteorder == "big":
            values.byteswap()
        return values.tolist()


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the configuration of a model in the form of config.json.

    Args:
        header: The header of the file.

    Raises:
        ValueError: If the architecture is not supported, or if values are missing or contradict the tensors.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        choices = one_of(_ARCHITECTURES)
        raise ValueError(
            f"`general.architecture` of {header.file} must be {choices}, got {shown(architecture)}"
        )
    name, read = _ARCHITECTURES[architecture]
    fields = _Fields(header, architecture)
    return {"architectures": [name], **_common(fields), **read(fields)}


def _common(fields: _Fields) -> dict[str, Any]:
    """Returns the values that all architectures have."""
    tensors = fields.header.tensors
    num_layers, hidden_size = fields.integer("block_count"), fields.integer("embedding_length")
    if num_layers > len(tensors) or not all(
        f"blk.{i}.attn_norm.weight" in tensors for i in range(num_layers)
    ):
        raise fields.problem("block_count", "the number of layers in the file")
    embedding = fields.shape("token_embd.weight")
    if len(embedding) != 2 or embedding[1] != hidden_size:
        raise fields.problem("embedding_length", f"the size of the embeddings in the file, {embedding}")
    heads = fields.integer("attention.head_count")
    kv_heads = fields.integer("attention.head_count_kv", heads)
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // heads))
    is_fused = "blk.0.attn_qkv.weight" in tensors
    rows = fields.shape("blk.0.attn_qkv.weight" if is_fused else "blk.0.attn_q.weight")[0]
    if head_dim * (heads + 2 * kv_heads if is_fused else heads) != rows:
        raise fields.problem("attention.head_count", f"a number of heads that fits {rows} columns")
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.problem("attention.value_length", f"{head_dim}, the length of a key")
    return {
        "vocab_size": embedding[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(fields.header),
        "rope_parameters": _rope(fields, head_dim),
    }


def _dtype(header: GgufHeader) -> str:
    """Returns the dtype of the matrices; bfloat16 if they are quantized or have several dtypes."""
    types = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    names = {"F32": "float32", "F16": "float16"}
    return names.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


def _rope(fields: _Fields, head_dim: int) -> dict[str, Any]:
    """Returns the settings of the rotary embedding."""
    num_rotated = fields.integer("rope.dimension_count", head_dim)
    share = num_rotated / head_dim
    if int(head_dim * share) < num_rotated:
        share = math.nextafter(share, 2)
    rope: dict[str, Any] = {
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": share,
    }
    kind = fields.get("rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": fields.number("rope.scaling.factor", 1.0)}
    elif kind == "yarn":
        rope |= _yarn(fields)
    elif kind not in ("none", "longrope"):
        raise fields.problem("rope.scaling.type", one_of(("none", "linear", "yarn", "longrope")))
    factors = fields.factors("rope_freqs.weight")
    return rope if factors is None else rope | _llama3(fields, rope["rope_theta"], num_rotated, factors)


def _yarn(fields: _Fields) -> dict[str, Any]:
    """Returns the settings of YaRN."""
    names = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    optional = {name: fields.number(f"rope.scaling.{key}") for name, key in names.items()}
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    return {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": original,
    } | {name: value for name, value in optional.items() if value is not None}


def _llama3(fields: _Fields, theta: Any, num_rotated: int, factors: list[float]) -> dict[str, Any]:
    """Returns the settings of Llama 3's scaling. A file has only the factors that follow from them.

    Raises:
        ValueError: If no settings give these factors.
    """
    factor, low, high, original = max(factors), _LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_LENGTH
    frequencies = [theta ** (-i / num_rotated) for i in range(0, num_rotated, 2)]
    if factor > 1 and len(factors) == len(frequencies) and min(factors) > 0:
        # Between two limits, the share of the unscaled frequency is proportional to the original length.
        shares = [(1 / x - 1 / factor) / (1 - 1 / factor) for x in factors]
        lengths = [
            (low + share * (high - low)) * 2 * math.pi / f
            for share, f in zip(shares, frequencies, strict=True)
        ]
        between = [n for n, share in zip(lengths, shares, strict=True) if 0.01 < share < 0.99]
        shortest = max((n for n, share in zip(lengths, shares, strict=True) if share >= 0.99), default=1)
        longest = min(
            (n for n, share in zip(lengths, shares, strict=True) if share <= 0.01), default=original
        )
        if between:
            original = round(statistics.median(between))
        else:
            original = min(max(original, math.ceil(shortest)), math.floor(longest))
    turns = [original * f / (2 * math.pi) for f in frequencies]
    shares = [min(max((n - low) / (high - low), 0), 1) for n in turns]
    expected = [1 / ((1 - share) / factor + share) for share in shares] if factor > 0 else []
    # The factors are computed in float32, with a few rounding errors of 2^-24.
    if len(factors) != len(expected) or not all(
        math.isclose(a, b, rel_tol=1e-4) for a, b in zip(factors, expected, strict=True)
    ):
        raise ValueError(
            f"rope_freqs.weight of {fields.header.file} must have factors as in Llama 3, with "
            f"low_freq_factor {low} and high_freq_factor {high}, got {shown(factors)}"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(fields: _Fields) -> dict[str, Any]:
    if fields.get("expert_count", 0):
        raise fields.problem("expert_count", "0 because experts are not supported for this architecture")
    return {"attention_bias": "blk.0.attn_q.bias" in fields.header.tensors}


def _qwen(fields: _Fields) -> dict[str, Any]:
    return {}


def _qwen3moe(fields: _Fields) -> dict[str, Any]:
    return _experts(fields) | {
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        # llama.cpp scales the weights of a token's experts to a sum of 1 in all models of this architecture.
        "norm_topk_prob": True,
    }


def _experts(fields: _Fields) -> dict[str, Any]:
    """Returns the numbers of experts."""
    num, shape = fields.integer("expert_count"), fields.shape("blk.0.ffn_gate_exps.weight")
    if num != shape[0]:
        raise fields.problem("expert_count", f"{shape[0]}, the number of experts in the file")
    return {"num_experts": num, "num_experts_per_tok": fields.integer("expert_used_count")}


def _window(fields: _Fields) -> dict[str, Any]:
    """Returns the sliding window, and the layers that have it if the file lists them."""
    window = fields.get("attention.sliding_window", 0)
    if not window:
        return {}
    values: dict[str, Any] = {"sliding_window": fields.integer("attention.sliding_window")}
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, array):
        types = ["sliding_attention" if is_sliding else "full_attention" for is_sliding in pattern]
        return values | {"layer_types": types}
    if pattern is not None:
        values["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern")
    return values


def _gemma(fields: _Fields) -> dict[str, Any]:
    num_layers, heads = fields.integer("block_count"), fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    is_27b = num_layers == _GEMMA_27B[fields.architecture]
    head_dim = fields.integer("attention.key_length", max(1, hidden_size // heads))
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    caps = {name: cap for name in names if (cap := fields.number(name))}
    return caps | _window(fields) | {"query_pre_attn_scalar": hidden_size // heads if is_27b else head_dim}


def _gemma3(fields: _Fields) -> dict[str, Any]:
    values, rope = _gemma(fields), _common(fields)["rope_parameters"]
    if "sliding_window" not in values:
        values["layer_types"] = ["full_attention"] * fields.integer("block_count")
    local = {"rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    return values | {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}


def _phi3(fields: _Fields) -> dict[str, Any]:
    rope = _common(fields)["rope_parameters"]
    values = {"sliding_window": None, **_window(fields)}
    short = fields.factors("rope_factors_short.weight")
    if short is None:
        return values
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    rope |= {"rope_type": "longrope", "short_factor": short, "original_max_position_embeddings": original}
    if (magnitude := fields.number("rope.scaling.attn_factor")) is not None:
        rope["attention_factor"] = magnitude
    return values | {"rope_parameters": rope, "original_max_position_embeddings": original}


def _gpt_oss(fields: _Fields) -> dict[str, Any]:
    rope = _common(fields)["rope_parameters"]
    if rope.get("rope_type") == "yarn":
        rope["truncate"] = False
    values = _experts(fields)
    return {
        **_window(fields),
        "num_local_experts": values["num_experts"],
        "num_experts_per_tok": values["num_experts_per_tok"],
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "attention_bias": True,
        "rope_parameters": rope,
    }


# The class of each architecture, and the function that returns the values that only this class has.
_ARCHITECTURES: dict[str, tuple[str, Callable[[_Fields], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "qwen2": ("Qwen2ForCausalLM", _qwen),
    "qwen3": ("Qwen3ForCausalLM", _qwen),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3moe),
    "gemma2": ("Gemma2ForCausalLM", _gemma),
    "gemma3": ("Gemma3ForCausalLM", _gemma3),
    "phi3": ("Phi3ForCausalLM", _phi3),
    "gpt-oss": ("GptOssForCausalLM", _gpt_oss),
}


def generation_config_of(header: GgufHeader) -> dict[str, Any]:
    """Returns the end tokens and the recommended sampling parameters in the form of generation_config.json.

    Args:
        header: The header of the file.
    """
    metadata = header.metadata
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ends = {metadata[name] for name in names if isinstance(metadata.get(name), int)}
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, array) and len(types) == len(tokens):
        named = {
            text: i
            for i, text in enumerate(tokens)
            if text in _END_TOKENS and types[i] in (CONTROL, USER_DEFINED)
        }
        if named.keys() >= _HARMONY_TOKENS:
            named.pop("<|end|>", None)
        ends |= set(named.values())
    values = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
    sampling = {name: value for name, value in values.items() if type(value) in (int, float)}
    return {"eos_token_id": sorted(ends), **sampling}

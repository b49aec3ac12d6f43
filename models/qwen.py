"""Qwen2, Qwen2.5 (biases of queries, keys and values) and Qwen3 (normed queries and keys).

Source: Qwen2 Technical Report, 2024; Qwen3 Technical Report, 2025.
"""

import dataclasses
from typing import Any, ClassVar

from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.llama import LlamaConfig, LlamaForCausalLM


def _windows(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Returns the windows; without `layer_types` the first max_window_layers layers attend to all."""
    has_window = read.choice("use_sliding_window", False, (False, True))
    if not has_window or read.get("sliding_window", 4096) is None:
        return read.windows(num_layers, ["full_attention"] * num_layers, None)
    first = read.integer("max_window_layers", 28, low=0)
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return read.windows(num_layers, types, read.integer("sliding_window", 4096))


@dataclasses.dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Shape of a Qwen2."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 32}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        fields = super().read(read)
        biases = {"attention_bias": True, "output_bias": False, "mlp_bias": False}
        return fields | biases | {"windows": _windows(read, fields["num_hidden_layers"])}


class Qwen2ForCausalLM(LlamaForCausalLM):
    """A Llama with the config above."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen2Config


@dataclasses.dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """Shape of a Qwen3."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        fields = super().read(read)
        windows = _windows(read, fields["num_hidden_layers"])
        return fields | {"mlp_bias": False, "qk_norm": True, "windows": windows}


class Qwen3ForCausalLM(LlamaForCausalLM):
    """A Llama with the config above."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen3Config

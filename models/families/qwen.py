"""Qwen2 and Qwen2.5 (biases on queries, keys and values), Qwen3 (normed queries and keys) and Qwen3-MoE.

Source: Qwen2 Technical Report, 2024; Qwen3 Technical Report, 2025.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.moe import EXPERT_TABLE, MoeConfig, MoeDecoderLayer


def _windows(read: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Returns the windows; without `layer_types` the first max_window_layers layers attend to all tokens."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoeConfig):
    """Shape of a Qwen3-MoE."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        has_window = read.choice("use_sliding_window", False, (False, True))
        dense = read.get("mlp_only_layers", [])
        ok = isinstance(dense, list) and all(isinstance(i, int) for i in dense)
        dense = dense if read.check(ok, "mlp_only_layers", dense, "a list of layers") else []
        step = read.integer("decoder_sparse_step", 1)
        return (
            fields
            | {
                "mlp_bias": False,
                "qk_norm": True,
                "windows": cls.one_window(read, num_layers) if has_window else (),
                "moe_layers": tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
                "moe_intermediate_size": read.integer("moe_intermediate_size"),
                "norm_topk_prob": read.choice("norm_topk_prob", False, (False, True)),
            }
            | cls.read_experts(read)
        )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """A Qwen3 in which some or all MLPs are mixtures of experts."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen3MoeConfig
    layer_class: ClassVar[Callable[..., Module]] = MoeDecoderLayer
    weight_table: ClassVar[WeightTable] = EXPERT_TABLE

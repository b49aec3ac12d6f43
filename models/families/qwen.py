"""Qwen2ForCausalLM (Qwen2, Qwen2.5), Qwen3ForCausalLM and Qwen3MoeForCausalLM.

Differences from Llama:

- Qwen2: biases in the projections to queries, keys and values.
- Qwen3: RMSNorm of queries and keys, per head, and no such biases unless config.json enables them.
- Qwen3-MoE: as Qwen3, with a mixture of experts in place of some or all MLPs.

All of them may have sliding windows.

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
    """Returns the window of each layer.

    Without `layer_types`, the first `max_window_layers` layers have full attention.
    """
    has_window = read.choice("use_sliding_window", False, (False, True))
    if not has_window or read.get("sliding_window", 4096) is None:
        return read.windows(num_layers, ["full_attention"] * num_layers, None)
    first = read.integer("max_window_layers", 28, low=0)
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return read.windows(num_layers, types, read.integer("sliding_window", 4096))


@dataclasses.dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """Configuration of a Qwen2."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 32}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        biases = {"attention_bias": True, "output_bias": False, "mlp_bias": False}
        return fields | biases | {"windows": _windows(read, fields["num_hidden_layers"])}


class Qwen2ForCausalLM(LlamaForCausalLM):
    """A Llama with biases in the projections to queries, keys and values."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen2Config


@dataclasses.dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """Configuration of a Qwen3."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        windows = _windows(read, fields["num_hidden_layers"])
        return fields | {"mlp_bias": False, "qk_norm": True, "windows": windows}


class Qwen3ForCausalLM(LlamaForCausalLM):
    """A Llama with normalized queries and keys."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(MoeConfig):
    """Configuration of a Qwen3-MoE."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass.

        Layer i has experts if it is not in `mlp_only_layers` and i + 1 is a multiple of
        `decoder_sparse_step`.
        """
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        has_window = read.choice("use_sliding_window", False, (False, True))
        dense = read.get("mlp_only_layers", [])
        ok = isinstance(dense, list) and all(isinstance(i, int) for i in dense)
        dense = dense if read.check(ok, "mlp_only_layers", dense, "a list of layer indices") else []
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
    """A Qwen3 with a mixture of experts in place of some or all MLPs."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen3MoeConfig
    layer_class: ClassVar[Callable[..., Module]] = MoeDecoderLayer
    weight_table: ClassVar[WeightTable] = EXPERT_TABLE

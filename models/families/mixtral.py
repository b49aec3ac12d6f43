"""MixtralForCausalLM (Mixtral): a Mistral with a mixture of experts in place of every MLP.

Source: Jiang et al., Mixtral of Experts, 2024.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.moe import MoeConfig, MoeDecoderLayer

MOE = r"model.layers.\1.block_sparse_moe."


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoeConfig):
    """Configuration of a Mixtral."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        return (
            fields
            | {
                "attention_bias": False,
                "output_bias": False,
                "windows": cls.one_window(read, num_layers),
                "moe_layers": tuple(range(num_layers)),
                "moe_intermediate_size": fields["intermediate_size"],
                "norm_topk_prob": True,
            }
            | cls.read_experts(read)
        )


class MixtralForCausalLM(LlamaForCausalLM):
    """A Llama with a mixture of experts in place of every MLP."""

    config_class: ClassVar[type[LlamaConfig]] = MixtralConfig
    layer_class: ClassVar[Callable[..., Module]] = MoeDecoderLayer
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE.with_names(
        (r"layers\.(\d+)\.mlp\.gate", MOE + "gate"),
        (r"layers\.(\d+)\.mlp\.experts\.gate_proj", MOE + "experts.{}.w1.weight"),
        (r"layers\.(\d+)\.mlp\.experts\.down_proj", MOE + "experts.{}.w2.weight"),
        (r"layers\.(\d+)\.mlp\.experts\.up_proj", MOE + "experts.{}.w3.weight"),
    )

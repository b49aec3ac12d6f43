"""Starcoder2ForCausalLM (StarCoder2).

Differences from Llama: LayerNorm; biases in the linear layers; an MLP without a gate; a sliding window in all
layers, if config.json sets one.

Source: Lozhkov et al., StarCoder 2 and The Stack v2, 2024; semantics as in Hugging Face's
Starcoder2ForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.blocks import UngatedDecoderLayer, renamed
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import LayerNorm


@dataclasses.dataclass(frozen=True)
class Starcoder2Config(LlamaConfig):
    """Configuration of a StarCoder2."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    }
    epsilon_name: ClassVar[str] = "norm_epsilon"

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        has_bias = read.choice("use_bias", True, (False, True))
        biases = dict.fromkeys(("attention_bias", "output_bias", "mlp_bias"), has_bias)
        return fields | biases | {"windows": cls.one_window(read, fields["num_hidden_layers"])}


class Starcoder2DecoderLayer(UngatedDecoderLayer):
    """Llama's layer with LayerNorm and an MLP without a gate."""

    norm_class: ClassVar[Callable[..., Module]] = LayerNorm


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """A Llama with LayerNorm and MLPs without a gate."""

    config_class: ClassVar[type[LlamaConfig]] = Starcoder2Config
    layer_class: ClassVar[Callable[..., Module]] = Starcoder2DecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = LayerNorm
    weight_table: ClassVar[WeightTable] = renamed({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})

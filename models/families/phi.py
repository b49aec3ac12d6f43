"""PhiForCausalLM (Phi-1, Phi-1.5 and Phi-2).

Differences from Llama: attention and MLP are parallel, with one norm for both; LayerNorm; partial rotary
embedding; an MLP without a gate; biases in all linear layers, including the head.

Source: Li et al., Textbooks Are All You Need II, 2023; semantics as in Hugging Face's PhiForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.blocks import ParallelDecoderLayer, UngatedMLP, renamed
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import LayerNorm

LAYER_NAMES = {"self_attn.o_proj": "self_attn.dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}


@dataclasses.dataclass(frozen=True)
class PhiConfig(LlamaConfig):
    """Configuration of a Phi-1, Phi-1.5 or Phi-2."""

    defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
    }
    epsilon_name: ClassVar[str] = "layer_norm_eps"
    is_partly_rotated: ClassVar[bool] = True

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        read.choice("qk_layernorm", False, (False,))
        read.choice("tie_word_embeddings", False, (False,))
        return super().read(read) | {"attention_bias": True, "output_bias": True, "mlp_bias": True}


class PhiDecoderLayer(ParallelDecoderLayer):
    """Parallel layer with LayerNorm and an MLP without a gate."""

    norm_class: ClassVar[Callable[..., Module]] = LayerNorm
    mlp_class: ClassVar[Callable[..., Module]] = UngatedMLP


class PhiForCausalLM(LlamaForCausalLM):
    """A Llama with parallel layers, LayerNorm and a bias in the head."""

    config_class: ClassVar[type[LlamaConfig]] = PhiConfig
    layer_class: ClassVar[Callable[..., Module]] = PhiDecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = LayerNorm
    has_head_bias: ClassVar[bool] = True
    weight_table: ClassVar[WeightTable] = renamed(LAYER_NAMES).with_names((r"norm", "model.final_layernorm"))

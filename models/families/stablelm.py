"""StableLmForCausalLM (StableLM).

Differences from Llama: LayerNorm and partial rotary embedding. Some models also have parallel attention and
MLP, LayerNorm of queries and keys per head, or biases in the projections to queries, keys and values.

Source: Bellagente et al., Stable LM 2 1.6B Technical Report, 2024; semantics as in Hugging Face's
StableLmForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jax_paged.models.families.blocks import HeadsLayerNormAttention, ParallelDecoderLayer
from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import LayerNorm


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableLmConfig(LlamaConfig):
    """Configuration of a StableLM.

    Args:
        use_parallel_residual: Whether attention and MLP are parallel.
    """

    use_parallel_residual: bool

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 32,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.25,
    }
    epsilon_name: ClassVar[str] = "layer_norm_eps"
    is_partly_rotated: ClassVar[bool] = True

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        return super().read(read) | {
            "attention_bias": read.choice("use_qkv_bias", False, (False, True)),
            "output_bias": False,
            "mlp_bias": False,
            "qk_norm": read.choice("qk_layernorm", False, (False, True)),
            "use_parallel_residual": read.choice("use_parallel_residual", False, (False, True)),
        }


class StableLmDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with LayerNorm."""

    attention_class: ClassVar[Callable[..., Module]] = HeadsLayerNormAttention
    norm_class: ClassVar[Callable[..., Module]] = LayerNorm


class StableLmParallelLayer(ParallelDecoderLayer):
    """Parallel layer with LayerNorm."""

    attention_class: ClassVar[Callable[..., Module]] = HeadsLayerNormAttention
    norm_class: ClassVar[Callable[..., Module]] = LayerNorm


def _make_layer(config: StableLmConfig, layer: int, **options: Any) -> Module:
    make = StableLmParallelLayer if config.use_parallel_residual else StableLmDecoderLayer
    return make(config, layer, **options)


class StableLmForCausalLM(LlamaForCausalLM):
    """A Llama with LayerNorm and, in some models, parallel layers."""

    config_class: ClassVar[type[LlamaConfig]] = StableLmConfig
    layer_class: ClassVar[Callable[..., Module]] = staticmethod(_make_layer)
    norm_class: ClassVar[Callable[..., Any]] = LayerNorm
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE.with_names(
        (r"(layers\.\d+\.self_attn\.[qk])_norm", r"model.\1_layernorm.norms.{}")
    )

"""MinistralForCausalLM (Ministral) and Ministral3ForCausalLM (the text models of Ministral 3).

Differences from Llama:

- Ministral: sliding windows, in all layers or in the layers that `layer_types` selects.
- Ministral 3: a sliding window in all layers, if config.json sets one. Queries are multiplied by 1 + beta *
  log(1 + floor(position / original_positions)), as in Llama 4.

Source: semantics as in Hugging Face's MinistralForCausalLM and Ministral3ForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.rope import rope_values

NO_BIAS = {"attention_bias": False, "output_bias": False, "mlp_bias": False}


@dataclasses.dataclass(frozen=True)
class MinistralConfig(LlamaConfig):
    """Configuration of a Ministral."""

    defaults: ClassVar[dict[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass, with a sliding window per layer."""
        fields = super().read(read)
        num_layers, window = fields["num_hidden_layers"], read.integer("sliding_window")
        windows = read.windows(num_layers, ["sliding_attention"] * num_layers, window)
        return fields | NO_BIAS | {"windows": windows}


class MinistralForCausalLM(LlamaForCausalLM):
    """A Llama with a sliding window per layer."""

    config_class: ClassVar[type[LlamaConfig]] = MinistralConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ministral3Config(LlamaConfig):
    """Configuration of a Ministral 3.

    Args:
        query_growth: Coefficient beta of the factor of the queries (`llama_4_scaling_beta`).
        original_positions: Length of the unscaled context (tokens). Queries below this position are not
            scaled.
    """

    query_growth: float
    original_positions: int

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        rope = rope_values(read, read.integer("max_position_embeddings"))
        return (
            fields
            | NO_BIAS
            | {
                "windows": cls.one_window(read, fields["num_hidden_layers"]),
                "query_growth": rope.number("llama_4_scaling_beta", low_open=False),
                "original_positions": rope.integer("original_max_position_embeddings"),
            }
        )


class Ministral3Attention(LlamaAttention):
    """Llama's attention with queries that are scaled by their position."""

    def rotate_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        """Returns queries and keys after the rotary embedding, with the queries scaled."""
        q, k = super().rotate_qk(q, k, context)
        c = self.config
        growth = c.query_growth * jnp.log1p((context.positions // c.original_positions).astype(jnp.float32))
        return q * (1 + growth)[..., None, None].astype(q.dtype), k


class Ministral3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with Ministral3Attention."""

    attention_class: ClassVar[Callable[..., Module]] = Ministral3Attention


class Ministral3ForCausalLM(LlamaForCausalLM):
    """A Llama with scaled queries."""

    config_class: ClassVar[type[LlamaConfig]] = Ministral3Config
    layer_class: ClassVar[Callable[..., Module]] = Ministral3DecoderLayer

"""GraniteForCausalLM (the dense models of Granite).

Differences from Llama: constant factors for embeddings, attention scores, the outputs of attention and MLP
before they are added to the residual stream, and logits.

Source: Granite 3.0 Language Models, 2024; semantics as in Hugging Face's GraniteForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteConfig(LlamaConfig):
    """Configuration of a Granite.

    Args:
        embedding_multiplier: Factor of the embeddings.
        attention_multiplier: Factor of the attention scores.
        residual_multiplier: Factor of the outputs of attention and MLP.
        logits_scaling: Divisor of the logits.
    """

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        return super().read(read) | {name: read.number(name, 1.0) for name in names}


class GraniteAttention(LlamaAttention):
    """Llama's attention with `attention_multiplier` as the factor of the scores."""

    def __init__(self, config: GraniteConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.scale = config.attention_multiplier


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with `residual_multiplier` as the factor of attention and MLP outputs."""

    attention_class: ClassVar[Callable[..., Module]] = GraniteAttention

    def __init__(self, config: GraniteConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.residual_multiplier = config.residual_multiplier

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        x = x + self.residual_multiplier * self.self_attn(self.input_layernorm(x, context), context)
        return x + self.residual_multiplier * self.mlp(self.post_attention_layernorm(x, context), context)


class GraniteForCausalLM(LlamaForCausalLM):
    """A Llama with scaled embeddings, layer outputs and logits."""

    config: GraniteConfig
    config_class: ClassVar[type[LlamaConfig]] = GraniteConfig
    layer_class: ClassVar[Callable[..., Module]] = GraniteDecoderLayer

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the scaled token embeddings."""
        return super().embed(tokens, context) * self.config.embedding_multiplier

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the scaled float32 logits."""
        return super().logits(hidden) / self.config.logits_scaling

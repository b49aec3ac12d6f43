"""GlmForCausalLM (GLM-4 of 2024) and Glm4ForCausalLM (GLM-4 of 2025).

Differences from Llama: partial and interleaved rotary embedding (pairs of adjacent dimensions); biases in the
projections to queries, keys and values, by default; a fused projection to gate and up of the MLP.
Glm4ForCausalLM also has norms after attention and MLP.

Source: GLM et al., ChatGLM, 2024; names and semantics of the weights as in Hugging Face's classes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array, Float

from jax_paged.models.families.llama import LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.families.phi3 import Phi3MLP
from jax_paged.models.forward_context import ForwardContext, Module


@dataclasses.dataclass(frozen=True)
class GlmConfig(LlamaConfig):
    """Configuration of a GLM-4."""

    defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }
    is_partly_rotated: ClassVar[bool] = True
    is_interleaved: ClassVar[bool] = True
    fixed: ClassVar[dict[str, Any]] = {"output_bias": False, "mlp_bias": False}


class GlmDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with the MLP of Phi-3."""

    mlp_class: ClassVar[Callable[..., Module]] = Phi3MLP


class GlmForCausalLM(LlamaForCausalLM):
    """A Llama with partial rotary embedding and a fused MLP."""

    config_class: ClassVar[type[LlamaConfig]] = GlmConfig
    layer_class: ClassVar[Callable[..., Module]] = GlmDecoderLayer


class Glm4DecoderLayer(GlmDecoderLayer):
    """Decoder layer: attention, then the MLP, each with a norm before and after it, then added."""

    def make_norms(self, make: Callable[[], Module]) -> None:
        """Creates the norms before and after attention and MLP."""
        super().make_norms(make)
        self.post_self_attn_layernorm, self.post_mlp_layernorm = make(), make()

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        attended = self.self_attn(self.input_layernorm(x, context), context)
        x = x + self.post_self_attn_layernorm(attended, context)
        out = self.mlp(self.post_attention_layernorm(x, context), context)
        return x + self.post_mlp_layernorm(out, context)


class Glm4ForCausalLM(GlmForCausalLM):
    """A GLM-4 of 2024 with additional norms."""

    layer_class: ClassVar[Callable[..., Module]] = Glm4DecoderLayer

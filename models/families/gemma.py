"""Gemma2ForCausalLM, Gemma3ForCausalLM, and the text model of Gemma3ForConditionalGeneration.

Differences from Llama: norms before and after attention and MLP, with the scale 1 + weight; sliding windows
in most layers; embeddings multiplied by sqrt(hidden_size); a different factor of the attention scores; GELU.
Gemma 2 has soft caps of attention scores and logits. Gemma 3 has RMSNorm of queries and keys, per head, and a
different rotary embedding in layers with a window.

Source: Gemma 2: Improving Open Language Models at a Practical Size, 2024; Gemma 3 Technical Report, 2025;
semantics as in Hugging Face's Gemma2ForCausalLM and Gemma3ForCausalLM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.families.llama import (
    WEIGHT_TABLE,
    LlamaAttention,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaMLP,
)
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable, multimodal_table, text_values
from jax_paged.models.layers import RMSNorm
from jax_paged.models.rope import Rope, read_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """Configuration of a Gemma 2 or 3.

    Args:
        window_rope: Rotary embedding of the layers with a sliding window.
        query_pre_attn_scalar: Attention scores are divided by its square root.
        attn_logit_softcapping: Soft cap of attention scores; None for no cap.
        final_logit_softcapping: Soft cap of logits; None for no cap.
    """

    window_rope: Rope
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None

    activation_name: ClassVar[str] = "hidden_activation"

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        read.choice("use_bidirectional_attention", False, (False,))
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        return (
            fields
            | {name: None if read.get(name, None) is None else read.number(name) for name in caps}
            | {
                "mlp_bias": False,
                "query_pre_attn_scalar": read.number("query_pre_attn_scalar", 256.0),
                "windows": cls.patterned_windows(read, fields["num_hidden_layers"]),
                "window_rope": fields["rope"],
            }
        )

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary embedding of a layer."""
        return self.rope if self.windows[layer] is None else self.window_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Configuration of a Gemma 2."""

    defaults: ClassVar[dict[str, Any]] = {
        "sliding_window_pattern": 2,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """Configuration of a Gemma 3 text model."""

    defaults: ClassVar[dict[str, Any]] = {
        "sliding_window_pattern": 6,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 4096,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        # transformers reads a soft cap of attention scores for Gemma 3 but does not apply it.
        read.choice("attn_logit_softcapping", None, (None,))
        fields = super().read(read)
        head_dim, limit = fields["head_dim"], fields["max_position_embeddings"]
        return fields | {
            "qk_norm": True,
            "window_rope": read_rope(_rope_values(read, "sliding_attention"), head_dim, limit, 10000.0),
        }

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        """Returns the maximum length of a sequence (tokens)."""
        # config.json of Gemma 3 states the length after RoPE scaling.
        return max_position_embeddings

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding of the layers with full attention."""
        return read_rope(_rope_values(read, "full_attention"), head_dim, max_position_embeddings, 1000000.0)


def _rope_values(read: ConfigReader, layer_type: str) -> ConfigReader:
    """Returns a reader of the rope values of one layer type.

    config.json has them in `rope_parameters`, as an object per layer type, or in `rope_theta` and
    `rope_scaling` (full attention) and `rope_local_base_freq` (sliding windows).
    """
    name, theta = "rope_parameters", "rope_local_base_freq"
    values = read.nested(name, read.table(name)).table(layer_type)
    if layer_type == "full_attention":
        values, theta = values | read.table("rope_scaling"), "rope_theta"
    return read.nested(f"{name}.{layer_type}", {"rope_theta": read.get(theta, None)} | values)


class GemmaRMSNorm(RMSNorm):
    """RMSNorm with the scale 1 + weight, computed in float32 and rounded to the model's dtype at the end."""

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        """Returns the normalized input."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (x32 * (1.0 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class GemmaAttention(LlamaAttention):
    """Llama's attention with GemmaRMSNorm, another factor of the scores and a soft cap."""

    norm_class: ClassVar[type[RMSNorm]] = GemmaRMSNorm

    def __init__(self, config: GemmaConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.scale = config.query_pre_attn_scalar**-0.5
        self.soft_cap = config.attn_logit_softcapping


class GemmaDecoderLayer(Module):
    """Decoder layer: attention, then the MLP, each with a norm before and after it, then added."""

    def __init__(self, config: GemmaConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(GemmaRMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = GemmaAttention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = LlamaMLP(config, layer, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        attended = self.self_attn(self.input_layernorm(x, context), context)
        x = x + self.post_attention_layernorm(attended, context)
        out = self.mlp(self.pre_feedforward_layernorm(x, context), context)
        return x + self.post_feedforward_layernorm(out, context)


class Gemma2ForCausalLM(LlamaForCausalLM):
    """A Gemma 2: a Llama with GemmaDecoderLayer, scaled embeddings and a soft cap of the logits."""

    config_class: ClassVar[type[LlamaConfig]] = Gemma2Config
    layer_class: ClassVar[Callable[..., Module]] = GemmaDecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = GemmaRMSNorm

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the scaled token embeddings."""
        x = self.embed_tokens(tokens, context)
        # The factor is rounded to the model's dtype, in the same way as in training.
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits after the soft cap."""
        logits, cap = super().logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / cap) * cap


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """A Gemma 3: the modules of Gemma 2 with another configuration."""

    # Prompt embeddings are not supported. In transformers they take the place of scaled embeddings, but here
    # the scaling follows the embedding module.
    embed_path: ClassVar[str] = ""
    config_class: ClassVar[type[LlamaConfig]] = Gemma3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3ConditionalConfig(Gemma3Config):
    """Configuration of the text model in a Gemma 3 checkpoint with image input.

    Such checkpoints omit values that are transformers' defaults.
    """

    defaults: ClassVar[dict[str, Any]] = Gemma3Config.defaults | {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
    }

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json, whose text values are in `text_config`."""
        return super().from_hf(text_values(hf_config), max_model_len)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        # transformers reads a soft cap of logits but does not apply it in models with image input.
        read.choice("final_logit_softcapping", None, (None,))
        return super().read(read)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a Gemma 3 checkpoint with image input. The weights for images are not loaded."""

    config_class: ClassVar[type[LlamaConfig]] = Gemma3ConditionalConfig
    weight_table: ClassVar[WeightTable] = multimodal_table(
        WEIGHT_TABLE, ("vision_tower", "multi_modal_projector")
    )

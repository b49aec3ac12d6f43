"""Gemma 2 and the text models of Gemma 3: layers with and without windows, soft caps, norms around each part.

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
from jax_paged.models.hf_format import ConfigReader, WeightTable, of_text_model, text_values
from jax_paged.models.layers import RMSNorm
from jax_paged.models.rope import Rope, read_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig(LlamaConfig):
    """Shape of a Gemma 2 or 3.

    Args:
        window_rope: Rotary positions of the layers that have a window.
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
        return self.rope if self.windows[layer] is None else self.window_rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(GemmaConfig):
    """Shape of a Gemma 2."""

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
    """Shape of a Gemma 3 text model."""

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
        # transformers reads a soft cap of attention scores here but does not apply it.
        read.choice("attn_logit_softcapping", None, (None,))
        fields = super().read(read)
        head_dim, limit = fields["head_dim"], fields["max_position_embeddings"]
        return fields | {
            "qk_norm": True,
            "window_rope": read_rope(_rope_values(read, "sliding_attention"), head_dim, limit, 10000.0),
        }

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        # A Gemma 3's config.json states the context after scaling.
        return max_position_embeddings

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        return read_rope(_rope_values(read, "full_attention"), head_dim, max_position_embeddings, 1000000.0)


def _rope_values(read: ConfigReader, layer_type: str) -> ConfigReader:
    """Returns a reader of the rotary values for one type of layers, in whichever form they are given."""
    name, theta = "rope_parameters", "rope_local_base_freq"
    values = read.nested(name, read.table(name)).table(layer_type)
    if layer_type == "full_attention":
        values, theta = values | read.table("rope_scaling"), "rope_theta"
    return read.nested(f"{name}.{layer_type}", {"rope_theta": read.get(theta, None)} | values)


class GemmaRMSNorm(RMSNorm):
    """An RMSNorm whose scale is 1 + weight, and which rounds to the model's type at the very end."""

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        return (x32 * (1.0 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class GemmaAttention(LlamaAttention):
    """A Llama's attention with other norms, another scale and a soft cap."""

    norm_class: ClassVar[type[RMSNorm]] = GemmaRMSNorm

    def __init__(self, config: GemmaConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.scale = config.query_pre_attn_scalar**-0.5
        self.soft_cap = config.attn_logit_softcapping


class GemmaDecoderLayer(Module):
    """Attention, then the MLP, each with a norm before and after it, then added to the residual stream."""

    def __init__(self, config: GemmaConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(GemmaRMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        self.self_attn = GemmaAttention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = LlamaMLP(config, layer, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        attended = self.self_attn(self.input_layernorm(x, context), context)
        x = x + self.post_attention_layernorm(attended, context)
        out = self.mlp(self.pre_feedforward_layernorm(x, context), context)
        return x + self.post_feedforward_layernorm(out, context)


class Gemma2ForCausalLM(LlamaForCausalLM):
    """A Llama with the layers above, scaled embeddings and a soft cap on the logits."""

    config_class: ClassVar[type[LlamaConfig]] = Gemma2Config
    layer_class: ClassVar[Callable[..., Module]] = GemmaDecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = GemmaRMSNorm

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        x = self.embed_tokens(tokens, context)
        # The factor is rounded to the model's type, as it was in training.
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        logits, cap = super().logits(hidden), self.config.final_logit_softcapping
        return logits if cap is None else jnp.tanh(logits / cap) * cap


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """The modules of Gemma 2 with the config of Gemma 3."""

    # transformers scales the vectors of Gemma 3's table within it: given ones would stand behind that.
    embed_path: ClassVar[str] = ""
    config_class: ClassVar[type[LlamaConfig]] = Gemma3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3ConditionalConfig(Gemma3Config):
    """Shape of the text model in a checkpoint that reads images, too; these leave out what is usual."""

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
        return super().from_hf(text_values(hf_config), max_model_len)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        # transformers reads a soft cap of logits but does not apply it where a model reads images.
        read.choice("final_logit_softcapping", None, (None,))
        return super().read(read)


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text model of a checkpoint whose other weights, for images, are not read."""

    config_class: ClassVar[type[LlamaConfig]] = Gemma3ConditionalConfig
    weight_table: ClassVar[WeightTable] = of_text_model(
        WEIGHT_TABLE, ("vision_tower", "multi_modal_projector")
    )

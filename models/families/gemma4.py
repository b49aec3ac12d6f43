"""Gemma4ForCausalLM, and the text model of Gemma4ForConditionalGeneration.

Differences from Gemma 3:

- Layers with full attention have a different number and size of kv heads than layers with a window.
- The last layers may share the keys and values of earlier layers. A sharing layer attends to the keys and
  values of the last non-sharing layer with the same window, and has no cache of its own:

      layer            0    1    2    3    4    5    6    7        num_kv_shared_layers = 4
      window           w    w    w    full w    w    w    full
      attends to       0    1    2    3    2    2    2    3

- Values are normalized, like queries and keys, and may be computed by the same projection as the keys.
- The scale of norms is the weight instead of 1 + weight, and attention scores are not scaled.
- Each layer's output is multiplied by a trained scalar.
- Small models have per-layer embeddings: an additional vector for each token and layer, which a gated
  projection adds to the residual stream at the end of the layer.
- Some models have a mixture of experts beside each MLP.

Source: Gemma 4, 2026; semantics as in Hugging Face's Gemma4ForCausalLM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from jax_paged.models.families.gemma import Gemma2ForCausalLM
from jax_paged.models.families.gemma4_config import Gemma4ConditionalConfig, Gemma4Config
from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaConfig, LlamaMLP
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import WeightTable, multimodal_table
from jax_paged.models.layers import ACTIVATIONS, Embedding, Linear, RMSNorm, parameter
from jax_paged.models.moe import FusedExperts, RoutedTokens, Router
from jax_paged.models.parallel.sharding import even, repeated

# Layers that share keys and values have no projections for them. Checkpoints may contain these weights.
GEMMA4_TABLE = WEIGHT_TABLE.with_names(
    (r"(layers\.\d+\.router)\.hidden_scale", r"model.\1.scale"),
    (r"per_layer_inputs\.(\w+)", r"model.\1"),
    ignored=r"model\.layers\.\d+\.self_attn\.([kv]_proj|[kv]_norm)\.weight",
)


def unit_norm(x: Float[Array, "... e"], epsilon: float) -> Float[Array, "... e"]:
    """Returns x in float32, divided by its root mean square."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + epsilon)


class Gemma4RMSNorm(RMSNorm):
    """RMSNorm that is computed in float32 and rounded to the model's dtype at the end."""

    def forward(self, x: Float[Array, "... e"], context: ForwardContext) -> Float[Array, "... e"]:
        """Returns the normalized input."""
        return (unit_norm(x, self.epsilon) * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class SharingAttention(Module):
    """Attention of a layer that shares the keys and values of an earlier layer. It computes queries only."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.layer = config.kv_source(layer)
        self.rope = config.rope if config.windows[layer] is None else config.window_rope
        self.epsilon = config.rms_norm_eps
        self.num_kv_heads, self.head_dim = config.kv_shape(layer)
        bias, size, heads = config.attention_bias, config.hidden_size, config.num_attention_heads
        units = even(heads, self.head_dim)
        make = functools.partial(Linear, bias=bias, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.q_proj = make(size, heads * self.head_dim, split=(None, units))
        self.o_proj = make(heads * self.head_dim, size, split=(units, None))
        self.q_norm = Gemma4RMSNorm(self.head_dim, epsilon=self.epsilon, dtype=dtype)

    def in_heads(self, y: Float[Array, "*t d"]) -> Float[Array, "*t h e"]:
        """Returns the output of a projection with its heads separated: [*t, heads, head_dim]."""
        return y.reshape(*y.shape[:-1], -1, self.head_dim)

    def keys_and_values(
        self, x: Float[Array, "*t e"], context: ForwardContext
    ) -> tuple[Float[Array, "*t k d"] | None, Float[Array, "*t k d"] | None]:
        """Returns the keys and values that the layer adds to the cache; (None, None) if it shares them."""
        return None, None

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        q = self.q_norm(self.in_heads(self.q_proj(x, context)), context)
        k, v = self.keys_and_values(x, context)
        out = context.attend(self.layer, context.rotations[self.rope](q), k, v, scale=1.0)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), context)


class Gemma4Attention(SharingAttention):
    """Attention of a layer that computes its own keys and values."""

    same_input: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        make = functools.partial(
            Linear,
            config.hidden_size,
            self.num_kv_heads * self.head_dim,
            bias=config.attention_bias,
            split=(None, repeated(self.num_kv_heads, self.head_dim)),
            std=config.initializer_range,
            dtype=dtype,
            rngs=rngs,
        )
        self.k_proj, self.k_norm = make(), Gemma4RMSNorm(self.head_dim, epsilon=self.epsilon, dtype=dtype)
        self.v_proj = None if config.attention_k_eq_v and config.windows[layer] is None else make()

    def keys_and_values(
        self, x: Float[Array, "*t e"], context: ForwardContext
    ) -> tuple[Float[Array, "*t k d"], Float[Array, "*t k d"]]:
        """Returns the keys and values that the layer adds to the cache."""
        k = self.in_heads(self.k_proj(x, context))
        v = k if self.v_proj is None else self.in_heads(self.v_proj(x, context))
        k = context.rotations[self.rope](self.k_norm(k, context))
        return k, unit_norm(v, self.epsilon).astype(v.dtype)


class Gemma4DecoderLayer(Module):
    """Decoder layer: attention, then the MLP, with norms before and after; multiplied by a trained scalar."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(Gemma4RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()
        attention = Gemma4Attention if config.kv_source(layer) == layer else SharingAttention
        self.self_attn = attention(config, layer, dtype=dtype, rngs=rngs)
        mlp_config = dataclasses.replace(config, intermediate_size=config.mlp_widths[layer])
        self.mlp = LlamaMLP(mlp_config, layer, dtype=dtype, rngs=rngs)
        self.layer_scalar = parameter(jnp.ones(1, dtype), (None,))

    def feed_forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP, before the norm that follows it."""
        return self.mlp(self.pre_feedforward_layernorm(x, context), context)

    def attention_and_mlp(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after attention and MLP, without the trained scalar."""
        attended = self.self_attn(self.input_layernorm(x, context), context)
        x = x + self.post_attention_layernorm(attended, context)
        return x + self.post_feedforward_layernorm(self.feed_forward(x, context), context)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        return self.attention_and_mlp(x, context) * self.layer_scalar[...]


class LayerInput(NamedTuple):
    """Input of a layer with per-layer embeddings.

    Args:
        hidden: [*t, E], the residual stream.
        per_layer: [*t, P], the layer's embeddings of the tokens.
    """

    hidden: Float[Array, "*t e"]
    per_layer: Float[Array, "*t p"]


class PerLayerDecoderLayer(Gemma4DecoderLayer):
    """Gemma4DecoderLayer with per-layer embeddings, which it gates and adds to the residual stream."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.activation = ACTIVATIONS[config.hidden_act]
        size, per_layer = config.hidden_size, config.hidden_size_per_layer_input
        make = functools.partial(Linear, bias=False, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.per_layer_input_gate = make(size, per_layer, split=(None, even(per_layer)))
        self.per_layer_projection = make(per_layer, size, split=(even(per_layer), None))
        self.post_per_layer_input_norm = Gemma4RMSNorm(size, epsilon=config.rms_norm_eps, dtype=dtype)

    def forward(self, x: Any, context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        hidden = self.attention_and_mlp(x.hidden, context)
        per_layer = self.activation(self.per_layer_input_gate(hidden, context)) * x.per_layer
        added = self.post_per_layer_input_norm(self.per_layer_projection(per_layer, context), context)
        return (hidden + added) * self.layer_scalar[...]


class Gemma4Router(Module):
    """Router of a mixture of experts."""

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        size, num, std = config.hidden_size, config.num_experts, config.initializer_range
        self.num_chosen, self.epsilon = config.num_experts_per_tok, config.rms_norm_eps
        self.hidden_scale = parameter(jnp.ones(size, dtype), (None,))
        self.per_expert_scale = parameter(jnp.ones(num, dtype), (None,))
        self.proj = Router(size, num, bias=False, split=(None, None), std=std, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t g"]:
        """Returns the factor of each expert's output, 0 for experts that are not chosen."""
        normed = unit_norm(x, self.epsilon).astype(x.dtype) * self.hidden_scale[...] * x.shape[-1] ** -0.5
        probabilities = jax.nn.softmax(self.proj(normed, context))
        best, chosen = jax.lax.top_k(probabilities, self.num_chosen)
        factors = best / jnp.sum(best, axis=-1, keepdims=True) * self.per_expert_scale[...][chosen]
        return jnp.put_along_axis(jnp.zeros_like(probabilities), chosen, factors, axis=-1, inplace=False)


class MoeGemma4DecoderLayer(Gemma4DecoderLayer):
    """Gemma4DecoderLayer with a mixture of experts beside the MLP; their outputs are added."""

    def __init__(self, config: Gemma4Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        norm = functools.partial(Gemma4RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = norm(), norm()
        self.pre_feedforward_layernorm_2 = norm()
        self.router = Gemma4Router(config, dtype=dtype, rngs=rngs)
        self.experts = FusedExperts(config, dtype=dtype, rngs=rngs)

    def feed_forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the sum of the outputs of MLP and experts, before the norm that follows."""
        by_mlp = self.post_feedforward_layernorm_1(super().feed_forward(x, context), context)
        # The router's output is a single array, so that hooks can change it. The experts with the largest
        # factors are the chosen ones.
        factors = self.router(x, context)
        _, chosen = jax.lax.top_k(jnp.abs(factors), self.router.num_chosen)
        factors = jnp.take_along_axis(factors, chosen, axis=-1)
        routed = RoutedTokens(self.pre_feedforward_layernorm_2(x, context), chosen, factors)
        return by_mlp + self.post_feedforward_layernorm_2(self.experts(routed, context), context)


class EmbeddedTokens(NamedTuple):
    """Input of PerLayerInputs.

    Args:
        tokens: int32 [*t], token ids.
        hidden: [*t, E], input of the first layer.
    """

    tokens: Int[Array, "*t"]
    hidden: Float[Array, "*t e"]


class PerLayerInputs(Module):
    """Per-layer embeddings of all layers: an embedding table plus a projection of the first layer's input."""

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.size, std = config.hidden_size_per_layer_input, config.initializer_range
        width = config.num_hidden_layers * self.size
        make: dict[str, Any] = {"std": std, "dtype": dtype, "rngs": rngs}
        self.embed_tokens_per_layer = Embedding(config.vocab_size_per_layer_input, width, **make)
        self.per_layer_model_projection = Linear(
            config.hidden_size, width, bias=False, split=(None, None), **make
        )
        self.per_layer_projection_norm = Gemma4RMSNorm(self.size, epsilon=config.rms_norm_eps, dtype=dtype)

    def forward(self, x: EmbeddedTokens, context: ForwardContext) -> Float[Array, "*t p"]:
        """Returns the per-layer embeddings of all layers, concatenated."""
        table = self.embed_tokens_per_layer(x.tokens, context)
        table = table * jnp.asarray(self.size**0.5, table.dtype)
        vectors = self.per_layer_model_projection(x.hidden, context) * x.hidden.shape[-1] ** -0.5
        vectors = self.per_layer_projection_norm(vectors.reshape(*vectors.shape[:-1], -1, self.size), context)
        return (vectors.reshape(table.shape) + table) * 2**-0.5


def make_layer(config: Gemma4Config, layer: int, **options: Any) -> Gemma4DecoderLayer:
    """Returns a layer of the class that the config requires."""
    if config.num_experts:
        return MoeGemma4DecoderLayer(config, layer, **options)
    has_per_layer = config.hidden_size_per_layer_input > 0
    return (PerLayerDecoderLayer if has_per_layer else Gemma4DecoderLayer)(config, layer, **options)


class Gemma4ForCausalLM(Gemma2ForCausalLM):
    """A Gemma 4 text model."""

    # Prompt embeddings are not supported, because per-layer embeddings are computed from token ids.
    embed_path: ClassVar[str] = ""
    config_class: ClassVar[type[LlamaConfig]] = Gemma4Config
    weight_table: ClassVar[WeightTable] = GEMMA4_TABLE
    layer_class: ClassVar[Callable[..., Module]] = staticmethod(make_layer)
    norm_class: ClassVar[Callable[..., Any]] = Gemma4RMSNorm

    def __init__(self, config: Gemma4Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        has_per_layer = config.hidden_size_per_layer_input > 0
        self.per_layer_inputs = PerLayerInputs(config, dtype=dtype, rngs=rngs) if has_per_layer else None

    @property
    def pp_unsupported_reason(self) -> str:
        """The reason why the model cannot be divided into pipeline stages; empty if it can."""
        if self.config.num_kv_shared_layers:
            return "its last layers share the keys and values of earlier layers"
        return "its layers have per-layer embeddings of token ids" if self.per_layer_inputs else ""

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the token embeddings, followed by the per-layer embeddings of all layers, if any."""
        x = super().embed(tokens, context)
        if self.per_layer_inputs is None:
            return x
        return jnp.concatenate([x, self.per_layer_inputs(EmbeddedTokens(tokens, x), context)], axis=-1)

    def apply_layers(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the last layer."""
        if self.per_layer_inputs is None:
            return super().apply_layers(x, context)
        hidden, per_layer = jnp.split(x, [self.config.hidden_size], axis=-1)
        context, layers = self.with_rotations(context), self.own_layers
        for layer, vectors in zip(layers, jnp.split(per_layer, len(layers), axis=-1), strict=True):
            hidden = layer(LayerInput(hidden, vectors), context)
        return hidden

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches, without the layers at the end that share keys and values."""
        c: Gemma4Config = self.config
        specs = list[KVCacheSpec]()
        for layer in range(c.num_hidden_layers - c.num_kv_shared_layers):
            shape, window = c.kv_shape(layer), c.windows[layer]
            specs.append(FullAttentionSpec(*shape) if window is None else SlidingWindowSpec(*shape, window))
        return specs


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text model of a Gemma 4 checkpoint with image and audio input, whose weights are not loaded."""

    config_class: ClassVar[type[LlamaConfig]] = Gemma4ConditionalConfig
    weight_table: ClassVar[WeightTable] = multimodal_table(
        GEMMA4_TABLE, ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    )

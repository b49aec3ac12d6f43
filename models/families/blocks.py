"""Layers, MLPs and norms that several families use in place of those in llama.py."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaAttention, LlamaDecoderLayer
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.layers import ACTIVATIONS, LayerNorm, Linear, RMSNorm, parameter
from jax_paged.models.parallel.sharding import Units, even


def renamed(names: Mapping[str, str]) -> WeightTable:
    """Returns Llama's weight table for checkpoints in which some modules of a layer have other names.

    Args:
        names: The checkpoint's name for each of these modules, such as {"mlp.up_proj": "mlp.c_fc"}.
    """
    rows = (
        (rf"layers\.(\d+)\.{re.escape(ours)}", rf"model.layers.\1.{theirs}") for ours, theirs in names.items()
    )
    return WEIGHT_TABLE.with_names(*rows)


class PostNormDecoderLayer(LlamaDecoderLayer):
    """Decoder layer with post-norm: attention, then the MLP, each followed by a norm and then added."""

    def make_norms(self, make: Callable[[], Module]) -> None:
        """Creates the norms after the attention and after the MLP."""
        self.post_attention_layernorm, self.post_feedforward_layernorm = make(), make()

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        x = x + self.post_attention_layernorm(self.self_attn(x, context), context)
        return x + self.post_feedforward_layernorm(self.mlp(x, context), context)


class ParallelDecoderLayer(LlamaDecoderLayer):
    """Decoder layer that adds attention and MLP, both computed from the same normalized input."""

    def make_norms(self, make: Callable[[], Module]) -> None:
        """Creates the single norm of the layer."""
        self.input_layernorm = make()

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        normed = self.input_layernorm(x, context)
        return x + self.self_attn(normed, context) + self.mlp(normed, context)


class UngatedMLP(Module):
    """An MLP without a gate: two linear layers with an activation between them."""

    def __init__(self, config: Any, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = config.hidden_act
        make = functools.partial(
            Linear, bias=config.mlp_bias, std=config.initializer_range, dtype=dtype, rngs=rngs
        )
        size, inner = config.hidden_size, config.intermediate_size
        self.up_proj = make(size, inner, split=(None, even(inner)))
        self.down_proj = make(inner, size, split=(even(inner), None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP."""
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x, context)), context)


class UngatedDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with an MLP without a gate."""

    mlp_class: ClassVar[Callable[..., Module]] = UngatedMLP


class UnbiasedLayerNorm(LayerNorm):
    """LayerNorm without a bias."""

    def __init__(self, features: int, *, epsilon: float, dtype: jnp.dtype) -> None:
        super().__init__(features, epsilon=epsilon, bias=False, dtype=dtype)


class HeadsLayerNorm(UnbiasedLayerNorm):
    """LayerNorm of each head separately, with a scale per head and without a bias.

    Args:
        heads: The heads, and how they are divided among devices.
        epsilon: Added to the variance.
        dtype: Dtype of the scale.
    """

    def __init__(self, heads: tuple[Units, ...], *, epsilon: float, dtype: jnp.dtype) -> None:
        super().__init__(heads[0].size, epsilon=epsilon, dtype=dtype)
        units = (Units(heads[0].num, division=heads[0].division),)
        self.scale = parameter(jnp.ones((heads[0].num, heads[0].size), dtype), (units, None))


class HeadsLayerNormAttention(LlamaAttention):
    """Llama's attention, but with HeadsLayerNorm if queries and keys are normalized."""

    def make_norm(self, heads: tuple[Units, ...], dtype: jnp.dtype) -> Module:
        """Returns a HeadsLayerNorm."""
        return HeadsLayerNorm(heads, epsilon=self.config.rms_norm_eps, dtype=dtype)


class JoinedHeadsNorm(RMSNorm):
    """RMSNorm of all heads of a token, concatenated to one vector.

    If kv heads are replicated on several devices, every head has the same number of copies. The mean over all
    copies is therefore equal to the mean over the heads.

    Args:
        heads: The heads, and how they are divided among devices.
        epsilon: Added to the mean square.
        dtype: Dtype of the scale.
    """

    def __init__(self, heads: tuple[Units, ...], *, epsilon: float, dtype: jnp.dtype) -> None:
        super().__init__(heads[0].num * heads[0].size, epsilon=epsilon, dtype=dtype)
        self.scale = parameter(self.scale[...], (heads,))

    def forward(self, x: Float[Array, "*t h d"], context: ForwardContext) -> Float[Array, "*t h d"]:
        """Returns the normalized heads."""
        return super().forward(x.reshape(*x.shape[:-2], -1), context).reshape(x.shape)

"""Layers, MLPs and norms in which several relatives of Llama differ from it in the same way."""

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
    """Returns Llama's table for checkpoints that have other names for modules of a layer.

    Args:
        names: The checkpoint's name of each of these modules, such as {"mlp.up_proj": "mlp.c_fc"}.
    """
    rows = (
        (rf"layers\.(\d+)\.{re.escape(ours)}", rf"model.layers.\1.{theirs}") for ours, theirs in names.items()
    )
    return WEIGHT_TABLE.with_names(*rows)


class PostNormDecoderLayer(LlamaDecoderLayer):
    """Attention, then the MLP, each with a norm after it, and then added to the residual stream."""

    def make_norms(self, make: Callable[[], Module]) -> None:
        self.post_attention_layernorm, self.post_feedforward_layernorm = make(), make()

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        x = x + self.post_attention_layernorm(self.self_attn(x, context), context)
        return x + self.post_feedforward_layernorm(self.mlp(x, context), context)


class ParallelDecoderLayer(LlamaDecoderLayer):
    """Attention and the MLP beside it, after one norm, both added to the residual stream."""

    def make_norms(self, make: Callable[[], Module]) -> None:
        self.input_layernorm = make()

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        normed = self.input_layernorm(x, context)
        return x + self.self_attn(normed, context) + self.mlp(normed, context)


class UngatedMLP(Module):
    """Two linear maps with an activation between them."""

    def __init__(self, config: Any, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = config.hidden_act
        make = functools.partial(
            Linear, bias=config.mlp_bias, std=config.initializer_range, dtype=dtype, rngs=rngs
        )
        size, inner = config.hidden_size, config.intermediate_size
        self.up_proj = make(size, inner, split=(None, even(inner)))
        self.down_proj = make(inner, size, split=(even(inner), None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        return self.down_proj(ACTIVATIONS[self.activation](self.up_proj(x, context)), context)


class UngatedDecoderLayer(LlamaDecoderLayer):
    """A Llama's layer with the MLP above."""

    mlp_class: ClassVar[Callable[..., Module]] = UngatedMLP


class UnbiasedLayerNorm(LayerNorm):
    """A LayerNorm that scales and does not shift."""

    def __init__(self, features: int, *, epsilon: float, dtype: jnp.dtype) -> None:
        super().__init__(features, epsilon=epsilon, bias=False, dtype=dtype)


class HeadsLayerNorm(UnbiasedLayerNorm):
    """A norm of each head alone, with a scale for each head.

    Args:
        heads: The heads, as they are divided among devices.
        epsilon: Added to the variance.
        dtype: Of the scale.
    """

    def __init__(self, heads: tuple[Units, ...], *, epsilon: float, dtype: jnp.dtype) -> None:
        super().__init__(heads[0].size, epsilon=epsilon, dtype=dtype)
        units = (Units(heads[0].num, kind=heads[0].kind),)
        self.scale = parameter(jnp.ones((heads[0].num, heads[0].size), dtype), (units, None))


class HeadsLayerNormAttention(LlamaAttention):
    """A Llama's attention that norms queries and keys, if at all, with a scale for each head."""

    def make_norm(self, heads: tuple[Units, ...], dtype: jnp.dtype) -> Module:
        return HeadsLayerNorm(heads, epsilon=self.config.rms_norm_eps, dtype=dtype)


class JoinedHeadsNorm(RMSNorm):
    """A norm of all heads of a token as one vector.

    Where devices have copies of a head, each has as many: the mean over all of them is the same.

    Args:
        heads: The heads, as they are divided among devices.
        epsilon: Added to the mean square.
        dtype: Of the scale.
    """

    def __init__(self, heads: tuple[Units, ...], *, epsilon: float, dtype: jnp.dtype) -> None:
        super().__init__(heads[0].num * heads[0].size, epsilon=epsilon, dtype=dtype)
        self.scale = parameter(self.scale[...], (heads,))

    def forward(self, x: Float[Array, "*t h d"], context: ForwardContext) -> Float[Array, "*t h d"]:
        return super().forward(x.reshape(*x.shape[:-2], -1), context).reshape(x.shape)

"""Mixtures of experts: a router chooses a few MLPs for each token, and only those are computed.

Source: Shazeer et al., Outrageously Large Neural Networks, 2017.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, TENSOR, Linear, normal, parameter
from jax_paged.models.llama import LlamaConfig, LlamaDecoderLayer, LlamaMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Shape of a Llama with experts.

    Args:
        moe_layers: Layers that have experts; the others have an MLP.
        moe_intermediate_size: Width of an expert.
        num_experts: Experts per layer.
        num_experts_per_tok: Experts per token.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to 1.
    """

    moe_layers: tuple[int, ...]
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool

    @staticmethod
    def read_experts(read: ConfigReader) -> dict[str, int]:
        """Returns the fields num_experts and num_experts_per_tok."""
        name = "num_experts" if read.get("num_local_experts", None) is None else "num_local_experts"
        num, chosen = read.integer(name), read.integer("num_experts_per_tok")
        allowed = f"at most {name}, which is {num}"
        read.check(chosen <= num, "num_experts_per_tok", chosen, allowed, also_needs=(name,))
        return {"num_experts": num, "num_experts_per_tok": chosen}


class RoutedTokens(NamedTuple):
    """The input of a layer's experts.

    Args:
        tokens: [*t, E], the token rows.
        chosen: int32 [*t, K], the experts of each token.
        weights: float32 [*t, K], factor of each of these experts' outputs.
    """

    tokens: Float[Array, "*t e"]
    chosen: Int[Array, "*t k"]
    weights: Float[Array, "*t k"]


class Experts(Module):
    """Gated MLPs, of which each token goes through those chosen for it; their kernels are stacked."""

    def __init__(self, config: MoeConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = ACTIVATIONS[config.hidden_act]
        self.num_experts = config.num_experts
        size, inner, std = config.hidden_size, config.moe_intermediate_size, config.initializer_range

        def make(shape: tuple[int, int], split: tuple[str | None, str | None]) -> nnx.Param:
            value = normal(rngs.params(), (config.num_experts, *shape), dtype, std)
            return parameter(value, (None, *split))

        self.gate_proj = make((size, inner), (None, TENSOR))
        self.up_proj = make((size, inner), (None, TENSOR))
        self.down_proj = make((inner, size), (TENSOR, None))

    def forward(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        *leading, features = x.tokens.shape
        tokens, top_k = x.tokens.reshape(-1, features), x.chosen.shape[-1]
        by_expert = jnp.argsort(x.chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(x.chosen.reshape(-1), length=self.num_experts)
        rows = tokens[by_expert // top_k]
        gate = self.activation(context.grouped_matmul(rows, self.gate_proj[...], sizes))
        inner = gate * context.grouped_matmul(rows, self.up_proj[...], sizes)
        out = context.grouped_matmul(inner, self.down_proj[...], sizes)[jnp.argsort(by_expert)]
        out = out.reshape(*leading, top_k, features) * x.weights[..., None]
        return jnp.sum(out, axis=-2).astype(tokens.dtype)


class Router(Linear):
    """A linear map from a token to the float32 logits of the experts."""

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t g"]:
        return self.logits(x)


class MoeMLP(Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, config: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        options: Any = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        self.gate = Router(config.hidden_size, config.num_experts, bias=False, split=(None, None), **options)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        probabilities = jax.nn.softmax(self.gate(x, context))
        weights, chosen = jax.lax.top_k(probabilities, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return self.experts(RoutedTokens(x, chosen, weights), context)


class MoeDecoderLayer(LlamaDecoderLayer):
    """A Llama's layer with experts, where the config says so."""

    @classmethod
    def mlp_class(cls, config: Any, layer: int) -> Callable[..., Module]:
        return MoeMLP if layer in config.moe_layers else LlamaMLP

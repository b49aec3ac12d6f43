"""Mixtures of experts: a router chooses a few MLPs for each token, and only those are computed.

Source: Shazeer et al., Outrageously Large Neural Networks, 2017.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, Linear, normal, parameter
from jax_paged.models.llama import LlamaConfig, LlamaDecoderLayer, LlamaMLP
from jax_paged.models.sharding import TENSOR, Split, Units, even


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
    def read_experts(read: ConfigReader, name: str | None = None) -> dict[str, int]:
        """Returns the fields num_experts, which may have another name, and num_experts_per_tok."""
        if name is None:
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

        def make(shape: tuple[int, int], split: Split) -> nnx.Param:
            value = normal(rngs.params(), (config.num_experts, *shape), dtype, std)
            return parameter(value, ((Units(config.num_experts, kind="experts"),), *split))

        self.gate_proj = make((size, inner), (None, even(inner)))
        self.up_proj = make((size, inner), (None, even(inner)))
        self.down_proj = make((inner, size), (even(inner), None))

    def forward(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        params = self.gate_proj, self.up_proj, self.down_proj
        kernels, grid = [param[...] for param in params], context.grid
        if grid is None:
            return self.compute(x, *kernels, context=context).astype(x.tokens.dtype)

        def compute(x: RoutedTokens, *kernels: Array) -> Array:
            first = jax.lax.axis_index(TENSOR) * kernels[0].shape[0] if grid.splits_experts else 0
            return jax.lax.psum(self.compute(x, *kernels, context=context, first=first), TENSOR)

        specs = [grid.spec(param.get_metadata("split")) for param in params]
        out = grid.on_each(compute, (PartitionSpec(), *specs), PartitionSpec())(x, *kernels)
        return out.astype(x.tokens.dtype)

    def compute(
        self,
        x: RoutedTokens,
        gate_proj: Float[Array, "g e i"],
        up_proj: Float[Array, "g e i"],
        down_proj: Float[Array, "g i e"],
        *,
        context: ForwardContext,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "*t e"]:
        """Returns the sum of what some of the experts make of their tokens, or a part of each of them.

        Args:
            x: The input of the layer.
            gate_proj: Of the experts that are here; so are the two that follow.
            up_proj: See gate_proj.
            down_proj: See gate_proj.
            context: Of the pass.
            first: The first of the experts that are here.
        """
        *leading, features = x.tokens.shape
        tokens, top_k = x.tokens.reshape(-1, features), x.chosen.shape[-1]
        # The rows of the experts that are here come first; those of others belong to no group, and become 0.
        experts = (x.chosen.reshape(-1) - first) % self.num_experts
        by_expert = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=self.num_experts)[: len(gate_proj)]
        rows = tokens[by_expert // top_k]
        gate = self.activation(context.grouped_matmul(rows, gate_proj, sizes))
        inner = gate * context.grouped_matmul(rows, up_proj, sizes)
        out = context.grouped_matmul(inner, down_proj, sizes)
        out = out[jnp.argsort(by_expert)].reshape(*leading, top_k, features) * x.weights[..., None]
        return jnp.sum(out, axis=-2)


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

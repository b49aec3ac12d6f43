"""Mixtures of experts: a router chooses a few MLPs for each token, and only those are computed.

Source: Shazeer et al., Outrageously Large Neural Networks, 2017.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaConfig, LlamaDecoderLayer
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, Linear, normal, parameter
from jax_paged.models.parallel.sharding import TENSOR, Split, Units, even
from jax_paged.models.quantization.quantized_linear import KernelStack, QuantizedWeight
from jax_paged.pallas_kernels import grouped_loop

# Llama's table, and experts each of which the checkpoint holds alone.
EXPERT_TABLE = WEIGHT_TABLE.with_names(
    (r"layers\.(\d+)\.mlp\.experts\.(\w+)", r"model.layers.\1.mlp.experts.{}.\2.weight")
)


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


# Multiplies the rows of each expert by its kernel.
Multiply = Callable[[Array, Any], Array]


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
    """Gated MLPs, of which each token goes through those chosen for it; their weights are stacked.

    A family with other experts overrides kernel_names, make_weights, divided_weights and apply_experts.
    """

    kernel_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: Any, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config

        def make(shape: tuple[int, ...], split: Split, std: float = config.initializer_range) -> nnx.Param:
            value = normal(rngs.params(), (config.num_experts, *shape), dtype, std)
            return parameter(value, ((Units(config.num_experts, kind="experts"),), *split))

        self.make_weights(make)

    def make_weights(self, make: Callable[..., nnx.Param]) -> None:
        size, inner = self.config.hidden_size, self.config.moe_intermediate_size
        self.gate_proj = make((size, inner), (None, even(inner)))
        self.up_proj = make((size, inner), (None, even(inner)))
        self.down_proj = make((inner, size), (even(inner), None))

    def divided_weights(self) -> tuple[nnx.Param | QuantizedWeight, ...]:
        """Returns the weights of which every device has some experts, or a part of each."""
        return tuple(getattr(self, name) for name in self.kernel_names)

    def apply_experts(
        self,
        rows: Float[Array, "n e"],
        experts: Int[Array, " n"],
        weights: tuple[Any, ...],
        multiply: Multiply,
    ) -> Float[Array, "n e"]:
        """Returns what becomes of rows that are sorted by their experts, but for a sum over devices.

        Args:
            rows: Sorted; those behind the last expert that is here must become 0.
            experts: int32, the place of each row's expert among those that are here; any behind the last.
            weights: Of the experts that are here, as divided_weights has them: arrays, or quantized weights.
            multiply: Multiplies the rows of each expert by its kernel; those behind the last one become 0.
        """
        gate_proj, up_proj, down_proj = weights
        gate = ACTIVATIONS[self.config.hidden_act](multiply(rows, gate_proj))
        return multiply(gate * multiply(rows, up_proj), down_proj)

    def forward(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        return self.mixed(x, context).astype(x.tokens.dtype)

    def mixed(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the sum of what the experts make of each token, in float32."""
        own, grid = self.divided_weights(), context.grid
        weights = [w.stack if isinstance(w, QuantizedWeight) else w[...] for w in own]
        if grid is None:
            return self.compute(x, *weights, context=context)
        arrays, treedef = jax.tree.flatten(weights)

        def compute(x: RoutedTokens, *arrays: Array) -> Array:
            first = jax.lax.axis_index(TENSOR) * len(arrays[0]) if grid.splits_experts else 0
            weights = jax.tree.unflatten(treedef, arrays)
            return jax.lax.psum(self.compute(x, *weights, context=context, first=first), TENSOR)

        splits = [w.part_splits if isinstance(w, QuantizedWeight) else [w.get_metadata("split")] for w in own]
        specs = [grid.spec(split) for weight in splits for split in weight if split is not None]
        return grid.on_each(compute, (PartitionSpec(), *specs), PartitionSpec())(x, *arrays)

    def compute(
        self,
        x: RoutedTokens,
        *weights: Array | KernelStack,
        context: ForwardContext,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "*t e"]:
        """Returns the sum of what some of the experts make of their tokens, or a part of each of them.

        Args:
            x: The input of the layer.
            weights: Of the experts that are here.
            context: Of the pass.
            first: The first of the experts that are here.
        """
        *leading, features = x.tokens.shape
        tokens, top_k = x.tokens.reshape(-1, features), x.chosen.shape[-1]
        # The rows of the experts that are here come first; those of others belong to no group, and become 0.
        num_experts, num_here = self.config.num_experts, len(jax.tree.leaves(weights)[0])
        experts = (x.chosen.reshape(-1) - first) % num_experts
        by_expert = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=num_experts)[:num_here]

        def multiply(rows: Array, kernels: Array | KernelStack) -> Array:
            if isinstance(kernels, KernelStack):
                return grouped_loop.by_group(rows, kernels.product, kernels.num_columns, sizes)
            return context.grouped_matmul(rows, kernels, sizes)

        own = jnp.minimum(experts[by_expert], num_here - 1)
        out = self.apply_experts(tokens[by_expert // top_k], own, weights, multiply)
        out = out[jnp.argsort(by_expert)].reshape(*leading, top_k, features) * x.weights[..., None]
        return jnp.sum(out, axis=-2)


class FusedExperts(Experts):
    """Experts whose gate and up lie in one kernel side by side."""

    kernel_names: ClassVar[tuple[str, ...]] = ("gate_up_proj", "down_proj")

    def make_weights(self, make: Callable[..., nnx.Param]) -> None:
        size, inner = self.config.hidden_size, self.config.moe_intermediate_size
        self.gate_up_proj = make((size, 2 * inner), (None, 2 * even(inner)))
        self.down_proj = make((inner, size), (even(inner), None))

    def apply_experts(
        self,
        rows: Float[Array, "n e"],
        experts: Int[Array, " n"],
        weights: tuple[Any, ...],
        multiply: Multiply,
    ) -> Float[Array, "n e"]:
        gate_up_proj, down_proj = weights
        gate, up = jnp.split(multiply(rows, gate_up_proj), 2, axis=-1)
        return multiply(ACTIVATIONS[self.config.hidden_act](gate) * up, down_proj)


class Router(Linear):
    """A linear map from a token to the float32 logits of the experts."""

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t g"]:
        return self.logits(x)


class MoeMLP(Module):
    """A router, and the experts that it chooses from."""

    router_bias: ClassVar[bool] = False
    experts_class: ClassVar[type[Experts]] = Experts

    def __init__(self, config: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        options: Any = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        options |= {"bias": self.router_bias, "split": (None, None)}
        self.gate = Router(config.hidden_size, config.num_experts, **options)
        self.experts = self.experts_class(config, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        probabilities = jax.nn.softmax(self.gate(x, context))
        weights, chosen = jax.lax.top_k(probabilities, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return self.experts(RoutedTokens(x, chosen, weights), context)


class MoeDecoderLayer(LlamaDecoderLayer):
    """A Llama's layer with experts, where the config says so."""

    moe_class: ClassVar[Callable[..., Module]] = MoeMLP

    def make_mlp(self, config: Any, layer: int, **options: Any) -> Module:
        make = self.moe_class if layer in config.moe_layers else self.mlp_class
        return make(config, layer, **options)

"""Mixture-of-experts (MoE) layers: a router selects a few experts for each token, and only those run.

The rows of a step are sorted by expert. Each weight matrix of the experts is one stacked array, and a grouped
matrix product multiplies the rows of every expert by that expert's matrix. With several devices, either each
device has whole experts (expert parallelism) or each has a part of every expert (tensor parallelism). In both
cases a device computes a partial result, and the results of all devices are added.

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
from jax_paged.models.quantization.packed_weight import PackedWeight
from jax_paged.models.quantization.quantized_linear import KernelStack, QuantizedWeight
from jax_paged.pallas_kernels import grouped_loop
from jax_paged.pallas_kernels.native import quantized_products
from jax_paged.pallas_kernels.native.quantized_products import PackedQuantized

# Llama's weight names, and a checkpoint tensor of its own for each expert.
EXPERT_TABLE = WEIGHT_TABLE.with_names(
    (r"layers\.(\d+)\.mlp\.experts\.(\w+)", r"model.layers.\1.mlp.experts.{}.\2.weight")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Configuration of a Llama with mixture-of-experts layers.

    Args:
        moe_layers: Indices of the layers with experts. The other layers have a dense MLP.
        moe_intermediate_size: Intermediate size of an expert.
        num_experts: Number of experts per layer.
        num_experts_per_tok: Number of experts per token.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to 1.
    """

    moe_layers: tuple[int, ...]
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool

    @staticmethod
    def read_experts(read: ConfigReader, name: str | None = None) -> dict[str, int]:
        """Returns the fields num_experts and num_experts_per_tok.

        Args:
            read: The reader of config.json. Problems are noted in it.
            name: The name of the number of experts in config.json. If it is None, the name is
                num_local_experts or num_experts.
        """
        if name is None:
            name = "num_experts" if read.get("num_local_experts", None) is None else "num_local_experts"
        num, chosen = read.integer(name), read.integer("num_experts_per_tok")
        allowed = f"at most {name}, which is {num}"
        read.check(chosen <= num, "num_experts_per_tok", chosen, allowed, also_needs=(name,))
        return {"num_experts": num, "num_experts_per_tok": chosen}


# Multiplies the rows of each expert by the expert's weight matrix.
Multiply = Callable[[Array, Any], Array]


class RoutedTokens(NamedTuple):
    """The input of a layer's experts.

    Args:
        tokens: float [*T, E], the token rows.
        expert_ids: int32 [*T, K], indices of each token's K experts.
        weights: float32 [*T, K], factors of the outputs of these K experts.
    """

    tokens: Float[Array, "*t e"]
    expert_ids: Int[Array, "*t k"]
    weights: Float[Array, "*t k"]


class Experts(Module):
    """The experts of a layer: gated MLPs whose weights are stacked.

    A family with another type of experts overrides kernel_names, make_weights, divided_weights and
    apply_experts.

    Attributes:
        kernel_names: Names of the attributes that hold the stacked weight matrices.
    """

    kernel_names: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, config: Any, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config

        def make(shape: tuple[int, ...], split: Split, std: float = config.initializer_range) -> nnx.Param:
            value = normal(rngs.params(), (config.num_experts, *shape), dtype, std)
            return parameter(value, ((Units(config.num_experts, division="experts"),), *split))

        self.make_weights(make)

    def make_weights(self, make: Callable[..., nnx.Param]) -> None:
        """Creates the stacked weights as attributes.

        Args:
            make: A function (shape, split, std) that returns a parameter [num_experts, *shape].
        """
        size, inner = self.config.hidden_size, self.config.moe_intermediate_size
        self.gate_proj = make((size, inner), (None, even(inner)))
        self.up_proj = make((size, inner), (None, even(inner)))
        self.down_proj = make((inner, size), (even(inner), None))

    def divided_weights(self) -> tuple[nnx.Param | QuantizedWeight, ...]:
        """Returns the weights that are divided among devices, by expert or within each expert."""
        return tuple(getattr(self, name) for name in self.kernel_names)

    def apply_experts(
        self,
        rows: Float[Array, "n e"],
        experts: Int[Array, " n"],
        weights: tuple[Any, ...],
        multiply: Multiply,
    ) -> Float[Array, "n e"]:
        """Returns the outputs of this device's experts for rows that are sorted by expert.

        If each device has a part of every expert, the outputs are partial sums that still have to be added.

        Args:
            rows: float [N, E], sorted by expert. Rows that belong to no expert of this device come last, and
                their outputs must be 0.
            experts: int32 [N], index of each row's expert among the experts of this device; arbitrary for
                rows that belong to none of them.
            weights: The weights of this device's experts, in the order of `divided_weights`: arrays, or
                KernelStacks or PackedQuantized if they are quantized.
            multiply: Multiplies the rows of each expert by the expert's weight matrix. Rows that belong to no
                expert of this device become 0.

        Returns:
            float [N, E].
        """
        gate_proj, up_proj, down_proj = weights
        gate = ACTIVATIONS[self.config.hidden_act](multiply(rows, gate_proj))
        return multiply(gate * multiply(rows, up_proj), down_proj)

    def forward(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the weighted sum of the outputs of each token's experts.

        Args:
            x: The token rows, and the experts and weights that the router selected.
            context: The context of this forward pass.

        Returns:
            [*T, E] in the dtype of x.tokens.
        """
        return self.weighted_sum(x, context).astype(x.tokens.dtype)

    def weighted_sum(self, x: RoutedTokens, context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the weighted sum of the outputs of each token's experts, in float32.

        Args:
            x: The token rows, and the experts and weights that the router selected.
            context: The context of this forward pass.

        Returns:
            float32 [*T, E].
        """
        own, grid = self.divided_weights(), context.grid
        weights = [_arrays_of(w) for w in own]
        if grid is None:
            return self.local_weighted_sum(x, *weights, context=context)
        arrays, treedef = jax.tree.flatten(weights)

        def compute(x: RoutedTokens, *arrays: Array) -> Array:
            first = jax.lax.axis_index(TENSOR) * len(arrays[0]) if grid.splits_experts else 0
            weights = jax.tree.unflatten(treedef, arrays)
            return jax.lax.psum(self.local_weighted_sum(x, *weights, context=context, first=first), TENSOR)

        splits = [w.splits if isinstance(w, QuantizedWeight) else [w.get_metadata("split")] for w in own]
        specs = [grid.spec(split) for weight in splits for split in weight if split is not None]
        return grid.shard_map(compute, (PartitionSpec(), *specs), PartitionSpec())(x, *arrays)

    def local_weighted_sum(
        self,
        x: RoutedTokens,
        *weights: Array | KernelStack | PackedQuantized,
        context: ForwardContext,
        first: Int[Array, ""] | int = 0,
    ) -> Float[Array, "*t e"]:
        """Returns the weighted sum of the outputs of the experts, or parts of experts, on this device.

        Args:
            x: The token rows, and the experts and weights that the router selected.
            *weights: The weights of this device's experts, in the order of `divided_weights`.
            context: The context of this forward pass.
            first: Index of this device's first expert among all experts.

        Returns:
            float32 [*T, E].
        """
        *leading, features = x.tokens.shape
        tokens, top_k = x.tokens.reshape(-1, features), x.expert_ids.shape[-1]
        # Sort the rows by expert, with this device's experts first. Rows of other experts belong to no group,
        # so the grouped product sets them to 0.
        num_experts, num_here = self.config.num_experts, len(jax.tree.leaves(weights)[0])
        experts = (x.expert_ids.reshape(-1) - first) % num_experts
        by_expert = jnp.argsort(experts, stable=True)
        sizes = jnp.bincount(experts, length=num_experts)[:num_here]

        def multiply(rows: Array, kernels: Array | KernelStack | PackedQuantized) -> Array:
            if isinstance(kernels, PackedQuantized):
                return quantized_products.multiply(rows, kernels, rows.dtype, sizes)
            if isinstance(kernels, KernelStack):
                return grouped_loop.by_group(rows, kernels.product, kernels.num_columns, sizes)
            return context.grouped_matmul(rows, kernels, sizes)

        own = jnp.minimum(experts[by_expert], num_here - 1)
        out = self.apply_experts(tokens[by_expert // top_k], own, weights, multiply)
        out = out[jnp.argsort(by_expert)].reshape(*leading, top_k, features) * x.weights[..., None]
        return jnp.sum(out, axis=-2)


def _arrays_of(weight: Any) -> Any:
    """Returns the arrays of a stacked weight; see Experts.apply_experts."""
    if isinstance(weight, PackedWeight):
        return weight.packed
    return weight.stack if isinstance(weight, QuantizedWeight) else weight[...]


class FusedExperts(Experts):
    """Experts that have the gate and up projections side by side in one weight matrix."""

    kernel_names: ClassVar[tuple[str, ...]] = ("gate_up_proj", "down_proj")

    def make_weights(self, make: Callable[..., nnx.Param]) -> None:
        """Creates the stacked weights; see Experts.make_weights."""
        size, inner = self.config.hidden_size, self.config.moe_intermediate_size
        self.gate_up_proj = make((size, 2 * inner), (None, 2 * even(inner)))  # two lists of units
        self.down_proj = make((inner, size), (even(inner), None))

    def apply_experts(
        self,
        rows: Float[Array, "n e"],
        experts: Int[Array, " n"],
        weights: tuple[Any, ...],
        multiply: Multiply,
    ) -> Float[Array, "n e"]:
        """Returns the outputs of this device's experts; see Experts.apply_experts."""
        gate_up_proj, down_proj = weights
        gate, up = jnp.split(multiply(rows, gate_up_proj), 2, axis=-1)
        return multiply(ACTIVATIONS[self.config.hidden_act](gate) * up, down_proj)


class Router(Linear):
    """Linear map from a token row to the logits of the experts."""

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t g"]:
        """Returns the logits of the experts.

        Args:
            x: float [*T, E].
            context: The context of this forward pass.

        Returns:
            float32 [*T, num_experts].
        """
        return self.logits(x)


class MoeMLP(Module):
    """A router and its experts."""

    router_bias: ClassVar[bool] = False
    experts_class: ClassVar[type[Experts]] = Experts

    def __init__(self, config: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        options: Any = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        options |= {"bias": self.router_bias, "split": (None, None)}
        self.gate = Router(config.hidden_size, config.num_experts, **options)
        self.experts = self.experts_class(config, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Routes each token to its experts and returns the weighted sum of their outputs.

        Args:
            x: float [*T, E].
            context: The context of this forward pass.

        Returns:
            float [*T, E].
        """
        probabilities = jax.nn.softmax(self.gate(x, context))
        weights, chosen = jax.lax.top_k(probabilities, self.config.num_experts_per_tok)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return self.experts(RoutedTokens(x, chosen, weights), context)


class MoeDecoderLayer(LlamaDecoderLayer):
    """Llama decoder layer that has experts if its index is in `moe_layers` of the config."""

    moe_class: ClassVar[Callable[..., Module]] = MoeMLP

    def make_mlp(self, config: Any, layer: int, **options: Any) -> Module:
        """Returns the experts or the dense MLP of a layer."""
        make = self.moe_class if layer in config.moe_layers else self.mlp_class
        return make(config, layer, **options)

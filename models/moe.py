"""Mixtures of experts: a router chooses a few MLPs for each token, and only those are computed.

Source: Shazeer et al., Outrageously Large Neural Networks, 2017; for the blocks of rows Gale et
al., MegaBlocks, 2022.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, TENSOR, Linear, normal, parameter
from jax_paged.models.llama import LlamaConfig, LlamaDecoderLayer, LlamaMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Shape of a Llama with experts.

    Args:
        moe_layers: Layers that have experts; the others have an MLP.
        moe_intermediate_size: Width of an expert.
        num_experts: Experts of a layer.
        num_experts_per_tok: Experts that a token goes to.
        norm_topk_prob: Whether the weights of a token's experts are made to sum up to 1.
    """

    moe_layers: tuple[int, ...]
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool

    @staticmethod
    def read_experts(read: ConfigReader) -> dict[str, int]:
        """Returns how many experts there are, and to how many of them a token goes."""
        name = "num_experts" if read.get("num_local_experts", None) is None else "num_local_experts"
        num, chosen = read.integer(name), read.integer("num_experts_per_tok")
        allowed = f"at most {name}, which is {num}"
        read.check(chosen <= num, "num_experts_per_tok", chosen, allowed, also_needs=(name,))
        return {"num_experts": num, "num_experts_per_tok": chosen}


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "n i"], kernels: Float[Array, "g i o"], group_sizes: Int[Array, " g"]
) -> Float[Array, "n o"]:
    """Multiplies the first group_sizes[0] rows by kernels[0], the next group_sizes[1] by kernels[1], ...

    The same as jax.lax.ragged_dot, which on a CPU multiplies all rows by all kernels. This one reads the
    kernels of groups that are not empty, and computes a row as if it were alone. Not measured on a GPU.

    Args:
        x: Rows, sorted by group.
        kernels: One a group.
        group_sizes: Rows of each group; they sum up to n.
    """
    num_rows, num_groups = x.shape[0], kernels.shape[0]
    per_group = -(-num_rows // num_groups)
    block = min(max(1 << (per_group - 1).bit_length(), 8), 128)
    num_blocks = -(-group_sizes // block)
    ends = jnp.cumsum(num_blocks)
    # A work list of blocks of rows; there can be no more of them.
    items = jnp.arange(num_rows // block + min(num_groups, num_rows))
    group = jnp.minimum(jnp.sum(items[:, None] >= ends, axis=1), num_groups - 1)
    first = (jnp.cumsum(group_sizes) - group_sizes)[group] + (items - (ends - num_blocks)[group]) * block
    x = jnp.pad(x, ((0, block), (0, 0)))

    def multiply(i: Array, y: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, first[i], block)
        kernel = jax.lax.dynamic_index_in_dim(kernels, group[i], keepdims=False)
        # Rows past the group's end are of the groups behind it, whose blocks overwrite them.
        return jax.lax.dynamic_update_slice_in_dim(y, rows @ kernel, first[i], 0)

    y = jnp.zeros((num_rows + block, kernels.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, ends[-1], multiply, y)[:num_rows]


def _forward(x: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, kernels, group_sizes), (x, kernels, group_sizes)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    x, kernels, group_sizes = saved
    _, pull = jax.vjp(lambda x, kernels: jax.lax.ragged_dot(x, kernels, group_sizes), x, kernels)
    return *pull(cotangent), None


grouped_matmul.defvjp(_forward, _backward)


class Experts(nnx.Module):
    """The kernels of all experts of a layer, stacked."""

    def __init__(self, config: MoeConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        size, inner, std = config.hidden_size, config.moe_intermediate_size, config.initializer_range

        def make(shape: tuple[int, int], split: tuple[str | None, str | None]) -> nnx.Param:
            value = normal(rngs.params(), (config.num_experts, *shape), dtype, std)
            return parameter(value, (None, *split))

        self.gate_proj = make((size, inner), (None, TENSOR))
        self.up_proj = make((size, inner), (None, TENSOR))
        self.down_proj = make((inner, size), (TENSOR, None))


class MoeMLP(nnx.Module):
    """A router, and experts that are gated MLPs."""

    def __init__(self, config: MoeConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        self.activation = ACTIVATIONS[config.hidden_act]
        options: Any = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        size = config.hidden_size
        self.gate = Linear(size, config.num_experts, bias=False, split=(None, None), **options)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*t e"]) -> Float[Array, "*t e"]:
        tokens, top_k = x.reshape(-1, x.shape[-1]), self.config.num_experts_per_tok
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.gate.logits(tokens)), top_k)
        if self.config.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

        by_expert = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.config.num_experts)
        rows, e = tokens[by_expert // top_k], self.experts
        gate = self.activation(grouped_matmul(rows, e.gate_proj[...], sizes))
        inner = gate * grouped_matmul(rows, e.up_proj[...], sizes)
        out = grouped_matmul(inner, e.down_proj[...], sizes)[jnp.argsort(by_expert)]
        out = out.reshape(-1, top_k, x.shape[-1]) * weights[..., None]
        return jnp.sum(out, axis=1).astype(x.dtype).reshape(x.shape)


class MoeDecoderLayer(LlamaDecoderLayer):
    """A Llama's, with experts where the config says so."""

    @classmethod
    def mlp_class(cls, config: Any, layer: int) -> Callable[..., nnx.Module]:
        return MoeMLP if layer in config.moe_layers else LlamaMLP

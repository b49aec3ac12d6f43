"""DeepseekV2ForCausalLM (DeepSeek-V2).

Differences from Llama: multi-head latent attention (MLA), and a mixture of experts with shared experts in
place of most MLPs.

In MLA, keys and values of all heads are linear projections of one vector per token, the latent. Only the
latent is cached, together with a key part of qk_rope_head_dim numbers that has the rotary embedding and is
common to all heads:

    cache entry of a token    | latent: kv_lora_rank | rotated: qk_rope_head_dim |
    key of head h             W_UK[h] latent, followed by the rotated part
    value of head h           W_UV[h] latent

Keys and values per head are never computed, not even in prefill. Since q . (W_UK c) equals (W_UK^T q) . c,
queries are multiplied by W_UK^T and then attend to the cache entries as if these were the keys of a single kv
head. Since a weighted sum of W_UV c equals W_UV times the weighted sum of c, W_UV is applied to the output of
the attention.

Source: DeepSeek-AI, DeepSeek-V2, 2024; names and semantics of the weights as in Hugging Face's
DeepseekV2ForCausalLM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import KVCacheSpec, LatentAttentionSpec
from jax_paged.models.families.llama import LlamaConfig, LlamaForCausalLM, LlamaMLP
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import Linear, RMSNorm, normal, parameter
from jax_paged.models.moe import EXPERT_TABLE, Experts, MoeConfig, MoeDecoderLayer, RoutedTokens, Router
from jax_paged.models.parallel.sharding import even
from jax_paged.models.quantization.quantized_linear import QuantizedWeight
from jax_paged.models.rope import Rope, rope_values, yarn_score_factor

# Epsilon of the norms of latents, which does not depend on rms_norm_eps.
LATENT_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(MoeConfig):
    """Configuration of a DeepSeek-V2; most names are as in config.json.

    Args:
        head_dim: Elements of a query, including the elements with the rotary embedding.
        q_lora_rank: Size of the latent that queries are projected from; None if they are projected from the
            hidden state.
        kv_lora_rank: Size of the latent of keys and values.
        qk_rope_head_dim: Elements of a query or key that have the rotary embedding.
        v_head_dim: Elements of a value.
        scale: Factor of the attention scores.
        shared_intermediate_size: Total width of the shared experts.
        n_group: Number of groups that the experts are divided into.
        topk_group: Maximum number of groups that the experts of a token may belong to.
        routed_scaling_factor: Factor of the outputs of the routed experts.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    shared_intermediate_size: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float

    is_interleaved: ClassVar[bool] = True
    defaults: ClassVar[dict[str, Any]] = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    }

    @property
    def qk_nope_head_dim(self) -> int:
        """The number of elements of a query or key without the rotary embedding."""
        return self.head_dim - self.qk_rope_head_dim

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        head_dim = read.integer("qk_nope_head_dim") + read.integer("qk_rope_head_dim")
        read.choice("mlp_bias", False, (False,))
        read.choice("moe_layer_freq", 1, (1,))
        width = read.integer("moe_intermediate_size")
        no_q_latent = read.get("q_lora_rank", None) is None
        rope = rope_values(read, read.integer("max_position_embeddings"))
        return (
            fields
            | {name: read.integer(name) for name in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim")}
            | {
                "head_dim": head_dim,
                "q_lora_rank": None if no_q_latent else read.integer("q_lora_rank"),
                "scale": head_dim**-0.5 * yarn_score_factor(rope),
                "moe_layers": tuple(
                    range(read.integer("first_k_dense_replace", low=0), fields["num_hidden_layers"])
                ),
                "moe_intermediate_size": width,
                "shared_intermediate_size": width * read.integer("n_shared_experts"),
                "routed_scaling_factor": read.number("routed_scaling_factor", 1.0),
            }
            | cls.read_experts(read, "n_routed_experts")
            | cls.read_router(read)
        )

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding, for qk_rope_head_dim dimensions."""
        size, rope = read.integer("qk_rope_head_dim"), rope_values(read, max_position_embeddings)
        read.check(size % 2 == 0, "qk_rope_head_dim", size, "an even integer")
        # Other rope types are not supported, because their factor of the attention scores is not defined.
        rope.choice("rope_type", rope.get("type", "default"), ("default", "yarn"))
        return super().read_rope(read, size, max_position_embeddings)

    @classmethod
    def read_router(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields that describe how experts are chosen."""
        read.choice("scoring_func", "softmax", ("softmax",))
        method = read.choice("topk_method", "greedy", ("greedy", "group_limited_greedy"))
        groups = {"n_group": 1, "topk_group": 1} if method == "greedy" else cls.read_groups(read)
        return groups | {"norm_topk_prob": read.choice("norm_topk_prob", False, (False,))}

    @staticmethod
    def read_groups(read: ConfigReader) -> dict[str, int]:
        """Returns the fields n_group and topk_group."""
        num, chosen = read.integer("n_routed_experts"), read.integer("num_experts_per_tok")
        groups, best = read.integer("n_group"), read.integer("topk_group")
        allowed = f"a divisor of n_routed_experts, which is {num}"
        if read.check(num % groups == 0, "n_group", groups, allowed, also_needs=("n_routed_experts",)):
            most, least = groups, -(-chosen * groups // num)
            allowed = f"in [{least}, {most}] (enough groups for num_experts_per_tok experts, at most n_group)"
            needs = ("n_routed_experts", "num_experts_per_tok", "n_group")
            read.check(least <= best <= most, "topk_group", best, allowed, also_needs=needs)
        return {"n_group": groups, "topk_group": best}


class LatentProjections(nnx.Module):
    """Projections from a latent to the keys (without rotary embedding) and values of each head: kv_b_proj.

    This is not a Module with a context, because it is used at two points: it projects queries before the
    attention, and weighted sums of latents after it (see the docstring of this file).
    """

    kernel_names: ClassVar[tuple[str, ...]] = ("kernel",)

    def __init__(self, config: DeepseekV2Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.sizes = config.qk_nope_head_dim, config.v_head_dim
        heads, size = config.num_attention_heads, sum(self.sizes)
        value = normal(rngs.params(), (config.kv_lora_rank, heads * size), dtype, config.initializer_range)
        self.kernel: nnx.Param | QuantizedWeight = parameter(value, (None, even(heads, size)))

    def per_head(self, dtype: jnp.dtype) -> Float[Array, "r h d"]:
        """Returns the kernel by head, [kv_lora_rank, heads, qk_nope_head_dim + v_head_dim]."""
        kernel = self.kernel
        kernel = kernel.dense(dtype) if isinstance(kernel, QuantizedWeight) else kernel[...]
        return kernel.reshape(len(kernel), -1, sum(self.sizes))

    def queries(self, q: Float[Array, "*t h n"]) -> Float[Array, "*t h r"]:
        """Returns the queries for latents, W_UK^T q."""
        return jnp.einsum("...hn,rhn->...hr", q, self.per_head(q.dtype)[..., : self.sizes[0]])

    def values(self, latents: Float[Array, "*t h r"]) -> Float[Array, "*t h v"]:
        """Returns weighted sums of values, given the same weighted sums of latents."""
        return jnp.einsum("...hr,rhv->...hv", latents, self.per_head(latents.dtype)[..., self.sizes[0] :])


class LatentAttention(Module):
    """Multi-head latent attention, with queries that are projected from the hidden state."""

    same_input: ClassVar[tuple[str, ...]] = ("q_proj", "kv_a_proj_with_mqa")

    def __init__(self, config: DeepseekV2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer, self.rope = config, layer, config.rope
        make = functools.partial(Linear, std=config.initializer_range, dtype=dtype, rngs=rngs)
        norm = functools.partial(RMSNorm, epsilon=LATENT_NORM_EPS, dtype=dtype)
        self.make_queries(make, norm)
        rank = config.kv_lora_rank
        self.kv_a_proj_with_mqa = make(
            config.hidden_size,
            rank + config.qk_rope_head_dim,
            bias=config.attention_bias,
            split=(None, None),
        )
        self.kv_a_layernorm = norm(rank)
        self.kv_b_proj = LatentProjections(config, dtype=dtype, rngs=rngs)
        heads, size = config.num_attention_heads, config.v_head_dim
        self.o_proj = make(
            heads * size, config.hidden_size, bias=config.output_bias, split=(even(heads, size), None)
        )

    def make_queries(self, make: Callable[..., Linear], norm: Callable[[int], RMSNorm]) -> None:
        """Creates the projection to the queries.

        Args:
            make: Creates a linear layer.
            norm: Creates a norm of a given size.
        """
        self.q_proj = self.make_query_projection(make, self.config.hidden_size)

    def make_query_projection(self, make: Callable[..., Linear], in_features: int) -> Linear:
        """Returns the projection to the queries of all heads."""
        heads, size = self.config.num_attention_heads, self.config.head_dim
        return make(in_features, heads * size, bias=False, split=(None, even(heads, size)))

    def queries(self, x: Float[Array, "*t e"], context: ForwardContext) -> Array:
        """Returns the queries, with their heads concatenated."""
        return self.q_proj(x, context)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        c, rotate = self.config, context.rotations[self.rope]
        q = self.queries(x, context).reshape(*x.shape[:-1], -1, c.head_dim)
        plain, rotated = jnp.split(q, [c.qk_nope_head_dim], axis=-1)
        q = jnp.concatenate([self.kv_b_proj.queries(plain), rotate(rotated)], axis=-1)
        latent, rotated = jnp.split(self.kv_a_proj_with_mqa(x, context), [c.kv_lora_rank], axis=-1)
        latent = self.kv_a_layernorm(latent, context)
        cached = jnp.concatenate([latent[..., None, :], rotate(rotated[..., None, :])], axis=-1)
        out = self.kv_b_proj.values(context.attend(self.layer, q, cached, cached, scale=c.scale))
        return self.o_proj(out.reshape(*x.shape[:-1], -1), context)


class LowRankQueryAttention(LatentAttention):
    """Multi-head latent attention, with queries that are projected from a latent too."""

    same_input: ClassVar[tuple[str, ...]] = ("q_a_proj", "kv_a_proj_with_mqa")

    def make_queries(self, make: Callable[..., Linear], norm: Callable[[int], RMSNorm]) -> None:
        """Creates the projections to the latent of the queries and from it."""
        c = self.config
        self.q_a_proj = make(c.hidden_size, c.q_lora_rank, bias=c.attention_bias, split=(None, None))
        self.q_a_layernorm = norm(self.q_a_proj.out_features)
        self.q_b_proj = self.make_query_projection(make, self.q_a_proj.out_features)

    def queries(self, x: Float[Array, "*t e"], context: ForwardContext) -> Array:
        """Returns the queries, with their heads concatenated."""
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, context), context), context)


def latent_attention(
    config: DeepseekV2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> LatentAttention:
    """Returns the attention module of a layer."""
    attention_class = LatentAttention if config.q_lora_rank is None else LowRankQueryAttention
    return attention_class(config, layer, dtype=dtype, rngs=rngs)


class DeepseekMoE(Module):
    """Routed experts, a few of which are chosen for each token, and shared experts for all tokens."""

    router_class: ClassVar[type[Router]] = Router

    def __init__(self, config: DeepseekV2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        options: Any = {"std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        sizes = config.hidden_size, config.num_experts
        self.gate = self.router_class(*sizes, bias=False, split=(None, None), **options)
        self.experts = Experts(config, dtype=dtype, rngs=rngs)
        shared = dataclasses.replace(config, intermediate_size=config.shared_intermediate_size)
        self.shared_experts = LlamaMLP(shared, layer, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the weighted sum of the routed experts' outputs plus the output of the shared experts."""
        weights, chosen = self.choose(self.gate(x, context))
        weights = weights * self.config.routed_scaling_factor
        return self.experts(RoutedTokens(x, chosen, weights), context) + self.shared_experts(x, context)

    def choose(self, logits: Float[Array, "*t g"]) -> tuple[Float[Array, "*t k"], Int[Array, "*t k"]]:
        """Returns the weights of the chosen experts of each token, and their indices."""
        c = self.config
        scores = mask_other_groups(jax.nn.softmax(logits), c.n_group, c.topk_group, num_ranked=1)
        weights, chosen = jax.lax.top_k(scores, c.num_experts_per_tok)
        return weights, chosen


def mask_other_groups(
    scores: Float[Array, "*t g"], num_groups: int, num_best: int, *, num_ranked: int
) -> Float[Array, "*t g"]:
    """Returns the scores with -inf for all experts outside of the best groups.

    Args:
        scores: Scores of all experts.
        num_groups: Number of groups that the experts are divided into.
        num_best: Number of groups that are selected.
        num_ranked: A group is ranked by the sum of this many of its best scores.
    """
    if num_groups == 1:
        return scores
    groups = scores.reshape(*scores.shape[:-1], num_groups, -1)
    _, best = jax.lax.top_k(jnp.sum(jax.lax.top_k(groups, num_ranked)[0], axis=-1), num_best)
    is_best = jnp.any(best[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(scores.shape)


class DeepseekDecoderLayer(MoeDecoderLayer):
    """Llama's layer with latent attention, and with DeepseekMoE in the layers that have experts."""

    attention_class: ClassVar[Callable[..., Module]] = staticmethod(latent_attention)
    moe_class: ClassVar[Callable[..., Module]] = DeepseekMoE


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """A Llama with latent attention and a mixture of experts."""

    config: DeepseekV2Config
    config_class: ClassVar[type[LlamaConfig]] = DeepseekV2Config
    layer_class: ClassVar[Callable[..., Module]] = DeepseekDecoderLayer
    weight_table: ClassVar[WeightTable] = EXPERT_TABLE

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: a latent and the rotated part of the key."""
        c = self.config
        spec = LatentAttentionSpec(c.kv_lora_rank + c.qk_rope_head_dim, value_dim=c.kv_lora_rank)
        return [spec] * c.num_hidden_layers

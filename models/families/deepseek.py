"""DeepSeek-V2: multi-head latent attention, and experts beside shared ones.

Keys and values of all heads are linear maps of one vector per token, the latent. It is all that is cached,
beside a part of the key with rotary positions, which all heads have in common:

    cached by token       | latent: kv_lora_rank | rotated: qk_rope_head_dim |
    key of head h         W_UK[h] latent, and the rotated part
    value of head h       W_UV[h] latent

q . (W_UK c) is (W_UK^T q) . c, and a weighted sum of W_UV c is W_UV of the weighted sum. So queries are
multiplied by W_UK^T, attend to what is cached as the heads of a single kv head, and W_UV follows: no key or
value of a head is ever computed, not even in a prompt.

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

# Of the norms of latents, whatever rms_norm_eps is.
LATENT_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV2Config(MoeConfig):
    """Shape of a DeepSeek-V2; most names are those of config.json.

    Args:
        head_dim: Numbers of a query, those with rotary positions among them.
        q_lora_rank: Size of the vector that queries are a linear map of; None if that is the hidden state.
        kv_lora_rank: Size of a latent.
        qk_rope_head_dim: Numbers of a query or a key that have rotary positions.
        v_head_dim: Numbers of a value.
        scale: Factor of the scores.
        shared_intermediate_size: Width of the experts that all tokens go through, together.
        n_group: Groups that the experts are divided into.
        topk_group: Groups that the experts of a token may be in.
        routed_scaling_factor: Of the outputs of the chosen experts.
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
        """Numbers of a query or a key that have no rotary positions."""
        return self.head_dim - self.qk_rope_head_dim

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
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
        size, rope = read.integer("qk_rope_head_dim"), rope_values(read, max_position_embeddings)
        read.check(size % 2 == 0, "qk_rope_head_dim", size, "an even integer")
        # The others have no factor of the scores.
        rope.choice("rope_type", rope.get("type", "default"), ("default", "yarn"))
        return super().read_rope(read, size, max_position_embeddings)

    @classmethod
    def read_router(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields that say how experts are chosen."""
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
            allowed = f"in [{least}, {most}], at most n_group"
            needs = ("n_routed_experts", "num_experts_per_tok", "n_group")
            read.check(least <= best <= most, "topk_group", best, allowed, also_needs=needs)
        return {"n_group": groups, "topk_group": best}


class LatentMaps(nnx.Module):
    """The maps from a latent to each head's key without positions, and to its value: kv_b_proj.

    It is no Module of the context, as neither map is applied to a latent: see the top of the file.
    """

    kernel_names: ClassVar[tuple[str, ...]] = ("kernel",)

    def __init__(self, config: DeepseekV2Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.sizes = config.qk_nope_head_dim, config.v_head_dim
        heads, size = config.num_attention_heads, sum(self.sizes)
        value = normal(rngs.params(), (config.kv_lora_rank, heads * size), dtype, config.initializer_range)
        self.kernel: nnx.Param | QuantizedWeight = parameter(value, (None, even(heads, size)))

    def per_head(self, dtype: jnp.dtype) -> Float[Array, "r h d"]:
        """Returns the kernel by heads: what makes keys, and behind it what makes values."""
        kernel = self.kernel
        kernel = kernel.dense(dtype) if isinstance(kernel, QuantizedWeight) else kernel[...]
        return kernel.reshape(len(kernel), -1, sum(self.sizes))

    def queries(self, q: Float[Array, "*t h n"]) -> Float[Array, "*t h r"]:
        """Returns queries for latents, of those for keys."""
        return jnp.einsum("...hn,rhn->...hr", q, self.per_head(q.dtype)[..., : self.sizes[0]])

    def values(self, latents: Float[Array, "*t h r"]) -> Float[Array, "*t h v"]:
        """Returns sums of values, of the same sums of latents."""
        return jnp.einsum("...hr,rhv->...hv", latents, self.per_head(latents.dtype)[..., self.sizes[0] :])


class LatentAttention(Module):
    """Multi-head latent attention; queries are a linear map of the hidden state."""

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
        self.kv_b_proj = LatentMaps(config, dtype=dtype, rngs=rngs)
        heads, size = config.num_attention_heads, config.v_head_dim
        self.o_proj = make(
            heads * size, config.hidden_size, bias=config.output_bias, split=(even(heads, size), None)
        )

    def make_queries(self, make: Callable[..., Linear], norm: Callable[[int], RMSNorm]) -> None:
        self.q_proj = self.query_map(make, self.config.hidden_size)

    def query_map(self, make: Callable[..., Linear], in_features: int) -> Linear:
        """Returns the map to the queries of all heads."""
        heads, size = self.config.num_attention_heads, self.config.head_dim
        return make(in_features, heads * size, bias=False, split=(None, even(heads, size)))

    def queries(self, x: Float[Array, "*t e"], context: ForwardContext) -> Array:
        """Returns the queries, their heads joined."""
        return self.q_proj(x, context)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
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
    """Multi-head latent attention whose queries are made of a latent too."""

    same_input: ClassVar[tuple[str, ...]] = ("q_a_proj", "kv_a_proj_with_mqa")

    def make_queries(self, make: Callable[..., Linear], norm: Callable[[int], RMSNorm]) -> None:
        c = self.config
        self.q_a_proj = make(c.hidden_size, c.q_lora_rank, bias=c.attention_bias, split=(None, None))
        self.q_a_layernorm = norm(self.q_a_proj.out_features)
        self.q_b_proj = self.query_map(make, self.q_a_proj.out_features)

    def queries(self, x: Float[Array, "*t e"], context: ForwardContext) -> Array:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, context), context), context)


def latent_attention(
    config: DeepseekV2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
) -> LatentAttention:
    """Returns the attention of a layer."""
    kind = LatentAttention if config.q_lora_rank is None else LowRankQueryAttention
    return kind(config, layer, dtype=dtype, rngs=rngs)


class DeepseekMoE(Module):
    """Experts of which each token goes through a few, and shared ones, which all tokens go through."""

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
        weights, chosen = self.choose(self.gate(x, context))
        weights = weights * self.config.routed_scaling_factor
        return self.experts(RoutedTokens(x, chosen, weights), context) + self.shared_experts(x, context)

    def choose(self, logits: Float[Array, "*t g"]) -> tuple[Float[Array, "*t k"], Int[Array, "*t k"]]:
        """Returns the weights of the experts of each token, and which they are."""
        c = self.config
        scores = of_best_groups(jax.nn.softmax(logits), c.n_group, c.topk_group, num_ranked=1)
        weights, chosen = jax.lax.top_k(scores, c.num_experts_per_tok)
        return weights, chosen


def of_best_groups(
    scores: Float[Array, "*t g"], num_groups: int, num_best: int, *, num_ranked: int
) -> Float[Array, "*t g"]:
    """Returns the scores of the groups that are the best; -inf for experts of the others.

    Args:
        scores: Of all experts.
        num_groups: That they are divided into.
        num_best: Groups that remain.
        num_ranked: Experts of a group that it is ranked by: its best ones, whose scores are added.
    """
    if num_groups == 1:
        return scores
    groups = scores.reshape(*scores.shape[:-1], num_groups, -1)
    _, best = jax.lax.top_k(jnp.sum(jax.lax.top_k(groups, num_ranked)[0], axis=-1), num_best)
    is_best = jnp.any(best[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(scores.shape)


class DeepseekDecoderLayer(MoeDecoderLayer):
    """A Llama's layer with latent attention, and with experts where the config says so."""

    attention_class: ClassVar[Callable[..., Module]] = staticmethod(latent_attention)
    moe_class: ClassVar[Callable[..., Module]] = DeepseekMoE


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """A Llama with the layers above."""

    config: DeepseekV2Config
    config_class: ClassVar[type[LlamaConfig]] = DeepseekV2Config
    layer_class: ClassVar[Callable[..., Module]] = DeepseekDecoderLayer
    weight_table: ClassVar[WeightTable] = EXPERT_TABLE

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        c = self.config
        spec = LatentAttentionSpec(c.kv_lora_rank + c.qk_rope_head_dim, value_dim=c.kv_lora_rank)
        return [spec] * c.num_hidden_layers

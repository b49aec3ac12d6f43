"""DeepseekV3ForCausalLM (DeepSeek-V3, Kimi K2 and Moonlight): a DeepSeek-V2 with another router.

The router uses a sigmoid instead of a softmax, and adds a trained bias to the score of each expert when it
chooses experts, but not when it weights their outputs.

Source: DeepSeek-AI, DeepSeek-V3, 2024; names and semantics of the weights as in Hugging Face's
DeepseekV3ForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.models.families.deepseek import (
    DeepseekDecoderLayer,
    DeepseekMoE,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    mask_other_groups,
)
from jax_paged.models.families.llama import LlamaConfig
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import Float32Param
from jax_paged.models.moe import EXPERT_TABLE, Router
from jax_paged.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(DeepseekV2Config):
    """Configuration of a DeepSeek-V3."""

    defaults: ClassVar[dict[str, Any]] = DeepseekV2Config.defaults | {
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
    }

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding."""
        rope = super().read_rope(read, head_dim, max_position_embeddings)
        return dataclasses.replace(rope, is_interleaved=read.choice("rope_interleave", True, (False, True)))

    @classmethod
    def read_router(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields that describe how experts are chosen."""
        read.choice("scoring_func", "sigmoid", ("sigmoid",))
        read.choice("topk_method", "noaux_tc", ("noaux_tc",))
        groups, num = cls.read_groups(read), read.integer("n_routed_experts")
        ok, allowed = 2 * groups["n_group"] <= num, f"at most half of n_routed_experts, which is {num}"
        read.check(ok, "n_group", groups["n_group"], allowed, also_needs=("n_routed_experts",))
        return groups | {"norm_topk_prob": read.choice("norm_topk_prob", True, (False, True))}


class CorrectedRouter(Router):
    """A router with a bias per expert that affects the choice of experts, but not their weights."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        # The biases are float32, because they differ by less than the precision of bfloat16.
        self.e_score_correction_bias = Float32Param(jnp.zeros(out_features, jnp.float32), split=(None,))


class DeepseekV3MoE(DeepseekMoE):
    """Routed experts with sigmoid scores, and shared experts."""

    router_class: ClassVar[type[Router]] = CorrectedRouter

    def choose(self, logits: Float[Array, "*t g"]) -> tuple[Float[Array, "*t k"], Int[Array, "*t k"]]:
        """Returns the weights of the chosen experts of each token, and their indices."""
        c, scores = self.config, jax.nn.sigmoid(logits)
        corrected = scores + self.gate.e_score_correction_bias[...]
        best = mask_other_groups(corrected, c.n_group, c.topk_group, num_ranked=2)
        _, chosen = jax.lax.top_k(best, c.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if c.norm_topk_prob:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return weights, chosen


class DeepseekV3DecoderLayer(DeepseekDecoderLayer):
    """DeepSeek-V2's layer with DeepseekV3MoE."""

    moe_class: ClassVar[Callable[..., Module]] = DeepseekV3MoE


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """A DeepSeek-V2 with the router of DeepSeek-V3."""

    config_class: ClassVar[type[LlamaConfig]] = DeepseekV3Config
    layer_class: ClassVar[Callable[..., Module]] = DeepseekV3DecoderLayer
    # Layer 61 of the published checkpoints comes after the last decoder layer. It predicts further tokens and
    # is not loaded.
    weight_table: ClassVar[WeightTable] = EXPERT_TABLE.with_names(
        ignored=EXPERT_TABLE.ignored + r"|model\.layers\.61\..*"
    )

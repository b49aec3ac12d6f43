"""HunYuan, the dense ones: a Llama whose queries and keys are normed after they are rotated.

Source: Tencent, Hunyuan, 2025; semantics as in Hugging Face's HunYuanDenseV1ForCausalLM.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from jaxtyping import Array

from jax_paged.models.families.blocks import renamed
from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.rope import Rope, base_frequencies, rope_values


@dataclasses.dataclass(frozen=True)
class HunYuanDenseV1Config(LlamaConfig):
    """Shape of a dense HunYuan."""

    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        read.choice("use_qk_norm", True, (True,))
        return super().read(read) | {"mlp_bias": False, "qk_norm": True}

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        if cls._has_alpha(read, max_position_embeddings):
            return max_position_embeddings
        return super().read_max_positions(read, max_position_embeddings)

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        if not cls._has_alpha(read, max_position_embeddings):
            return super().read_rope(read, head_dim, max_position_embeddings)
        values = rope_values(read, max_position_embeddings)
        if not read.check(head_dim > 2, "head_dim", head_dim, "more than 2 with dynamic rotary positions"):
            return Rope(())
        theta = values.number("rope_theta", 10000.0, low=1.0)
        return Rope(base_frequencies(head_dim, theta * values.number("alpha") ** (head_dim / (head_dim - 2))))

    @staticmethod
    def _has_alpha(read: ConfigReader, max_position_embeddings: int) -> bool:
        """Returns whether "dynamic" means another base for texts of all lengths."""
        values = rope_values(read, max_position_embeddings)
        kind = values.get("rope_type", values.get("type", "default"))
        return kind == "dynamic" and bool(values.get("alpha", None))


class HunYuanAttention(LlamaAttention):
    """A Llama's attention, with its steps in another order."""

    def norm_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        return super().norm_qk(*super().rotated(q, k, context), context)

    def rotated(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        return q, k  # before they were normed


class HunYuanDecoderLayer(LlamaDecoderLayer):
    """A Llama's layer with the attention above."""

    attention_class: ClassVar[Callable[..., Module]] = HunYuanAttention


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """A Llama with the layers above."""

    config_class: ClassVar[type[LlamaConfig]] = HunYuanDenseV1Config
    layer_class: ClassVar[Callable[..., Module]] = HunYuanDecoderLayer
    weight_table: ClassVar[WeightTable] = renamed(
        {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
    )

"""HunYuanDenseV1ForCausalLM (the dense models of HunYuan).

Differences from Llama: RMSNorm of queries and keys, per head, after the rotary embedding; the rope type
"dynamic" may have a constant factor `alpha` for its base.

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
    """Configuration of a dense HunYuan."""

    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        read.choice("use_qk_norm", True, (True,))
        return super().read(read) | {"mlp_bias": False, "qk_norm": True}

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        """Returns the maximum length of a sequence (tokens).

        With `alpha`, this is the value in config.json, which needs no scaling.
        """
        if cls._has_alpha(read, max_position_embeddings):
            return max_position_embeddings
        return super().read_max_positions(read, max_position_embeddings)

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding. With `alpha`, the base is multiplied by alpha ** (d / (d - 2))."""
        if not cls._has_alpha(read, max_position_embeddings):
            return super().read_rope(read, head_dim, max_position_embeddings)
        values = rope_values(read, max_position_embeddings)
        if not read.check(head_dim > 2, "head_dim", head_dim, "more than 2 with rope_type 'dynamic'"):
            return Rope(())
        theta = values.number("rope_theta", 10000.0, low=1.0)
        return Rope(base_frequencies(head_dim, theta * values.number("alpha") ** (head_dim / (head_dim - 2))))

    @staticmethod
    def _has_alpha(read: ConfigReader, max_position_embeddings: int) -> bool:
        """Returns whether the rope type is "dynamic" with a constant factor `alpha`."""
        values = rope_values(read, max_position_embeddings)
        rope_type = values.get("rope_type", values.get("type", "default"))
        return rope_type == "dynamic" and bool(values.get("alpha", None))


class HunYuanAttention(LlamaAttention):
    """Llama's attention with the rotary embedding before the normalization of queries and keys."""

    def normalize_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        """Returns queries and keys after the rotary embedding and the normalization."""
        return super().normalize_qk(*super().rotate_qk(q, k, context), context)

    def rotate_qk(self, q: Array, k: Array, context: ForwardContext) -> tuple[Array, Array]:
        """Returns queries and keys unchanged, because normalize_qk has already rotated them."""
        return q, k


class HunYuanDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with HunYuanAttention."""

    attention_class: ClassVar[Callable[..., Module]] = HunYuanAttention


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """A Llama with normalized queries and keys."""

    config_class: ClassVar[type[LlamaConfig]] = HunYuanDenseV1Config
    layer_class: ClassVar[Callable[..., Module]] = HunYuanDecoderLayer
    weight_table: ClassVar[WeightTable] = renamed(
        {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
    )

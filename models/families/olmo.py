"""Olmo2ForCausalLM (OLMo 2) and Olmo3ForCausalLM (OLMo 3).

Differences from Llama: norms after attention and MLP instead of before; RMSNorm of queries and of keys over
all heads together. OLMo 3 also has sliding windows in most layers, and a different rotary embedding in these.

Source: OLMo et al., 2 OLMo 2 Furious, 2024; Olmo 3, 2025.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp

from jax_paged.models.families.blocks import JoinedHeadsNorm, PostNormDecoderLayer
from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaForCausalLM
from jax_paged.models.forward_context import Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.parallel.sharding import Units
from jax_paged.models.rope import Rope, max_positions, read_rope


@dataclasses.dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """Configuration of an OLMo 2."""

    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}
    fixed: ClassVar[dict[str, Any]] = {"mlp_bias": False, "qk_norm": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """Configuration of an OLMo 3.

    Args:
        window_rope: Rotary embedding of the layers with a sliding window.
    """

    window_rope: Rope

    defaults: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        trained = read.integer("max_position_embeddings")
        values = cls._rope_values(read, "sliding_attention", trained)
        return fields | {
            "windows": cls.patterned_windows(read, fields["num_hidden_layers"]),
            "window_rope": read_rope(values, fields["head_dim"], trained, 500000.0),
        }

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        """Returns the maximum length of a sequence (tokens)."""
        values = cls._rope_values(read, "full_attention", max_position_embeddings)
        return max_positions(values, max_position_embeddings, read.max_model_len)

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding of the layers with full attention."""
        values = cls._rope_values(read, "full_attention", max_position_embeddings)
        return read_rope(values, head_dim, max_position_embeddings, 500000.0, read.max_model_len)

    @staticmethod
    def _rope_values(read: ConfigReader, layer_type: str, max_position_embeddings: int) -> ConfigReader:
        """Returns a reader of the rope values of one layer type.

        config.json has them in `rope_parameters`, as an object per layer type, or in `rope_theta` and
        `rope_scaling`. Here `rope_scaling` is only for layers with full attention.
        """
        name = "rope_parameters"
        table = read.table(name)
        ok = table.keys() <= {"full_attention", "sliding_attention"}
        read.check(ok, name, table, "an object whose keys are full_attention and sliding_attention")
        values = {"original_max_position_embeddings": max_position_embeddings}
        nested = read.nested(name, table).table(layer_type)
        if layer_type == "full_attention":
            values |= {"rope_theta": read.get("rope_theta", None)}
            nested |= read.table("rope_scaling")
        return read.nested(f"{name}.{layer_type}", values | nested)

    def rope_of(self, layer: int) -> Rope:
        """Returns the rotary embedding of a layer."""
        return self.rope if self.windows[layer] is None else self.window_rope


class OlmoAttention(LlamaAttention):
    """Llama's attention with RMSNorm over all heads of the queries, and of the keys."""

    def make_norm(self, heads: tuple[Units, ...], dtype: jnp.dtype) -> Module:
        """Returns a JoinedHeadsNorm."""
        return JoinedHeadsNorm(heads, epsilon=self.config.rms_norm_eps, dtype=dtype)


class OlmoDecoderLayer(PostNormDecoderLayer):
    """Post-norm layer with OlmoAttention."""

    attention_class: ClassVar[Callable[..., Module]] = OlmoAttention


class Olmo2ForCausalLM(LlamaForCausalLM):
    """A Llama with post-norm layers."""

    config_class: ClassVar[type[LlamaConfig]] = Olmo2Config
    layer_class: ClassVar[Callable[..., Module]] = OlmoDecoderLayer


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """An OLMo 2 with sliding windows."""

    config_class: ClassVar[type[LlamaConfig]] = Olmo3Config

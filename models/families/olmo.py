"""OLMo 2 and 3: a Llama with a norm after each part, whose queries and keys are normed with heads joined.

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
    """Shape of an OLMo 2."""

    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5}
    fixed: ClassVar[dict[str, Any]] = {"mlp_bias": False, "qk_norm": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config):
    """Shape of an OLMo 3.

    Args:
        window_rope: Rotary positions of the layers that have a window.
    """

    window_rope: Rope

    defaults: ClassVar[dict[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        fields = super().read(read)
        trained = read.integer("max_position_embeddings")
        values = cls._rope_values(read, "sliding_attention", trained)
        return fields | {
            "windows": cls.patterned_windows(read, fields["num_hidden_layers"]),
            "window_rope": read_rope(values, fields["head_dim"], trained, 500000.0),
        }

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        values = cls._rope_values(read, "full_attention", max_position_embeddings)
        return max_positions(values, max_position_embeddings, read.max_model_len)

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        values = cls._rope_values(read, "full_attention", max_position_embeddings)
        return read_rope(values, head_dim, max_position_embeddings, 500000.0, read.max_model_len)

    @staticmethod
    def _rope_values(read: ConfigReader, kind: str, max_position_embeddings: int) -> ConfigReader:
        """Returns a reader of the rotary values of one type of layers, in whichever form they are given."""
        name = "rope_parameters"
        table = read.table(name)
        ok = table.keys() <= {"full_attention", "sliding_attention"}
        read.check(ok, name, table, "an object with full_attention and sliding_attention")
        values = {"original_max_position_embeddings": max_position_embeddings}
        nested = read.nested(name, table).table(kind)
        if kind == "full_attention":
            values |= {"rope_theta": read.get("rope_theta", None)}
            nested |= read.table("rope_scaling")
        return read.nested(f"{name}.{kind}", values | nested)

    def rope_of(self, layer: int) -> Rope:
        return self.rope if self.windows[layer] is None else self.window_rope


class OlmoAttention(LlamaAttention):
    """A Llama's attention with other norms."""

    def make_norm(self, heads: tuple[Units, ...], dtype: jnp.dtype) -> Module:
        return JoinedHeadsNorm(heads, epsilon=self.config.rms_norm_eps, dtype=dtype)


class OlmoDecoderLayer(PostNormDecoderLayer):
    """A layer with the attention above."""

    attention_class: ClassVar[Callable[..., Module]] = OlmoAttention


class Olmo2ForCausalLM(LlamaForCausalLM):
    """A Llama with the layers above."""

    config_class: ClassVar[type[LlamaConfig]] = Olmo2Config
    layer_class: ClassVar[Callable[..., Module]] = OlmoDecoderLayer


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """The modules of OLMo 2 with the config of OLMo 3."""

    config_class: ClassVar[type[LlamaConfig]] = Olmo3Config

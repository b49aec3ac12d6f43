"""Phi3ForCausalLM (Phi-3, Phi-3.5 and Phi-4-mini).

Differences from Llama: one fused projection to queries, keys and values, and one to gate and up of the MLP;
partial rotary embedding, optionally with LongRoPE; optional sliding window.

Source: Abdin et al., Phi-3 Technical Report, 2024; Ding et al., LongRoPE, 2024.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaDecoderLayer, LlamaForCausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader
from jax_paged.models.layers import ACTIVATIONS, Linear
from jax_paged.models.parallel.sharding import even, repeated
from jax_paged.models.rope import Rope, base_frequencies, rope_values, rotated_dim


@dataclasses.dataclass(frozen=True)
class Phi3Config(LlamaConfig):
    """Configuration of a Phi-3.

    With LongRoPE, only the short factors are supported, and the maximum length of a sequence is the original
    context length that these factors are for. A longer sequence would switch to the long factors and thus
    change all frequencies, which would invalidate the cached keys.
    """

    defaults: ClassVar[dict[str, Any]] = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        windows = cls.one_window(read, fields["num_hidden_layers"])
        return fields | {"attention_bias": False, "output_bias": False, "mlp_bias": False, "windows": windows}

    @classmethod
    def read_max_positions(cls, read: ConfigReader, max_position_embeddings: int) -> int:
        """Returns the maximum length of a sequence (tokens): with LongRoPE, the original context length."""
        rope = rope_values(read, max_position_embeddings)
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            return max_position_embeddings
        return min(rope.integer("original_max_position_embeddings"), max_position_embeddings)

    @classmethod
    def read_rope(cls, read: ConfigReader, head_dim: int, max_position_embeddings: int) -> Rope:
        """Returns the rotary embedding: unscaled, or LongRoPE with the short factors."""
        rope = rope_values(read, max_position_embeddings)
        base = base_frequencies(rotated_dim(rope, head_dim), rope.number("rope_theta", 10000.0))
        types = ("default", "longrope", "su", "yarn")  # the last two are older names of "longrope"
        if rope.choice("rope_type", rope.get("type", "default"), types) == "default":
            return Rope(base)
        original = rope.integer("original_max_position_embeddings")
        short = rope.get("short_factor", None)
        ok = isinstance(short, list) and len(short) == len(base)
        ok = ok and all(isinstance(f, int | float) and f > 0 for f in short)
        if not rope.check(ok, "short_factor", short, f"a list of {len(base)} numbers above 0"):
            return Rope(base)
        factor = rope.number("factor", max_position_embeddings / original)
        default_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        magnitude = rope.number("attention_factor", default_factor, low_open=False)
        return Rope(tuple(b / f for b, f in zip(base, short, strict=True)), magnitude)


class Phi3Attention(LlamaAttention):
    """Llama's attention with a fused projection to queries, keys and values."""

    same_input: ClassVar[tuple[str, ...]] = ()

    def make_projections(self, make: Callable[..., Linear]) -> None:
        """Creates the fused projection."""
        c = self.config
        kv_heads = repeated(c.num_key_value_heads, c.head_dim)
        self.units = (*even(c.num_attention_heads, c.head_dim), *kv_heads, *kv_heads)
        width = sum(u.num * u.size for u in self.units)
        self.qkv_proj = make(c.hidden_size, width, bias=False, split=(None, self.units))

    def project(self, x: Float[Array, "*t e"], context: ForwardContext) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values, each with its heads concatenated."""
        q, k, v = context.split_output(self.qkv_proj(x, context), self.units)
        return q, k, v


class Phi3MLP(Module):
    """SwiGLU MLP with a fused projection to gate and up."""

    def __init__(self, config: Phi3Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = ACTIVATIONS[config.hidden_act]
        make = functools.partial(Linear, bias=False, std=config.initializer_range, dtype=dtype, rngs=rngs)
        size, inner = config.hidden_size, config.intermediate_size
        self.units = 2 * even(inner)
        self.gate_up_proj = make(size, 2 * inner, split=(None, self.units))
        self.down_proj = make(inner, size, split=(even(inner), None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP."""
        gate, up = context.split_output(self.gate_up_proj(x, context), self.units)
        return self.down_proj(self.activation(gate) * up, context)


class Phi3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with fused projections."""

    attention_class: ClassVar[Callable[..., Module]] = Phi3Attention

    mlp_class: ClassVar[Callable[..., Module]] = Phi3MLP


class Phi3ForCausalLM(LlamaForCausalLM):
    """A Llama with fused projections."""

    config_class: ClassVar[type[LlamaConfig]] = Phi3Config
    layer_class: ClassVar[Callable[..., Module]] = Phi3DecoderLayer

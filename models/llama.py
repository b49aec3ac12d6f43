"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Source: Touvron et al., LLaMA, 2023; names and semantics of the weights as in Hugging Face's
LlamaForCausalLM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec
from jax_paged.models.causal_lm import Attend, CausalLM
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import TENSOR, Embedding, Linear, RMSNorm, apply_rope, rope_frequencies

WEIGHT_TABLE = WeightTable(
    rows=(
        (r"embed_tokens\.embedding", r"model.embed_tokens.weight", False),
        (r"layers\.(\d+)\.(\w+_layernorm)\.scale", r"model.layers.\1.\2.weight", False),
        (r"layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.kernel", r"model.layers.\1.\2.\3.weight", True),
        (r"layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.bias", r"model.layers.\1.\2.\3.bias", False),
        (r"norm\.scale", r"model.norm.weight", False),
        (r"lm_head\.kernel", r"lm_head.weight", True),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama; the names are those of config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    initializer_range: float = 0.02

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> "LlamaConfig":
        """Reads a config.json, of transformers 5 or older; what it leaves out is as in transformers.

        Raises:
            ValueError: If a value is missing, out of range or not supported; names all of them.
        """
        read = ConfigReader(hf_config)
        hidden_size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", heads)
        ok, allowed = heads % kv_heads == 0, f"a divisor of num_attention_heads, which is {heads}"
        read.check(ok, "num_key_value_heads", kv_heads, allowed, also_needs=("num_attention_heads",))
        head_dim = read.integer("head_dim", max(1, hidden_size // heads))
        if hf_config.get("head_dim") is None:
            ok, allowed = hidden_size % heads == 0, f"a multiple of num_attention_heads, which is {heads}"
            read.check(ok, "hidden_size", hidden_size, allowed, also_needs=("num_attention_heads",))
        derived_from = ("hidden_size", "num_attention_heads")
        read.check(head_dim % 2 == 0, "head_dim", head_dim, "an even integer", also_needs=derived_from)
        max_position_embeddings = read.integer("max_position_embeddings")
        rope_theta, rope_scaling = read.rope(max_position_embeddings)
        read.choice("hidden_act", "silu", ("silu",))
        read.choice("quantization_config", None, (None,))
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            tie_word_embeddings=read.choice("tie_word_embeddings", False, (False, True)),
            attention_bias=read.choice("attention_bias", False, (False, True)),
            mlp_bias=read.choice("mlp_bias", False, (False, True)),
            initializer_range=read.number("initializer_range", 0.02, low_open=False),
        )
        read.finish()
        return config

    @functools.cached_property
    def rope_frequencies(self) -> tuple[float, ...]:
        return rope_frequencies(self.head_dim, self.rope_theta, dict(self.rope_scaling))


class LlamaAttention(nnx.Module):
    """Projections and rotary positions; how the tokens attend is the caller's `attend`."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        make = functools.partial(
            Linear, bias=config.attention_bias, std=config.initializer_range, dtype=dtype, rngs=rngs
        )
        self.q_proj = make(config.hidden_size, width, split=(None, TENSOR))
        self.k_proj = make(config.hidden_size, kv_width, split=(None, TENSOR))
        self.v_proj = make(config.hidden_size, kv_width, split=(None, TENSOR))
        self.o_proj = make(width, config.hidden_size, split=(TENSOR, None))

    def __call__(
        self, x: Float[Array, "*t e"], positions: Int[Array, "*t"], attend: Callable[..., Array]
    ) -> Float[Array, "*t e"]:
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        q = apply_rope(self.q_proj(x).reshape(heads), positions, self.config.rope_frequencies)
        k = apply_rope(self.k_proj(x).reshape(heads), positions, self.config.rope_frequencies)
        out = attend(q, k, self.v_proj(x).reshape(heads), scale=self.config.head_dim**-0.5)
        return self.o_proj(out.reshape(*x.shape[:-1], -1))


class LlamaMLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        make = functools.partial(
            Linear, bias=config.mlp_bias, std=config.initializer_range, dtype=dtype, rngs=rngs
        )
        self.gate_proj = make(config.hidden_size, config.intermediate_size, split=(None, TENSOR))
        self.up_proj = make(config.hidden_size, config.intermediate_size, split=(None, TENSOR))
        self.down_proj = make(config.intermediate_size, config.hidden_size, split=(TENSOR, None))

    def __call__(self, x: Float[Array, "*t e"]) -> Float[Array, "*t e"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaDecoderLayer(nnx.Module):
    """Attention, then the MLP, each normed before and added to the stream."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm = norm()
        self.self_attn = LlamaAttention(config, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = norm()
        self.mlp = LlamaMLP(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "*t e"], positions: Int[Array, "*t"], attend: Callable[..., Array]
    ) -> Float[Array, "*t e"]:
        x = x + self.self_attn(self.input_layernorm(x), positions, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaForCausalLM(CausalLM):
    """The model that trains (dense) and serves (paged) with the same modules."""

    config_class: ClassVar[type[LlamaConfig]] = LlamaConfig
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        std = config.initializer_range
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self.embed_tokens = Embedding(vocab_size, hidden_size, std=std, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [LlamaDecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)]
        )
        self.norm = RMSNorm(hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        head = functools.partial(Linear, bias=False, split=(None, TENSOR), std=std, dtype=dtype, rngs=rngs)
        self.lm_head = None if config.tie_word_embeddings else head(hidden_size, vocab_size)

    def hidden(
        self, tokens: Int[Array, "*t"], positions: Int[Array, "*t"], attend: Attend
    ) -> Float[Array, "*t e"]:
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, functools.partial(attend, i))
        return self.norm(x)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        if self.lm_head is None:
            return self.embed_tokens.attend(hidden)
        return jnp.matmul(hidden, self.lm_head.kernel[...], preferred_element_type=jnp.float32)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        c = self.config
        return [FullAttentionSpec(c.num_key_value_heads, c.head_dim)] * c.num_hidden_layers

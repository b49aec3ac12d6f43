"""Lfm2ForCausalLM (LFM2).

Differences from Llama: most layers have a gated short convolution over the latest tokens in place of the
attention. Their state is the convolution's latest inputs. The other layers have RMSNorm of queries and keys,
per head.

Source: Liquid AI, LFM2 Technical Report, 2025; names and semantics of the weights as in Hugging Face's
Lfm2ForCausalLM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec, StateArray, StateSpec
from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaForCausalLM, LlamaMLP
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import Linear, RMSNorm, normal, parameter
from jax_paged.models.parallel.sharding import even
from jax_paged.models.recurrent.recurrence import Convolution

WEIGHT_TABLE = WeightTable(
    names=(
        (r"(layers\.\d+\.self_attn\.[qk])_norm", r"model.\1_layernorm"),
        (r"(layers\.\d+\.self_attn)\.o_proj", r"model.\1.out_proj"),
        (r"(layers\.\d+\.conv)", r"model.\1.conv"),
        (r"(layers\.\d+\.feed_forward)\.gate_proj", r"model.\1.w1"),
        (r"(layers\.\d+\.feed_forward)\.down_proj", r"model.\1.w2"),
        (r"(layers\.\d+\.feed_forward)\.up_proj", r"model.\1.w3"),
        (r"norm", "model.embedding_norm"),
        (r"lm_head", "lm_head"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    prefix="model.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(LlamaConfig):
    """Configuration of an LFM2.

    Args:
        has_attention: Whether each layer has attention; the other layers have a convolution.
        kernel_size: Number of tokens that a convolution covers.
        conv_bias: Whether the convolutions and their projections have biases.
    """

    has_attention: tuple[bool, ...]
    kernel_size: int
    conv_bias: bool

    defaults: ClassVar[dict[str, Any]] = {
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    }

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        num_layers = fields["num_hidden_layers"]
        indices = read.get("full_attn_idxs", list(range(num_layers)))
        ok = isinstance(indices, list) and all(isinstance(i, int) for i in indices)
        indices = indices if read.check(ok, "full_attn_idxs", indices, "a list of layer indices") else []
        types = ["full_attention" if i in indices else "conv" for i in range(num_layers)]
        types = read.layer_types(num_layers, types, "conv")
        return fields | {
            "intermediate_size": cls._mlp_size(read, fields["intermediate_size"]),
            "rms_norm_eps": read.number("norm_eps", 1e-5),
            "tie_word_embeddings": read.choice("tie_embedding", fields["tie_word_embeddings"], (False, True)),
            "attention_bias": False,
            "output_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "qk_norm": True,
            "has_attention": tuple(layer_type == "full_attention" for layer_type in types),
            "kernel_size": read.integer("conv_L_cache", 3, low=2),
            "conv_bias": read.choice("conv_bias", False, (False, True)),
        }

    @staticmethod
    def _mlp_size(read: ConfigReader, intermediate_size: int) -> int:
        """Returns the width of the MLPs, which config.json states before some adjustments."""
        size = read.integer("block_ff_dim", intermediate_size)
        if not read.choice("block_auto_adjust_ff_dim", True, (True, False)):
            return size
        size = int(read.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        multiple = read.integer("block_multiple_of", 256)
        return -(-size // multiple) * multiple


class ShortConvolution(Module):
    """Gated convolution: out_proj(c * convolution(b * x)), where b, c and x are parts of one projection."""

    def __init__(self, config: Lfm2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        size, std, self.layer = config.hidden_size, config.initializer_range, layer
        make = functools.partial(Linear, bias=config.conv_bias, std=std, dtype=dtype, rngs=rngs)
        self.units = even(size)
        self.in_proj = make(size, 3 * size, split=(None, self.units * 3))
        shape = size, 1, config.kernel_size
        self.weight = parameter(normal(rngs.params(), shape, dtype, std), (self.units, None, None))
        self.bias = parameter(jnp.zeros(size, dtype), (self.units,)) if config.conv_bias else None
        self.out_proj = make(size, size, split=(self.units, None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the convolution block."""
        b, c, x = context.split_output(self.in_proj(x, context), self.units * 3)
        y = context.recur(Convolution(self.weight[...][:, 0].T), self.layer, 0, b * x)
        return self.out_proj(c * (y if self.bias is None else y + self.bias[...]), context)


class Lfm2DecoderLayer(Module):
    """Decoder layer: attention or convolution, then the MLP, each preceded by a norm and added."""

    def __init__(self, config: Lfm2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.operator_norm, self.ffn_norm = norm(), norm()
        if config.has_attention[layer]:
            self.self_attn = LlamaAttention(config, layer, dtype=dtype, rngs=rngs)
        else:
            self.conv = ShortConvolution(config, layer, dtype=dtype, rngs=rngs)
        self.has_attention = config.has_attention[layer]
        self.feed_forward = LlamaMLP(config, layer, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        operator = self.self_attn if self.has_attention else self.conv
        x = x + operator(self.operator_norm(x, context), context)
        return x + self.feed_forward(self.ffn_norm(x, context), context)


class Lfm2ForCausalLM(LlamaForCausalLM):
    """A Llama with convolutions in place of the attention in most layers."""

    config_class: ClassVar[type[LlamaConfig]] = Lfm2Config
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    layer_class: ClassVar[Callable[..., Module]] = Lfm2DecoderLayer

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: keys and values, or the latest inputs of the convolution."""
        c = self.config
        attention = FullAttentionSpec(c.num_key_value_heads, c.head_dim)
        state = StateSpec((StateArray((c.kernel_size - 1, c.hidden_size)),))
        return [attention if x else state for x in c.has_attention]

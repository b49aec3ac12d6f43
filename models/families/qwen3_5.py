"""Qwen3_5ForCausalLM, and the text model of Qwen3_5ForConditionalGeneration.

Differences from Llama: most layers have a gated delta rule (linear attention with a recurrent state) in place
of the attention. By default every fourth layer has attention, with a gated output, normalized queries and
keys, and partial rotary embedding. Norms have the scale 1 + weight.

Source: Qwen Team, Qwen3-Next and Qwen3.5, 2025 and 2026; names and semantics of the weights as in Hugging
Face's Qwen3_5ForCausalLM and Qwen3_5ForConditionalGeneration.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec, StateArray, StateSpec
from jax_paged.models.families.gemma import GemmaRMSNorm
from jax_paged.models.families.llama import WEIGHT_TABLE as LLAMA_TABLE
from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaForCausalLM, LlamaMLP
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable, multimodal_table, text_values
from jax_paged.models.layers import ACTIVATIONS, Linear, RMSNorm, normal, parameter
from jax_paged.models.parallel.sharding import even, repeated
from jax_paged.models.recurrent.delta_rule import GatedDeltaRule
from jax_paged.models.recurrent.recurrence import Convolution

WEIGHT_TABLE = LLAMA_TABLE.with_names(
    (r"(layers\.\d+\.linear_attn\.conv1d)", r"model.\1.weight"), ignored=r"mtp\..*|model\.visual\..*"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(LlamaConfig):
    """Configuration of a Qwen3.5.

    Args:
        has_attention: Whether each layer has attention; the other layers have a delta rule.
        num_key_heads: Number of key heads of the delta rule.
        num_value_heads: Number of value heads of the delta rule, a multiple of num_key_heads.
        key_dim: Size of a key head of the delta rule.
        value_dim: Size of a value head of the delta rule.
        kernel_size: Number of tokens that the convolution before the delta rule covers.
    """

    has_attention: tuple[bool, ...]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    defaults: ClassVar[dict[str, Any]] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }
    # For text, all sections of the multimodal rotary embedding (M-RoPE) have the same positions.
    is_partly_rotated: ClassVar[bool] = True

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        num_layers, interval = fields["num_hidden_layers"], read.integer("full_attention_interval", 4)
        types = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)
        ]
        types = read.layer_types(num_layers, types, "linear_attention")
        key_heads = read.integer("linear_num_key_heads", 16)
        value_heads = read.integer("linear_num_value_heads", 32)
        allowed = f"a multiple of linear_num_key_heads, which is {key_heads}"
        read.check(value_heads % key_heads == 0, "linear_num_value_heads", value_heads, allowed)
        return fields | {
            "mlp_bias": False,
            "qk_norm": True,
            "has_attention": tuple(layer_type == "full_attention" for layer_type in types),
            "num_key_heads": key_heads,
            "num_value_heads": value_heads,
            "key_dim": read.integer("linear_key_head_dim", 128),
            "value_dim": read.integer("linear_value_head_dim", 128),
            "kernel_size": read.integer("linear_conv_kernel_dim", 4, low=2),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5ConditionalConfig(Qwen3_5Config):
    """Configuration of the text model in a checkpoint with image input."""

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json, whose text values are in `text_config`."""
        return super().from_hf(text_values(hf_config), max_model_len)


class GatedAttention(LlamaAttention):
    """Llama's attention with an elementwise gate on its output, before the output projection."""

    norm_class: ClassVar[type[RMSNorm]] = GemmaRMSNorm

    def make_projections(self, make: Callable[..., Linear]) -> None:
        """Creates the projections. q_proj computes both the query and the gate of each head."""
        c = self.config
        make = functools.partial(make, c.hidden_size, bias=c.attention_bias)
        heads, width = even(c.num_attention_heads, 2 * c.head_dim), c.num_key_value_heads * c.head_dim
        kv_heads = repeated(c.num_key_value_heads, c.head_dim)
        self.q_proj = make(2 * c.num_attention_heads * c.head_dim, split=(None, heads))
        self.k_proj, self.v_proj = (make(width, split=(None, kv_heads)) for _ in range(2))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        size, (q, k, v) = self.config.head_dim, self.project(x, context)
        q, gate = jnp.split(q.reshape(*x.shape[:-1], -1, 2 * size), 2, axis=-1)
        k, v = (y.reshape(*x.shape[:-1], -1, size) for y in (k, v))
        q, k = self.rotate_qk(*self.normalize_qk(q, k, context), context)
        out = self.attend(q, k, v, context) * jax.nn.sigmoid(gate)
        return self.o_proj(out.reshape(*x.shape[:-1], -1), context)


class GatedDeltaNet(Module):
    """Linear attention: a convolution over the latest tokens, the gated delta rule, a norm, and a gate."""

    same_input: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")

    def __init__(self, config: Qwen3_5Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        c, self.layer, std = config, layer, config.initializer_range
        self.activation = ACTIVATIONS[c.hidden_act]
        keys, values = even(c.num_key_heads, c.key_dim), even(c.num_value_heads, c.value_dim)
        heads, self.units, self.dims = even(c.num_value_heads), keys + keys + values, (c.key_dim, c.value_dim)
        make = functools.partial(Linear, c.hidden_size, bias=False, std=std, dtype=dtype, rngs=rngs)
        width, value_width = conv_width(c), c.num_value_heads * c.value_dim
        self.in_proj_qkv = make(width, split=(None, self.units))
        self.in_proj_z = make(value_width, split=(None, values))
        self.in_proj_b = make(c.num_value_heads, split=(None, heads))
        self.in_proj_a = make(c.num_value_heads, split=(None, heads))
        kernel = normal(rngs.params(), (width, 1, c.kernel_size), dtype, std)
        self.conv1d = parameter(kernel, (self.units, None, None))
        self.A_log = parameter(jnp.zeros(c.num_value_heads, dtype), (heads,))
        self.dt_bias = parameter(jnp.ones(c.num_value_heads, dtype), (heads,))
        self.norm = RMSNorm(c.value_dim, epsilon=c.rms_norm_eps, dtype=dtype)
        options: dict[str, Any] = {"bias": False, "std": std, "dtype": dtype, "rngs": rngs}
        self.out_proj = Linear(value_width, c.hidden_size, split=(values, None), **options)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the block."""
        mixed, z = self.in_proj_qkv(x, context), self.in_proj_z(x, context)
        b, a = self.in_proj_b(x, context), self.in_proj_a(x, context)
        mixed = context.recur(Convolution(self.conv1d[...][:, 0].T), self.layer, 0, mixed)
        key_dim, value_dim = self.dims
        q, k, v = context.split_output(self.activation(mixed), self.units)
        q, k = (y.reshape(*x.shape[:-1], -1, key_dim) for y in (q, k))
        v, z = (y.reshape(*x.shape[:-1], -1, value_dim) for y in (v, z))
        step = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias[...].astype(jnp.float32))
        decay = -jnp.exp(self.A_log[...].astype(jnp.float32)) * step
        out = context.recur(GatedDeltaRule(), self.layer, 1, q, k, v, decay, jax.nn.sigmoid(b))
        out = self.norm(out, context) * self.activation(z.astype(jnp.float32))
        return self.out_proj(out.astype(x.dtype).reshape(*x.shape[:-1], -1), context)


class Qwen3_5DecoderLayer(Module):
    """Decoder layer: attention or delta net, then the MLP, each preceded by a norm and added."""

    def __init__(self, config: Qwen3_5Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(GemmaRMSNorm, config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.has_attention = config.has_attention[layer]
        if self.has_attention:
            self.self_attn = GatedAttention(config, layer, dtype=dtype, rngs=rngs)
        else:
            self.linear_attn = GatedDeltaNet(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = LlamaMLP(config, layer, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        mixer = self.self_attn if self.has_attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x, context), context)
        return x + self.mlp(self.post_attention_layernorm(x, context), context)


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    """A Llama with a gated delta rule in place of the attention in most layers."""

    config_class: ClassVar[type[LlamaConfig]] = Qwen3_5Config
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    layer_class: ClassVar[Callable[..., Module]] = Qwen3_5DecoderLayer
    norm_class: ClassVar[Callable[..., Any]] = GemmaRMSNorm

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: keys and values, or the states of convolution and delta rule."""
        c: Any = self.config
        attention = FullAttentionSpec(c.num_key_value_heads, c.head_dim)
        inputs = StateArray((c.kernel_size - 1, conv_width(c)))
        state = StateArray((1, c.num_value_heads, c.key_dim, c.value_dim), "float32")
        return [attention if x else StateSpec((inputs, state)) for x in c.has_attention]


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text model of a Qwen3.5 checkpoint with image input.

    The weights for images and for multi-token prediction are not loaded.
    """

    config_class: ClassVar[type[LlamaConfig]] = Qwen3_5ConditionalConfig
    weight_table: ClassVar[WeightTable] = multimodal_table(WEIGHT_TABLE, ("visual", "mtp"))


def conv_width(config: Qwen3_5Config) -> int:
    """Returns the number of channels of the convolution: queries, keys and values."""
    return 2 * config.num_key_heads * config.key_dim + config.num_value_heads * config.value_dim

"""GPT2LMHeadModel (GPT-2).

Differences from Llama: LayerNorm; learned position embeddings; one fused projection to queries, keys and
values; multi-head attention; an MLP without a gate, with GELU; biases in all linear layers.

Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019; names and semantics of the
weights as in Hugging Face's GPT2LMHeadModel.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import FullAttentionSpec, KVCacheSpec
from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear
from jax_paged.models.parallel.sharding import even, padded
from jax_paged.models.quantization.config import read_quantization

WEIGHT_TABLE = WeightTable(
    names=((r"lm_head", "lm_head"),),
    tied={"lm_head.weight": "transformer.wte.weight"},
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
    prefix="transformer.",
    transposed=r"lm_head\.kernel",
)


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Configuration of a GPT-2. Most fields have the names that other families use.

    Args:
        scales: Factor of the attention scores of each layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    scales: tuple[float, ...]
    activation_function: str
    layer_norm_epsilon: float
    tie_word_embeddings: bool
    initializer_range: float

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json.

        Args:
            hf_config: The parsed config.json. Sizes such as n_embd must be present. Other missing fields
                have the default values of transformers.
            max_model_len: Ignored, because learned position embeddings cannot be extended.

        Raises:
            ValueError: If values are missing, out of range or not supported; the message lists all of them.
        """
        read = ConfigReader(hf_config, max_model_len=max_model_len)
        hidden_size, heads = read.integer("n_embd"), read.integer("n_head")
        ok, allowed = hidden_size % heads == 0, f"a multiple of n_head, which is {heads}"
        read.check(ok, "n_embd", hidden_size, allowed, also_needs=("n_head",))
        num_layers = read.integer("n_layer")
        scaled = read.choice("scale_attn_weights", True, (False, True))
        by_layer = read.choice("scale_attn_by_inverse_layer_idx", False, (False, True))
        scale = (hidden_size // heads) ** -0.5 if scaled and ok else 1.0
        read.choice("add_cross_attention", False, (False,))
        read_quantization(read)
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("n_inner", 4 * hidden_size),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            max_position_embeddings=read.integer("n_positions"),
            scales=tuple(scale / (i + 1 if by_layer else 1) for i in range(num_layers)),
            activation_function=read.choice("activation_function", "gelu_new", tuple(ACTIVATIONS)),
            layer_norm_epsilon=read.number("layer_norm_epsilon", 1e-5),
            tie_word_embeddings=read.choice("tie_word_embeddings", True, (False, True)),
            initializer_range=read.number("initializer_range", 0.02, low_open=False),
        )
        read.finish()
        return config


class GPT2Attention(Module):
    """Attention with a fused projection. How tokens attend to each other is determined by the context."""

    def __init__(self, config: GPT2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.layer, self.num_heads, self.scale = layer, config.num_attention_heads, config.scales[layer]
        size = config.hidden_size
        make = functools.partial(Linear, bias=True, std=config.initializer_range, dtype=dtype, rngs=rngs)
        self.units = even(self.num_heads, size // self.num_heads)
        self.c_attn = make(size, 3 * size, split=(None, 3 * self.units))
        self.c_proj = make(size, size, split=(self.units, None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        heads = (*x.shape[:-1], self.num_heads, -1)
        parts = context.split_output(self.c_attn(x, context), 3 * self.units)
        q, k, v = (y.reshape(heads) for y in parts)
        out = context.attend(self.layer, q, k, v, scale=self.scale)
        return self.c_proj(out.reshape(x.shape), context)


class GPT2MLP(Module):
    """Two linear layers with an activation between them."""

    def __init__(self, config: GPT2Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = ACTIVATIONS[config.activation_function]
        make = functools.partial(Linear, bias=True, std=config.initializer_range, dtype=dtype, rngs=rngs)
        size, inner = config.hidden_size, config.intermediate_size
        self.c_fc = make(size, inner, split=(None, even(inner)))
        self.c_proj = make(inner, size, split=(even(inner), None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP."""
        return self.c_proj(self.activation(self.c_fc(x, context)), context)


class GPT2Block(Module):
    """Decoder layer: attention, then the MLP, each preceded by a norm and added to the residual stream."""

    def __init__(self, config: GPT2Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(
            LayerNorm, config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=dtype
        )
        self.ln_1, self.ln_2 = norm(), norm()
        self.attn = GPT2Attention(config, layer, dtype=dtype, rngs=rngs)
        self.mlp = GPT2MLP(config, dtype=dtype, rngs=rngs)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        x = x + self.attn(self.ln_1(x, context), context)
        return x + self.mlp(self.ln_2(x, context), context)


class GPT2LMHeadModel(CausalLM):
    """A GPT-2. The same modules are used for training (dense call) and for serving (paged call)."""

    config_class: ClassVar[type[GPT2Config]] = GPT2Config
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    embed_path: ClassVar[str] = "wte"
    layers_name: ClassVar[str] = "h"
    pre_layer_names: ClassVar[tuple[str, ...]] = ("wte", "wpe")

    def __init__(self, config: GPT2Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        size, std = config.hidden_size, config.initializer_range
        embedding = functools.partial(Embedding, features=size, std=std, dtype=dtype, rngs=rngs)
        self.wte = embedding(config.vocab_size)
        self.wpe = embedding(config.max_position_embeddings, is_divided=False)
        self.h = nnx.List(
            [GPT2Block(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        )
        self.ln_f = LayerNorm(size, epsilon=config.layer_norm_epsilon, dtype=dtype)
        head = functools.partial(Linear, bias=False, std=std, dtype=dtype, rngs=rngs)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else head(size, config.vocab_size, split=(None, padded(config.vocab_size)))
        )

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the sum of token and position embeddings."""
        return self.wte(tokens, context) + self.wpe(context.positions, context)

    def apply_layers(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the last layer."""
        for block in self.own_layers:
            x = block(x, context)
        return x

    def final_norm(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the normalized hidden states."""
        return self.ln_f(x, context)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits."""
        return self.head.logits(hidden)

    @property
    def head(self) -> Linear | Embedding:
        """The language model head."""
        return self.wte if self.lm_head is None else self.lm_head

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: keys and values of all heads."""
        c = self.config
        heads = c.num_attention_heads
        return [FullAttentionSpec(heads, c.hidden_size // heads)] * c.num_hidden_layers

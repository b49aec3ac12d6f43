"""OPTForCausalLM (OPT).

Differences from Llama: LayerNorm, before or after attention and MLP; learned position embeddings; multi-head
attention; an MLP without a gate, with ReLU; biases in all linear layers. The token embeddings may have
another size than the hidden states, with projections between the two.

Source: Zhang et al., OPT: Open Pre-trained Transformer Language Models, 2022; names and semantics of the
weights as in Hugging Face's OPTForCausalLM.
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
    tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
    ignored=r"model\.decoder\.version",
    prefix="model.",
    start="model.decoder.",
)
# Number of unused rows at the start of the table of position embeddings.
POSITION_OFFSET = 2


@dataclasses.dataclass(frozen=True)
class OPTConfig:
    """Configuration of an OPT; most names are as in config.json.

    Args:
        final_layer_norm: Whether there is a norm after the last layer.
    """

    vocab_size: int
    hidden_size: int
    word_embed_proj_dim: int
    ffn_dim: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    do_layer_norm_before: bool
    final_layer_norm: bool
    activation_function: str
    enable_bias: bool
    layer_norm_elementwise_affine: bool
    tie_word_embeddings: bool
    init_std: float

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json.

        Args:
            hf_config: The parsed config.json. Sizes such as hidden_size must be present. Other missing fields
                have the default values of transformers.
            max_model_len: Ignored, because learned position embeddings cannot be extended.

        Raises:
            ValueError: If values are missing, out of range or not supported; the message lists all of them.
        """
        read = ConfigReader(hf_config, max_model_len=max_model_len)

        def flag(name: str, default: bool) -> bool:
            return read.choice(name, default, (False, True))

        hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        ok, allowed = hidden_size % heads == 0, f"a multiple of num_attention_heads, which is {heads}"
        read.check(ok, "hidden_size", hidden_size, allowed, also_needs=("num_attention_heads",))
        read_quantization(read)
        norm_before = flag("do_layer_norm_before", True)
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            word_embed_proj_dim=read.integer("word_embed_proj_dim", hidden_size),
            ffn_dim=read.integer("ffn_dim"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=heads,
            max_position_embeddings=read.integer("max_position_embeddings"),
            do_layer_norm_before=norm_before,
            final_layer_norm=norm_before and not flag("_remove_final_layer_norm", False),
            activation_function=read.choice("activation_function", "relu", tuple(ACTIVATIONS)),
            enable_bias=flag("enable_bias", True),
            layer_norm_elementwise_affine=flag("layer_norm_elementwise_affine", True),
            tie_word_embeddings=flag("tie_word_embeddings", True),
            init_std=read.number("init_std", 0.02, low_open=False),
        )
        read.finish()
        return config


class OPTAttention(Module):
    """Attention with four projections. How tokens attend to each other is determined by the context."""

    same_input: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")

    def __init__(self, config: OPTConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.layer, self.num_heads = layer, config.num_attention_heads
        size = config.hidden_size
        heads = even(self.num_heads, size // self.num_heads)
        make = functools.partial(
            Linear, size, size, bias=config.enable_bias, std=config.init_std, dtype=dtype, rngs=rngs
        )
        self.q_proj, self.k_proj, self.v_proj = (make(split=(None, heads)) for _ in range(3))
        self.out_proj = make(split=(heads, None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        heads = (*x.shape[:-1], self.num_heads, -1)
        q, k, v = (proj(x, context).reshape(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = context.attend(self.layer, q, k, v, scale=q.shape[-1] ** -0.5)
        return self.out_proj(out.reshape(x.shape), context)


class OPTDecoderLayer(Module):
    """Decoder layer: attention, then two linear layers, each added, with a norm before or after it.

    The linear layers belong to the decoder layer itself, as in the checkpoints. There is no MLP module.
    """

    def __init__(self, config: OPTConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.norm_before = config.do_layer_norm_before
        self.activation = ACTIVATIONS[config.activation_function]
        make = functools.partial(Linear, bias=config.enable_bias, std=config.init_std, dtype=dtype, rngs=rngs)
        self.self_attn = OPTAttention(config, layer, dtype=dtype, rngs=rngs)
        self.self_attn_layer_norm = _layer_norm(config, dtype)
        size, inner = config.hidden_size, config.ffn_dim
        self.fc1, self.fc2 = (
            make(size, inner, split=(None, even(inner))),
            make(inner, size, split=(even(inner), None)),
        )
        self.final_layer_norm = _layer_norm(config, dtype)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        if self.norm_before:
            x = x + self.self_attn(self.self_attn_layer_norm(x, context), context)
            return x + self._mlp(self.final_layer_norm(x, context), context)
        x = self.self_attn_layer_norm(x + self.self_attn(x, context), context)
        return self.final_layer_norm(x + self._mlp(x, context), context)

    def _mlp(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        return self.fc2(self.activation(self.fc1(x, context)), context)


class OPTForCausalLM(CausalLM):
    """An OPT. The same modules are used for training (dense call) and for serving (paged call)."""

    config_class: ClassVar[type[OPTConfig]] = OPTConfig
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE
    pre_layer_names: ClassVar[tuple[str, ...]] = ("embed_tokens", "embed_positions", "project_in")

    def __init__(self, config: OPTConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        size, word_size = config.hidden_size, config.word_embed_proj_dim
        options: Any = {"std": config.init_std, "dtype": dtype, "rngs": rngs}
        num_positions = config.max_position_embeddings + POSITION_OFFSET
        self.embed_tokens = Embedding(config.vocab_size, word_size, **options)
        self.embed_positions = Embedding(num_positions, size, is_divided=False, **options)
        make = functools.partial(Linear, bias=False, **options)
        projected = word_size != size
        self.project_in = make(word_size, size, split=(None, None)) if projected else None
        self.project_out = make(size, word_size, split=(None, None)) if projected else None
        self.layers = nnx.List(
            [OPTDecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)]
        )
        self.final_layer_norm = _layer_norm(config, dtype) if config.final_layer_norm else None
        tied = config.tie_word_embeddings
        self.lm_head = (
            None if tied else make(word_size, config.vocab_size, split=(None, padded(config.vocab_size)))
        )

    def embed(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the sum of token and position embeddings."""
        x = self.embed_tokens(tokens, context)
        if self.project_in is not None:
            x = self.project_in(x, context)
        return x + self.embed_positions(context.positions + POSITION_OFFSET, context)

    def apply_layers(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the last layer."""
        for layer in self.own_layers:
            x = layer(x, context)
        return x

    def final_norm(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the hidden states, normalized if the model has a final norm."""
        return x if self.final_layer_norm is None else self.final_layer_norm(x, context)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits."""
        if self.project_out is not None:
            hidden = self.project_out.product(hidden)
        return self.head.logits(hidden)

    @property
    def head(self) -> Linear | Embedding:
        """The language model head."""
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: keys and values of all heads."""
        c = self.config
        heads = c.num_attention_heads
        return [FullAttentionSpec(heads, c.hidden_size // heads)] * c.num_hidden_layers


def _layer_norm(config: OPTConfig, dtype: jnp.dtype) -> LayerNorm:
    affine = config.layer_norm_elementwise_affine
    return LayerNorm(config.hidden_size, epsilon=1e-5, affine=affine, dtype=dtype)

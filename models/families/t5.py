"""T5ForConditionalGeneration (T5 and Flan-T5), an encoder-decoder model.

Differences from Llama: an encoder, whose output the decoder layers attend to (cross attention); learned
biases of the attention scores by relative position in place of rotary embeddings; scores that are not scaled;
multi-head attention; in older models an MLP without a gate.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer,
2020; names and semantics of the weights as in Hugging Face's T5ForConditionalGeneration.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import ACTIVATIONS, Embedding, Linear, RMSNorm, gated, normal, parameter
from jax_paged.models.parallel.sharding import even, padded
from jax_paged.models.quantization.config import read_quantization

BLOCK, LAYER = r"(encoder|decoder)\.block\.(\d+)\.", r"\1.block.\2.layer."
BIAS = "relative_attention_bias"
WEIGHT_TABLE = WeightTable(
    names=(
        (rf"(\w+)\.{BIAS}", rf"\1.block.0.layer.0.SelfAttention.{BIAS}.weight"),
        (BLOCK + r"attention\.(\w)", LAYER + r"0.SelfAttention.\3"),
        (BLOCK + r"attention_norm", LAYER + r"0.layer_norm"),
        (BLOCK + r"cross_attention\.(\w)", LAYER + r"1.EncDecAttention.\3"),
        (BLOCK + r"cross_attention_norm", LAYER + r"1.layer_norm"),
        (r"encoder\.block\.(\d+)\.mlp\.(\w+)", r"encoder.block.\1.layer.1.DenseReluDense.\2"),
        (r"decoder\.block\.(\d+)\.mlp\.(\w+)", r"decoder.block.\1.layer.2.DenseReluDense.\2"),
        (r"encoder\.block\.(\d+)\.mlp_norm", r"encoder.block.\1.layer.1.layer_norm"),
        (r"decoder\.block\.(\d+)\.mlp_norm", r"decoder.block.\1.layer.2.layer_norm"),
    ),
    tied=dict.fromkeys(
        ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    ),
    ignored=rf"decoder\.block\.0\.layer\.1\.EncDecAttention\.{BIAS}\.weight",
)


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Configuration of a T5. Names are as in config.json, or as in other families.

    Args:
        max_position_embeddings: n_positions, the length of the training texts (tokens). The model itself has
            no limit.
        activation: Activation of the MLP.
        is_gated: Whether the MLP is gated.
        scale_decoder_outputs: Whether the last hidden state is divided by the square root of its size.
    """

    vocab_size: int
    hidden_size: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    max_position_embeddings: int
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    layer_norm_epsilon: float
    activation: str
    is_gated: bool
    tie_word_embeddings: bool
    scale_decoder_outputs: bool
    decoder_start_token_id: int
    initializer_factor: float

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json.

        Args:
            hf_config: The parsed config.json. Sizes such as d_model must be present. Other missing fields
                have the default values of transformers.
            max_model_len: Ignored; the maximum sequence length is always n_positions.

        Raises:
            ValueError: If values are missing, out of range or not supported; the message lists all of them.
        """
        read = ConfigReader(hf_config, max_model_len=max_model_len)
        names = {name: (name, False) for name in ACTIVATIONS}
        names |= {f"gated-{name}": (name, True) for name in ACTIVATIONS} | {"gated-gelu": ("gelu_new", True)}
        activation, is_gated = names[read.choice("feed_forward_proj", "relu", tuple(names))]
        tied = read.choice("tie_word_embeddings", True, (False, True))
        num_layers = read.integer("num_layers")
        buckets = read.integer("relative_attention_num_buckets", 32, low=4)
        read_quantization(read)
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("d_model"),
            d_kv=read.integer("d_kv"),
            d_ff=read.integer("d_ff"),
            num_layers=num_layers,
            num_decoder_layers=read.integer("num_decoder_layers", num_layers),
            num_heads=read.integer("num_heads"),
            max_position_embeddings=read.integer("n_positions", 512),
            relative_attention_num_buckets=buckets,
            relative_attention_max_distance=read.integer(
                "relative_attention_max_distance", 128, low=buckets // 2 + 1
            ),
            layer_norm_epsilon=read.number("layer_norm_epsilon", 1e-6),
            activation=activation,
            is_gated=is_gated,
            tie_word_embeddings=tied,
            # Models with untied embeddings are version 1.1, which does not scale.
            scale_decoder_outputs=read.choice("scale_decoder_outputs", tied, (False, True)),
            decoder_start_token_id=read.integer("decoder_start_token_id", read.get("pad_token_id", 0), low=0),
            initializer_factor=read.number("initializer_factor", 1.0, low_open=False),
        )
        ok, allowed = config.decoder_start_token_id < config.vocab_size, "an id below vocab_size"
        read.check(ok, "decoder_start_token_id", config.decoder_start_token_id, allowed)
        read.finish()
        return config

    def buckets(self, relative: np.ndarray, *, bidirectional: bool) -> np.ndarray:
        """Returns the row of the bias table for each relative position.

        Args:
            relative: Key position minus query position.
            bidirectional: Whether tokens attend to later tokens too, as in the encoder.
        """
        count, first = self.relative_attention_num_buckets, np.zeros_like(relative)
        if bidirectional:
            count //= 2
            first = np.where(relative > 0, count, 0)
        distance = np.abs(relative) if bidirectional else np.maximum(-relative, 0)
        # Half of the buckets hold one distance each. The others hold ranges that grow with the distance.
        exact = count // 2
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / exact)
        far = exact + (ratio / math.log(self.relative_attention_max_distance / exact) * (count - exact))
        return first + np.where(distance < exact, distance, np.minimum(far.astype(int), count - 1))


def _linear(config: T5Config, n_in: int, n_out: int, *, split: Any, dtype: Any, rngs: nnx.Rngs) -> Linear:
    std = config.initializer_factor * n_in**-0.5
    return Linear(n_in, n_out, bias=False, split=split, std=std, dtype=dtype, rngs=rngs)


class T5Attention(Module):
    """Self-attention with four projections and without scaling of the scores."""

    same_input: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def __init__(self, config: T5Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.layer, self.head_dim = layer, config.d_kv
        size, width = config.hidden_size, config.num_heads * config.d_kv
        make = functools.partial(_linear, config, dtype=dtype, rngs=rngs)
        heads = even(config.num_heads, config.d_kv)
        self.q, self.k, self.v = (make(size, width, split=(None, heads)) for _ in range(3))
        self.o = make(width, size, split=(heads, None))

    def heads(self, y: Float[Array, "*t w"]) -> Float[Array, "*t h d"]:
        """Returns the output of a projection with its heads separated: [*t, heads, d_kv]."""
        return y.reshape(*y.shape[:-1], -1, self.head_dim)

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        q, k, v = (self.heads(project(x, context)) for project in (self.q, self.k, self.v))
        out = context.attend(self.layer, q, k, v, scale=1.0)
        return self.o(out.reshape(*x.shape[:-1], -1), context)


class T5CrossAttention(T5Attention):
    """Attention to the encoder's output. Its keys and values are computed once, in a separate pass."""

    same_input: ClassVar[tuple[str, ...]] = ("k", "v")

    def key_value(self, encoded: Float[Array, "*n e"], context: ForwardContext) -> tuple[Array, Array]:
        """Returns the keys and values of the encoder's output.

        Args:
            encoded: Output of the encoder.
            context: Context of the encoder's pass.
        """
        return self.heads(self.k(encoded, context)), self.heads(self.v(encoded, context))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the attention block."""
        out = context.cross_attend(self.layer, self.heads(self.q(x, context)), scale=1.0)
        return self.o(out.reshape(*x.shape[:-1], -1), context)


class T5MLP(Module):
    """Two linear layers with an activation between them, optionally gated by a third one."""

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.activation = config.activation
        make = functools.partial(_linear, config, dtype=dtype, rngs=rngs)
        inner = even(config.d_ff)
        widen = functools.partial(make, config.hidden_size, config.d_ff, split=(None, inner))
        self.wi = None if config.is_gated else widen()
        self.wi_0 = widen() if config.is_gated else None
        self.wi_1 = widen() if config.is_gated else None
        self.wo = make(config.d_ff, config.hidden_size, split=(inner, None))

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the output of the MLP."""
        if self.wi is not None:
            return self.wo(ACTIVATIONS[self.activation](self.wi(x, context)), context)
        assert self.wi_0 is not None
        assert self.wi_1 is not None
        return self.wo(gated(self.activation, self.wi_0, self.wi_1, x, context), context)


class T5Block(Module):
    """Encoder layer: attention, then the MLP, each preceded by a norm and added to the residual stream."""

    def __init__(self, config: T5Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=dtype)
        self.attention, self.attention_norm = T5Attention(config, layer, dtype=dtype, rngs=rngs), norm()
        self.mlp, self.mlp_norm = T5MLP(config, dtype=dtype, rngs=rngs), norm()

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        x = x + self.attention(self.attention_norm(x, context), context)
        return x + self.mlp(self.mlp_norm(x, context), context)


class T5DecoderBlock(T5Block):
    """Decoder layer: T5Block with cross attention between attention and MLP.

    It has two indices in kv_cache_specs(): `layer` for the attention and `layer + 1` for the cross attention.
    """

    def __init__(self, config: T5Config, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, layer, dtype=dtype, rngs=rngs)
        self.cross_attention = T5CrossAttention(config, layer + 1, dtype=dtype, rngs=rngs)
        self.cross_attention_norm = RMSNorm(
            config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=dtype
        )

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the residual stream after the layer."""
        x = x + self.attention(self.attention_norm(x, context), context)
        x = x + self.cross_attention(self.cross_attention_norm(x, context), context)
        return x + self.mlp(self.mlp_norm(x, context), context)


class T5Stack(Module):
    """The layers of the encoder or the decoder, and the bias table that they share.

    Args:
        config: Configuration of the model.
        blocks: T5Block for the encoder, T5DecoderBlock for the decoder.
        dtype: Dtype of the bias table and the norm.
        rngs: Source of random weights.
    """

    def __init__(self, config: T5Config, blocks: list[Any], *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.relative_attention_num_buckets, config.num_heads)
        bias = normal(rngs.params(), shape, dtype, config.initializer_factor * config.hidden_size**-0.5)
        self.relative_attention_bias = parameter(bias, (None, even(config.num_heads)))
        self.block = nnx.List(blocks)
        self.final_layer_norm = RMSNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=dtype)

    def distance_bias(self, distances: np.ndarray, *, bidirectional: bool) -> Float[Array, "h n"]:
        """Returns the biases [heads, n] for distances.

        Args:
            distances: Query position minus key position.
            bidirectional: Whether tokens attend to later tokens too, as in the encoder.
        """
        buckets = self.config.buckets(-distances, bidirectional=bidirectional)
        return self.relative_attention_bias[...][buckets].T

    def forward(self, x: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the normalized hidden states after the last layer."""
        for block in self.block:
            x = block(x, context)
        return self.final_layer_norm(x, context)


class T5ForConditionalGeneration(EncoderDecoderLM):
    """A T5. The same modules are used for training (dense call) and for serving (paged call)."""

    config_class: ClassVar[type[T5Config]] = T5Config
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE

    def __init__(self, config: T5Config, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        size, vocab_size = config.hidden_size, config.vocab_size
        options: Any = {"dtype": dtype, "rngs": rngs}
        self.shared = Embedding(vocab_size, size, std=config.initializer_factor, **options)
        encoder = [T5Block(config, i, **options) for i in range(config.num_layers)]
        decoder = [T5DecoderBlock(config, 2 * i, **options) for i in range(config.num_decoder_layers)]
        self.encoder, self.decoder = (T5Stack(config, blocks, **options) for blocks in (encoder, decoder))
        head = functools.partial(_linear, config, split=(None, padded(vocab_size)), **options)
        self.lm_head = None if config.tie_word_embeddings else head(size, vocab_size)

    def encode(self, tokens: Int[Array, "b n"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns the output of the encoder."""
        n = tokens.shape[1]
        bias = self.encoder.distance_bias(np.arange(1 - n, n), bidirectional=True)
        return self.encoder(self.shared(tokens, context), _with_bias(context, bias))

    def cross_kv(self, encoded: Float[Array, "b n e"], context: ForwardContext) -> list[tuple[Array, Array]]:
        """Returns the cross-attention keys and values of each decoder layer."""
        return [block.cross_attention.key_value(encoded, context) for block in self.decoder.block]

    def hidden(self, tokens: Int[Array, "*t"], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the decoder's last hidden state of every token row."""
        # From this distance on, all distances share the last bias.
        distances = np.arange(self.config.relative_attention_max_distance + 1)
        bias = self.decoder.distance_bias(distances, bidirectional=False)
        return self.decoder(self.shared(tokens, context), _with_bias(context, bias))

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Returns the float32 logits."""
        if self.config.scale_decoder_outputs:
            hidden = hidden * self.config.hidden_size**-0.5
        return self.head.logits(hidden)

    @property
    def head(self) -> Linear | Embedding:
        """The language model head."""
        return self.shared if self.lm_head is None else self.lm_head

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns what each layer caches: self-attention and cross-attention alternate."""
        shape = (self.config.num_heads, self.config.d_kv)
        return [FullAttentionSpec(*shape), CrossAttentionSpec(*shape)] * self.config.num_decoder_layers


def _with_bias(context: ForwardContext, bias: Float[Array, "h n"]) -> ForwardContext:
    """Returns a context in which every layer's attention has these biases."""
    attend = functools.partial(context.attend, distance_bias=bias)
    return dataclasses.replace(context, attend=attend)

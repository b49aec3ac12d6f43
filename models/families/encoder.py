"""Encoders for embeddings and classification: BERT, RoBERTa, XLM-RoBERTa and ModernBERT.

The architectures are *Model and *ForSequenceClassification. Every token attends to the whole text, or to a
window on both sides. A text is processed in one pass, and nothing is cached. Differences from Llama:

- BERT: learned embeddings of positions and of token types; post-norm layers with LayerNorm; biases; an MLP
  without a gate.
- RoBERTa and XLM-RoBERTa: as BERT, with positions that start after the padding id.
- ModernBERT: LayerNorm without biases, before attention and MLP; a fused projection to queries, keys and
  values, and one to the two inputs of the gated MLP; windows in most layers.

Source: Devlin et al., BERT, 2019; Liu et al., RoBERTa, 2019; Warner et al., ModernBERT, 2024; names and
semantics of the weights as in Hugging Face's models.
"""

import dataclasses
import functools
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import KVCacheSpec
from jax_paged.models.causal_lm import LanguageModel, dense_positions
from jax_paged.models.forward_context import ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import ACTIVATIONS, Embedding, LayerNorm, Linear
from jax_paged.models.quantization.config import read_quantization
from jax_paged.models.rope import Rope, read_rope


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Configuration of a BERT or a similar model; most names are as in config.json.

    Args:
        max_position_embeddings: Maximum length of a text (tokens).
        first_position: Row of the position table for the first token.
        type_vocab_size: Number of token types, which distinguish the texts of a pair; 0 for none.
        ropes: Rotary embedding of each layer; empty for models with learned position embeddings.
        windows: For each layer, the number of tokens on either side that a token attends to, None for all;
            empty if no layer has a window.
        num_labels: Number of classes of a classifier; 0 for other models.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    first_position: int = 0
    type_vocab_size: int = 0
    ropes: tuple[Rope, ...] = ()
    windows: tuple[int | None, ...] = ()
    hidden_act: str = "gelu"
    norm_eps: float = 1e-12
    num_labels: int = 0
    initializer_range: float = 0.02

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any], max_model_len: int | None = None) -> Self:
        """Returns the configuration for a parsed config.json.

        Args:
            hf_config: The parsed config.json.
            max_model_len: Ignored: encoders do not support longer texts than they were trained for.

        Raises:
            ValueError: If values are missing, out of range or not supported; the message lists all of them.
        """
        read = ConfigReader(hf_config)
        fields = cls.read(read)
        read.finish()
        return cls(**fields)

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass. Subclasses add their own."""
        hidden_size, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        ok, allowed = hidden_size % heads == 0, f"a multiple of num_attention_heads, which is {heads}"
        read.check(ok, "hidden_size", hidden_size, allowed, also_needs=("num_attention_heads",))
        read_quantization(read)
        read.choice("position_embedding_type", "absolute", ("absolute",))
        return {
            "vocab_size": read.integer("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": read.integer("intermediate_size"),
            "num_hidden_layers": read.integer("num_hidden_layers"),
            "num_attention_heads": heads,
            "max_position_embeddings": read.integer("max_position_embeddings"),
            "type_vocab_size": read.integer("type_vocab_size", 2),
            "hidden_act": read.choice("hidden_act", "gelu", tuple(ACTIVATIONS)),
            "norm_eps": read.number("layer_norm_eps", 1e-12),
            "num_labels": read.num_labels(),
            "initializer_range": read.number("initializer_range", 0.02, low_open=False),
        }


class RobertaConfig(EncoderConfig):
    """Configuration of a RoBERTa, whose positions start after the id of padding."""

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        first = read.integer("pad_token_id", 1, low=0) + 1
        num_positions = fields["max_position_embeddings"] - first
        allowed = f"more than {first}, which is pad_token_id + 1"
        read.check(num_positions > 0, "max_position_embeddings", num_positions + first, allowed)
        return fields | {"first_position": first, "max_position_embeddings": num_positions}


class ModernBertConfig(EncoderConfig):
    """Configuration of a ModernBERT, with rotary embeddings, and windows in some layers."""

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
        fields = super().read(read)
        for name in ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias"):
            read.choice(name, False, (False,))
        read.choice("classifier_activation", "gelu", ("gelu",))
        num_layers, limit = fields["num_hidden_layers"], fields["max_position_embeddings"]
        every = read.integer("global_attn_every_n_layers", 3)
        types = ["sliding_attention" if i % every else "full_attention" for i in range(num_layers)]
        windows = read.windows(num_layers, types, read.integer("local_attention", 128) // 2)
        head_dim = fields["hidden_size"] // fields["num_attention_heads"]
        given, ropes = read.table("rope_parameters"), {}
        for layer_type, name, theta in (
            ("full_attention", "global_rope_theta", 160000.0),
            ("sliding_attention", "local_rope_theta", 10000.0),
        ):
            values = read.nested("rope_parameters", given.get(layer_type) or {})
            ropes[layer_type] = read_rope(values, head_dim, limit, read.number(name, theta))
        return fields | {
            "type_vocab_size": 0,
            "windows": windows,
            "ropes": tuple(ropes["full_attention" if w is None else "sliding_attention"] for w in windows),
            "hidden_act": read.choice("hidden_activation", "gelu", tuple(ACTIVATIONS)),
            "norm_eps": read.number("norm_eps", 1e-5),
        }


class EncoderLayer(Module):
    """Attention without a causal mask, then an MLP, each added and followed by a norm."""

    same_input: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def __init__(self, config: EncoderConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer = config, layer
        e, i, std = config.hidden_size, config.intermediate_size, config.initializer_range
        make = functools.partial(Linear, bias=True, std=std, dtype=dtype, rngs=rngs)
        self.query, self.key, self.value = (make(e, e, split=(None, None)) for _ in range(3))
        self.out = make(e, e, split=(None, None))
        self.attn_norm = LayerNorm(e, epsilon=config.norm_eps, dtype=dtype)
        self.up = make(e, i, split=(None, None))
        self.down = make(i, e, split=(None, None))
        self.mlp_norm = LayerNorm(e, epsilon=config.norm_eps, dtype=dtype)

    def attend(self, q: Array, k: Array, v: Array, context: ForwardContext) -> Array:
        """Returns the attention of every token. Queries, keys, values and result have concatenated heads."""
        heads = (*q.shape[:-1], self.config.num_attention_heads, -1)
        q, k, v = (y.reshape(heads) for y in (q, k, v))
        if self.config.ropes:
            rotate = context.rotations[self.config.ropes[self.layer]]
            q, k = rotate(q), rotate(k)
        out = context.attend(self.layer, q, k, v, scale=q.shape[-1] ** -0.5)
        return out.reshape(*out.shape[:-2], -1)

    def forward(self, x: Float[Array, "b n e"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns the hidden states after the layer."""
        q, k, v = self.query(x, context), self.key(x, context), self.value(x, context)
        x = self.attn_norm(x + self.out(self.attend(q, k, v, context), context), context)
        inner = ACTIVATIONS[self.config.hidden_act](self.up(x, context))
        return self.mlp_norm(x + self.down(inner, context), context)


class ModernBertLayer(EncoderLayer):
    """EncoderLayer with norms before attention and MLP, without biases, and with a gated MLP."""

    same_input: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: EncoderConfig, layer: int, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config, self.layer = config, layer
        e, i, std = config.hidden_size, config.intermediate_size, config.initializer_range
        make = functools.partial(Linear, bias=False, std=std, dtype=dtype, rngs=rngs)
        norm = functools.partial(LayerNorm, e, epsilon=config.norm_eps, bias=False, dtype=dtype)
        self.qkv = make(e, 3 * e, split=(None, None))
        self.out = make(e, e, split=(None, None))
        self.attn_norm = norm() if layer else None  # the embeddings are already normalized
        self.up = make(e, 2 * i, split=(None, None))
        self.down = make(i, e, split=(None, None))
        self.mlp_norm = norm()

    def forward(self, x: Float[Array, "b n e"], context: ForwardContext) -> Float[Array, "b n e"]:
        """Returns the hidden states after the layer."""
        y = x if self.attn_norm is None else self.attn_norm(x, context)
        q, k, v = jnp.split(self.qkv(y, context), 3, axis=-1)
        x = x + self.out(self.attend(q, k, v, context), context)
        inner, gate = jnp.split(self.up(self.mlp_norm(x, context), context), 2, axis=-1)
        return x + self.down(ACTIVATIONS[self.config.hidden_act](inner) * gate, context)


class EncoderModel(LanguageModel):
    """An encoder, with the head of a classifier if the config has labels. It generates no tokens."""

    layer_class: ClassVar[type[EncoderLayer]] = EncoderLayer

    def __init__(self, config: EncoderConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        e, std, is_modern = config.hidden_size, config.initializer_range, bool(config.ropes)
        table = functools.partial(Embedding, features=e, std=std, dtype=dtype, rngs=rngs)
        norm = functools.partial(LayerNorm, e, epsilon=config.norm_eps, bias=not is_modern, dtype=dtype)
        num_positions = config.max_position_embeddings + config.first_position
        self.words = table(config.vocab_size)
        self.positions = None if is_modern else table(num_positions)
        self.types = table(config.type_vocab_size) if config.type_vocab_size else None
        self.norm = norm()
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([self.layer_class(config, i, dtype=dtype, rngs=rngs) for i in layers])
        self.final_norm = norm() if is_modern else None
        make = functools.partial(Linear, split=(None, None), std=std, dtype=dtype, rngs=rngs)
        num_labels = config.num_labels
        self.dense = make(e, e, bias=not is_modern) if num_labels else None
        self.dense_norm = norm() if num_labels and is_modern else None
        self.classifier = make(e, num_labels, bias=True) if num_labels else None

    def hidden(
        self, tokens: Int[Array, "b n"], context: ForwardContext, types: Int[Array, "b n"] | None = None
    ) -> Float[Array, "b n e"]:
        """Returns the last hidden state of every token.

        Args:
            tokens: int32, token ids.
            context: Context of the forward pass.
            types: int32, token types, 0 for the first text of a pair and 1 for the second; None for all 0.
        """
        x = self.words(tokens, context)
        if self.positions is not None:
            x += self.positions(context.positions + self.config.first_position, context)
        if self.types is not None:
            x += self.types(jnp.zeros_like(tokens) if types is None else types, context)
        x = self.norm(x, context)
        rotations = {rope: rope.at(context.positions) for rope in dict.fromkeys(self.config.ropes)}
        context = dataclasses.replace(context, rotations=rotations)
        for layer in self.layers:
            x = layer(x, context)
        return x if self.final_norm is None else self.final_norm(x, context)

    def encode(
        self, tokens: Int[Array, "b n"], lens: Int[Array, " b"], second_texts: Int[Array, " b"]
    ) -> Float[Array, "b n e"]:
        """Returns the last hidden state of every token of a padded batch; arbitrary for padding.

        Args:
            tokens: int32, token ids.
            lens: int32, length of each text; tokens after it are not attended to.
            second_texts: int32, index at which the second text of each pair begins; the length of a text that
                is not a pair.
        """
        windows = self.config.windows

        def attend(layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
            window = windows[layer] if windows else None
            return jax.nn.dot_product_attention(
                q, k, v, key_value_seq_lengths=lens, local_window_size=window, **options
            )

        positions = dense_positions(tokens)
        types = (positions >= second_texts[:, None]).astype(jnp.int32)
        return self.hidden(tokens, ForwardContext(self, positions, attend), types)

    def pooled_output(self, hidden: Float[Array, "b e"]) -> Float[Array, "b p"]:
        """Returns the float32 logits of the classes; `hidden` itself for models without classes."""
        if self.dense is None or self.classifier is None:
            return hidden
        context = ForwardContext(self, jnp.zeros(hidden.shape[:1], jnp.int32), _no_attention)
        x = self.dense(hidden.astype(self.words.dtype), context)
        x = jnp.tanh(x) if self.dense_norm is None else self.dense_norm(ACTIVATIONS["gelu"](x), context)
        return self.classifier(x, context).astype(jnp.float32)

    def logits(self, hidden: Float[Array, "... e"]) -> Float[Array, "... v"]:
        """Raises AssertionError, because an encoder generates no tokens."""
        raise AssertionError("an encoder generates no tokens and has no logits")

    @property
    def head(self) -> None:
        """None, because an encoder has no language model head."""
        return None

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Returns an empty list, because nothing is cached."""
        return []


def _no_attention(layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
    raise AssertionError("the classification head has no attention")


def _bert_table(prefix: str, dense: str, classifier: str) -> WeightTable:
    layer = rf"{prefix}.encoder.layer.\1."
    names = {
        "words": f"{prefix}.embeddings.word_embeddings",
        "positions": f"{prefix}.embeddings.position_embeddings",
        "types": f"{prefix}.embeddings.token_type_embeddings",
        "norm": f"{prefix}.embeddings.LayerNorm",
        r"layers\.(\d+)\.(query|key|value)": layer + r"attention.self.\2",
        r"layers\.(\d+)\.out": layer + "attention.output.dense",
        r"layers\.(\d+)\.attn_norm": layer + "attention.output.LayerNorm",
        r"layers\.(\d+)\.up": layer + "intermediate.dense",
        r"layers\.(\d+)\.down": layer + "output.dense",
        r"layers\.(\d+)\.mlp_norm": layer + "output.LayerNorm",
        "dense": dense,
        "classifier": classifier,
    }
    ignored = rf"{prefix}\.(pooler\..*|embeddings\.position_ids)|(cls|lm_head)\..*"
    return WeightTable(tuple(names.items()), {}, ignored, f"{prefix}.")


class BertModel(EncoderModel):
    """A BERT."""

    config_class: ClassVar[type[EncoderConfig]] = EncoderConfig
    weight_table: ClassVar[WeightTable] = _bert_table("bert", "bert.pooler.dense", "classifier")


class BertForSequenceClassification(BertModel):
    """A BERT that classifies texts."""


class RobertaModel(EncoderModel):
    """A RoBERTa."""

    config_class: ClassVar[type[EncoderConfig]] = RobertaConfig
    weight_table: ClassVar[WeightTable] = _bert_table("roberta", "classifier.dense", "classifier.out_proj")


class RobertaForSequenceClassification(RobertaModel):
    """A RoBERTa that classifies texts."""


class XLMRobertaModel(RobertaModel):
    """An XLM-RoBERTa."""


class XLMRobertaForSequenceClassification(RobertaModel):
    """An XLM-RoBERTa that classifies texts."""


class ModernBertModel(EncoderModel):
    """A ModernBERT."""

    config_class: ClassVar[type[EncoderConfig]] = ModernBertConfig
    layer_class: ClassVar[type[EncoderLayer]] = ModernBertLayer
    weight_table: ClassVar[WeightTable] = WeightTable(
        (
            ("words", "model.embeddings.tok_embeddings"),
            ("norm", "model.embeddings.norm"),
            (r"layers\.(\d+)\.qkv", r"model.layers.\1.attn.Wqkv"),
            (r"layers\.(\d+)\.out", r"model.layers.\1.attn.Wo"),
            (r"layers\.(\d+)\.up", r"model.layers.\1.mlp.Wi"),
            (r"layers\.(\d+)\.down", r"model.layers.\1.mlp.Wo"),
            ("dense", "head.dense"),
            ("dense_norm", "head.norm"),
            ("classifier", "classifier"),
        ),
        tied={},
        ignored=r"(head|decoder)\..*",
        prefix="model.",
    )


class ModernBertForSequenceClassification(ModernBertModel):
    """A ModernBERT that classifies texts."""

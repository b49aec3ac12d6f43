"""EAGLE-3 heads for Llama and its relatives: one layer that continues the hidden states of a model.

    low, middle, high hidden state of token p ---- fc ----> g_p
    [input_layernorm(embedding of token p + 1), hidden_norm(g_p)] --> attention --> MLP --> h_p
    lm_head(norm(h_p)) --> token p + 2, and h_p stands in for g_(p+1), which nobody knows yet

Where g_p is known, the key and the value at position p need nothing else: no pass before it, no attention.

Source: Li et al., EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test,
2025; names of the weights as in SafeAILab/EAGLE (eagle/model/cnets.py) and vLLM (llama_eagle3.py).
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import FullAttentionSpec, SlidingWindowSpec
from jax_paged.models.families.llama import LlamaAttention, LlamaConfig, LlamaMLP
from jax_paged.models.forward_context import Attend, ForwardContext, Module
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import Embedding, Linear, RMSNorm
from jax_paged.models.parallel.sharding import DeviceGrid, padded, whole_logits

# How many hidden states of the model a head reads.
NUM_FEATURES = 3

WEIGHT_TABLE = WeightTable(names=(), tied={}, ignored=r"t2d|midlayer\.self_attn\.rotary_emb\.inv_freq")


def usual_key(key: str) -> str:
    """Returns the name that a tensor has in the table; some checkpoints name it as a model of one layer's."""
    return re.sub(r"^layers\.0\.", "midlayer.", key.removeprefix("model."))


@dataclasses.dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Shape of a head; vocab_size is that of the model that it drafts for.

    Args:
        draft_vocab_size: Tokens that it can draft.
        target_hidden_size: Of the model that it drafts for.
        norm_before_residual: Whether what is added to the attention is normed, too.
        feature_layers: It reads what goes into these layers of the model; empty for the usual ones.
    """

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    norm_before_residual: bool = False
    feature_layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        fields = super().read(read)
        read.check(fields["num_hidden_layers"] == 1, "num_hidden_layers", fields["num_hidden_layers"], "1")
        draft_vocab_size = read.integer("draft_vocab_size", fields["vocab_size"])
        allowed = f"at most vocab_size, which is {fields['vocab_size']}"
        ok = draft_vocab_size <= fields["vocab_size"]
        read.check(ok, "draft_vocab_size", draft_vocab_size, allowed, also_needs=("vocab_size",))
        return fields | {
            "draft_vocab_size": draft_vocab_size,
            "target_hidden_size": read.integer("target_hidden_size", fields["hidden_size"]),
            "norm_before_residual": read.choice("norm_before_residual", False, (False, True)),
            "feature_layers": cls.read_feature_layers(read),
        }

    @staticmethod
    def read_feature_layers(read: ConfigReader) -> tuple[int, ...]:
        """Returns the layers whose inputs are read, if config.json names them.

        Under eagle_config (SpecForge, SGLang) they are numbered by what comes out of them, at the top (vLLM)
        by what goes in.
        """
        name, nested = (
            "eagle_aux_hidden_state_layer_ids",
            read.nested("eagle_config", read.table("eagle_config")),
        )
        nested.choice("use_aux_hidden_state", True, (True,))
        found: tuple[int, ...] = ()
        for reader, shift in ((nested, 1), (read, 0)):
            ids = reader.get(name, [])
            is_list = isinstance(ids, list) and len(ids) in (0, NUM_FEATURES)
            ok = is_list and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)
            if reader.check(ok, name, ids, f"{NUM_FEATURES} indices of layers, or none") and ids:
                found = tuple(i + shift for i in ids)
        return found

    def features_of(self, num_layers: int) -> tuple[str, ...]:
        """Returns the paths of the modules of a model whose outputs are the hidden states to read.

        The usual ones go into the layers 2, n // 2 and n - 3; of a model with few layers, the nearest.

        Args:
            num_layers: Of the model.
        """
        usual = [min(max(1, i), num_layers) for i in (2, num_layers // 2, num_layers - 3)]
        layers = self.feature_layers or usual
        return tuple("embed_tokens" if i == 0 else f"layers.{i - 1}" for i in layers)


class EagleAttention(LlamaAttention):
    """Attention over rows that are twice as wide: an embedding and a hidden state."""

    def make_projections(self, make: Callable[..., Linear]) -> None:
        def of_pairs(in_features: int, out_features: int, **how: Any) -> Linear:
            return make(2 * in_features, out_features, **how)

        super().make_projections(of_pairs)

    def key_and_value(self, x: Float[Array, "*t e2"], context: ForwardContext) -> tuple[Array, Array]:
        """Returns what is cached of every row."""
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        key = self.k_proj(x, context).reshape(heads)
        return context.rotations[self.rope](key), self.v_proj(x, context).reshape(heads)


class EagleLayer(Module):
    """A decoder layer that takes a pair: the embeddings of tokens, and the hidden states before them."""

    def __init__(self, config: EagleConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.self_attn = EagleAttention(config, 0, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.mlp = LlamaMLP(config, 0, dtype=dtype, rngs=rngs)

    def forward(self, x: tuple[Array, Array], context: ForwardContext) -> Float[Array, "*t e"]:
        rows, normed = self._rows(x, context)
        hidden = normed if self.config.norm_before_residual else x[1]
        hidden = hidden + self.self_attn(rows, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden, context), context)

    def key_and_value(self, x: tuple[Array, Array], context: ForwardContext) -> tuple[Array, Array]:
        """Returns what is cached of every row."""
        return self.self_attn.key_and_value(self._rows(x, context)[0], context)

    def _rows(self, x: tuple[Array, Array], context: ForwardContext) -> tuple[Array, Array]:
        embedded, features = x
        normed = self.hidden_norm(features, context)
        return jnp.concatenate([self.input_layernorm(embedded, context), normed], axis=-1), normed


class DraftColumns(nnx.Variable[Array]):
    """int32 [V]: which of the head's logits each token of the model has; draft_vocab_size for none."""


class EagleHead(nnx.Module):
    """A head of EAGLE-3; its rows at position p are token p + 1 and the feature of token p.

    Args:
        config: The shape.
        has_embedding: Whether it has embeddings of its own; else the model's are read.
        dtype: Of weights and activations.
        rngs: Where random weights come from.
    """

    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE

    def __init__(self, config: EagleConfig, *, has_embedding: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        c, make = config, {"bias": False, "std": config.initializer_range, "dtype": dtype, "rngs": rngs}
        self.embed_tokens = (
            Embedding(c.vocab_size, c.hidden_size, std=c.initializer_range, dtype=dtype, rngs=rngs)
            if has_embedding
            else None
        )
        self.fc = Linear(NUM_FEATURES * c.target_hidden_size, c.hidden_size, split=(None, None), **make)
        self.midlayer = EagleLayer(c, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(c.hidden_size, epsilon=c.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(
            c.hidden_size, c.draft_vocab_size, split=(None, padded(c.draft_vocab_size)), **make
        )
        self.columns = DraftColumns(jnp.arange(c.vocab_size, dtype=jnp.int32))

    def context(
        self, positions: Int[Array, "*t"], attend: Attend, grid: DeviceGrid | None = None
    ) -> ForwardContext:
        """Returns the context of a pass, whose tokens attend so, on these devices."""
        rope = self.config.rope
        return ForwardContext(self, positions, attend, rotations={rope: rope.at(positions)}, grid=grid)

    def embed(
        self, tokens: Int[Array, "*t"], embedding: Embedding, context: ForwardContext
    ) -> Float[Array, "*t e"]:
        """Returns the embeddings of tokens: its own, or else those of the model."""
        return (embedding if self.embed_tokens is None else self.embed_tokens)(tokens, context)

    def features(
        self, hidden_states: list[Float[Array, "*t m"]], context: ForwardContext
    ) -> Float[Array, "*t e"]:
        """Returns what it continues, of the hidden states that it reads of the model."""
        return self.fc(jnp.concatenate(hidden_states, axis=-1), context)

    def hidden(
        self, embedded: Float[Array, "*t e"], features: Float[Array, "*t e"], context: ForwardContext
    ) -> Float[Array, "*t e"]:
        """Returns what stands in for the features of the next position."""
        return self.midlayer((embedded, features), context)

    def key_and_value(
        self, embedded: Float[Array, "*t e"], features: Float[Array, "*t e"], context: ForwardContext
    ) -> tuple[Float[Array, "*t k d"], Float[Array, "*t k d"]]:
        """Returns what is cached of rows."""
        return self.midlayer.key_and_value((embedded, features), context)

    def logits(self, hidden: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t v"]:
        """Returns the float32 logits of the model's tokens; -inf of those that it can't draft."""
        own = self.lm_head.logits(self.norm(hidden, context))
        own = whole_logits(own, self.config.draft_vocab_size, context.grid)
        if self.config.draft_vocab_size == self.config.vocab_size:
            return own
        return own.at[..., self.columns[...]].get(mode="fill", fill_value=-jnp.inf)

    def kv_cache_spec(self, window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
        """Returns what its layer caches, among layers with a window or without."""
        shape = self.config.num_key_value_heads, self.config.head_dim
        return FullAttentionSpec(*shape) if window is None else SlidingWindowSpec(*shape, window)

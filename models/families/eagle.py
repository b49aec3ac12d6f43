"""EAGLE-3 heads, which draft tokens for a Llama or a similar target model (speculative decoding).

A head is one decoder layer. It reads hidden states from three layers of the target model:

    low, middle, high hidden state of token p ---- fc ----> feature g_p
    [input_layernorm(embedding of token p + 1), hidden_norm(g_p)] --> attention --> MLP --> h_p
    lm_head(norm(h_p)) --> token p + 2, and h_p takes the place of g_(p+1)

The row of a head at position p thus consists of the embedding of token p + 1 and the feature of token p. The
target model has not computed features of drafted tokens yet, so for these the head uses its own output h_p.
For all other tokens g_p is known, and their keys and values depend only on g_p and token p + 1.
`key_and_value` therefore computes them without the attention and the MLP of the head.

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
from jax_paged.models.forward_context import ForwardContext, Module, SelfAttention
from jax_paged.models.hf_format import ConfigReader, WeightTable
from jax_paged.models.layers import Embedding, Linear, RMSNorm
from jax_paged.models.parallel.sharding import DeviceGrid, padded, whole_logits

# Number of hidden states of the target model that a head reads.
NUM_FEATURES = 3

WEIGHT_TABLE = WeightTable(names=(), tied={}, ignored=r"t2d|midlayer\.self_attn\.rotary_emb\.inv_freq")


def canonical_key(key: str) -> str:
    """Returns the name of a tensor as in the weight table.

    Some checkpoints name the tensors like a model with one layer: layers.0 instead of midlayer.
    """
    return re.sub(r"^layers\.0\.", "midlayer.", key.removeprefix("model."))


@dataclasses.dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Configuration of a head. vocab_size is the vocabulary size of the target model.

    Args:
        draft_vocab_size: Number of tokens that the head can draft.
        target_hidden_size: Hidden size of the target model.
        norm_before_residual: Whether the residual stream starts with the normalized feature instead of the
            feature.
        feature_layers: Layers of the target model whose inputs are read; empty for the default layers.
    """

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    norm_before_residual: bool = False
    feature_layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, read: ConfigReader) -> dict[str, Any]:
        """Returns the fields of the dataclass."""
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
        """Returns the layers whose inputs are read, if config.json names them; otherwise ().

        In eagle_config (SpecForge, SGLang) the numbers refer to the outputs of layers, at the top level
        (vLLM) to the inputs.
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
            allowed = f"a list of {NUM_FEATURES} layer indices, or an empty list"
            if reader.check(ok, name, ids, allowed) and ids:
                found = tuple(i + shift for i in ids)
        return found

    def feature_paths(self, num_layers: int) -> tuple[str, ...]:
        """Returns the paths of the target model's modules whose outputs are read.

        By default these outputs are the inputs of layers 2, n // 2 and n - 3, limited to the range [1, n].

        Args:
            num_layers: Number of layers of the target model, n.
        """
        default_layers = [min(max(1, i), num_layers) for i in (2, num_layers // 2, num_layers - 3)]
        layers = self.feature_layers or default_layers
        return tuple("embed_tokens" if i == 0 else f"layers.{i - 1}" for i in layers)


class EagleAttention(LlamaAttention):
    """Llama's attention with an input of twice the hidden size: an embedding and a feature."""

    def make_projections(self, make: Callable[..., Linear]) -> None:
        """Creates the projections to queries, keys and values."""

        def project_pairs(in_features: int, out_features: int, **options: Any) -> Linear:
            return make(2 * in_features, out_features, **options)

        super().make_projections(project_pairs)

    def key_and_value(self, x: Float[Array, "*t e2"], context: ForwardContext) -> tuple[Array, Array]:
        """Returns the keys and values that are cached."""
        heads = (*x.shape[:-1], -1, self.config.head_dim)
        key = self.k_proj(x, context).reshape(heads)
        return context.rotations[self.rope](key), self.v_proj(x, context).reshape(heads)


class EagleLayer(Module):
    """Decoder layer whose input is a pair: embeddings of tokens, and features of the tokens before them."""

    def __init__(self, config: EagleConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        self.input_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.self_attn = EagleAttention(config, 0, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype)
        self.mlp = LlamaMLP(config, 0, dtype=dtype, rngs=rngs)

    def forward(self, x: tuple[Array, Array], context: ForwardContext) -> Float[Array, "*t e"]:
        """Returns the hidden states after the layer."""
        rows, normed = self._rows(x, context)
        hidden = normed if self.config.norm_before_residual else x[1]
        hidden = hidden + self.self_attn(rows, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden, context), context)

    def key_and_value(self, x: tuple[Array, Array], context: ForwardContext) -> tuple[Array, Array]:
        """Returns the keys and values that are cached."""
        return self.self_attn.key_and_value(self._rows(x, context)[0], context)

    def _rows(self, x: tuple[Array, Array], context: ForwardContext) -> tuple[Array, Array]:
        embedded, features = x
        normed = self.hidden_norm(features, context)
        return jnp.concatenate([self.input_layernorm(embedded, context), normed], axis=-1), normed


class DraftLogitIndex(nnx.Variable[Array]):
    """int32 [V], the column of the head's logits for each token of the target model.

    Tokens that the head cannot draft have the value draft_vocab_size.
    """


class EagleHead(nnx.Module):
    """An EAGLE-3 head. Its row at position p is token p + 1 and the feature of token p.

    Args:
        config: The configuration.
        has_embedding: Whether the head has its own embeddings; otherwise it uses the target model's.
        dtype: Dtype of weights and activations.
        rngs: Source of random weights.
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
        self.columns = DraftLogitIndex(jnp.arange(c.vocab_size, dtype=jnp.int32))

    def context(
        self, positions: Int[Array, "*t"], attend: SelfAttention, grid: DeviceGrid | None = None
    ) -> ForwardContext:
        """Returns the context of a forward pass.

        Args:
            positions: int32, positions of the rows.
            attend: How the rows attend to each other.
            grid: Devices that the head is divided among; None for one.
        """
        rope = self.config.rope
        return ForwardContext(self, positions, attend, rotations={rope: rope.at(positions)}, grid=grid)

    def embed(
        self, tokens: Int[Array, "*t"], embedding: Embedding, context: ForwardContext
    ) -> Float[Array, "*t e"]:
        """Returns the embeddings of tokens.

        Args:
            tokens: int32, token ids.
            embedding: The target model's embeddings, which are used if the head has none.
            context: Context of the forward pass.
        """
        return (embedding if self.embed_tokens is None else self.embed_tokens)(tokens, context)

    def features(
        self, hidden_states: list[Float[Array, "*t m"]], context: ForwardContext
    ) -> Float[Array, "*t e"]:
        """Returns the features of tokens.

        Args:
            hidden_states: The hidden states of the target model that the head reads.
            context: Context of the forward pass.
        """
        return self.fc(jnp.concatenate(hidden_states, axis=-1), context)

    def hidden(
        self, embedded: Float[Array, "*t e"], features: Float[Array, "*t e"], context: ForwardContext
    ) -> Float[Array, "*t e"]:
        """Returns the hidden states h_p, which take the place of the next position's features."""
        return self.midlayer((embedded, features), context)

    def key_and_value(
        self, embedded: Float[Array, "*t e"], features: Float[Array, "*t e"], context: ForwardContext
    ) -> tuple[Float[Array, "*t k d"], Float[Array, "*t k d"]]:
        """Returns the keys and values that are cached."""
        return self.midlayer.key_and_value((embedded, features), context)

    def logits(self, hidden: Float[Array, "*t e"], context: ForwardContext) -> Float[Array, "*t v"]:
        """Returns float32 logits of the target model's tokens; -inf for tokens that the head cannot draft."""
        logits = self.lm_head.logits(self.norm(hidden, context))
        logits = whole_logits(logits, self.config.draft_vocab_size, context.grid)
        if self.config.draft_vocab_size == self.config.vocab_size:
            return logits
        return logits.at[..., self.columns[...]].get(mode="fill", fill_value=-jnp.inf)

    def kv_cache_spec(self, window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
        """Returns what the head's layer caches.

        Args:
            window: Sliding window of the head's layer (tokens); None for full attention.
        """
        shape = self.config.num_key_value_heads, self.config.head_dim
        return FullAttentionSpec(*shape) if window is None else SlidingWindowSpec(*shape, window)

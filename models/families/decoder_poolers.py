"""Decoders that make embeddings or classes of texts, and draw no tokens.

Names and semantics of the weights are those of Hugging Face: LlamaModel and its relatives have no head, and
a classifier's is called score.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_paged.models.families.llama import WEIGHT_TABLE, LlamaConfig, LlamaForCausalLM
from jax_paged.models.families.mistral import MistralForCausalLM
from jax_paged.models.families.qwen import Qwen2ForCausalLM, Qwen3ForCausalLM
from jax_paged.models.hf_format import WeightTable
from jax_paged.models.layers import Linear


class LlamaModel(LlamaForCausalLM):
    """A Llama without a head."""

    draws: ClassVar[bool] = False
    # Checkpoints saved from a causal model hold its head, tied or not.
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE.with_names(
        (r"score", "score"), tied={}, unused=r"(model\.)?lm_head\.weight"
    )


class MistralModel(LlamaModel, MistralForCausalLM):
    """A Mistral without a head."""


class Qwen2Model(LlamaModel, Qwen2ForCausalLM):
    """A Qwen2 without a head."""


class Qwen3Model(LlamaModel, Qwen3ForCausalLM):
    """A Qwen3 without a head."""


class LlamaForSequenceClassification(LlamaModel):
    """A Llama whose pooled hidden states become logits of classes."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        std, split = config.initializer_range, (None, None)
        sizes = config.hidden_size, config.num_labels
        self.score = Linear(*sizes, bias=False, split=split, std=std, dtype=dtype, rngs=rngs)

    def pooled(self, hidden: Float[Array, "b e"]) -> Float[Array, "b p"]:
        return self.score.logits(hidden.astype(self.norm.scale.dtype))


class MistralForSequenceClassification(LlamaForSequenceClassification, MistralForCausalLM):
    """A Mistral that classifies."""


class Qwen2ForSequenceClassification(LlamaForSequenceClassification, Qwen2ForCausalLM):
    """A Qwen2 that classifies."""


class Qwen3ForSequenceClassification(LlamaForSequenceClassification, Qwen3ForCausalLM):
    """A Qwen3 that classifies."""

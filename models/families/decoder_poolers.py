"""Decoders for embeddings and classification: *Model and *ForSequenceClassification of some families.

The families are Llama, Mistral, Qwen2 and Qwen3. The models are the same as the causal ones, but without a
language model head. They produce a pooled hidden state, which classifiers pass to a linear layer called
`score`.

Source: names and semantics of the weights as in Hugging Face's LlamaModel, LlamaForSequenceClassification and
the corresponding classes of the other families.
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
    """A Llama without a language model head."""

    has_head: ClassVar[bool] = False
    # Checkpoints that were saved from a causal model contain its head, tied or not. It is not loaded.
    weight_table: ClassVar[WeightTable] = WEIGHT_TABLE.with_names(
        (r"score", "score"), tied={}, unused=r"(model\.)?lm_head\.weight"
    )


class MistralModel(LlamaModel, MistralForCausalLM):
    """A Mistral without a language model head."""


class Qwen2Model(LlamaModel, Qwen2ForCausalLM):
    """A Qwen2 without a language model head."""


class Qwen3Model(LlamaModel, Qwen3ForCausalLM):
    """A Qwen3 without a language model head."""


class LlamaForSequenceClassification(LlamaModel):
    """A Llama that classifies sequences by their pooled hidden states."""

    def __init__(self, config: LlamaConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        std, split = config.initializer_range, (None, None)
        sizes = config.hidden_size, config.num_labels
        self.score = Linear(*sizes, bias=False, split=split, std=std, dtype=dtype, rngs=rngs)

    def pooled_output(self, hidden: Float[Array, "b e"]) -> Float[Array, "b p"]:
        """Returns the float32 logits of the classes."""
        return self.score.logits(hidden.astype(self.norm.scale.dtype))


class MistralForSequenceClassification(LlamaForSequenceClassification, MistralForCausalLM):
    """A Mistral that classifies sequences."""


class Qwen2ForSequenceClassification(LlamaForSequenceClassification, Qwen2ForCausalLM):
    """A Qwen2 that classifies sequences."""


class Qwen3ForSequenceClassification(LlamaForSequenceClassification, Qwen3ForCausalLM):
    """A Qwen3 that classifies sequences."""

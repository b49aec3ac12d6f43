"""Draft model: a smaller model that drafts tokens inside the step in which the target model verifies them.

To draft k tokens, the draft model runs k + 1 passes with one token per sequence: the last known token, then
each draft token. The first k passes draw a draft token each. The last pass only stores the keys and values of
the last draft token. Then the target model verifies all k draft tokens in one pass.

The list of KV cache arrays contains the arrays of the target model, followed by the arrays of the draft
model. Both use the same block tables, so blocks of both models are shared, copied and swapped together. In
steps without drafts, the draft model computes the same tokens as the target model, so that its KV cache is
complete.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.errors import check
from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import CausalLM, LanguageModel
from jax_paged.models.parallel.sharding import whole_logits
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.features.speculation.drafter import LastRows, TracedModels, draw_drafts, num_drafts_of
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.loading.weights import FlatModel
from jax_paged.worker.sampling.sampler import SamplerOptions, SamplingBatch


@dataclasses.dataclass(frozen=True, eq=False)
class DraftModel:
    """A Drafter that is a complete model.

    Args:
        model: The draft model without its weights, which are the last ones in the list of all weights.
        layout: Layout of its KV cache arrays, which are the last ones in the list of all arrays.
        paths: Empty, because the draft model does not read outputs of the target model.
    """

    model: FlatModel[LanguageModel]
    layout: KVCacheLayout
    paths: tuple[str, ...] = ()

    def states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns an empty list, because a draft model keeps no state besides its KV cache."""
        return []

    def draft(
        self,
        traced: TracedModels,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        states: list[Array],
        batch: SamplingBatch,
        options: SamplerOptions,
    ) -> tuple[Int[Array, " t"], list[Array]]:
        """Draws draft tokens with the draft model; see Drafter.draft."""
        metadata = traced.metadata
        num_drafts, query_start_loc = num_drafts_of(metadata), jnp.arange(metadata.query_start_loc.shape[0])

        def one_pass(
            i: Array, token_rows: Array, is_live: Array, token_ids: Array, kv_cache: list[Array]
        ) -> tuple[Array, list[Array]]:
            """Runs the draft model on one token of each sequence."""
            pass_metadata = dataclasses.replace(
                metadata,
                positions=metadata.positions.at[token_rows].get(mode="fill", fill_value=0),
                slot_mapping=metadata.slot_mapping.at[:, token_rows].get(
                    mode="fill", fill_value=jnp.iinfo(jnp.int32).max
                ),
                context_lens=jnp.where(is_live, metadata.context_lens - num_drafts + i, 0),
                query_start_loc=query_start_loc,
                is_decode=True,
                shared_blocks=None,
            )
            hidden, kv_cache = self._run(traced.weights, token_ids, kv_cache, pass_metadata)
            logits = self._merge(traced.weights).logits(hidden)
            return whole_logits(logits, traced.target.config.vocab_size, metadata.grid), kv_cache

        return draw_drafts(metadata, tokens, batch, options, one_pass, kv_cache, caches_last=True)

    def observe(
        self,
        traced: TracedModels,
        tokens: Int[Array, " t"],
        outputs: list[Float[Array, "t e"]],
        kv_cache: list[Array],
        states: list[Array],
        last: LastRows,
        *,
        has_drafted: bool,
    ) -> tuple[list[Array], list[Array]]:
        """Computes the tokens of a step without drafts, to fill the KV cache; see Drafter.observe."""
        if not has_drafted:
            _, kv_cache = self._run(traced.weights, tokens, kv_cache, traced.metadata)
        return kv_cache, states

    def _merge(self, weights: list[Array]) -> LanguageModel:
        """Returns the draft model with its weights."""
        return self.model.merge(weights[len(weights) - self.model.num_weights :])

    def _run(
        self,
        weights: list[Array],
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        metadata: AttentionMetadata,
    ) -> tuple[Array, list[Array]]:
        """Computes tokens; returns their hidden states, and all KV cache arrays with its own ones updated."""
        first = len(kv_cache) - self.layout.num_block_arrays
        metadata = dataclasses.replace(metadata, kv_locations=self.layout.locations, attend=None)
        hidden, own = self._merge(weights).paged(tokens, kv_cache[first:], metadata)
        return hidden, [*kv_cache[:first], *own]


def check_draft(draft: LoadedModel, model: LoadedModel, max_model_len: int | None, name: str) -> None:
    """Checks that a model can draft for another one.

    Args:
        draft: The draft model.
        model: The target model.
        max_model_len: max_model_len of the engine; None to use the target model's.
        name: Name of the draft model, for error messages.

    Raises:
        ValueError: If it can't. The message lists every reason.
    """
    problems, max_model_len = [], max_model_len or model.max_model_len
    for ok, problem in (
        (isinstance(draft.model, CausalLM), "is not a decoder"),
        (isinstance(model.model, CausalLM), f"cannot draft for {model.architecture}, which is not a decoder"),
        (
            draft.vocab_size == model.vocab_size,
            f"has a vocabulary of {draft.vocab_size} tokens instead of {model.vocab_size}",
        ),
        (
            draft.max_model_len >= max_model_len,
            f"supports {draft.max_model_len} tokens, but max_model_len is {max_model_len}",
        ),
    ):
        if not ok:
            problems.append(problem)
    allowed = "a decoder with the vocabulary and at least the max_model_len of the served model"
    remedy = f", which {', and '.join(problems)}"
    check(not problems, "speculative_config['model']", name, allowed, remedy=remedy)


def check_groups(draft: KVCacheLayout, model: KVCacheLayout, name: str) -> None:
    """Checks that two models can use the same block tables.

    Args:
        draft: Cache layout of the draft model.
        model: Cache layout of the target model.
        name: Name of the draft model, for error messages.

    Raises:
        ValueError: If they can't.
    """
    allowed = f"a model with the cache groups of the served model, {model.groups}, and not {draft.groups}"
    check(draft.groups == model.groups, "speculative_config['model']", name, allowed)

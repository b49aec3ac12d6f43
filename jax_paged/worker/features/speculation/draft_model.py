"""A smaller model that drafts tokens, inside the step that verifies them.

    the known token -> draft model, k + 1 passes: k drafts, keys and values of all -> model: verifies k drafts

Its keys and values lie in arrays of their own, behind the model's, under the same block tables: what is
shared, copied or swapped of one is so of the other. Every step runs it on the tokens that the model computes.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.checks import check
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
    """A Drafter that is a model of its own.

    Args:
        model: Without its weights, which lie behind all others.
        layout: Of its arrays of the pool, which lie behind the model's.
    """

    model: FlatModel[LanguageModel]
    layout: KVCacheLayout
    paths: tuple[str, ...] = ()

    def states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
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
        metadata = traced.metadata
        num_drafts, num_rows = num_drafts_of(metadata), jnp.arange(metadata.query_start_loc.shape[0])

        def one_pass(
            i: Array, at: Array, is_live: Array, token_ids: Array, kv_cache: list[Array]
        ) -> tuple[Array, list[Array]]:
            moved = dataclasses.replace(
                metadata,
                positions=metadata.positions.at[at].get(mode="fill", fill_value=0),
                slot_mapping=metadata.slot_mapping.at[:, at].get(
                    mode="fill", fill_value=jnp.iinfo(jnp.int32).max
                ),
                context_lens=jnp.where(is_live, metadata.context_lens - num_drafts + i, 0),
                query_start_loc=num_rows,
                is_decode=True,
                shared_blocks=None,
            )
            hidden, kv_cache = self._run(traced.weights, token_ids, kv_cache, moved)
            logits = self._merge(traced.weights).logits(hidden)
            return whole_logits(logits, traced.target.config.vocab_size, metadata.grid), kv_cache

        return draw_drafts(metadata, tokens, batch, options, one_pass, kv_cache, sees_last=True)

    def follow(
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
        if not has_drafted:
            _, kv_cache = self._run(traced.weights, tokens, kv_cache, traced.metadata)
        return kv_cache, states

    def _merge(self, weights: list[Array]) -> LanguageModel:
        return self.model.merge(weights[len(weights) - self.model.num_weights :])

    def _run(
        self,
        weights: list[Array],
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        metadata: AttentionMetadata,
    ) -> tuple[Array, list[Array]]:
        """Computes tokens; returns their hidden states, and the whole pool, of which its own part is new."""
        first = len(kv_cache) - self.layout.num_pools
        metadata = dataclasses.replace(metadata, places=self.layout.places, attend=None)
        hidden, own = self._merge(weights).paged(tokens, kv_cache[first:], metadata)
        return hidden, [*kv_cache[:first], *own]


def check_draft(draft: LoadedModel, model: LoadedModel, max_model_len: int | None, name: str) -> None:
    """Checks that a model can draft for another.

    Raises:
        ValueError: If it can't; the message names all that is wrong.
    """
    problems = []
    for ok, what in (
        (isinstance(draft.model, CausalLM), "is no decoder"),
        (isinstance(model.model, CausalLM), "would draft for a model that is no decoder"),
        (
            draft.vocab_size == model.vocab_size,
            f"has {draft.vocab_size} tokens in its vocabulary, the model that is served {model.vocab_size}",
        ),
        (
            draft.max_model_len >= (max_model_len or model.max_model_len),
            f"takes {draft.max_model_len} tokens, max_model_len is {max_model_len or model.max_model_len}",
        ),
    ):
        if not ok:
            problems.append(what)
    allowed = "a decoder with the vocabulary and at least the length of the model that is served"
    check(not problems, "speculative_config['model']", name, f"{allowed}; this one {', and '.join(problems)}")


def check_groups(draft: KVCacheLayout, model: KVCacheLayout, name: str) -> None:
    """Checks that two models share block tables.

    Raises:
        ValueError: If they don't.
    """
    allowed = (
        f"one whose layers cache as those of the model that is served: {model.groups}, not {draft.groups}"
    )
    check(draft.groups == model.groups, "speculative_config['model']", name, allowed)

"""Drafts in a traced step: they are proposed, verified, and the drafter observes what the model computes."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.worker.compilation.programs import StepState
from jax_paged.worker.compilation.traced_values import DrawnTokens, TracedStep
from jax_paged.worker.features.speculation.drafter import Drafter, LastRows, TracedModels
from jax_paged.worker.sampling.sampler import SamplerOptions


def drafts_before(step: TracedStep, tokens: Int[Array, " t"], vocab_size: int) -> Int[Array, "l k"]:
    """Returns the drafts that precede each logits row, padded with vocab_size."""
    back, fields = jnp.arange(step.bucket.num_drafts), step.fields
    rows = jnp.maximum(fields["logits_rows"][:, None] - back, 0)
    return jnp.where(back < fields["num_drafts"][:, None], tokens.at[rows].get(mode="clip"), vocab_size)


def accept(
    step: TracedStep, tokens: Int[Array, " t"], drawn: Int[Array, " l"], count_slots: Int[Array, " l"]
) -> DrawnTokens:
    """Returns the batch slots that take and count drawn tokens: those of the logits rows that count.

    A logits row counts if every draft before it was drawn in its place. The logits rows of one sequence are
    neighbours, so the row before that of a draft has drawn the token that the draft is compared with. A
    sequence goes on from the last of its rows that count.
    """
    fields, num_batch_slots = step.fields, step.context.max_num_seqs
    behind = fields["num_drafts"]
    drafts = tokens[fields["logits_rows"]]
    is_wrong = (behind > 0) & (jnp.roll(drawn, 1) != drafts)
    num_wrong = jnp.cumsum(is_wrong.astype(jnp.int32))
    first = jnp.maximum(jnp.arange(len(behind)) - behind, 0)
    counts = num_wrong == num_wrong[first]
    has_successor = jnp.concatenate([((behind > 0) & counts)[1:], jnp.zeros(1, bool)])
    return DrawnTokens(
        sample_slots=jnp.where(counts & ~has_successor, fields["sample_slots"], num_batch_slots),
        count_slots=jnp.where(counts, count_slots, num_batch_slots),
    )


def propose(
    drafter: Drafter, step: TracedStep, tokens: Int[Array, " t"], state: StepState[Array]
) -> tuple[Int[Array, " t"], StepState[Array]]:
    """Puts drafts after the first token of every row; returns the tokens and the state."""
    drafts = drafts_before(step, tokens, state.token_counts.shape[1])
    batch = step.sampling_batch(state.token_counts, drafts)
    traced = _traced_models(step, step.context.merge(step.weights), step.metadata())
    options = SamplerOptions(max_logprobs=1, custom=step.context.sampling.custom)
    tokens, kv_cache = drafter.draft(traced, tokens, state.kv_cache, state.draft_states, batch, options)
    return tokens, dataclasses.replace(state, kv_cache=kv_cache)


def observe(
    drafter: Drafter,
    step: TracedStep,
    model: LanguageModel,
    metadata: AttentionMetadata,
    tokens: Int[Array, " t"],
    outputs: dict[str, Float[Array, "t e"]],
    rows: DrawnTokens,
    state: StepState[Array],
) -> StepState[Array]:
    """Lets the drafter read what the model has computed; returns the state."""
    has_drafted, fields = step.bucket.num_drafts > 0, step.fields
    last = LastRows(fields["batch_slots"], fields["query_start_loc"][1:] - 1)
    if has_drafted:
        last = LastRows(rows.sample_slots, fields["logits_rows"])
    kv_cache, draft_states = drafter.follow(
        _traced_models(step, model, metadata),
        tokens,
        [outputs[path] for path in drafter.paths],
        state.kv_cache,
        state.draft_states,
        last,
        has_drafted=has_drafted,
    )
    return dataclasses.replace(state, kv_cache=kv_cache, draft_states=draft_states)


def _traced_models(step: TracedStep, model: LanguageModel, metadata: AttentionMetadata) -> TracedModels:
    # The drafter reads a text, whose positions are those of its tokens.
    metadata = dataclasses.replace(metadata, mrope_positions=None)
    return TracedModels(step.weights, model, metadata, step.fields["batch_slots"])

"""Speculative decoding in a traced step: the drafter is called, and draft tokens are accepted."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.worker.compilation.programs import StepState
from jax_paged.worker.compilation.traced_values import TokenTargets, TracedStep
from jax_paged.worker.features.speculation.drafter import Drafter, LastRows, TracedModels
from jax_paged.worker.sampling.sampler import SamplerOptions


def drafts_before(step: TracedStep, tokens: Int[Array, " t"], vocab_size: int) -> Int[Array, "l k"]:
    """Returns the draft tokens that precede each logits row, the latest first, padded with `vocab_size`."""
    back, fields = jnp.arange(step.bucket.num_drafts), step.fields
    rows = jnp.maximum(fields["logits_rows"][:, None] - back, 0)
    return jnp.where(back < fields["num_drafts"][:, None], tokens.at[rows].get(mode="clip"), vocab_size)


def accept(
    step: TracedStep, tokens: Int[Array, " t"], drawn: Int[Array, " l"], count_slots: Int[Array, " l"]
) -> TokenTargets:
    """Returns the batch slots that receive and count the drawn tokens.

    A logits row counts if every draft before it is equal to the token that was drawn in its place. The logits
    rows of a sequence are consecutive, so a draft is compared with the token drawn from the previous logits
    row. A sequence continues after the last of its logits rows that count.

    Args:
        step: The step.
        tokens: The tokens of all token rows, including drafts.
        drawn: The token drawn from each logits row.
        count_slots: The batch slot in whose token counts each drawn token is counted if it is accepted.
    """
    fields, num_batch_slots = step.fields, step.context.max_num_seqs
    num_before = fields["num_drafts"]
    drafts = tokens[fields["logits_rows"]]
    is_wrong = (num_before > 0) & (jnp.roll(drawn, 1) != drafts)
    num_wrong = jnp.cumsum(is_wrong.astype(jnp.int32))
    first = jnp.maximum(jnp.arange(len(num_before)) - num_before, 0)
    is_counted = num_wrong == num_wrong[first]
    has_successor = jnp.concatenate([((num_before > 0) & is_counted)[1:], jnp.zeros(1, bool)])
    return TokenTargets(
        sample_slots=jnp.where(is_counted & ~has_successor, fields["sample_slots"], num_batch_slots),
        count_slots=jnp.where(is_counted, count_slots, num_batch_slots),
    )


def propose(
    drafter: Drafter, step: TracedStep, tokens: Int[Array, " t"], state: StepState[Array]
) -> tuple[Int[Array, " t"], StepState[Array]]:
    """Calls the drafter; returns the tokens with its drafts, and the state."""
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
    targets: TokenTargets,
    state: StepState[Array],
) -> StepState[Array]:
    """Passes the outputs of the model's pass to the drafter; returns the state."""
    has_drafted, fields = step.bucket.num_drafts > 0, step.fields
    last = LastRows(fields["batch_slots"], fields["query_start_loc"][1:] - 1)
    if has_drafted:
        last = LastRows(targets.sample_slots, fields["logits_rows"])
    kv_cache, draft_states = drafter.observe(
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
    # The drafter uses the index of a token in its sequence as its position, also in prompts with images.
    metadata = dataclasses.replace(metadata, mrope_positions=None)
    return TracedModels(step.weights, model, metadata, step.fields["batch_slots"])

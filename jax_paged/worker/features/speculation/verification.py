"""Verification of drafts in a traced step: which logits rows count, and which drafts precede them."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_paged.worker.traced_step import DrawnTokens, TracedStep


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

"""Verification of drafts in a traced step: which logits rows count, and which drafts precede them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jax_paged.worker.compilation.buckets import Bucket


def drafts_before(
    fields: dict[str, Array], tokens: Int[Array, " t"], bucket: Bucket, vocab_size: int
) -> Int[Array, "l k"]:
    """Returns the drafts that precede each logits row, padded with vocab_size."""
    back = jnp.arange(bucket.num_drafts)
    rows = jnp.maximum(fields["logits_rows"][:, None] - back, 0)
    return jnp.where(back < fields["num_drafts"][:, None], tokens.at[rows].get(mode="clip"), vocab_size)


def accepted(
    fields: dict[str, Array], tokens: Int[Array, " t"], drawn: Int[Array, " l"]
) -> tuple[Bool[Array, " l"], Bool[Array, " l"]]:
    """Returns which logits rows count, and which of them is the last one of its sequence.

    A logits row counts if every draft before it was drawn in its place. The logits rows of one sequence are
    neighbours, so the row before that of a draft has drawn the token that the draft is compared with.
    """
    behind = fields["num_drafts"]
    drafts = tokens[fields["logits_rows"]]
    is_wrong = (behind > 0) & (jnp.roll(drawn, 1) != drafts)
    num_wrong = jnp.cumsum(is_wrong.astype(jnp.int32))
    first = jnp.maximum(jnp.arange(len(behind)) - behind, 0)
    counts = num_wrong == num_wrong[first]
    has_successor = jnp.concatenate([((behind > 0) & counts)[1:], jnp.zeros(1, bool)])
    return counts, counts & ~has_successor

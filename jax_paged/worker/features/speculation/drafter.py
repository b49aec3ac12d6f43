"""What drafts tokens on the device: a protocol, and how drafts are drawn in the step that verifies them.

It draws with the seeds, positions and parameters that the model draws with: where their distributions are
alike, they draw the same token, at any temperature.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jax_paged.models.attention import AttentionMetadata
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.worker.kv_cache import KVCacheLayout
from jax_paged.worker.sampling.sampler import SamplerOptions, SamplingBatch


class TracedModels(NamedTuple):
    """What a step is traced with, as those see it who draft for its model.

    Args:
        weights: Of all models; those of the one that drafts come last.
        target: The model that is drafted for.
        metadata: Of its pass; in steps that verify, the token rows are the rows of logits.
        batch_slots: int32 [B], of the rows; a row that is not used, or computes nothing, has one that is not
            there.
    """

    weights: list[Array]
    target: LanguageModel
    metadata: AttentionMetadata
    batch_slots: Int[Array, " b"]


class LastRows(NamedTuple):
    """Where sequences go on after a step.

    Args:
        batch_slots: int32 [n], each batch slot once at most; those that are not there are padding.
        rows: int32 [n], the token row of the last token that a sequence has computed, and that counts.
    """

    batch_slots: Int[Array, " n"]
    rows: Int[Array, " n"]


class Drafter(Protocol):
    """What drafts tokens on the device."""

    @property
    def layout(self) -> KVCacheLayout:
        """Of its arrays of the pool, which lie behind the model's, under the same block tables."""
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """The modules of the model whose outputs it reads."""
        ...

    def states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and types of what it keeps by batch slot; they begin as zeros."""
        ...

    def draft(
        self,
        traced: TracedModels,
        tokens: Int[Array, " t"],
        kv_cache: list[Array],
        states: list[Array],
        batch: SamplingBatch,
        options: SamplerOptions,
    ) -> tuple[Int[Array, " t"], list[Array]]:
        """Puts drafts behind the first token of every row, ahead of the model's pass.

        Args:
            traced: The step.
            tokens: Of all token rows; those behind the first of a row are replaced.
            kv_cache: The pool.
            states: What it keeps by batch slot.
            batch: Of the rows of logits; a padding row has no effects.
            options: Of the sampler.

        Returns:
            The tokens, and the pool.
        """
        ...

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
        """Takes in what the model has computed.

        Args:
            traced: The step.
            tokens: Of all token rows.
            outputs: Of the modules at `paths`.
            kv_cache: The pool.
            states: What it keeps by batch slot.
            last: Where sequences go on.
            has_drafted: Whether it drafted in this step.

        Returns:
            The pool and the states.
        """
        ...


class OnePass[T](Protocol):
    """A pass of what drafts: (number of the pass, token rows, whether they count, tokens, what passes carry).

    It returns the logits of what follows the tokens, and what the next pass carries.
    """

    def __call__(
        self,
        i: Int[Array, ""],
        at: Int[Array, " b"],
        is_live: Bool[Array, " b"],
        tokens: Int[Array, " b"],
        carry: T,
        /,
    ) -> tuple[Float[Array, "b v"], T]: ...


def draw_drafts[T](
    metadata: AttentionMetadata,
    tokens: Int[Array, " t"],
    batch: SamplingBatch,
    options: SamplerOptions,
    one_pass: OnePass[T],
    carry: T,
    *,
    sees_last: bool,
) -> tuple[Int[Array, " t"], T]:
    """Draws the drafts of all rows, one after the other.

    Args:
        metadata: Of the step that verifies: its token rows are the rows of logits.
        tokens: Of all token rows; those behind the first of a row are replaced.
        batch: Of the rows of logits.
        options: Of the sampler.
        one_pass: What a pass computes.
        carry: What the first pass gets.
        sees_last: Whether there is a pass for the last draft, too, which draws nothing.

    Returns:
        The tokens, and what the last pass has left.
    """
    first, num_tokens = metadata.query_start_loc[:-1], tokens.shape[0]
    num_drafts = num_drafts_of(metadata)
    num_passes = num_drafts + sees_last

    def step(state: tuple[Int[Array, ""], Array, T]) -> tuple[Int[Array, ""], Array, T]:
        i, tokens, carry = state
        is_live = i < num_passes
        at = jnp.where(is_live, first + i, num_tokens)
        logits, carry = one_pass(i, at, is_live, tokens.at[at].get(mode="fill", fill_value=0), carry)
        drawn = options.sample(logits, _rows_of(batch, jnp.minimum(at, num_tokens - 1), tokens, i))
        goes_on = jnp.where(i < num_drafts, at + 1, num_tokens)
        return i + 1, tokens.at[goes_on].set(drawn.token_ids, mode="drop"), carry

    state = lax.while_loop(lambda state: state[0] < jnp.max(num_passes), step, (jnp.int32(0), tokens, carry))
    return state[1], state[2]


def num_drafts_of(metadata: AttentionMetadata) -> Int[Array, " b"]:
    """Returns the drafts of each row of a step that verifies; -1 of rows that are not used."""
    return metadata.query_start_loc[1:] - metadata.query_start_loc[:-1] - 1


def _rows_of(
    batch: SamplingBatch, rows: Int[Array, " b"], tokens: Int[Array, " t"], num_drafts: Int[Array, ""]
) -> SamplingBatch:
    """Returns the parameters of some rows of logits, behind so many drafts each."""
    shared = ("token_counts", "drafts")
    values = {
        field.name: getattr(batch, field.name)[rows]
        for field in dataclasses.fields(batch)
        if field.name not in shared
    }
    assert batch.drafts is not None, "the step verifies drafts"
    back = jnp.arange(batch.drafts.shape[1])
    behind = tokens[jnp.maximum(rows[:, None] - back, 0)]
    drafts = jnp.where(back < num_drafts, behind, batch.token_counts.shape[1])
    off = jnp.zeros(rows.shape, bool)
    values |= {"drafts": drafts, "token_counts": batch.token_counts, "wants_logprobs": off}
    return SamplingBatch(**values)

"""The protocol of drafters on the device, and the loop that draws draft tokens.

Draft tokens are drawn with the same seeds, positions and sampling parameters as the tokens of the target
model. If the distributions of drafter and target model are equal, both therefore draw the same token, at any
temperature.
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
    """Models and inputs of a traced step, as drafters use them.

    Args:
        weights: Weights of all models; the drafter's weights are last.
        target: The target model.
        metadata: Attention metadata of the target model's pass. In steps that verify drafts, each token row
            has a logits row.
        batch_slots: int32 [B], the batch slot of each sequence; out of range for unused sequences and
            sequences that compute nothing.
    """

    weights: list[Array]
    target: LanguageModel
    metadata: AttentionMetadata
    batch_slots: Int[Array, " b"]


class LastRows(NamedTuple):
    """The last computed and accepted token of each sequence of a step.

    Args:
        batch_slots: int32 [n], batch slots, each at most once; out of range for padding.
        rows: int32 [n], the token row of each of these tokens.
    """

    batch_slots: Int[Array, " n"]
    rows: Int[Array, " n"]


class Drafter(Protocol):
    """Protocol of drafters that run on the device."""

    @property
    def layout(self) -> KVCacheLayout:
        """The layout of the drafter's KV cache arrays.

        These arrays follow the target model's arrays and use the same block tables.
        """
        ...

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the target model's modules whose outputs the drafter reads."""
        ...

    def states(self, num_batch_slots: int) -> list[tuple[tuple[int, ...], Any]]:
        """Returns shapes and dtypes of the arrays that the drafter keeps by batch slot, initially zeros."""
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
        """Draws draft tokens, before the target model's pass.

        Args:
            traced: The step.
            tokens: The tokens of all token rows. Those after the first one of each sequence are replaced by
                draft tokens.
            kv_cache: All KV cache arrays.
            states: The drafter's arrays by batch slot.
            batch: Sampling parameters of the logits rows. Rows of padding have parameters without effect.
            options: Options of the sampler.

        Returns:
            The tokens, and the KV cache arrays.
        """
        ...

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
        """Processes the outputs of the target model's pass.

        Args:
            traced: The step.
            tokens: The tokens of all token rows.
            outputs: Outputs of the modules in `paths`.
            kv_cache: All KV cache arrays.
            states: The drafter's arrays by batch slot.
            last: The last computed and accepted token of each sequence.
            has_drafted: Whether `draft` was called in this step.

        Returns:
            The KV cache arrays and the states.
        """
        ...


class OnePass[T](Protocol):
    """One pass of a drafter, with at most one token per sequence."""

    def __call__(
        self,
        i: Int[Array, ""],
        token_rows: Int[Array, " b"],
        is_live: Bool[Array, " b"],
        tokens: Int[Array, " b"],
        carry: T,
        /,
    ) -> tuple[Float[Array, "b v"], T]:
        """Returns the logits after the given tokens, and the carry of the next pass.

        Args:
            i: Number of the pass, from 0.
            token_rows: Token row of each sequence's token; out of range if the sequence is not live.
            is_live: Whether each sequence takes part in the pass.
            tokens: The token of each sequence.
            carry: The carry of the previous pass.
        """
        ...


def draw_drafts[T](
    metadata: AttentionMetadata,
    tokens: Int[Array, " t"],
    batch: SamplingBatch,
    options: SamplerOptions,
    one_pass: OnePass[T],
    carry: T,
    *,
    caches_last: bool,
) -> tuple[Int[Array, " t"], T]:
    """Draws the draft tokens of all sequences, one pass after the other.

    Args:
        metadata: Attention metadata of the step, in which each token row has a logits row.
        tokens: The tokens of all token rows. Those after the first one of each sequence are replaced.
        batch: Sampling parameters of the logits rows.
        options: Options of the sampler.
        one_pass: Computes one pass.
        carry: The carry of the first pass.
        caches_last: Whether to run one more pass for the last draft token, without drawing a token.

    Returns:
        The tokens, and the carry of the last pass.
    """
    first, num_tokens = metadata.query_start_loc[:-1], tokens.shape[0]
    num_drafts = num_drafts_of(metadata)
    num_passes = num_drafts + caches_last

    def step(state: tuple[Int[Array, ""], Array, T]) -> tuple[Int[Array, ""], Array, T]:
        i, tokens, carry = state
        is_live = i < num_passes
        token_rows = jnp.where(is_live, first + i, num_tokens)
        token_ids = tokens.at[token_rows].get(mode="fill", fill_value=0)
        logits, carry = one_pass(i, token_rows, is_live, token_ids, carry)
        drawn = options.sample(logits, _rows_of(batch, jnp.minimum(token_rows, num_tokens - 1), tokens, i))
        draft_rows = jnp.where(i < num_drafts, token_rows + 1, num_tokens)
        return i + 1, tokens.at[draft_rows].set(drawn.token_ids, mode="drop"), carry

    state = lax.while_loop(lambda state: state[0] < jnp.max(num_passes), step, (jnp.int32(0), tokens, carry))
    return state[1], state[2]


def num_drafts_of(metadata: AttentionMetadata) -> Int[Array, " b"]:
    """Returns the number of drafts of each sequence of a verification step; -1 for unused sequences."""
    return metadata.query_start_loc[1:] - metadata.query_start_loc[:-1] - 1


def _rows_of(
    batch: SamplingBatch, rows: Int[Array, " b"], tokens: Int[Array, " t"], num_drafts: Int[Array, ""]
) -> SamplingBatch:
    """Returns the sampling parameters of the given logits rows, each of which follows `num_drafts` drafts."""
    shared = ("token_counts", "drafts")
    values = {
        field.name: getattr(batch, field.name)[rows]
        for field in dataclasses.fields(batch)
        if field.name not in shared
    }
    assert batch.drafts is not None, "drafts is None in a step that verifies drafts"
    back = jnp.arange(batch.drafts.shape[1])
    previous_tokens = tokens[jnp.maximum(rows[:, None] - back, 0)]
    drafts = jnp.where(back < num_drafts, previous_tokens, batch.token_counts.shape[1])
    wants_logprobs = jnp.zeros(rows.shape, bool)
    values |= {"drafts": drafts, "token_counts": batch.token_counts, "wants_logprobs": wants_logprobs}
    return SamplingBatch(**values)

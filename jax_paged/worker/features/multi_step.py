"""Multi-step decoding: several decode steps in one program, without transfers to the host in between."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jax_paged.worker.compilation.programs import StepResult, StepState
from jax_paged.worker.compilation.traced_values import TokenTargets, TracedStep
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.sampling.sampler import SampledTokens

type Decode = Callable[
    [TracedStep, Array, StepState[Array]],
    tuple[SampledTokens, TokenTargets, StepResult[Array], StepState[Array]],
]


def decode_steps(
    decode: Decode, step: TracedStep, tokens: Int[Array, " b"], state: StepState[Array]
) -> tuple[StepResult[Array], Int[Array, " b"], StepState[Array]]:
    """Decodes until every sequence has drawn an end token or its maximum number of tokens.

    A finished sequence takes no further part: it writes no keys and values, attends to nothing, and its
    tokens are not counted. A sequence is finished from the start if its last known token is an end token.
    This can happen because the host did not know that token when it scheduled the step.

    Args:
        decode: Computes one decode step.
        step: The first decode step.
        tokens: The last known token of each sequence.
        state: Arrays that stay on the device.

    Returns:
        The result with tokens int32 [K, 5, B], whose fifth row is 1 if the sequence was not finished before
        that decode step; the last token of each sequence; and the state.
    """
    context, fields, k = step.context, step.fields, step.bucket.num_steps
    num_batch_slots = len(state.token_counts)
    is_cross = jnp.array([group.is_cross for group in context.layout.groups])[:, None]
    size, no_slot = context.block_size, state.kv_cache[0].shape[0] * context.block_size

    def ends(tokens: Array) -> Array:
        return jnp.any(tokens[:, None] == fields["end_tokens"], axis=1)

    def fields_at(i: Array, is_live: Array) -> dict[str, Array]:
        """Returns the fields of the packed buffer for decode step `i`."""
        lens = fields["context_lens"] + jnp.where(is_cross, 0, i)
        table_slots = jnp.maximum(lens - 1, 0)
        blocks = jnp.take_along_axis(step.tables, (table_slots // size)[:, :, None], axis=2)[:, :, 0]
        slots = jnp.where(is_live & ~is_cross, blocks * size + table_slots % size, no_slot)
        changed = {
            "batch_slots": jnp.where(is_live, fields["batch_slots"], num_batch_slots),
            "positions": jnp.where(is_live, fields["positions"] + i, 0),
            "slot_mapping": slots,
            "state_slots": jnp.where(is_live, fields["state_slots"], context.num_state_slots),
            "context_lens": jnp.where(is_live, lens, 0),
            "sample_positions": fields["sample_positions"] + i,
            "count_slots": jnp.where(is_live, fields["count_slots"], num_batch_slots),
            "forced_tokens": lax.dynamic_slice_in_dim(fields["forced_tokens"], i, 1, axis=1),
        }
        if context.features.has_mrope:
            changed["mrope_positions"] = fields["mrope_positions"] + i
        return changed

    def one_step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        i, is_live, tokens, state, results, details, captured = carry
        drawn, _, new, state = decode(step.with_fields(**fields_at(i, is_live)), tokens, state)
        new_results = jnp.concatenate([new.tokens, is_live.astype(jnp.int32)[None]])
        tokens = jnp.where(is_live, drawn.token_ids, tokens)
        goes_on = (i + 1 < fields["max_draws"]) & ~ends(tokens) & drawn.is_finite & drawn.has_choice
        results, details = results.at[i].set(new_results), details.at[i].set(new.details)
        captured = {name: captured[name].at[i].set(values) for name, values in new.captured.items()}
        return i + 1, is_live & goes_on, tokens, state, results, details, captured

    b, columns = step.bucket.num_seqs, 1 + 2 * context.sampling.max_logprobs
    results, details = jnp.zeros((k, 5, b), jnp.int32), jnp.zeros((k, b, columns), jnp.int32)
    is_live = (fields["max_draws"] > 0) & ~ends(tokens)
    captured = {name: jnp.zeros((k, b, *shape)) for name, shape in context.features.captured.items()}
    # The loop does not change the block tables and the last tokens, so it does not carry them.
    carried: Any = dataclasses.replace(state, block_tables=None, last_tokens=None)
    carry = jnp.int32(0), is_live, tokens, carried, results, details, captured
    carry = lax.while_loop(lambda carry: (carry[0] < k) & jnp.any(carry[1]), one_step, carry)
    _, _, tokens, carried, results, details, captured = carry
    state = dataclasses.replace(carried, block_tables=state.block_tables, last_tokens=state.last_tokens)
    return StepResult(tokens=results, details=details, hidden=None, captured=captured), tokens, state


def fill(
    view: dict[str, np.ndarray],
    batch: InputBatch,
    batch_slots: np.ndarray,
    start: np.ndarray,
    max_draws: tuple[int, ...],
    block_size: int,
) -> None:
    """Fills the fields `max_draws` and `end_tokens` of the packed buffer.

    Asserts that every sequence has blocks for all tokens that it may draw.

    Args:
        view: Fields of the packed buffer.
        batch: State of the batch slots.
        batch_slots: Batch slot of each sequence.
        start: Position of the token that each sequence computes first.
        max_draws: Maximum number of tokens that each sequence may draw.
        block_size: Tokens per block.
    """
    n = len(batch_slots)
    assert len(max_draws) == n, f"{n} sequences have {len(max_draws)} values of max_draws"
    view["max_draws"][:n] = max_draws
    view["end_tokens"][:n] = batch.end_tokens[batch_slots]
    table_slots = start - batch.num_dropped[batch_slots]
    last = (table_slots + np.array(max_draws, np.int32) - 1) // block_size
    for tables, is_cross in zip(batch.block_tables, batch.is_cross, strict=True):
        assert is_cross or tables[batch_slots, last].min() > 0, "a decode step would write to the null block"

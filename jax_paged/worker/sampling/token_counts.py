"""Token counts of all batch slots on the device, from which penalties are computed.

The array is int32 [S, V]: row s belongs to batch slot s. A step reads the rows of its sequences, adds the
drawn tokens, and returns the array, which is updated in place. When a sequence with penalties takes a batch
slot, as a new sequence or after a preemption, ResetTokenCountsProgram writes its row. Rows of sequences
without penalties have no meaning.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.input_batch import TokenCountReset
from jax_paged.worker.sampling.sampler import IN_PROMPT

# Number of tokens that one call of ResetTokenCountsProgram counts.
NUM_RESET_TOKENS = 2048


def add_tokens(
    token_counts: Int[Array, "s v"], batch_slots: Int[Array, " b"], token_ids: Int[Array, " b"]
) -> Int[Array, "s v"]:
    """Counts one drawn token for each given batch slot; slots that do not exist are dropped."""
    return token_counts.at[batch_slots, token_ids].add(1, mode="drop")


@dataclasses.dataclass(frozen=True)
class ResetTokenCountsProgram(Program):
    """Program that counts up to NUM_RESET_TOKENS tokens of one sequence in the row of its batch slot."""

    def __str__(self) -> str:
        return "reset token counts"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def reset(token_counts: Array, packed: Array) -> Array:
            (batch_slot, is_first, num_prompt), tokens = packed[:3], packed[3:]
            vocab_size = token_counts.shape[1]
            is_prompt = jnp.arange(NUM_RESET_TOKENS) < num_prompt
            zeros = jnp.zeros(vocab_size, jnp.int32)
            # Ids from vocab_size on are padding and are dropped.
            prompt = zeros.at[jnp.where(is_prompt, tokens, vocab_size)].set(IN_PROMPT, mode="drop")
            output = zeros.at[jnp.where(is_prompt, vocab_size, tokens)].add(1, mode="drop")
            row = jnp.where(
                is_first != 0, 0, lax.dynamic_index_in_dim(token_counts, batch_slot, keepdims=False)
            )
            return lax.dynamic_update_index_in_dim(token_counts, (row | prompt) + output, batch_slot, 0)

        jitted = jax.jit(reset, donate_argnums=0, out_shardings=context.replicated)
        packed = context.shape((3 + NUM_RESET_TOKENS,), jnp.int32)
        return jitted.trace(context.state().token_counts, packed)


def reset_token_counts(
    run: Callable[..., Any],
    token_counts: Array,
    resets: Iterable[TokenCountReset],
) -> Array:
    """Initializes the rows of sequences that take a batch slot.

    Args:
        run: Runs a program with the given arguments.
        token_counts: int32 [S, V]. Donated.
        resets: The sequences.

    Returns:
        The updated token counts.
    """
    for reset in resets:
        for packed in _chunks(reset, token_counts.shape[1]):
            token_counts = run(ResetTokenCountsProgram(), token_counts, packed)
    return token_counts


def _chunks(reset: TokenCountReset, vocab_size: int) -> Iterator[np.ndarray]:
    """Yields the packed inputs of the calls that count a sequence.

    Each is int32 [3 + NUM_RESET_TOKENS]: the batch slot, whether this is the first call, the number of prompt
    tokens, and the tokens.
    """
    tokens = np.array([*reset.prompt_token_ids, *reset.output_token_ids], np.int32)
    for start in range(0, len(tokens), NUM_RESET_TOKENS):
        chunk = tokens[start : start + NUM_RESET_TOKENS]
        packed = np.full(3 + NUM_RESET_TOKENS, vocab_size, np.int32)
        num_prompt = min(max(len(reset.prompt_token_ids) - start, 0), len(chunk))
        packed[:3] = reset.batch_slot, start == 0, num_prompt
        packed[3 : 3 + len(chunk)] = chunk
        yield packed

"""Log-probabilities of prompt tokens, computed from the hidden states of a step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array

from jax_paged.core.runner_output import TokenLogprobs, read_details
from jax_paged.core.scheduler_output import ScheduledSequence
from jax_paged.worker.sampler import token_logprobs

# Prompt positions whose log-probabilities are computed at a time.
NUM_ROWS = 64


class PromptLogprobs:
    """The program that computes them, and the loop around it.

    Args:
        weights: Of the model.
        logits: (weights, hidden states [N, E]) to logits [N, V].
        hidden: Shape of a step's hidden states, padded to the largest step.
        max_logprobs: Most likely tokens to report.
        replicated: Where inputs are placed.
    """

    def __init__(
        self,
        weights: list[Array],
        logits: Callable[[list[Array], Array], Array],
        hidden: jax.ShapeDtypeStruct,
        max_logprobs: int,
        replicated: NamedSharding,
    ) -> None:
        def compute(weights: list[Array], hidden: Array, rows: Array, targets: Array) -> Array:
            logprob, rank, top_ids, top_logprobs = token_logprobs(
                logits(weights, hidden[rows]), targets, jnp.ones(rows.shape, bool), max_logprobs=max_logprobs
            )
            columns = [rank[:, None], top_ids, _bits(top_logprobs), _bits(logprob)[:, None]]
            return jnp.concatenate(columns, axis=1)

        index = jax.ShapeDtypeStruct((NUM_ROWS,), jnp.int32, sharding=replicated)
        self._compiled: Any = jax.jit(compute).trace(weights, hidden, index, index).lower().compile()
        self._max_tokens = hidden.shape[0]
        self._replicated = replicated

    def of_step(
        self, rows: Sequence[ScheduledSequence], weights: list[Array], hidden: Array
    ) -> list[list[TokenLogprobs]]:
        """Returns those of the prompt tokens that follow the rows of a step; empty where not wanted."""
        out: list[list[TokenLogprobs]] = []
        first = 0
        for row in rows:
            wants = row.group.sampling_params.prompt_logprobs is not None
            prompt = row.seq.prompt_token_ids
            last = min(row.start + row.num_tokens, len(prompt) - 1) if wants else row.start
            targets = prompt[row.start + 1 : last + 1]
            out.append(self._run(weights, hidden, first, targets) if targets else [])
            first += row.num_tokens
        return out

    def _run(
        self, weights: list[Array], hidden: Array, first: int, targets: list[int]
    ) -> list[TokenLogprobs]:
        out: list[TokenLogprobs] = []
        if hidden.shape[0] != self._max_tokens:
            # A one-token chunk of a prompt in a decode step: its few rows are brought to the usual shape.
            padded = np.zeros((self._max_tokens, hidden.shape[1]), hidden.dtype)
            padded[: hidden.shape[0]] = np.asarray(hidden)
            hidden = jax.device_put(padded, self._replicated)
        for i in range(0, len(targets), NUM_ROWS):
            chunk = targets[i : i + NUM_ROWS]
            rows, ids = np.zeros((2, NUM_ROWS), np.int32)
            rows[: len(chunk)] = np.arange(first + i, first + i + len(chunk))
            ids[: len(chunk)] = chunk
            placed = jax.device_put((rows, ids), self._replicated)
            result = np.asarray(self._compiled(weights, hidden, *placed))
            ranks, top_ids, top_logprobs = read_details(result[:, :-1])
            logprobs = result[:, -1].view(np.float32)
            out += [
                TokenLogprobs(float(logprobs[j]), ranks[j], top_ids[j], top_logprobs[j])
                for j in range(len(chunk))
            ]
        return out


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.int32)

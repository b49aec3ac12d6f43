"""Log-probabilities of prompt tokens and drafts, computed from the hidden states of a step."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.core.scheduler_output import ScheduledSequence, SchedulerOutput
from jax_paged.worker.compilation.programs import Program, TraceContext, bits
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.sampling.sampler import token_logprobs

# Number of tokens per run of PromptLogprobsProgram.
NUM_ROWS = 64


@dataclasses.dataclass(frozen=True)
class PromptLogprobsProgram(Program):
    """Program that computes the log-probabilities of NUM_ROWS given tokens.

    Its arguments are the weights, the hidden states of a mixed step, and int32 [2, NUM_ROWS]: token rows of
    the step, and the token that follows each of them. It returns int32 [NUM_ROWS, 2 + 2N]: bits of the
    log-probability, rank, ids of the N most likely tokens, and bits of their log-probabilities.

    Args:
        hidden_size: Columns of the hidden states.
    """

    hidden_size: int
    reads_hidden: ClassVar[bool] = True

    def __str__(self) -> str:
        return "prompt logprobs"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def compute(weights: list[Array], hidden: Array, packed: Array) -> Array:
            rows, targets = packed
            logits = context.logits(context.merge(weights), hidden[rows])
            wanted = jnp.ones(NUM_ROWS, bool)
            logprob, rank, top_ids, top = token_logprobs(
                logits, targets, wanted, max_logprobs=context.sampling.max_logprobs
            )
            columns = [bits(logprob)[:, None], rank[:, None], top_ids, bits(top)]
            return jnp.concatenate(columns, axis=1)

        hidden = context.shape((context.max_num_batched_tokens, self.hidden_size), context.dtype)
        packed = context.shape((2, NUM_ROWS), jnp.int32)
        jitted = jax.jit(compute, out_shardings=context.replicated)
        return jitted.trace(context.weights, hidden, packed)


@dataclasses.dataclass(frozen=True, eq=False)
class PendingPromptLogprobs:
    """Log-probabilities that the device is computing for one scheduled sequence.

    Args:
        row: Index in SchedulerOutput.scheduled.
        num_tokens: Number of tokens.
        num_top: Number of most likely tokens to report.
        results: Results of PromptLogprobsProgram, one per NUM_ROWS tokens.
    """

    row: int
    num_tokens: int
    num_top: int
    results: list[Array]

    def read(self) -> list[TokenLogprobs]:
        """Waits for the results and returns one entry per token."""
        table = np.concatenate([np.asarray(x) for x in self.results])[: self.num_tokens]
        max_logprobs = table.shape[1] // 2 - 1
        logprobs = np.ascontiguousarray(table[:, 0]).view(np.float32).tolist()
        ids = table[:, 2 : 2 + self.num_top].tolist()
        top = np.ascontiguousarray(table[:, 2 + max_logprobs :]).view(np.float32)[:, : self.num_top].tolist()
        columns = zip(logprobs, table[:, 1].tolist(), ids, top, strict=True)
        return [TokenLogprobs(*values) for values in columns]


def row_targets(output: SchedulerOutput, batch: InputBatch) -> dict[int, tuple[list[int], int]]:
    """Returns the tokens of a step that need log-probabilities: prompt tokens or drafts.

    Args:
        output: The step.
        batch: State of the batch slots.

    Returns:
        By index of the scheduled sequence, the tokens and the number of most likely tokens to report.
    """
    rows, targets = output.scheduled, {}
    if output.scores_drafts:
        targets = {i: (rows[i].token_ids[1:], 0) for i, _, num_logits in output.samples if num_logits > 1}
    if not batch.prompts:
        return targets
    for i, batch_slot in enumerate(batch.slots_of([row.seq_id for row in rows]).tolist()):
        if batch_slot in batch.prompts:
            prompt, num_top = batch.prompts[batch_slot]
            if tokens := targets_of(rows[i], prompt):
                targets[i] = tokens, num_top
    return targets


def targets_of(row: ScheduledSequence, prompt_token_ids: list[int]) -> list[int]:
    """Returns the prompt tokens that follow the tokens that a sequence computes in a step."""
    return prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1]


def begin(
    run: Callable[..., Any],
    program: PromptLogprobsProgram,
    weights: list[Array],
    hidden: Array,
    first: int,
    targets: list[int],
) -> list[Array]:
    """Starts computing the log-probabilities of tokens that follow consecutive token rows.

    Args:
        run: Runs a program.
        program: The program.
        weights: The model's weights.
        hidden: Hidden states of a mixed step.
        first: The first of the token rows.
        targets: The tokens.

    Returns:
        The results of the program, one per NUM_ROWS tokens.
    """
    results = []
    for i in range(0, len(targets), NUM_ROWS):
        chunk = targets[i : i + NUM_ROWS]
        packed = np.zeros((2, NUM_ROWS), np.int32)
        packed[0, : len(chunk)] = np.arange(first + i, first + i + len(chunk))
        packed[1, : len(chunk)] = chunk
        results.append(run(program, weights, hidden, packed))
    return results


def begin_rows(
    run: Callable[..., Any],
    program: PromptLogprobsProgram,
    weights: list[Array],
    hidden: Array,
    output: SchedulerOutput,
    targets: dict[int, tuple[list[int], int]],
) -> list[PendingPromptLogprobs]:
    """Starts computing the log-probabilities of a step.

    Args:
        run: Runs a program.
        program: The program.
        weights: The model's weights.
        hidden: Hidden states of the step.
        output: The step.
        targets: The tokens, as returned by `row_targets`.
    """
    pending, first = [], 0
    for i, row in enumerate(output.scheduled if targets else ()):
        if i in targets:
            tokens, num_top = targets[i]
            results = begin(run, program, weights, hidden, first, tokens)
            pending.append(PendingPromptLogprobs(i, len(tokens), num_top, results))
        first += row.num_tokens
    return pending

"""Per-request logits processors that are Python functions, as in vLLM's V0 engine.

The step draws tokens as usual. Then the logits of requests with such functions are recomputed from the hidden
states of the step, transferred to the host, changed by the functions, and a token is drawn from them on the
device. Each token therefore waits for the host twice.
"""

import dataclasses
import inspect
import logging
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_paged.sampling_params import MAX_BIAS_IDS, LogitsFunction
from jax_paged.worker.compilation.programs import DeviceInputs, Program, TraceContext, packed_results
from jax_paged.worker.input_batch import InputBatch
from jax_paged.worker.packed_buffer import NUM_SAMPLING_COLUMNS, sampling_batch

if TYPE_CHECKING:
    from jax_paged.worker.compilation.compiler import CompiledPrograms

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RowLogitsProgram(Program):
    """Program that computes the logits of one token row, float32 [1, V].

    Its arguments are the weights, the hidden states of a mixed step, and the index of the token row, int32
    [1].

    Args:
        hidden_size: Columns of the hidden states.
    """

    hidden_size: int

    def __str__(self) -> str:
        return "row logits"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def compute(weights: list[Array], hidden: Array, row: Array) -> Array:
            return context.logits(context.merge(weights), hidden[row])

        hidden = context.shape((context.max_num_batched_tokens, self.hidden_size), context.dtype)
        jitted = jax.jit(compute, out_shardings=context.replicated)
        return jitted.trace(context.weights, hidden, context.shape((1,), jnp.int32))


@dataclasses.dataclass(frozen=True)
class RedrawProgram(Program):
    """Program that draws a token from changed logits.

    Its arguments are the model's logits, the changed logits, one row of the field `sampling`, the position,
    and one row each of bias_ids, bias_values and token_mask. It returns int32 [4, 1] and [1, 1 + 2N], in the
    format of StepResult.tokens and StepResult.details.
    """

    def __str__(self) -> str:
        return "redraw"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def draw(
            logits: Array, processed: Array, sampling: Array, position: Array, *rows: Array
        ) -> tuple[Array, Array]:
            fields = {"sampling": sampling, "sample_positions": position, "count_slots": position * 0}
            batch = sampling_batch(fields, jnp.zeros_like(logits, jnp.int32), *rows)
            return packed_results(context.sampling.sample(logits, batch, processed=processed))

        logits = context.shape((1, context.vocab_size), jnp.float32)
        inputs = [
            context.shape((1, NUM_SAMPLING_COLUMNS), jnp.int32),
            context.shape((1,), jnp.int32),
            context.shape((1, MAX_BIAS_IDS), jnp.int32),
            context.shape((1, MAX_BIAS_IDS), jnp.float32),
            context.shape((1, context.num_mask_words), jnp.int32),
        ]
        jitted = jax.jit(draw, out_shardings=(context.replicated, context.replicated))
        return jitted.trace(logits, logits, *inputs)


def redraw(
    compiled: "CompiledPrograms",
    weights: list[Array],
    hidden: Array,
    batch: InputBatch,
    fields: dict[str, np.ndarray],
    inputs: DeviceInputs[Any],
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Draws the tokens of requests with Python logits processors again.

    Args:
        compiled: Receives the programs when they are first needed.
        weights: The model's weights.
        hidden: Hidden states of the step, which is a mixed step.
        batch: State of the batch slots.
        fields: Fields of the step's packed buffer.
        inputs: Device inputs of the step.

    Returns:
        By logits row, a column of StepResult.tokens, int32 [4], and a row of StepResult.details, int32
        [1 + 2N].
    """
    redrawn, run = {}, compiled.run
    row_logits, drawing = RowLogitsProgram(hidden.shape[1]), RedrawProgram()
    for program in (row_logits, drawing):
        compiled.add(program)
    for j, batch_slot in enumerate(fields["sample_slots"].tolist()):
        functions = batch.features.host_processors.get(batch_slot)
        if functions is None:
            continue
        row, position = fields["logits_rows"][j : j + 1], fields["sample_positions"][j : j + 1]
        logits = run(row_logits, weights, hidden, row)
        prompt, output = batch.known_tokens[batch_slot].before(int(position[0]))
        changed = _apply(functions, prompt, output, np.asarray(logits)[0].copy())
        sampling = inputs.bias_ids, inputs.bias_values, inputs.token_mask
        rows = [np.asarray(x)[j : j + 1] for x in sampling]
        results, details = run(drawing, logits, changed[None], fields["sampling"][j : j + 1], position, *rows)
        redrawn[j] = np.asarray(results)[:, 0], np.asarray(details)[0]
    return redrawn


def _apply(
    functions: list[LogitsFunction], prompt: list[int], output: list[int], logits: np.ndarray
) -> np.ndarray:
    """Returns the logits after all functions. If a function fails, returns NaN, which ends the request."""
    shape = logits.shape
    try:
        for function in functions:
            takes_prompt = len(inspect.signature(function).parameters) == 3
            logits = function(*([prompt] if takes_prompt else []), output, logits)
        logits = np.asarray(logits, np.float32)
        if logits.shape != shape:
            raise ValueError(f"logits processors must return the shape {shape}, got {logits.shape}")
        return logits
    except Exception:
        _LOGGER.exception("a logits processor raised an error; its request ends with an error")
        return np.full(shape, np.nan, np.float32)

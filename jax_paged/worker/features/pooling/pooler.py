"""Pooling of texts from the hidden states of a step."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.models.causal_lm import LanguageModel
from jax_paged.models.checkpoint import read_config, resolve_model_dir
from jax_paged.models.features.pooling import PoolingSpec, read_pooling
from jax_paged.models.weights import LoadedModel
from jax_paged.worker.compilation.programs import Program, TraceContext
from jax_paged.worker.input_batch import InputBatch

# Names of the captured arrays of a scheduled sequence: its pooled hidden state, or all hidden states.
POOLED, HIDDEN = "pooled", "hidden"


def pooling_of(args: EngineArgs, loaded: LoadedModel, *, is_from_checkpoint: bool) -> PoolingSpec | None:
    """Returns how the engine's model pools texts; None if it only generates tokens.

    Args:
        args: Engine arguments.
        loaded: The model.
        is_from_checkpoint: Whether the model was loaded from args.model, and not provided by the caller.

    Raises:
        ValueError: If the model does not support what the arguments ask for.
    """
    folder = resolve_model_dir(args.model) if is_from_checkpoint else None
    overrides = args.hf_overrides or {}
    pooler = args.pooler
    return read_pooling(
        folder,
        dict(overrides) if folder is None else read_config(folder, overrides),
        loaded.architecture,
        loaded.config.hidden_size,
        pools={"pooling": True, "generate": False}.get(args.runner),
        pooling_type=pooler.pooling_type,
        normalize=pooler.use_activation if pooler.normalize is None else pooler.normalize,
    )


@dataclasses.dataclass(frozen=True)
class PoolProgram(Program):
    """Program that computes weighted sums of hidden states, and class logits from them for a classifier.

    Its arguments are the weights, the hidden states of a mixed step, and int32 [2, T]: for each token row,
    the index of the sum that it belongs to (S for none) and the bits of its float32 weight. It returns
    float32 [S, P]: S is max_num_seqs, and P the size of an embedding or the number of classes.

    Args:
        hidden_size: Columns of the hidden states.
    """

    hidden_size: int
    reads_hidden: ClassVar[bool] = True

    def __str__(self) -> str:
        return "pool"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""

        def compute(weights: list[Array], hidden: Array, packed: Array) -> Array:
            sums = weighted_sums(hidden, packed, context.max_num_seqs)
            return finish(context.merge(weights), sums, context)

        num_rows = context.max_num_batched_tokens
        hidden = context.shape((num_rows, self.hidden_size), context.dtype)
        packed = context.shape((2, num_rows), jnp.int32)
        return jax.jit(compute, out_shardings=context.replicated).trace(context.weights, hidden, packed)


def weighted_sums(
    hidden: Float[Array, "t e"], packed: Int[Array, "2 t"], num_sums: int
) -> Float[Array, "s e"]:
    """Returns weighted sums of hidden states in float32. Rows with weight 0 may contain any values, even NaN.

    Args:
        hidden: Hidden states of all token rows.
        packed: For each token row, the index of its sum and the bits of its weight, as for PoolProgram.
        num_sums: Number of sums, S.
    """
    weights = lax.bitcast_convert_type(packed[1], jnp.float32)[:, None]
    rows = jnp.where(weights == 0, 0, hidden.astype(jnp.float32) * weights)
    return jnp.zeros((num_sums, hidden.shape[1])).at[packed[0]].add(rows, mode="drop")


def finish(model: LanguageModel, sums: Float[Array, "s e"], context: TraceContext) -> Float[Array, "s p"]:
    """Converts pooled hidden states into the model's result: unchanged embeddings, or class logits."""
    spec = context.features.pooling
    if spec is None or not spec.label_tokens:
        return model.pooled_output(sums)
    logits = model.logits(sums.astype(context.dtype))[:, jnp.array(spec.label_tokens)]
    return logits[:, 1:] - logits[:, :1] if spec.is_two_way else logits


@dataclasses.dataclass(frozen=True, eq=False)
class PendingPooled:
    """Pooled hidden states that the device is computing for the scheduled sequences of a step.

    Args:
        sum_index: Index in `sums`, by index of the scheduled sequence.
        hidden_rows: First token row and number of token rows, by index of the scheduled sequence, for
            sequences whose hidden states are all returned.
        sums: Result of PoolProgram; None if no sequence needs a sum.
        hidden: Hidden states of the step; None if no sequence needs all of them.
    """

    sum_index: dict[int, int]
    hidden_rows: dict[int, tuple[int, int]]
    sums: Array | None
    hidden: Array | None

    def read(self) -> dict[int, dict[str, np.ndarray]]:
        """Waits for the results; returns them by index of the scheduled sequence and by name."""
        sums, hidden = np.asarray(self.sums), np.asarray(self.hidden)
        found = {i: {POOLED: sums[index]} for i, index in self.sum_index.items()}
        for i, (first, n) in self.hidden_rows.items():
            found[i] = {HIDDEN: hidden[first : first + n].astype(np.float32)}
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedPooling:
    """The pooling of one step.

    Args:
        packed: Argument of PoolProgram.
        sum_index: As in PendingPooled.
        hidden_rows: As in PendingPooled.
    """

    packed: np.ndarray
    sum_index: dict[int, int]
    hidden_rows: dict[int, tuple[int, int]]

    def begin(self, run: Callable[..., Any], weights: list[Array], hidden: Array) -> PendingPooled:
        """Starts computing the pooled hidden states.

        Args:
            run: Runs a program.
            weights: The model's weights.
            hidden: Hidden states of the step.
        """
        sums = None
        if self.sum_index:
            sums = run(PoolProgram(hidden.shape[1]), weights, hidden, self.packed)
            sums.copy_to_host_async()
        return PendingPooled(self.sum_index, self.hidden_rows, sums, hidden if self.hidden_rows else None)


def plan_pooling(output: SchedulerOutput, batch: InputBatch, context: TraceContext) -> PlannedPooling | None:
    """Returns the pooling of a step; None if no scheduled sequence is pooled.

    Args:
        output: The step.
        batch: State of the batch slots.
        context: The limits of the engine.
    """
    if not batch.features.pooling:
        return None
    packed = np.zeros((2, context.max_num_batched_tokens), np.int32)
    packed[0] = context.max_num_seqs
    weights, first = packed[1].view(np.float32), 0
    sum_index: dict[int, int] = {}
    hidden_rows: dict[int, tuple[int, int]] = {}
    batch_slots = batch.slots_of([row.seq_id for row in output.scheduled]).tolist()
    for i, (row, batch_slot) in enumerate(zip(output.scheduled, batch_slots, strict=True)):
        pooling_type, prompt_len = batch.features.pooling.get(batch_slot, (None, 0))
        end = first + row.num_tokens
        rows = slice(first, end)
        first = end
        if pooling_type == "ALL":
            hidden_rows[i] = rows.start, row.num_tokens
            continue
        if pooling_type == "LAST":
            rows = slice(end - 1, end if row.start + row.num_tokens == prompt_len else end - 1)
        elif pooling_type == "CLS":
            rows = slice(rows.start, rows.start + (row.start == 0))
        if pooling_type is not None and rows.start < rows.stop:
            sum_index[i] = len(sum_index)
            packed[0, rows] = sum_index[i]
            weights[rows] = 1 / prompt_len if pooling_type == "MEAN" else 1
    return PlannedPooling(packed, sum_index, hidden_rows) if sum_index or hidden_rows else None

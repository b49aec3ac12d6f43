"""Programs of a pipeline whose stages are all in one process.

    stage 0   tokens --> embeddings, layers --> hidden states
    stage 1                                     `--> layers --> hidden states
    stage 2                                                     `--> layers, norm, logits, sampler --> results
      ^                                                                             |
      `----------------- last sampled token of every batch slot --------------------'

A program of a model without stages becomes a chain of programs, one per stage. Each stage has the part of the
KV cache for its layers, and a copy of the block tables of all batch slots. Each stage receives the step's
input buffer from the host. Hidden states are copied between the devices of consecutive stages.

A step is dispatched to all stages at once. A stage starts when the hidden states of the previous stage are
available; meanwhile it computes steps of other engines.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jax_paged.worker.block_mover import CopyProgram, SwapInProgram, SwapOutProgram
from jax_paged.worker.block_tables import WriteBlockTablesProgram
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.programs import (
    DeviceInputs,
    Program,
    StepResult,
    StepState,
    TraceContext,
)
from jax_paged.worker.traced_step import StepProgram, input_shapes, open_step, with_drawn_tokens


@dataclasses.dataclass(frozen=True)
class StageStepProgram(Program):
    """The step of one bucket in any stage except the last.

    Arguments: weights, arrays of the KV cache, block tables (arrays and block tables are donated), the packed
    input buffer, and the hidden states of the previous stage. The first stage takes the last token of every
    batch slot instead of hidden states. Results: hidden states, arrays of the KV cache, block tables.

    Args:
        bucket: The shape of the step.
    """

    bucket: Bucket

    def __str__(self) -> str:
        """Returns the name of the bucket."""
        return str(self.bucket)

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program for the model and devices of a stage."""
        bucket, is_first = self.bucket, not context.stage.hidden_size

        def step(
            weights: list[Array], kv_cache: list[Array], block_tables: Array, packed: Array, given: Array
        ) -> tuple[Array, list[Array], Array]:
            # Only the last stage reads biases and masks. `packed` takes the place of these arrays.
            inputs = DeviceInputs(packed=packed, bias_ids=packed, bias_values=packed, token_mask=packed)
            opened, block_tables = open_step(context, bucket, weights, block_tables, inputs)
            x = with_drawn_tokens(opened.fields, given) if is_first else given
            hidden, kv_cache = context.merge(weights).paged(x, kv_cache, opened.metadata())
            return hidden, kv_cache, block_tables

        state, inputs = context.state(), input_shapes(context, bucket)
        pool = context.pool()
        given = state.last_tokens if is_first else inputs.hidden
        out_shardings = context.replicated, [context.pool_sharding] * len(pool), context.replicated
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
        return jitted.trace(context.weights, pool, state.block_tables, inputs.packed, given)


@dataclasses.dataclass(frozen=True, eq=False)
class ProgramChain:
    """A program that consists of one program per stage, lowered or compiled.

    It has the methods of jax.stages.Lowered and jax.stages.Compiled that callers use.

    Args:
        parts: The programs of the stages.
        call: Function that calls the parts in order; its arguments are `parts` and the arguments of the whole
            program.
    """

    parts: list[Any]
    call: Callable[..., Any]

    def compile(self, compiler_options: dict[str, str | bool | int] | None) -> "ProgramChain":
        """Compiles all parts."""
        return ProgramChain(
            [part.compile(compiler_options=compiler_options) for part in self.parts], self.call
        )

    def memory_analysis(self) -> Any:
        """Returns the memory analysis of the part with the largest temporary memory; None if unknown."""
        found = [part.memory_analysis() for part in self.parts]
        if None in found:
            return None
        return max(found, key=lambda memory: memory.temp_size_in_bytes, default=None)

    def __call__(self, *args: Any) -> Any:
        """Calls the program with the arguments of the whole program."""
        return self.call(self.parts, *args)


class Pipeline:
    """Runner for programs on all stages of a model, shared by the threads of several engines.

    Args:
        contexts: Trace context of each stage. List arguments of programs contain the arrays of all stages,
            in order of the stages.
    """

    def __init__(self, contexts: Sequence[TraceContext]) -> None:
        self._contexts = contexts
        self._weights = _slices(len(context.weights) for context in contexts)
        self._pools = _slices(len(context.pool()) for context in contexts)
        # All devices of a stage must receive programs in the same order, because a program's collectives wait
        # for all of them.
        self._locks = [threading.Lock() for _ in contexts]

    def lower(self, program: Program) -> ProgramChain:
        """Traces and lowers the programs that the stages run in place of a program."""
        match program:
            case StepProgram(bucket):
                programs: list[Program] = [StageStepProgram(bucket)] * (len(self._contexts) - 1)
                pairs = zip([*programs, program], self._contexts, strict=True)
                return ProgramChain([p.lower(context) for p, context in pairs], self._step)
            case CopyProgram() | SwapOutProgram() | SwapInProgram():
                return ProgramChain([program.lower(context) for context in self._contexts], self._on_pools)
            case WriteBlockTablesProgram():
                return ProgramChain([program.lower(context) for context in self._contexts], self._on_tables)
            case _:
                return ProgramChain([program.lower(self._contexts[-1])], self._in_last)

    def _step(
        self,
        parts: list[Any],
        weights: list[Array],
        state: StepState[Any],
        inputs: DeviceInputs[Any],
    ) -> tuple[StepResult[Any], StepState[Any]]:
        x, tables, pools = state.last_tokens, list(state.block_tables), []
        for i, part in enumerate(parts[:-1]):
            x = jax.device_put(x, self._contexts[i].replicated)
            own = weights[self._weights[i]], state.kv_cache[self._pools[i]], tables[i]
            with self._locks[i]:
                x, pool, tables[i] = part(*own, inputs.packed, x)
            pools += pool
        x = jax.device_put(x, self._contexts[-1].replicated)
        own = state.kv_cache[self._pools[-1]]
        last = dataclasses.replace(state, kv_cache=own, block_tables=tables[-1])
        inputs = dataclasses.replace(inputs, hidden=x)
        with self._locks[-1]:
            result, last = parts[-1](weights[self._weights[-1]], last, inputs)
        tables[-1] = last.block_tables
        return result, dataclasses.replace(
            last, kv_cache=[*pools, *last.kv_cache], block_tables=tuple(tables)
        )

    def _on_pools(self, parts: list[Any], *args: Any) -> list[Array]:
        """Calls a program on each stage with that stage's part of each list, and returns all results."""
        results = []
        for part, own, lock in zip(parts, self._pools, self._locks, strict=True):
            with lock:
                results += part(*[arg[own] if isinstance(arg, list) else arg for arg in args])
        return results

    def _on_tables(self, parts: list[Any], tables: tuple[Array, ...], changes: Any) -> tuple[Array, ...]:
        written = []
        for part, table, lock in zip(parts, tables, self._locks, strict=True):
            with lock:
                written.append(part(table, changes))
        return tuple(written)

    def _in_last(self, parts: list[Any], *args: Any) -> Any:
        """Calls a program of the last stage; list arguments of such programs are always weights."""
        own = [arg[self._weights[-1]] if isinstance(arg, list) else arg for arg in args]
        with self._locks[-1]:
            return parts[0](*own)


def state_shapes(contexts: Sequence[TraceContext]) -> StepState[Any]:
    """Returns the shapes of the arrays that stay on the devices.

    Args:
        contexts: Trace context of each stage.

    Returns:
        The state of the last stage, with the pools and block tables of all stages.
    """
    states = [context.state() for context in contexts]
    if len(states) == 1:
        return states[0]
    return dataclasses.replace(
        states[-1],
        kv_cache=[array for state in states for array in state.kv_cache],
        block_tables=tuple(state.block_tables for state in states),
    )


def _slices(lengths: Iterable[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(lengths)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]

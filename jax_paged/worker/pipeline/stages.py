"""Programs of a pipeline: what is one program on one group of devices is a chain of them, a stage each.

    stage 0   tokens --> embeddings, layers --> hidden states
    stage 1                                     `--> layers --> hidden states
    stage 2                                                     `--> layers, norm, logits, sampler --> results
      ^                                                                             |
      `----------------- the tokens that were drawn last, of all batch slots -------------'

Every stage has its layers' part of the pool, the block tables of all batch slots, and reads the step's buffer
from the host; hidden states go from device to device. A step is dispatched to all stages at once: each begins
as soon as it has what the one before makes, and works on the step of another engine until then.
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
from jax_paged.worker.traced_step import StepProgram, input_shapes, known_tokens, open_step


@dataclasses.dataclass(frozen=True)
class StageProgram(Program):
    """The step of one bucket in a stage that is not the last.

    Its arguments are weights, arrays of the pool and block tables (these two are donated), the packed buffer,
    and the hidden states of token rows from the previous stage; in the first stage, the last token of every
    batch slot instead. It returns hidden states, arrays of the pool and block tables.
    """

    bucket: Bucket

    def __str__(self) -> str:
        return str(self.bucket)

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        bucket, is_first = self.bucket, not context.stage.hidden_size

        def step(
            weights: list[Array], kv_cache: list[Array], block_tables: Array, packed: Array, given: Array
        ) -> tuple[Array, list[Array], Array]:
            inputs = DeviceInputs(packed=packed, bias_ids=packed, bias_values=packed, token_mask=packed)
            opened, block_tables = open_step(context, bucket, weights, block_tables, inputs)
            x = known_tokens(opened.fields, given) if is_first else given
            hidden, kv_cache = context.merge(weights).paged(x, kv_cache, opened.metadata())
            return hidden, kv_cache, block_tables

        state, inputs = context.state(), input_shapes(context, bucket)
        pool = context.pool()
        given = state.last_tokens if is_first else inputs.hidden
        out_shardings = context.replicated, [context.pool_sharding] * len(pool), context.replicated
        jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
        return jitted.trace(context.weights, pool, state.block_tables, inputs.packed, given)


@dataclasses.dataclass(frozen=True, eq=False)
class StagedProgram:
    """A program of several stages, lowered or compiled; it has what callers ask of jax.stages.

    Args:
        parts: Its programs.
        call: Calls them, in order, with the arguments of the whole.
    """

    parts: list[Any]
    call: Callable[..., Any]

    def compile(self, compiler_options: dict[str, str | bool | int] | None) -> "StagedProgram":
        """Compiles all parts."""
        return StagedProgram(
            [part.compile(compiler_options=compiler_options) for part in self.parts], self.call
        )

    def memory_analysis(self) -> Any:
        """Returns what the part needs that needs most beside its arguments."""
        found = [part.memory_analysis() for part in self.parts]
        by_size = max(found, key=lambda memory: memory.temp_size_in_bytes, default=None)
        return None if None in found else by_size

    def __call__(self, *args: Any) -> Any:
        return self.call(self.parts, *args)


class Pipeline:
    """Runs programs on the stages of a model, for several engines, whose threads may call it at any time.

    Args:
        contexts: What the programs of each stage are traced for. In lists of arguments, those of the first
            stage come first, and so on.
    """

    def __init__(self, contexts: Sequence[TraceContext]) -> None:
        self._contexts = contexts
        self._weights = _slices(len(context.weights) for context in contexts)
        self._pools = _slices(len(context.pool()) for context in contexts)
        # The devices of a stage get all programs in the same order, as they wait for each other in them.
        self._locks = [threading.Lock() for _ in contexts]

    def lower(self, program: Program) -> StagedProgram:
        """Traces and lowers what the stages do in place of a program."""
        match program:
            case StepProgram(bucket):
                programs: list[Program] = [StageProgram(bucket)] * (len(self._contexts) - 1)
                pairs = zip([*programs, program], self._contexts, strict=True)
                return StagedProgram([p.lower(context) for p, context in pairs], self._step)
            case CopyProgram() | SwapOutProgram() | SwapInProgram():
                return StagedProgram([program.lower(context) for context in self._contexts], self._on_pools)
            case WriteBlockTablesProgram():
                return StagedProgram([program.lower(context) for context in self._contexts], self._on_tables)
            case _:
                return StagedProgram([program.lower(self._contexts[-1])], self._in_last)

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
        """Calls a program of every stage with its own of the arrays in lists, and returns those of all."""
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
        """Calls a program of the last stage; the only lists that such programs take are weights."""
        own = [arg[self._weights[-1]] if isinstance(arg, list) else arg for arg in args]
        with self._locks[-1]:
            return parts[0](*own)


def state_shapes(contexts: Sequence[TraceContext]) -> StepState[Any]:
    """Returns the shapes of the arrays that stay on the devices: the last stage's, and the pools and block
    tables of all stages.
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

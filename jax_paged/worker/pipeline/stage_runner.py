"""Execution of programs in a process that has a single pipeline stage.

    process 0   tokens --> embeddings, layers --> hidden states
    process 1                                     `--> layers --> hidden states
    process 2                                                     `--> layers, norm, logits, sampler
      ^                                                                             |
      `------------ results, and last sampled token of every batch slot ------------'

All processes call the same programs in the same order. Each has its own part of the KV cache and its own
per-slot arrays. The first process waits for the result of an engine's step before it starts the engine's next
step, because that step needs the sampled tokens. Meanwhile the stages compute steps of other engines.
"""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Array

from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.programs import DeviceInputs, Program, StepResult, StepState, TraceContext
from jax_paged.worker.pipeline.stage_links import RemoteArray, StageLinks
from jax_paged.worker.pipeline.stages import ProgramChain, StageStepProgram
from jax_paged.worker.sampling.token_counts import ResetTokenCountsProgram
from jax_paged.worker.traced_step import StepProgram


def lower_part(program: Program, context: TraceContext) -> Any:
    """Traces and lowers the part of a program that one stage runs.

    Without pipeline stages, that is the whole program.

    Args:
        program: The program.
        context: Trace context of the stage.
    """
    match program:
        case _ if context.stage.is_last:
            return program.lower(context)
        case StepProgram(bucket):
            return StageStepProgram(bucket).lower(context)
        case _ if program.reads_hidden or isinstance(program, ResetTokenCountsProgram):
            return ProgramChain([], lambda *_: None)  # only runs in the last stage; see StageRunner.run
        case _:
            return program.lower(context)


class StageRunner:
    """Runner for one stage's part of programs, for one engine.

    Args:
        engine: Index of the engine.
        links: Links to the other stages.
        context: Trace context of the stage.
        compiled: The compiled programs.
    """

    def __init__(
        self, engine: int, links: StageLinks, context: TraceContext, compiled: CompiledPrograms
    ) -> None:
        self._engine, self._links, self._compiled = engine, links, compiled
        self._is_first, self._is_last = not context.stage.hidden_size, context.stage.is_last
        self._has_pooling = context.features.pooling is not None

    def run(self, program: Program, *args: Any) -> Any:
        """Runs a program.

        Args:
            program: The program.
            *args: Its arguments.

        Returns:
            The results of the program. In other stages than the last, a RemoteArray stands for each result
            that only the last stage computes.
        """
        match program:
            case StepProgram():
                return self._step(program, *args)
            case ResetTokenCountsProgram() if not self._is_last:
                return args[0]
            case _ if program.reads_hidden:
                if not self._is_last:
                    return RemoteArray(self._last_stage_results())
                result = self._call(program, *args)
                self._links.send(self._engine, [result])
                return result
            case _:
                return self._call(program, *args)

    def _step(
        self,
        program: StepProgram,
        weights: list[Array],
        state: StepState[Any],
        inputs: DeviceInputs[Any],
    ) -> tuple[StepResult[Any], StepState[Any]]:
        links, engine = self._links, self._engine
        given = np.asarray(state.last_tokens) if self._is_first else links.receive(engine).result()[0]
        if not self._is_last:
            args = weights, state.kv_cache, state.block_tables, inputs.packed, given
            hidden, kv_cache, tables = self._call(program, *args)
            links.send(engine, [hidden])
            results = self._last_stage_results()
            last_tokens, tokens, details, hidden = (RemoteArray(results, index) for index in range(4))
            state = dataclasses.replace(
                state, kv_cache=kv_cache, block_tables=tables, last_tokens=last_tokens
            )
            return StepResult(tokens=tokens, details=details, hidden=hidden), state
        inputs = dataclasses.replace(inputs, hidden=given)
        result, state = self._call(program, weights, state, inputs)
        arrays = [state.last_tokens, result.tokens, result.details]
        links.send(engine, [*arrays, *([result.hidden] if self._has_pooling else [])])
        return result, state

    def _last_stage_results(self) -> Any:
        """Returns a future for the results of the last stage in the first stage; None in other stages."""
        return self._links.receive(self._engine) if self._is_first else None

    def _call(self, program: Program, *args: Any) -> Any:
        with self._links.computing:
            return self._compiled.run(program, *args)

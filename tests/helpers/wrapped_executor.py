"""An executor around another one, for tests that look at steps, change their results or make them fail."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import BlockTables, InspectionInput, SchedulerOutput
from jax_paged.worker.executor import Executor


class WrappedExecutor:
    """Runs the steps of another executor, and does not close it.

    Args:
        inner: Runs the steps.
        before: Called with each step before it is dispatched; may raise.
        after: Called with each step and its result; returns the result that the engine gets.
    """

    def __init__(
        self,
        inner: Executor,
        before: Callable[[SchedulerOutput], object] = lambda output: None,
        after: Callable[[SchedulerOutput, ModelRunnerOutput], ModelRunnerOutput] = lambda output, result: (
            result
        ),
    ) -> None:
        self.inner = inner
        self._before = before
        self._after = after
        self._dispatched: deque[SchedulerOutput] = deque()

    @property
    def config(self) -> EngineConfig:
        return self.inner.config

    @property
    def buckets(self) -> tuple[str, ...]:
        return self.inner.buckets

    @property
    def compile_progress(self) -> tuple[int, int]:
        return self.inner.compile_progress

    @property
    def runner(self) -> Any:
        """The ModelRunner of a LocalExecutor."""
        return self.inner.runner  # pyright: ignore[reportAttributeAccessIssue]

    def on_failure(self, callback: Callable[[str], None]) -> None:
        self.inner.on_failure(callback)

    def dispatch(self, output: SchedulerOutput) -> None:
        self._before(output)
        self.inner.dispatch(output)
        self._dispatched.append(output)

    def result(self) -> ModelRunnerOutput:
        return self._after(self._dispatched.popleft(), self.inner.result())

    def read_memory(
        self, blocks: list[int], host_blocks: list[int], *, with_weights: bool
    ) -> dict[str, np.ndarray]:
        return self.inner.read_memory(blocks, host_blocks, with_weights=with_weights)

    def write_memory(
        self, blocks: list[int], host_blocks: list[int], arrays: dict[str, np.ndarray], *, with_weights: bool
    ) -> None:
        self.inner.write_memory(blocks, host_blocks, arrays, with_weights=with_weights)

    def fingerprint(self) -> tuple[str, str]:
        return self.inner.fingerprint()

    def read_kv(self, layer: int, block_tables: BlockTables, num_tokens: list[int]) -> Any:
        return self.inner.read_kv(layer, block_tables, num_tokens)

    def inspect(self, query: InspectionInput) -> Any:
        return self.inner.inspect(query)

    def compile_plan(self) -> str:
        return self.inner.compile_plan()

    def compile_report(self) -> Any:
        return self.inner.compile_report()

    def wait_until_compiled(self) -> None:
        self.inner.wait_until_compiled()

    def update_weights(self, new: Any) -> None:
        self.inner.update_weights(new)

    def check_weights(self) -> None:
        self.inner.check_weights()

    def free_memory(self, *, keeps_weights: bool) -> None:
        self.inner.free_memory(keeps_weights=keeps_weights)

    def restore_weights(self) -> None:
        self.inner.restore_weights()

    def restore_pool(self) -> None:
        self.inner.restore_pool()

    def close(self) -> None:
        pass

"""The executor interface that the engine calls, and the executor that runs steps in this process."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import BlockTables, InspectionInput, SchedulerOutput
from jax_paged.errors import check
from jax_paged.pallas_kernels.jax_settings import methods_with_default_settings, with_default_settings

if TYPE_CHECKING:
    import numpy as np

    from jax_paged.models.attention import CustomAttention
    from jax_paged.models.causal_lm import LanguageModel
    from jax_paged.models.features.hooks import Hook
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.models.weights import LoadedModel
    from jax_paged.worker.compilation.compiler import CompileRecord
    from jax_paged.worker.distributed.process_group import ProcessGroup
    from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor
    from jax_paged.worker.sampling.sampler import Sampler


class Executor(Protocol):
    """Interface for running the steps of one scheduler.

    Steps run in the order in which they are dispatched. Several steps may be dispatched before the first
    result is read.
    """

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration of the engine."""
        ...

    @property
    def buckets(self) -> tuple[str, ...]:
        """The names of the buckets, the shapes that steps are padded to."""
        ...

    @property
    def compile_progress(self) -> tuple[int, int]:
        """The number of compiled programs and the total number; may be read from any thread."""
        ...

    def dispatch(self, output: SchedulerOutput, /) -> None:
        """Starts a step and returns without waiting for its result.

        Before some steps it waits for earlier results, for example to copy blocks to host memory.
        """
        ...

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest dispatched step whose result has not been read, and returns its result."""
        ...

    def read_memory(
        self, blocks: list[int], host_blocks: list[int], *, with_weights: bool
    ) -> "dict[str, np.ndarray]":
        """Returns the contents of blocks and, optionally, the weights. No step may be in flight.

        Args:
            blocks: Ids of device blocks.
            host_blocks: Ids of blocks in host memory.
            with_weights: Whether to include the weights.

        Returns:
            Arrays by name, in the form that `write_memory` reads.
        """
        ...

    def write_memory(
        self,
        blocks: list[int],
        host_blocks: list[int],
        arrays: "dict[str, np.ndarray]",
        *,
        with_weights: bool,
    ) -> None:
        """Writes arrays that `read_memory` returned. No step may be in flight.

        Args:
            blocks: Ids of the device blocks to write.
            host_blocks: Ids of the blocks in host memory to write.
            arrays: The return value of `read_memory`.
            with_weights: Whether to write the weights too.

        Raises:
            ValueError: If an array is missing or has another shape or dtype.
        """
        ...

    def fingerprint(self) -> tuple[str, str]:
        """Returns a hash of the served weights, and an identifier of their packing.

        The packing is the memory format of weights; oneDNN chooses it for the processor. An engine can load a
        saved engine state without weights if its own hash is equal, and a state with weights if its own
        packing is equal.
        """
        ...

    def read_kv(
        self, layer: int, block_tables: BlockTables, num_tokens: list[int]
    ) -> "tuple[np.ndarray, np.ndarray]":
        """Returns the cached keys and values of a sequence.

        Args:
            layer: Index into the model's kv_cache_specs().
            block_tables: Block tables of the sequence. Tokens in null blocks are left out.
            num_tokens: Number of tokens whose keys and values the blocks of each table contain.

        Returns:
            Keys and values, each [tokens, kv_heads, head_dim] in the model's dtype.
        """
        ...

    def inspect(self, query: InspectionInput) -> "tuple[np.ndarray, dict[int, np.ndarray]]":
        """Recomputes tokens of a sequence from the cached keys and values, without changing any state.

        Args:
            query: The tokens, the blocks of their sequence, and the layers whose attention is returned.

        Returns:
            The logits of the last token, float32 [V], and the attention probabilities of all tokens by layer,
            float32 [heads, tokens, tokens in the blocks of the block table].
        """
        ...

    def compile_plan(self) -> str:
        """Returns a table of all programs with the compilation time and temporary memory of each."""
        ...

    def compile_report(self) -> "list[CompileRecord]":
        """Returns the rows of the `compile_plan` table as records."""
        ...

    def wait_until_compiled(self) -> None:
        """Waits until all programs are compiled.

        Until then, a step may run in a larger bucket than it needs.
        """
        ...

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Registers a callback for failures that happen while no step is running.

        Args:
            callback: Called with the reason, from any thread.
        """
        ...

    def update_weights(self, new: "NewWeights") -> None:
        """Replaces the weights from the next step on.

        Raises:
            ValueError: If the new weights do not fit the model.
        """
        ...

    def check_weights(self) -> None:
        """Raises RuntimeError if the engine serves the caller's weights and they were replaced or deleted."""
        ...

    def free_memory(self, *, keeps_weights: bool) -> None:
        """Frees the KV cache and the weights. No step may be in flight.

        Args:
            keeps_weights: Whether to copy the weights to host memory. Otherwise they are dropped.
        """
        ...

    def restore_weights(self) -> None:
        """Restores freed weights from host memory, or reloads dropped weights from their checkpoint.

        Does nothing if the weights are on the device.

        Raises:
            ValueError: If the weights were dropped and did not come from a checkpoint.
        """
        ...

    def restore_pool(self) -> None:
        """Allocates the KV cache again if it was freed. The contents of its blocks are lost."""
        ...

    def close(self) -> None:
        """Frees the weights and the KV cache."""
        ...


@methods_with_default_settings
class LocalExecutor:
    """Executor that runs steps in this process, on the devices that JAX sees.

    Args:
        args: Arguments of the engine.
        loaded: A model in memory to serve instead of the checkpoint in args.model, for example a model in
            training. Its weights remain the caller's.
        hooks: Hooks that requests may select by name.
        attend: Attention function that replaces args.attention_backend.
        sampler: Function that replaces the sampler.
        logits_processors: Logits processors that requests may select by name. They run before the sampler.
        first_device: Index of the first device to use, among the devices that JAX sees.
        group: The processes whose devices are used; None for this process alone.
        shared_with: The first executor of a pipeline, whose weights and programs this one shares. A pipeline
            has one executor per stage (see ServedModel). None for the first executor, or without a pipeline.

    Attributes:
        runner: The runner that does the work: a ModelRunner, or an EncoderRunner for an encoder-only model.
        dispatch: See Executor.
        result: See Executor.
        check_weights: See Executor.

    Raises:
        ValueError: If the model cannot be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        loaded: "LoadedModel | LanguageModel | None" = None,
        hooks: "Sequence[Hook]" = (),
        attend: "CustomAttention | None" = None,
        sampler: "Sampler | None" = None,
        logits_processors: "Sequence[LogitsProcessor]" = (),
        first_device: int = 0,
        group: "ProcessGroup | None" = None,
        shared_with: "LocalExecutor | None" = None,
    ) -> None:
        # These modules import JAX. They are imported here so that importing the engine does not import JAX.
        from jax_paged.worker.composition import Inspector, encoder_runner
        from jax_paged.worker.loading.caller_parts import CustomComponents
        from jax_paged.worker.model_runner import ModelRunner

        backend = args.distributed_executor_backend
        allowed = "'uni' with a model in memory or custom functions, which run in this process"
        check(group is not None or backend == "uni", "distributed_executor_backend", backend, allowed)
        self.runner: Any
        custom = CustomComponents(loaded, tuple(hooks), attend, sampler, tuple(logits_processors))
        runner = shared_with.runner if shared_with else None
        make = encoder_runner(args, custom, first_device) or functools.partial(
            ModelRunner, args, custom, first_device, group, runner
        )
        with _no_arrays_in_traceback():
            self.runner = make()
        # Every step calls these three functions. They are attributes, not methods, to save one call per step.
        self.dispatch: Callable[[SchedulerOutput], None] = with_default_settings(self.runner.dispatch)
        self.result: Callable[[], ModelRunnerOutput] = with_default_settings(self.runner.result)
        self.check_weights: Callable[[], None] = with_default_settings(self.runner.check_weights)
        self._inspector = Inspector()
        self._overrides = args.hf_overrides or {}
        self._source: str | Path | None = args.model if loaded is None else None
        self._has_pool = True

    @property
    def config(self) -> EngineConfig:
        """The resolved configuration of the engine."""
        return self.runner.config

    @property
    def buckets(self) -> tuple[str, ...]:
        """The names of the buckets, the shapes that steps are padded to."""
        return tuple(map(str, self.runner.buckets))

    @property
    def compile_progress(self) -> tuple[int, int]:
        """The number of compiled programs and the total number; may be read from any thread."""
        return self.runner.compiled.progress

    def read_memory(
        self, blocks: list[int], host_blocks: list[int], *, with_weights: bool
    ) -> "dict[str, np.ndarray]":
        """Returns the contents of blocks and, optionally, the weights; see Executor."""
        self._check_single_stage("to save or load an engine state")
        from jax_paged.worker.composition import snapshot

        arrays = self.runner.arrays
        saved = snapshot.read_blocks(arrays["kv_cache"], self.runner.host_blocks, blocks, host_blocks)
        return saved | (snapshot.read_weights(arrays["weights"]) if with_weights else {})

    def write_memory(
        self,
        blocks: list[int],
        host_blocks: list[int],
        arrays: "dict[str, np.ndarray]",
        *,
        with_weights: bool,
    ) -> None:
        """Writes arrays that `read_memory` of an executor with the same configuration returned; see Executor.

        Raises:
            ValueError: If an array is missing or has another shape or dtype.
        """
        self._check_single_stage("to save or load an engine state")
        from jax_paged.worker.composition import snapshot

        own_arrays = self.runner.arrays
        snapshot.write_blocks(own_arrays["kv_cache"], self.runner.host_blocks, blocks, host_blocks, arrays)
        if with_weights:
            snapshot.write_weights(own_arrays["weights"], arrays)
            self.runner.forget_images()
            self._source = None

    def fingerprint(self) -> tuple[str, str]:
        """Returns a hash of the served weights and an identifier of their packing; see Executor."""
        self._check_single_stage("to save or load an engine state")
        from jax_paged.worker.composition import snapshot

        packing = snapshot.packing(self.config.matmul_backend, self.runner.context.dtype)
        return snapshot.fingerprint(self.runner.arrays["weights"]), packing

    def read_kv(
        self, layer: int, block_tables: BlockTables, num_tokens: list[int]
    ) -> "tuple[np.ndarray, np.ndarray]":
        """Returns the cached keys and values of a sequence; see Executor."""
        self._check_single_stage("to read keys and values")
        context, arrays = self.runner.context, self.runner.arrays
        return self._inspector.read_kv(context, arrays, layer, block_tables, num_tokens)

    def inspect(self, query: InspectionInput) -> "tuple[np.ndarray, dict[int, np.ndarray]]":
        """Recomputes tokens of a sequence from the cached keys and values; see Executor."""
        self._check_single_stage("to inspect requests")
        return self._inspector.inspect(self.runner.context, self.runner.arrays, query)

    def compile_plan(self) -> str:
        """Returns a table of all programs, and the attention backend; see Executor."""
        plan, config = self.runner.compiled.plan(), self.config
        return f"{plan}\nbackend {config.attention_backend} ({config.backend_reason})"

    def compile_report(self) -> "list[CompileRecord]":
        """Returns the rows of the `compile_plan` table as records."""
        return self.runner.compiled.report()

    def wait_until_compiled(self) -> None:
        """Waits until all programs are compiled.

        Until then, a step may run in a larger bucket than it needs.
        """
        self.runner.compiled.wait()

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Does nothing: failures in this process are raised by the step in which they happen."""

    def update_weights(self, new: "NewWeights") -> None:
        """Replaces the weights from the next step on.

        Raises:
            ValueError: If the new weights do not fit the model.
        """
        self._check_single_stage("to update weights")
        self.runner.served.replace(new, self._overrides)
        self.runner.forget_images()
        self._source = new if isinstance(new, str | Path) else None

    def free_memory(self, *, keeps_weights: bool) -> None:
        """Frees the KV cache and the weights. No step may be in flight.

        Args:
            keeps_weights: Whether to copy the weights to host memory. Otherwise they are dropped.
        """
        self._check_single_stage("to sleep")
        self.runner.free()
        self._has_pool = False
        self.runner.served.free(keeps_copy=keeps_weights)
        self.runner.served.free_extra()

    def restore_weights(self) -> None:
        """Restores freed weights from host memory, or reloads dropped weights from their checkpoint.

        Raises:
            ValueError: If the weights were dropped and did not come from a checkpoint.
        """
        if not self.runner.served.are_dropped:
            self.runner.served.restore()
        elif self._source is None:
            raise ValueError(
                "sleep(level=2) has dropped the weights, and they cannot be read again because they did not "
                "come from a folder. Call update_weights before wake_up"
            )
        else:
            self.update_weights(self._source)

    def restore_pool(self) -> None:
        """Allocates the KV cache again if it was freed. The contents of its blocks are lost."""
        if not self._has_pool:
            self.runner.served.restore_extra()
            self.runner.allocate()
            self._has_pool = True

    def close(self) -> None:
        """Frees the KV cache, and the weights unless other executors or the caller use them."""
        self.runner.close()

    def _check_single_stage(self, what: str) -> None:
        """Raises ValueError unless there is a single pipeline stage, whose executor has all layers."""
        size = self.config.pipeline_parallel_size
        check(size == 1, "pipeline_parallel_size", size, f"1 {what}")


@contextlib.contextmanager
def _no_arrays_in_traceback() -> Iterator[None]:
    """Frees the arrays that a constructor has allocated if it raises an error.

    A notebook keeps the last error. Its traceback refers to the local variables of all functions in it, so
    the weights and the KV cache would stay allocated while the user tries again with other settings.
    """
    try:
        yield
    except BaseException as error:
        seen: set[int] = set()
        related: BaseException | None = error
        while related is not None and id(related) not in seen:
            seen.add(id(related))
            traceback.clear_frames(related.__traceback__)
            related = related.__cause__ or related.__context__
        raise

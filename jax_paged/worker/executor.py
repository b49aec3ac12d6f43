"""What the engine asks of whoever runs its steps, and the executor that does it in this process."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import BlockTables, InspectionInput, SchedulerOutput
from jax_paged.errors import check
from jax_paged.pallas_kernels.jax_settings import methods_with_default_settings, with_default_settings

if TYPE_CHECKING:
    import numpy as np

    from jax_paged.models.attention import Attend
    from jax_paged.models.causal_lm import LanguageModel
    from jax_paged.models.features.hooks import Hook
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.models.weights import LoadedModel
    from jax_paged.worker.compilation.compiler import CompileRecord
    from jax_paged.worker.distributed.process_group import ProcessGroup
    from jax_paged.worker.features.user_functions.logits_processors import LogitsProcessor
    from jax_paged.worker.sampling.sampler import Sampler


class Executor(Protocol):
    """Runs the steps of one scheduler, in the order in which they are dispatched."""

    @property
    def config(self) -> EngineConfig:
        """What the engine has come to: sizes, limits, names."""
        ...

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of the shapes that steps are padded to."""
        ...

    @property
    def compile_progress(self) -> tuple[int, int]:
        """How many programs are compiled, and how many there are; may be read from any thread."""
        ...

    def dispatch(self, output: SchedulerOutput, /) -> None:
        """Begins a step; returns as soon as the device has what it needs."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was dispatched and whose result was not asked for yet."""
        ...

    def read_memory(
        self, blocks: list[int], host_blocks: list[int], *, with_weights: bool
    ) -> "dict[str, np.ndarray]":
        """Returns what some blocks hold, and perhaps the weights; no step is in flight."""
        ...

    def write_memory(
        self,
        blocks: list[int],
        host_blocks: list[int],
        arrays: "dict[str, np.ndarray]",
        *,
        with_weights: bool,
    ) -> None:
        """Writes what `read_memory` returned; ValueError if an array is missing or does not fit."""
        ...

    def fingerprint(self) -> tuple[str, str]:
        """Returns hashes of the weights as they are served, and of how such kernels are packed here."""
        ...

    def read_kv(
        self, layer: int, block_tables: BlockTables, num_tokens: list[int]
    ) -> "tuple[np.ndarray, np.ndarray]":
        """Returns the keys and values [tokens, kv heads, head_dim] of a sequence, in the model's dtype.

        Args:
            layer: Index into the model's kv_cache_specs().
            block_tables: Of the sequence; tokens in null blocks are left out.
            num_tokens: How many slots of each table are filled.
        """
        ...

    def inspect(self, query: InspectionInput) -> "tuple[np.ndarray, dict[int, np.ndarray]]":
        """Computes tokens again with what the pool holds, and changes nothing.

        Returns:
            The logits of the last token, float32 [V]; and by layer, the attention probabilities of all of
            them, float32 [heads, tokens, slots of the block table].
        """
        ...

    def compile_plan(self) -> str:
        """Returns a table of what is compiled: shapes, seconds and bytes."""
        ...

    def compile_report(self) -> "list[CompileRecord]":
        """Returns what the table of `compile_plan` says, as records."""
        ...

    def wait_until_compiled(self) -> None:
        """Returns when everything is compiled; until then steps may use a larger shape than they need."""
        ...

    def when_failed(self, note: Callable[[str], None]) -> None:
        """Calls a function with the reason, from any thread, should it fail while no step runs."""
        ...

    def update_weights(self, new: "NewWeights") -> None:
        """Computes with other weights from the next step on; ValueError if they don't fit."""
        ...

    def check_weights(self) -> None:
        """Raises RuntimeError if a model in memory has got other weights than those of the steps."""
        ...

    def free_memory(self, *, keeps_weights: bool) -> None:
        """Frees pool and weights, which are kept in host memory or dropped; no step is in flight."""
        ...

    def restore_weights(self) -> None:
        """Brings weights back that were freed, if they are not there: from host memory, or read again.

        Raises:
            ValueError: If they were dropped, and did not come from a folder.
        """
        ...

    def restore_pool(self) -> None:
        """Takes memory for a pool that was freed, if it has none; what its blocks held is lost."""
        ...

    def close(self) -> None:
        """Frees weights and pool."""
        ...


@methods_with_default_settings
class LocalExecutor:
    """Runs steps in this process, on the devices that JAX sees. It is an Executor.

    Args:
        args: Model and limits.
        loaded: A model in memory to serve in place of args.model's weights, such as one in training. They
            stay the caller's.
        hooks: What requests may ask for by name.
        attend: Attends in place of args.attention_backend.
        sampler: Chooses tokens in place of the sampler.
        logits_processors: What requests may ask for by name, ahead of the sampler.
        first_device: The first of its devices, among those that JAX sees.
        group: The processes whose devices they are; None for this one alone.
        beside: An executor of the same pipeline, whose weights and programs it shares; None for the first.

    Attributes:
        runner: Does the work.
        dispatch: As in Executor; so are the two that follow.
        result: As in Executor.
        check_weights: As in Executor.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        loaded: "LoadedModel | LanguageModel | None" = None,
        hooks: "Sequence[Hook]" = (),
        attend: "Attend | None" = None,
        sampler: "Sampler | None" = None,
        logits_processors: "Sequence[LogitsProcessor]" = (),
        first_device: int = 0,
        group: "ProcessGroup | None" = None,
        beside: "LocalExecutor | None" = None,
    ) -> None:
        # JAX is loaded by whoever makes an executor, and not by whoever imports the engine.
        from jax_paged.worker.composition import Inspector, encoder_runner
        from jax_paged.worker.loading.caller_parts import CallerParts
        from jax_paged.worker.model_runner import ModelRunner

        backend = args.distributed_executor_backend
        allowed = "'uni' for an executor of this process or with custom parts"
        check(group is not None or backend == "uni", "distributed_executor_backend", backend, allowed)
        self.runner: Any
        parts = CallerParts(loaded, tuple(hooks), attend, sampler, tuple(logits_processors))
        runner = beside.runner if beside else None
        make = encoder_runner(args, parts, first_device) or functools.partial(
            ModelRunner, args, parts, first_device, group, runner
        )
        with _no_arrays_in_traceback():
            self.runner = make()
        # Every step calls these three, which need nothing of the executor.
        self.dispatch: Callable[[SchedulerOutput], None] = with_default_settings(self.runner.dispatch)
        self.result: Callable[[], ModelRunnerOutput] = with_default_settings(self.runner.result)
        self.check_weights: Callable[[], None] = with_default_settings(self.runner.check_weights)
        self._inspector = Inspector()
        self._overrides = args.hf_overrides or {}
        self._source: str | Path | None = args.model if loaded is None else None  # of the weights
        self._has_pool = True

    @property
    def config(self) -> EngineConfig:
        """What the engine has come to: sizes, limits, names."""
        return self.runner.config

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of the shapes that steps are padded to."""
        return tuple(map(str, self.runner.buckets))

    @property
    def compile_progress(self) -> tuple[int, int]:
        """How many programs are compiled, and how many there are; may be read from any thread."""
        return self.runner.compiled.progress

    def read_memory(
        self, blocks: list[int], host_blocks: list[int], *, with_weights: bool
    ) -> "dict[str, np.ndarray]":
        """Returns what some blocks hold, and perhaps the weights; no step is in flight."""
        self._check_whole("to save or load a state")
        from jax_paged.worker.composition import snapshot

        arrays = self.runner.arrays
        kept = snapshot.read_blocks(arrays["kv_cache"], self.runner.host_blocks, blocks, host_blocks)
        return kept | (snapshot.read_weights(arrays["weights"]) if with_weights else {})

    def write_memory(
        self,
        blocks: list[int],
        host_blocks: list[int],
        arrays: "dict[str, np.ndarray]",
        *,
        with_weights: bool,
    ) -> None:
        """Writes what `read_memory` of an executor with the same config has returned.

        Raises:
            ValueError: If an array is missing, or of another shape or type.
        """
        self._check_whole("to save or load a state")
        from jax_paged.worker.composition import snapshot

        ours = self.runner.arrays
        snapshot.write_blocks(ours["kv_cache"], self.runner.host_blocks, blocks, host_blocks, arrays)
        if with_weights:
            snapshot.write_weights(ours["weights"], arrays)
            self.runner.forget_images()
            self._source = None

    def fingerprint(self) -> tuple[str, str]:
        """Returns hashes of the weights as they are served, and of how such kernels are packed here."""
        self._check_whole("to save or load a state")
        from jax_paged.worker.composition import snapshot

        packing = snapshot.packing(self.config.matmul_backend, self.runner.context.dtype)
        return snapshot.fingerprint(self.runner.arrays["weights"]), packing

    def read_kv(
        self, layer: int, block_tables: BlockTables, num_tokens: list[int]
    ) -> "tuple[np.ndarray, np.ndarray]":
        """Returns the keys and values of a sequence; see Executor."""
        self._check_whole("to read keys and values")
        context, arrays = self.runner.context, self.runner.arrays
        return self._inspector.read_kv(context, arrays, layer, block_tables, num_tokens)

    def inspect(self, query: InspectionInput) -> "tuple[np.ndarray, dict[int, np.ndarray]]":
        """Computes tokens again with what the pool holds; see Executor."""
        self._check_whole("to inspect requests")
        return self._inspector.inspect(self.runner.context, self.runner.arrays, query)

    def compile_plan(self) -> str:
        """Returns a table of what is compiled: shapes, seconds and bytes."""
        return f"{self.runner.compiled.plan()}\nbackend {self.config.backend} ({self.config.backend_reason})"

    def compile_report(self) -> "list[CompileRecord]":
        """Returns what the table of `compile_plan` says, as records."""
        return self.runner.compiled.report()

    def wait_until_compiled(self) -> None:
        """Returns when everything is compiled; until then steps may use a larger shape than they need."""
        self.runner.compiled.wait()

    def when_failed(self, note: Callable[[str], None]) -> None:
        """Never calls the function: what fails in this process does so in a step."""

    def update_weights(self, new: "NewWeights") -> None:
        """Computes with other weights from the next step on; ValueError if they don't fit."""
        self._check_whole("to exchange weights")
        self.runner.served.replace(new, self._overrides)
        self.runner.forget_images()
        self._source = new if isinstance(new, str | Path) else None

    def free_memory(self, *, keeps_weights: bool) -> None:
        """Frees pool and weights, which are kept in host memory or dropped; no step is in flight."""
        self._check_whole("to sleep")
        self.runner.free()
        self._has_pool = False
        self.runner.served.free(keeps=keeps_weights)
        self.runner.served.free_extra()

    def restore_weights(self) -> None:
        """Brings weights back that were freed, if they are not there; see Executor."""
        if not self.runner.served.are_dropped:
            self.runner.served.restore()
        elif self._source is None:
            raise ValueError(
                "sleep(level=2) has dropped the weights, which did not come from a folder. Call "
                "update_weights before the engine wakes up"
            )
        else:
            self.update_weights(self._source)

    def restore_pool(self) -> None:
        """Takes memory for a pool that was freed, if it has none; what its blocks held is lost."""
        if not self._has_pool:
            self.runner.served.restore_extra()
            self.runner.allocate()
            self._has_pool = True

    def close(self) -> None:
        """Frees the pool, and the weights unless others use them or the caller brought the model."""
        self.runner.close()

    def _check_whole(self, what: str) -> None:
        """Checks that there is one stage, which has all weights and the whole of each block."""
        size = self.config.pipeline_parallel_size
        check(size == 1, "pipeline_parallel_size", size, f"1 {what}")


@contextlib.contextmanager
def _no_arrays_in_traceback() -> Iterator[None]:
    """Frees what a constructor has allocated, if it raises an error.

    A notebook keeps the last error, whose traceback refers to the local variables of all functions in it:
    the weights and the pool would stay while the user tries again with other settings.
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

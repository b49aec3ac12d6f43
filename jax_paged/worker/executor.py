"""What the engine asks of whoever runs its steps, and the executor that does it in this process."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from jax_paged.config import EngineArgs, EngineConfig
from jax_paged.core.runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput

if TYPE_CHECKING:
    from jax_paged.models.causal_lm import LanguageModel
    from jax_paged.models.exchange import NewWeights
    from jax_paged.models.hooks import Hook
    from jax_paged.models.weights import LoadedModel


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

    def dispatch(self, output: SchedulerOutput) -> None:
        """Begins a step; returns as soon as the device has what it needs."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was dispatched and whose result was not asked for yet."""
        ...

    def compile_plan(self) -> str:
        """Returns a table of what is compiled: shapes, seconds and bytes."""
        ...

    def wait_until_compiled(self) -> None:
        """Returns when everything is compiled; until then steps may use a larger shape than they need."""
        ...

    def update_weights(self, new: "NewWeights") -> None:
        """Computes with other weights from the next step on; ValueError if they don't fit."""
        ...

    def check_weights(self) -> None:
        """Raises RuntimeError if a model in memory has got other weights than those of the steps."""
        ...

    def close(self) -> None:
        """Frees weights and pool."""
        ...


class LocalExecutor:
    """Runs steps in this process, on the devices that JAX sees. It is an Executor.

    Args:
        args: Model and limits.
        loaded: A model in memory to serve in place of args.model's weights, such as one in training. They
            stay the caller's.
        hooks: What requests may ask for by name.

    Attributes:
        runner: Does the work.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
    """

    def __init__(
        self,
        args: EngineArgs,
        loaded: "LoadedModel | LanguageModel | None" = None,
        hooks: "Sequence[Hook]" = (),
    ) -> None:
        # JAX is loaded by whoever makes an executor, and not by whoever imports the engine.
        from jax_paged.worker.model_runner import ModelRunner

        self.runner = ModelRunner(args, loaded, hooks)

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

    def dispatch(self, output: SchedulerOutput) -> None:
        """Begins a step; returns as soon as the device has what it needs."""
        self.runner.dispatch(output)

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was dispatched and whose result was not asked for yet."""
        return self.runner.result()

    def compile_plan(self) -> str:
        """Returns a table of what is compiled: shapes, seconds and bytes."""
        return self.runner.compile_plan()

    def wait_until_compiled(self) -> None:
        """Returns when everything is compiled; until then steps may use a larger shape than they need."""
        self.runner.wait_until_compiled()

    def update_weights(self, new: "NewWeights") -> None:
        """Computes with other weights from the next step on; ValueError if they don't fit."""
        self.runner.served.replace(new, self.config.max_model_len)

    def check_weights(self) -> None:
        """Raises RuntimeError if a model in memory has got other weights than those of the steps."""
        self.runner.served.check()

    def close(self) -> None:
        """Frees the pool, and the weights unless the caller brought the model."""
        self.runner.close()

"""ReplicatedEngine: several engines with the interface of one. Each has its own thread and devices."""

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.replicas.router import MAX_LAG
from jax_paged.engine.async_engine.engine import AsyncLLMEngine
from jax_paged.engine.async_engine.request_methods import RequestMethods
from jax_paged.engine.async_engine.request_stream import NoOpCoroutine, RequestStream
from jax_paged.engine.errors import EngineDeadError, stopped_by
from jax_paged.engine.executors import ExecutorFactory, check_single_engine
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.replicas.placement import Placement, make_replicas

if TYPE_CHECKING:
    from jax_paged.engine.features.weights.sleeping import Mode
    from jax_paged.engine.features.weights.weight_updates import Running
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.worker.executor import Executor


class ReplicatedEngine(RequestMethods):
    """Several engines with the interface of one, among which requests are distributed.

    All requests of a conversation run on the same engine. If that engine has too much to do, or if the prompt
    is too short to identify a conversation, the request runs on the least loaded engine.

    When one engine fails, none of them accepts requests any more, because the rest of the process can't be
    trusted; a supervisor has to restart it. The weights can't be updated, and the engines can't sleep,
    because they would not do so at the same step.

    Args:
        args: Model and limits of each engine. data_parallel_size and pipeline_parallel_size determine the
            number of engines.
        executors: One executor per engine; None makes the executors that the arguments specify.

    Attributes:
        engine: The engine that checks requests and manages the adapters, for all engines.
        replicas: The engines.

    Raises:
        ValueError: If the model or a setting can't be used.
    """

    def __init__(self, args: EngineArgs, executors: "Sequence[Executor] | None" = None) -> None:
        makers = ExecutorFactory()

        def make_engine(replica: int) -> AsyncLLMEngine:
            nonlocal args
            make = functools.partial(makers.make, replica)
            engine = AsyncLLMEngine(args, executors[replica] if executors else make, replica)
            # The following engines use the backends that the first one has chosen.
            args = engine.engine.args
            return engine

        self.replicas = make_replicas(args.num_engines, make_engine)
        self.engine = self.replicas[0].engine
        self._placement = Placement(len(self.replicas), self.engine.seeds, MAX_LAG)
        self._placing = threading.Lock()

    @property
    def error(self) -> BaseException | None:
        """The error that has stopped one of the engines; None if there is none."""
        return next((replica.error for replica in self.replicas if replica.error is not None), None)

    @property
    def stopped_error(self) -> EngineDeadError | None:
        """The error raised for requests after an engine has stopped; None while all engines are running."""
        return None if self.error is None else stopped_by(self.error)

    @property
    def asleep_error(self) -> None:
        """None, because these engines never sleep."""
        return None

    @property
    def step_began(self) -> float | None:
        """The time.monotonic() at which the longest running step began; None if no step is running."""
        began = (replica.step_began for replica in self.replicas)
        return min((time for time in began if time is not None), default=None)

    def start(self, request: CheckedRequest, request_id: str, *, final_only: bool) -> RequestStream:
        """Starts a checked request on one of the engines; see `submit`."""
        if (stopped := self.stopped_error) is not None:
            raise stopped
        with self._placing:
            [(replica, request)] = self._placement.place([request], [r.load for r in self.replicas])
        # If an unfinished request has the same id, its engine gets this request and reports the error.
        same_id = (i for i, engine in enumerate(self.replicas) if engine.has(request_id))
        return self.replicas[next(same_id, replica)].start(request, request_id, final_only=final_only)

    async def update_weights(
        self, weights: "NewWeights", *, running: "Running" = "error", weight_version: str | None = None
    ) -> None:
        """Raises ValueError, because several engines can't change their weights at the same step."""
        self._refuse("update weights")

    async def sleep(self, level: int = 1, mode: "Mode" = "wait") -> None:
        """Raises ValueError, because these engines never sleep."""
        self._refuse("sleep")

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Raises ValueError, because these engines never sleep."""
        self._refuse("wake up")

    def abort(self, request_id: str | Iterable[str]) -> NoOpCoroutine:
        """Aborts one or several requests; see AsyncLLMEngine.abort."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for replica in self.replicas:
            replica.abort(ids)
        return NoOpCoroutine()

    def close(self) -> None:
        """Ends all requests. Frees the weights and the KV caches."""
        for replica in self.replicas:
            replica.close()

    def fail(self, error: EngineDeadError) -> None:
        """Ends all requests of all engines with an error; see AsyncLLMEngine.fail."""
        for replica in self.replicas:
            replica.fail(error)

    def stack(self) -> str:
        """Returns the current call stacks of the engines' threads, formatted like tracebacks."""
        return "\n".join(f"engine {i}:\n{replica.stack()}" for i, replica in enumerate(self.replicas))

    def __repr__(self) -> str:
        return f"{len(self.replicas)} engines, each {self.engine!r}"

    def _refuse(self, what: str) -> None:
        check_single_engine(self.engine.args, f"1 to {what}")


# The engine that the server runs requests on.
type ServingEngine = AsyncLLMEngine | ReplicatedEngine


def serving_engine(args: EngineArgs) -> ServingEngine:
    """Returns the engine that the arguments specify: a single one, or a ReplicatedEngine for several.

    Raises:
        ValueError: If the model or a setting can't be used.
    """
    return AsyncLLMEngine(args) if args.num_engines == 1 else ReplicatedEngine(args)

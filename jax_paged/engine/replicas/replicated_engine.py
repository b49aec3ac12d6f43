"""Several engines for asyncio that look like one to the server; each has a thread and devices of its own."""

import functools
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.replicas.router import MAX_LAG
from jax_paged.engine.async_engine.engine import AsyncLLMEngine
from jax_paged.engine.async_engine.request_methods import RequestMethods
from jax_paged.engine.async_engine.request_stream import Done, RequestStream
from jax_paged.engine.errors import EngineDeadError, stopped_by
from jax_paged.engine.executors import Executors, check_alone
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.replicas.placement import Placement, make_replicas

if TYPE_CHECKING:
    from jax_paged.engine.features.weights.sleeping import Mode
    from jax_paged.engine.features.weights.weight_updates import Running
    from jax_paged.models.loading.new_weights import NewWeights
    from jax_paged.worker.executor import Executor


class ReplicatedEngine(RequestMethods):
    """Gives each request to one of several engines: where its conversation is, or to the least loaded.

    When one engine fails, none takes requests any more: what is left of the process can't be trusted with
    them, and whoever watches it makes another one. What they have in common can't be changed while they run:
    weights are not exchanged, and none sleeps.

    Args:
        args: Model and limits of each engine; data_parallel_size and pipeline_parallel_size say how many.
        executors: One per engine, as LLMEngine takes it; None runs the steps in this process.

    Attributes:
        engine: Checks requests, and knows the adapters, for all of them.
        replicas: The engines.

    Raises:
        ValueError: If the model or a setting can't be used.
    """

    def __init__(self, args: EngineArgs, executors: "Sequence[Executor] | None" = None) -> None:
        makers = Executors()

        def make_engine(replica: int) -> AsyncLLMEngine:
            nonlocal args
            make = functools.partial(makers.make, replica)
            engine = AsyncLLMEngine(args, executors[replica] if executors else make, replica)
            args = engine.engine.args  # with the backends that the first engine has chosen
            return engine

        self.replicas = make_replicas(args.num_engines, make_engine)
        self.engine = self.replicas[0].engine
        self._placement = Placement(len(self.replicas), self.engine.seeds, MAX_LAG)
        self._placing = threading.Lock()

    @property
    def error(self) -> BaseException | None:
        """What has stopped an engine, if anything."""
        return next((replica.error for replica in self.replicas if replica.error is not None), None)

    @property
    def stopped(self) -> EngineDeadError | None:
        """What requests are told once an engine has stopped; None while all run."""
        return None if self.error is None else stopped_by(self.error)

    @property
    def asleep(self) -> None:
        """None, as these engines don't sleep."""
        return None

    @property
    def step_began(self) -> float | None:
        """When the step began that runs for longest, as AsyncLLMEngine.step_began; None between steps."""
        began = (replica.step_began for replica in self.replicas)
        return min((time for time in began if time is not None), default=None)

    def start(self, request: CheckedRequest, request_id: str, *, whole: bool) -> RequestStream:
        """Starts a request that was checked on one of the engines; see `submit`."""
        if (stopped := self.stopped) is not None:
            raise stopped
        with self._placing:
            [(replica, request)] = self._placement.place([request], [r.load for r in self.replicas])
        # If the id is taken, the engine that has the other request reports that.
        taken = (i for i, engine in enumerate(self.replicas) if engine.has(request_id))
        return self.replicas[next(taken, replica)].start(request, request_id, whole=whole)

    async def update_weights(
        self, weights: "NewWeights", *, running: "Running" = "error", weight_version: str | None = None
    ) -> None:
        """Raises ValueError: several engines can't change their weights at the same step."""
        self._refuse("update weights")

    async def sleep(self, level: int = 1, mode: "Mode" = "wait") -> None:
        """Raises ValueError, as these engines don't sleep."""
        self._refuse("sleep")

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Raises ValueError, as these engines don't sleep."""
        self._refuse("wake up")

    def abort(self, request_id: str | Iterable[str]) -> Done:
        """Ends a request, or several, as AsyncLLMEngine.abort does."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        for replica in self.replicas:
            replica.abort(ids)
        return Done()

    def close(self) -> None:
        """Ends all requests, and frees weights and pools."""
        for replica in self.replicas:
            replica.close()

    def fail(self, error: EngineDeadError) -> None:
        """Ends all requests of all engines with an error, as AsyncLLMEngine.fail does."""
        for replica in self.replicas:
            replica.fail(error)

    def stack(self) -> str:
        """Returns where the engines' threads are, as tracebacks."""
        return "\n".join(f"engine {i}:\n{replica.stack()}" for i, replica in enumerate(self.replicas))

    def __repr__(self) -> str:
        return f"{len(self.replicas)} engines, each {self.engine!r}"

    def _refuse(self, what: str) -> None:
        check_alone(self.engine.args, f"1 to {what}")


# What the server runs requests on.
type ServingEngine = AsyncLLMEngine | ReplicatedEngine


def serving_engine(args: EngineArgs) -> ServingEngine:
    """Returns the engine that the arguments ask for, or several.

    Raises:
        ValueError: If the model or a setting can't be used.
    """
    return AsyncLLMEngine(args) if args.num_engines == 1 else ReplicatedEngine(args)

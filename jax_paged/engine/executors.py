"""Creation of the executors that the engine arguments specify, and the check of attention kernels."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import launch_of_environment
from jax_paged.engine.distributed.multiprocess import ExternalExecutor, MultiprocessExecutor
from jax_paged.errors import check

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

# Makes the executor of an engine from its arguments.
MakeExecutor = Callable[[EngineArgs], "Executor"]


def make_executor(args: EngineArgs) -> "Executor":
    """Returns the executor that the arguments specify for a single engine.

    An executor whose devices belong to this process imports JAX.

    Raises:
        ValueError: If the model can't be loaded, or a limit does not fit it.
        SystemExit: In a process that a launcher has started as a follower. The call runs the follower's work,
            and raises this when the first process ends.
    """
    backend = args.distributed_executor_backend
    if backend == "mp":
        return MultiprocessExecutor(args)
    if backend == "external_launcher":
        return ExternalExecutor(args, launch_of_environment())
    if backend == "ray":
        allowed = "'uni', 'mp' or 'external_launcher' because Ray is not installed"
        remedy = ". Run pip install 'jax-paged[ray]'"
        has_ray = importlib.util.find_spec("ray") is not None
        check(has_ray, "distributed_executor_backend", backend, allowed, remedy=remedy)
        from jax_paged.engine.distributed.ray_executor import RayExecutor

        return RayExecutor(args)
    return ExecutorFactory().make(0, args)


class ExecutorFactory:
    """Factory of the executors of several engines.

    With pipeline_parallel_size N, N engines run their steps on the same N stages, so that every stage has
    work. The executor of the first of these engines owns the devices. The executors of the others refer to
    it.

    Args:
        **custom_parts: Arguments of LocalExecutor that customize steps: loaded, hooks, attend, sampler and
            logits_processors. With any of them, the executors use the devices of this process.
    """

    def __init__(self, **custom_parts: Any) -> None:
        self._custom_parts = custom_parts
        self._pipeline_leader: Any = None  # first executor of the current pipeline

    def make(self, engine: int, args: EngineArgs) -> "Executor":
        """Makes the executor of an engine. Must be called in the order of the engines.

        May be called again, with other arguments, for the engine whose executor was made last. This happens
        if the backends of the earlier executor did not pass the check of batch_invariant.

        An executor whose devices belong to this process imports JAX.

        Args:
            engine: Index of the engine.
            args: Model and limits.

        Raises:
            ValueError: If the model can't be loaded, or a limit does not fit it.
            SystemExit: See `make_executor`.
        """
        num_stages = args.pipeline_parallel_size
        if args.distributed_executor_backend == "uni" or self._custom_parts:
            from jax_paged.worker.executor import LocalExecutor

            pipeline, position = divmod(engine, num_stages)
            first_device = pipeline * num_stages * args.tensor_parallel_size
            leader = self._pipeline_leader if position else None
            executor = LocalExecutor(
                args, **self._custom_parts, first_device=first_device, shared_with=leader
            )
            self._pipeline_leader = leader or executor
            return executor
        if engine == 0:
            self._pipeline_leader = make_executor(args)
            return self._pipeline_leader
        assert isinstance(self._pipeline_leader, MultiprocessExecutor), "the pipeline has no workers"
        return MultiprocessExecutor(args, engine, self._pipeline_leader)


def check_single_engine(args: EngineArgs, allowed: str) -> None:
    """Checks that the arguments specify a single engine.

    Args:
        args: The arguments.
        allowed: The allowed values, for the error message.

    Raises:
        ValueError: If they specify several engines.
    """
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        check(getattr(args, name) == 1, name, getattr(args, name), allowed)


def check_kernels(args: EngineArgs) -> tuple[str, bool]:
    """Checks attention kernels on this machine with the shapes of a model, and stores the verdict.

    Engines with attention_backend="auto" use the stored verdict.

    Args:
        args: Arguments that name the model and the attention backend; "auto" checks "pallas".

    Returns:
        The results as a table, and whether the kernels have passed.

    Raises:
        ValueError: If there is no such model.
    """
    from jax_paged.worker.loading.kernel_check import check_all, suites_of

    name = "pallas" if args.attention_backend == "auto" else args.attention_backend
    verdict = check_all(suites_of(args), candidate=name, ignores_stored=True)
    return verdict.table(), verdict.outcome == "passed"

"""Executors of engines: which one the arguments ask for, and the check of its kernels."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jax_paged.checks import check
from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import launch_of_environment
from jax_paged.engine.distributed.multiprocess import ExternalExecutor, MultiprocessExecutor

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

# Makes the executor of an engine from its arguments.
MakeExecutor = Callable[[EngineArgs], "Executor"]


def make_executor(args: EngineArgs) -> "Executor":
    """Returns the executor that the arguments ask for, of one engine: one of this process imports JAX.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
        SystemExit: If a launcher has started this process to follow another, and that has ended.
    """
    backend = args.distributed_executor_backend
    if backend == "mp":
        return MultiprocessExecutor(args)
    if backend == "external_launcher":
        return ExternalExecutor(args, launch_of_environment())
    if backend == "ray":
        allowed = "'uni', 'mp' or 'external_launcher' without Ray: pip install 'jax-paged[ray]'"
        check(importlib.util.find_spec("ray") is not None, "distributed_executor_backend", backend, allowed)
        from jax_paged.engine.distributed.ray_executor import RayExecutor

        return RayExecutor(args)
    return Executors().make(0, args)


class Executors:
    """Makes the executors of all engines, in the order of the engines.

    Args:
        **custom_parts: The arguments of LocalExecutor that change steps: loaded, hooks, attend, sampler and
            logits_processors. With any of them the devices are those of this process.
    """

    def __init__(self, **custom_parts: Any) -> None:
        self._custom_parts = custom_parts
        self._first: Any = None  # of the engines that share devices with the next one

    def make(self, engine: int, args: EngineArgs) -> "Executor":
        """Makes the executor of an engine; may be called again for the last one, with other arguments.

        One of this process imports JAX. The engines of a pipeline have the same devices.

        Args:
            engine: Its index.
            args: Model and limits.

        Raises:
            ValueError: As make_executor.
            SystemExit: As make_executor.
        """
        num_stages = args.pipeline_parallel_size
        if args.distributed_executor_backend == "uni" or self._custom_parts:
            from jax_paged.worker.executor import LocalExecutor

            replica, follower = divmod(engine, num_stages)
            first_device = replica * num_stages * args.tensor_parallel_size
            beside = self._first if follower else None
            executor = LocalExecutor(args, **self._custom_parts, first_device=first_device, beside=beside)
            self._first = beside or executor
            return executor
        if engine == 0:
            self._first = make_executor(args)
            return self._first
        assert isinstance(self._first, MultiprocessExecutor), "other processes have the devices"
        return MultiprocessExecutor(args, engine, self._first)


def check_alone(args: EngineArgs, allowed: str) -> None:
    """Checks that there is one engine.

    Args:
        args: Say how many.
        allowed: What is, and why.

    Raises:
        ValueError: If there are several.
    """
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        check(getattr(args, name) == 1, name, getattr(args, name), allowed)


def check_kernels(args: EngineArgs) -> tuple[str, bool]:
    """Checks kernels with the shapes of a model on this machine, and keeps the verdict, which `auto` goes by.

    Args:
        args: Name the model and the backend; "auto" stands for "pallas" here.

    Returns:
        What was found, as a table, and whether the kernels have passed.

    Raises:
        ValueError: If there is no such model.
    """
    from jax_paged.worker.loading.kernel_check import check_all, suites_of

    name = "pallas" if args.attention_backend == "auto" else args.attention_backend
    verdict = check_all(suites_of(args), candidate=name, is_anew=True)
    return verdict.table(), verdict.outcome == "passed"

"""Chooses other backends for an engine if those that `auto` stands for fail the check of batch_invariant."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.engine.executors import MakeExecutor
from jax_paged.engine.features.batch_invariance.invariance import NotInvariantError

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

_LOGGER = logging.getLogger(__name__)

# Every machine has this backend for attention and for products.
_EVERYWHERE = "xla"


def begin_with_passing_backends(
    args: EngineArgs, make: MakeExecutor, begin: Callable[[EngineArgs, "Executor"], None]
) -> None:
    """Begins an engine with the first backends that pass its check.

    Backends that the arguments name are kept. For `auto`, the backends that are usually chosen are tried
    first, then "xla". A line of the log says which backends were chosen because others failed.

    Args:
        args: Model and limits.
        make: Makes an executor from arguments.
        begin: Makes the engine with an executor; closes the executor if that raises an error.

    Raises:
        ValueError: If the engine can't be made, or if no backends that the arguments allow pass the check.
            The message names backends that pass, if there are any.
    """
    executor = make(args)
    config = executor.config
    failure = _failure(args, executor, begin)
    if failure is None:
        return
    if args.distributed_executor_backend == "external_launcher":
        # The launcher's other processes have ended with the executor, and can't be started again here.
        raise failure
    used = _named({"attention_backend": config.backend, "matmul_backend": config.matmul_backend})
    others = list(_others(config))
    allowed = [other for other in others if all(getattr(args, name) == "auto" for name in other)]
    for other in allowed:
        changed = dataclasses.replace(args, **other)
        if _failure(changed, make(changed), begin) is None:
            _LOGGER.warning(
                "%s is chosen for batch_invariant, as the check fails with %s", _named(other), used
            )
            return
    for other in others:
        if other in allowed:
            continue
        changed = dataclasses.replace(args, **other)
        executor = make(changed)
        if _failure(changed, executor, begin) is None:
            executor.close()
            raise NotInvariantError(
                f"batch_invariant is True; allowed for this model on this machine with {used}: False, as the "
                f"steps for answers and for prompts add up in different orders. It can be True with "
                f"{_named(other)}"
            )
    raise failure


def _failure(
    args: EngineArgs, executor: "Executor", begin: Callable[[EngineArgs, "Executor"], None]
) -> NotInvariantError | None:
    """Begins an engine; returns the error of its check, and None if it passes."""
    try:
        begin(args, executor)
    except NotInvariantError as error:
        return error
    return None


def _others(config: EngineConfig) -> Iterator[dict[str, str]]:
    """Yields other backends than those of a configuration, as the arguments that change."""
    names = [
        name
        for name, backend in (
            ("matmul_backend", config.matmul_backend),
            ("attention_backend", config.backend),
        )
        if backend != _EVERYWHERE
    ]
    for num in range(1, len(names) + 1):
        for changed in itertools.combinations(names, num):
            yield dict.fromkeys(changed, _EVERYWHERE)


def _named(backends: dict[str, str]) -> str:
    """Returns arguments as a caller writes them."""
    return " and ".join(f"{name}={value!r}" for name, value in backends.items())

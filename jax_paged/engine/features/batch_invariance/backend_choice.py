"""Backend fallback for an engine that fails the check of `batch_invariant`."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.engine.executors import MakeExecutor
from jax_paged.engine.features.batch_invariance.invariance import NotInvariantError

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor

_LOGGER = logging.getLogger(__name__)

# This attention and matrix-product backend is available on every machine.
_FALLBACK_BACKEND = "xla"


def start_with_passing_backends(
    args: EngineArgs, make: MakeExecutor, begin: Callable[[EngineArgs, "Executor"], None]
) -> None:
    """Starts an engine with the first combination of backends that passes its invariance check.

    Backends that the arguments name explicitly are kept. A backend that is "auto" is first resolved as usual.
    If the check then fails, "xla" is tried in its place. A log line names the chosen backends if a fallback
    was necessary.

    Args:
        args: Engine arguments.
        make: Makes an executor from engine arguments.
        begin: Makes the engine with an executor, and runs the check. Closes the executor if it raises an
            error.

    Raises:
        ValueError: If the engine can't be made, or if no allowed combination of backends passes the check.
            The message names a combination that passes, if there is one.
    """
    executor = make(args)
    config = executor.config
    failure = _try_start(args, executor, begin)
    if failure is None:
        return
    if args.distributed_executor_backend == "external_launcher":
        # The other processes of the launcher ended with the executor and can't be restarted from here.
        raise failure
    backends = {"attention_backend": config.attention_backend, "matmul_backend": config.matmul_backend}
    used = _format_args(backends)
    others = list(_others(config))
    allowed = [other for other in others if all(getattr(args, name) == "auto" for name in other)]
    for other in allowed:
        changed = dataclasses.replace(args, **other)
        if _try_start(changed, make(changed), begin) is None:
            _LOGGER.warning(
                "using %s because batch_invariant fails with %s; pass these arguments to start faster",
                _format_args(other),
                used,
            )
            return
    for other in others:
        if other in allowed:
            continue
        changed = dataclasses.replace(args, **other)
        executor = make(changed)
        if _try_start(changed, executor, begin) is None:
            executor.close()
            raise NotInvariantError(
                f"`batch_invariant` must be False for this model on this machine with {used} because results "
                f"depend on the batch, got True. Pass {_format_args(other)} to use batch_invariant"
            )
    raise failure


def _try_start(
    args: EngineArgs, executor: "Executor", begin: Callable[[EngineArgs, "Executor"], None]
) -> NotInvariantError | None:
    """Starts an engine and returns the error of its invariance check, or None if it passes."""
    try:
        begin(args, executor)
    except NotInvariantError as error:
        return error
    return None


def _others(config: EngineConfig) -> Iterator[dict[str, str]]:
    """Yields the argument changes that replace one or more of the current backends with "xla"."""
    names = [
        name
        for name, backend in (
            ("matmul_backend", config.matmul_backend),
            ("attention_backend", config.attention_backend),
        )
        if backend != _FALLBACK_BACKEND
    ]
    for num in range(1, len(names) + 1):
        for changed in itertools.combinations(names, num):
            yield dict.fromkeys(changed, _FALLBACK_BACKEND)


def _format_args(backends: dict[str, str]) -> str:
    """Returns backend arguments as text, such as "matmul_backend='xla'"."""
    return " and ".join(f"{name}={value!r}" for name, value in backends.items())

"""The processes of an engine: what its first one runs on its devices, the others run too, on theirs."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.programs import Program
from jax_paged.worker.pipeline.stage_links import StageLinks

# In a message, in the place of an argument: the list of weights.
WEIGHTS = "weights"


class ProcessGroup(Protocol):
    """What a runner asks of the processes that it is one of."""

    @property
    def engine(self) -> int:
        """Which of the engines of a pipeline the runner is of; the first one makes what all share."""
        ...

    @property
    def links(self) -> StageLinks | None:
        """To the other stages of a pipeline; None if every process has all of them, or there is one."""
        ...

    def least(self, value: int) -> int:
        """Returns the least that any process has passed."""
        ...

    def everywhere[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns a function that runs in every process, each on its own devices and memory.

        Args:
            name: The same in every process; no program is called so.
            function: Takes arrays and lists of them, and returns such, as `units` names them, or nothing.
        """
        ...

    @property
    def is_ready(self) -> Callable[[Program], bool] | None:
        """Returns whether a program compiled here is compiled in every process; None if it always is."""
        ...

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], kept: Any
    ) -> Callable[..., Any]:
        """Waits for all processes, and returns what runs a program, on arguments, in each of them.

        Args:
            compiled: The programs.
            run: Runs one in this process.
            weights: The list that programs are called with.
            kept: Arrays that are there from the start; programs take and return them.
        """
        ...


class OneProcess:
    """An engine whose devices are all in this process. It is a ProcessGroup."""

    engine = 0
    links: StageLinks | None = None
    is_ready: Callable[[Program], bool] | None = None

    def least(self, value: int) -> int:
        """Returns the least that any process has passed."""
        return value

    def everywhere[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns the function; see ProcessGroup."""
        return function

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], kept: Any
    ) -> Callable[..., Any]:
        """Returns what runs a program; see ProcessGroup."""
        return run


def units(value: Any) -> list[Any]:
    """Returns the arrays of a result, and the lists of arrays in it: what has a number in messages.

    A list has one number, as the pools of the stages of a pipeline have more arrays or fewer.
    """
    found = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, list))
    return [x for x in found if not isinstance(x, list) or x]

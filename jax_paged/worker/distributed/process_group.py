"""The interface through which a model runner executes programs in all processes of an engine."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.programs import Program
from jax_paged.worker.pipeline.stage_links import StageLinks

# Stands for the list of weights in the arguments of a message.
WEIGHTS = "weights"


class ProcessGroup(Protocol):
    """The processes of an engine, as seen by the ModelRunner of one of them.

    In each process, programs run on the local devices with local arrays. There are three implementations:
    OneProcess for an engine with a single process, and Leader and Follower for several processes.
    """

    @property
    def engine(self) -> int:
        """The index of the runner's engine in a pipeline.

        Engine 0 creates the programs and weights that all engines share.
        """
        ...

    @property
    def links(self) -> StageLinks | None:
        """Links to the other pipeline stages; None without pipeline stages in other processes."""
        ...

    def min_over_processes(self, value: int) -> int:
        """Returns the minimum of the values that all processes have passed."""
        ...

    def in_all_processes[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns a function that runs in every process, on local devices and memory.

        Args:
            name: Name of the function: the same in every process, and different from the names of programs.
            function: A function of arrays and lists of arrays. It returns None, or arrays and lists of arrays
                as in `arrays_with_ids`.
        """
        ...

    @property
    def is_ready(self) -> Callable[[Program], bool] | None:
        """Function that returns True if a program compiled here is compiled in every process.

        None if a program that is compiled here can always be used.
        """
        ...

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], persistent_arrays: Any
    ) -> Callable[..., Any]:
        """Waits until all processes are ready, and returns a function that runs a program in all of them.

        Args:
            compiled: The compiled programs.
            run: Runs a program in this process.
            weights: The list of weights that programs are called with.
            persistent_arrays: Arrays that exist at the start and that programs take and return.
        """
        ...


class OneProcess:
    """The ProcessGroup of an engine whose devices all belong to this process."""

    engine = 0
    links: StageLinks | None = None
    is_ready: Callable[[Program], bool] | None = None

    def min_over_processes(self, value: int) -> int:
        """Returns the value."""
        return value

    def in_all_processes[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns the function unchanged."""
        return function

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], persistent_arrays: Any
    ) -> Callable[..., Any]:
        """Returns `run` unchanged."""
        return run


def arrays_with_ids(value: Any) -> list[Any]:
    """Returns the arrays and the lists of arrays in a result; each of them has one id in messages.

    A list has a single id because its length may differ between processes: pipeline stages have pools of
    different lengths.

    Args:
        value: A pytree of arrays and lists of arrays.
    """
    found = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, list))
    return [x for x in found if not isinstance(x, list) or x]

"""A process of an engine that runs what the first one says, and knows nothing of requests."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.programs import DeviceInputs, Program, StepState
from jax_paged.worker.distributed.channel import Channel
from jax_paged.worker.distributed.process_group import WEIGHTS, units
from jax_paged.worker.pipeline.stage_links import StageLinks

_LOGGER = logging.getLogger(__name__)


class Follower:
    """Runs what the leader announces for an engine, on the devices of this process. It is a ProcessGroup.

    Args:
        channel: To the leader.
        engine: Which of the engines of a pipeline.
        links: To the other stages, if each process has one.
    """

    def __init__(self, channel: Channel, engine: int = 0, links: StageLinks | None = None) -> None:
        self._channel, self.engine, self.links = channel, engine, links
        self.is_ready: Callable[[Program], bool] | None = None  # the leader chooses among programs
        self._functions: dict[str, Callable[..., Any]] = {}
        self._weights: list[Any] = []
        self._arrays: dict[int, Any] = {}  # and lists of them, by the leader's numbers
        self._next = 0

    def least(self, value: int) -> int:
        """Returns the least that any process has passed."""
        self._channel.send({"least": value})
        return self._channel.receive()[0]

    def everywhere[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Notes a function that the leader may announce; see ProcessGroup."""
        self._functions[name] = function
        return function

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], kept: Any
    ) -> Callable[..., Any]:
        """Tells the leader that all is there, and what is compiled; see ProcessGroup."""
        self._weights, self._run = weights, run
        self._programs = {str(program): program for program in compiled.programs}
        self._keep(kept)
        if self.engine == 0:
            compiled.when_compiled(lambda program: self._channel.send({"compiled": str(program)}))
            self._channel.send({"ready": True})
        return run

    def do(self, name: str, codes: list[Any], dropped: list[int], arrays: list[np.ndarray]) -> None:
        """Runs what a message names."""
        given = iter(arrays)
        args = [self._arg(code, given) for code in codes]
        function = self._functions.get(name)
        self._keep(function(*args) if function else self._run(self._programs[name], *args))
        for number in dropped:
            del self._arrays[number]

    def _arg(self, code: Any, given: Any) -> Any:
        """Returns the argument that a code stands for; see Leader."""
        match code:
            case None:
                return next(given)
            case str():
                assert code == WEIGHTS, "nothing else is called by a name"
                return self._weights
            case list():
                return [self._arg(x, given) for x in code]
            case {"state": codes}:
                return StepState(**{name: self._arg(x, given) for name, x in codes.items()})
            case {"inputs": codes}:
                return DeviceInputs(**{name: self._arg(x, given) for name, x in codes.items()})
            case _:
                return self._arrays[code]

    def _keep(self, result: Any) -> None:
        for unit in units(result):
            self._arrays[self._next] = unit
            self._next += 1


def follow_leader(channel: Channel, groups: Sequence[Follower], end: Callable[[int], None]) -> NoReturn:
    """Runs the programs that the leader announces; does not return.

    Args:
        channel: To the leader.
        groups: One for each engine of a pipeline.
        end: Called from another thread with the exit status of this process: 0 if the leader has ended, 1 if
            it has stalled or its host is gone.
    """
    announced: queue.SimpleQueue[tuple[Any, list[np.ndarray]]] = queue.SimpleQueue()

    def read() -> None:
        # Beside the thread that runs: it may wait for a process that is lost, and the leader with it.
        try:
            while True:
                message, arrays = channel.receive()
                links = groups[0].links
                if links is not None and isinstance(message, dict):
                    links.arrive(message["engine"], arrays)
                else:
                    announced.put((message, arrays))
        except TimeoutError as error:
            _LOGGER.error("worker 0 has stalled, or its host is gone: %s", error)
            end(1)
        except (OSError, ValueError):
            end(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        (engine, name, codes, dropped), arrays = announced.get()
        groups[engine].do(name, codes, dropped, arrays)

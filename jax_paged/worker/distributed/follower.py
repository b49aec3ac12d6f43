"""A follower of an engine with several processes: it runs the programs that the leader announces."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from jax_paged.worker.compilation.compiler import CompiledPrograms
from jax_paged.worker.compilation.programs import DeviceInputs, Program, StepState
from jax_paged.worker.distributed.channel import Channel
from jax_paged.worker.distributed.process_group import WEIGHTS, arrays_with_ids
from jax_paged.worker.pipeline.stage_links import StageLinks

_LOGGER = logging.getLogger(__name__)


class Follower:
    """The ProcessGroup of every process except the first one.

    It runs the announced programs of one engine on the devices of this process, and has no knowledge of
    requests.

    Args:
        channel: Channel to the leader.
        engine: Index of the engine in a pipeline.
        links: Links to the other pipeline stages; None without pipeline stages.
    """

    def __init__(self, channel: Channel, engine: int = 0, links: StageLinks | None = None) -> None:
        self._channel, self.engine, self.links = channel, engine, links
        self.is_ready: Callable[[Program], bool] | None = None  # only needed in the leader
        self._functions: dict[str, Callable[..., Any]] = {}
        self._weights: list[Any] = []
        self._arrays: dict[int, Any] = {}  # arrays and lists of arrays, by id in messages
        self._next = 0

    def min_over_processes(self, value: int) -> int:
        """Returns the minimum of the values that all processes have passed."""
        self._channel.send({"min": value})
        return self._channel.receive()[0]

    def in_all_processes[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Registers a function that the leader may announce, and returns it; see ProcessGroup."""
        self._functions[name] = function
        return function

    def begin(
        self, compiled: CompiledPrograms, run: Callable[..., Any], weights: list[Any], persistent_arrays: Any
    ) -> Callable[..., Any]:
        """Tells the leader when this process is ready and which programs are compiled. Returns `run`."""
        self._weights, self._run = weights, run
        self._programs = {str(program): program for program in compiled.programs}
        self._assign_ids(persistent_arrays)
        if self.engine == 0:
            compiled.on_compiled(lambda program: self._channel.send({"compiled": str(program)}))
            self._channel.send({"ready": True})
        return run

    def run_announced(
        self, name: str, encoded_args: list[Any], dropped: list[int], arrays: list[np.ndarray]
    ) -> None:
        """Runs an announced program or function.

        Args:
            name: Name of the program or function.
            encoded_args: Representations of its arguments; see Leader.
            dropped: Ids of arrays that the leader has deleted.
            arrays: Host arrays sent with the message.
        """
        host_arrays = iter(arrays)
        args = [self._decode(encoded, host_arrays) for encoded in encoded_args]
        function = self._functions.get(name)
        self._assign_ids(function(*args) if function else self._run(self._programs[name], *args))
        for array_id in dropped:
            del self._arrays[array_id]

    def _decode(self, encoded: Any, host_arrays: Any) -> Any:
        """Returns the argument for its representation in a message; see Leader."""
        match encoded:
            case None:
                return next(host_arrays)
            case str():
                assert encoded == WEIGHTS, f"unknown argument name {encoded!r} in a message"
                return self._weights
            case list():
                return [self._decode(x, host_arrays) for x in encoded]
            case {"state": fields}:
                return StepState(**{name: self._decode(x, host_arrays) for name, x in fields.items()})
            case {"inputs": fields}:
                return DeviceInputs(**{name: self._decode(x, host_arrays) for name, x in fields.items()})
            case _:
                return self._arrays[encoded]

    def _assign_ids(self, result: Any) -> None:
        for value in arrays_with_ids(result):
            self._arrays[self._next] = value
            self._next += 1


def follow_leader(channel: Channel, groups: Sequence[Follower], end: Callable[[int], None]) -> NoReturn:
    """Runs the programs that the leader announces; does not return.

    Args:
        channel: Channel to the leader.
        groups: The Follower of each engine in a pipeline.
        end: Ends this process with an exit status: 0 if the leader has ended, 1 if it has stalled or its host
            is lost. Called from another thread.
    """
    announced: queue.SimpleQueue[tuple[Any, list[np.ndarray]]] = queue.SimpleQueue()

    def read() -> None:
        # Runs in its own thread, because the main thread may wait for a collective of a lost process while
        # the leader ends.
        try:
            while True:
                message, arrays = channel.receive()
                links = groups[0].links
                if links is not None and isinstance(message, dict):
                    links.deliver(message["engine"], arrays)
                else:
                    announced.put((message, arrays))
        except TimeoutError as error:
            _LOGGER.error("worker 0 has stalled, or its host is gone: %s", error)
            end(1)
        except (OSError, ValueError):
            end(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        (engine, name, encoded_args, dropped), arrays = announced.get()
        groups[engine].run_announced(name, encoded_args, dropped, arrays)

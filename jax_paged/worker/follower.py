"""A process of an engine that runs what the first one says, and knows nothing of requests."""

import queue
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from jax_paged.worker.channel import Channel
from jax_paged.worker.compilation import CompiledPrograms
from jax_paged.worker.process_group import WEIGHTS
from jax_paged.worker.programs import Program


class Follower:
    """Runs what the leader announces, on the devices of this process. It is a ProcessGroup.

    Args:
        channel: To the leader.
        end: Is called when the leader is gone; by another thread.
    """

    def __init__(self, channel: Channel, end: Callable[[], None]) -> None:
        self._channel, self._end = channel, end
        self._functions: dict[str, Callable[..., Any]] = {}
        self._weights: list[Any] = []
        self._arrays: dict[int, Any] = {}  # by the leader's numbers
        self._next = 0
        self._messages: queue.SimpleQueue[tuple[Any, list[np.ndarray]]] = queue.SimpleQueue()

    def least(self, value: int) -> int:
        """Returns the least that any process has passed."""
        self._channel.send({"least": value})
        return self._channel.receive()[0]

    def everywhere[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Notes a function that the leader may announce; see ProcessGroup."""
        self._functions[name] = function
        return function

    def is_ready(self, program: Program) -> bool:
        """Whether a program may be run: the leader knows, who asks for it."""
        return True

    def begin(self, compiled: CompiledPrograms, weights: list[Any], kept: Any) -> Callable[..., Any]:
        """Tells the leader that all is there, and what is compiled; see ProcessGroup."""
        self._weights = weights
        self._keep(kept)
        self._functions |= {str(program): self._on_leaves(compiled, program) for program in compiled.programs}
        compiled.when_compiled(lambda program: self._channel.send({"compiled": str(program)}))
        self._channel.send({"ready": True})
        return compiled.run

    def follow(self) -> NoReturn:
        """Runs what the leader announces, for ever."""
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            (name, codes, dropped), arrays = self._messages.get()
            given, leaves = iter(arrays), []
            for code in codes:
                if code == WEIGHTS:
                    leaves += self._weights
                else:
                    leaves.append(next(given) if code is None else self._arrays[code])
            self._keep(self._functions[name](*leaves))
            for number in dropped:
                del self._arrays[number]

    def _keep(self, result: Any) -> None:
        for leaf in jax.tree.leaves(result):
            self._arrays[self._next] = leaf
            self._next += 1

    def _on_leaves(self, compiled: CompiledPrograms, program: Program) -> Callable[..., Any]:
        def run(*leaves: Any) -> Any:
            args, _ = jax.tree.unflatten(compiled[program].execute.in_tree, leaves)
            return compiled.run(program, *args)

        return run

    def _read(self) -> None:
        # Beside the thread that runs: it may wait for a process that is lost, and the leader with it.
        try:
            while True:
                self._messages.put(self._channel.receive())
        except (OSError, ValueError):
            self._end()

"""The first process of an engine that has several: it says what they run, and follows nobody."""

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_paged.worker.channel import Channel
from jax_paged.worker.compilation import CompiledPrograms
from jax_paged.worker.process_group import WEIGHTS
from jax_paged.worker.programs import Program


class Leader:
    """Tells its followers what it runs, before it does. It is a ProcessGroup.

    A message names a function and its arguments. An array that lies on the devices has a number, the same in
    every process: those that are there from the start have the first ones, and then each array that is
    returned gets the next. What is in the host's memory travels along.

    Args:
        channels: To each follower, in the order of their ranks.
        fail: Is called, with the reason, when a follower is lost; by another thread.
    """

    def __init__(self, channels: list[Channel], fail: Callable[[str], None]) -> None:
        self._channels, self._fail = channels, fail
        self._weights: list[Any] = []
        self._numbers: dict[int, tuple[int, Any]] = {}  # by id of an array: its number, and what watches it
        self._next = 0
        self._dropped: collections.deque[int] = collections.deque()  # numbers that mean nothing any more
        self._compiled: list[set[str]] = [set() for _ in channels]  # names of programs, by follower

    def least(self, value: int) -> int:
        """Returns the least that any process has passed."""
        for rank, channel in enumerate(self._channels, 1):
            value = min(value, self._receive(rank, channel)["least"])
        for channel in self._channels:
            channel.send(value)
        return value

    def everywhere[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Returns a function that runs in every process; see ProcessGroup."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            self._announce(name, args)
            return self._numbered(function(*args, **kwargs))

        return run

    def is_ready(self, program: Program) -> bool:
        """Whether a program that is compiled here is so in every process."""
        return all(str(program) in names for names in self._compiled)

    def begin(self, compiled: CompiledPrograms, weights: list[Any], kept: Any) -> Callable[..., Any]:
        """Waits for all processes, and returns what runs a program in each of them; see ProcessGroup."""
        self._weights = weights
        self._numbered(kept)
        for rank, channel in enumerate(self._channels, 1):
            while "ready" not in (message := self._receive(rank, channel)):
                self._compiled[rank - 1].add(message["compiled"])
            threading.Thread(target=self._watch, args=(rank, channel), daemon=True).start()

        def run(program: Program, *args: Any) -> Any:
            self._announce(str(program), args)
            return self._numbered(compiled.run(program, *args))

        return run

    def _announce(self, name: str, args: tuple[Any, ...]) -> None:
        codes: list[Any] = []
        arrays: list[np.ndarray] = []
        for arg in args:
            if arg is self._weights:
                codes.append(WEIGHTS)
                continue
            for leaf in jax.tree.leaves(arg):
                if isinstance(leaf, jax.Array):
                    codes.append(self._numbers[id(leaf)][0])
                else:
                    codes.append(None)
                    arrays.append(np.asarray(leaf))
        # Others may end at any time, in any thread.
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        for channel in self._channels:
            channel.send([name, codes, dropped], arrays)

    def _numbered[T](self, result: T) -> T:
        for leaf in jax.tree.leaves(result):
            self._numbers[id(leaf)] = self._next, weakref.ref(leaf, self._forget(id(leaf)))
            self._next += 1
        return result

    def _forget(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._dropped.append(self._numbers.pop(key)[0])

    def _receive(self, rank: int, channel: Channel) -> dict[str, Any]:
        try:
            message = channel.receive()[0]
        except OSError as error:
            raise RuntimeError(f"worker {rank} has ended: {error}") from error
        if "error" in message:
            raise ValueError(f"worker {rank}: {message['error']}")
        return message

    def _watch(self, rank: int, channel: Channel) -> None:
        try:
            while True:
                self._compiled[rank - 1].add(self._receive(rank, channel)["compiled"])
        except (RuntimeError, ValueError) as error:
            self._fail(str(error))

"""How the stages of a pipeline hand on arrays when each of them has a process of its own."""

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from jaxtyping import Array


class RemoteArray:
    """Stands for an array of the last stage, in a process that does not have it.

    Args:
        arriving: Comes to what the last stage tells of a program; None where nobody reads it.
        place: Of the array in that.
    """

    def __init__(self, arriving: "Future[list[np.ndarray]] | None" = None, place: int = 0) -> None:
        self._arriving, self._place = arriving, place

    @property
    def ndim(self) -> int:
        """Its dimensions; waits for it."""
        return self.__array__().ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; waits for it."""
        return self.__array__().shape

    def copy_to_host_async(self) -> None:
        """Does nothing, as it is on its way."""

    def wait(self) -> None:
        """Waits until the program that makes it is done."""
        if self._arriving is not None:
            self._arriving.result()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        assert self._arriving is not None, "nobody reads it here"
        array = self._arriving.result()[self._place]
        return np.array(array, dtype, copy=copy)


class StageLinks:
    """Hands arrays to the next stage, and from the last to the first, in a thread of its own.

    Args:
        stage: That of this process.
        num_stages: How many there are, and how many engines.
        send: Sends a header and arrays to the next stage, or to who hands them on.
        fail: Is called with what has failed while an array was computed.

    Attributes:
        stage: See Args.
        computing: Held while a program is dispatched: all devices of a stage have to get them in one order.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        send: Callable[[Any, Sequence[np.ndarray]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.stage, self.computing = stage, threading.Lock()
        self._next, self._send, self._fail = (stage + 1) % num_stages, send, fail
        self._leaving: queue.SimpleQueue[tuple[int, Sequence[Array]]] = queue.SimpleQueue()
        # By engine: what has come before it was asked for, or who asks for what has not come.
        self._arrived = [collections.deque[list[np.ndarray]]() for _ in range(num_stages)]
        self._awaited = [collections.deque[Future[list[np.ndarray]]]() for _ in range(num_stages)]
        self._meeting = threading.Lock()
        threading.Thread(target=self._send_all, daemon=True).start()

    def give(self, engine: int, arrays: Sequence[Array]) -> None:
        """Sends arrays of an engine to the next stage, as soon as they are computed."""
        for array in arrays:
            array.copy_to_host_async()
        self._leaving.put((engine, arrays))

    def take(self, engine: int) -> "Future[list[np.ndarray]]":
        """Returns what comes to the next arrays that the stage before gives for an engine."""
        future: Future[list[np.ndarray]] = Future()
        with self._meeting:
            if self._arrived[engine]:
                future.set_result(self._arrived[engine].popleft())
            else:
                self._awaited[engine].append(future)
        return future

    def arrive(self, engine: int, arrays: list[np.ndarray]) -> None:
        """Takes in what the stage before has given."""
        with self._meeting:
            if self._awaited[engine]:
                self._awaited[engine].popleft().set_result(arrays)
            else:
                self._arrived[engine].append(arrays)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # who is lost is noticed by whoever receives
            while True:
                engine, arrays = self._leaving.get()
                try:
                    values = [np.asarray(array) for array in arrays]
                except Exception as error:
                    return self._fail(error)
                self._send({"stage": self._next, "engine": engine}, values)

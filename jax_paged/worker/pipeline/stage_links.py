"""Transfer of arrays between pipeline stages that run in different processes."""

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
    """Placeholder for an array of the last stage, in a process that does not have it.

    Args:
        arriving: Future for the arrays that the last stage sends; None in stages where the array is not read.
        index: Index of the array among the arrays that the last stage sends.
    """

    def __init__(self, arriving: "Future[list[np.ndarray]] | None" = None, index: int = 0) -> None:
        self._arriving, self._index = arriving, index

    @property
    def ndim(self) -> int:
        """The number of dimensions; waits for the array."""
        return self.__array__().ndim

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; waits for the array."""
        return self.__array__().shape

    def copy_to_host_async(self) -> None:
        """Does nothing because the last stage sends the array to the host anyway."""

    def wait(self) -> None:
        """Waits until the array has arrived; does nothing if the array is not read here."""
        if self._arriving is not None:
            self._arriving.result()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        assert self._arriving is not None, "the array is not sent to this stage"
        array = self._arriving.result()[self._index]
        return np.array(array, dtype, copy=copy)


class StageLinks:
    """Connection of a stage to its neighbors: sends arrays to the next stage, and from the last to the first.

    Args:
        stage: Index of this process's stage.
        num_stages: Number of stages, which is also the number of engines.
        send_message: Sends a header and arrays to the next stage, directly or through the leader.
        fail: Called with the error if the computation of an array has failed.

    Attributes:
        stage: Index of this process's stage.
        computing: Lock that is held while a program is dispatched, because all devices of a stage must
            receive programs in the same order.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        send_message: Callable[[Any, Sequence[np.ndarray]], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self.stage, self.computing = stage, threading.Lock()
        self._next, self._send_message, self._fail = (stage + 1) % num_stages, send_message, fail
        self._outgoing: queue.SimpleQueue[tuple[int, Sequence[Array]]] = queue.SimpleQueue()
        # Per engine: arrays that arrived before `receive` was called, and futures that wait for arrays.
        self._arrived = [collections.deque[list[np.ndarray]]() for _ in range(num_stages)]
        self._awaited = [collections.deque[Future[list[np.ndarray]]]() for _ in range(num_stages)]
        self._lock = threading.Lock()
        threading.Thread(target=self._send_all, daemon=True).start()

    def send(self, engine: int, arrays: Sequence[Array]) -> None:
        """Sends arrays to the next stage when they are computed; does not wait.

        Args:
            engine: Index of the engine.
            arrays: Arrays on the devices.
        """
        for array in arrays:
            array.copy_to_host_async()
        self._outgoing.put((engine, arrays))

    def receive(self, engine: int) -> "Future[list[np.ndarray]]":
        """Returns a future for the next arrays from the previous stage.

        Args:
            engine: Index of the engine.
        """
        future: Future[list[np.ndarray]] = Future()
        with self._lock:
            if self._arrived[engine]:
                future.set_result(self._arrived[engine].popleft())
            else:
                self._awaited[engine].append(future)
        return future

    def deliver(self, engine: int, arrays: list[np.ndarray]) -> None:
        """Passes arrays from the previous stage to the oldest unresolved future of `receive`, or stores them.

        Args:
            engine: Index of the engine.
            arrays: The received arrays.
        """
        with self._lock:
            if self._awaited[engine]:
                self._awaited[engine].popleft().set_result(arrays)
            else:
                self._arrived[engine].append(arrays)

    def _send_all(self) -> None:
        with contextlib.suppress(OSError):  # the receiving thread detects a lost process
            while True:
                engine, arrays = self._outgoing.get()
                try:
                    values = [np.asarray(array) for array in arrays]
                except Exception as error:
                    return self._fail(error)
                self._send_message({"stage": self._next, "engine": engine}, values)

"""WorkerTeam: the workers of an executor, or of the executors of a pipeline."""

import contextlib
import json
import logging
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import Launch
from jax_paged.engine.errors import EngineDeadError
from jax_paged.worker.distributed.channel import Channel, silence_limit_s
from jax_paged.worker.distributed.task import Task

_WORKER = """
import json, sys
sys.path[:], descriptor = json.loads(sys.argv[1])
from jax_paged.worker.distributed.process import main
main(descriptor)
"""
# Time (seconds) for workers to end by themselves before they are killed.
CLOSING_S = 1.0
_STDERR = 2


class StartedWorker(Protocol):
    """Interface of a worker that has been started."""

    @property
    def channel(self) -> Channel:
        """The connection to the worker."""
        ...

    def stop(self) -> None:
        """Tells the worker to end, without waiting for its end."""
        ...

    def close(self, *, until: float) -> None:
        """Ends the worker and waits for its end. Kills it if it is still running at a given time.

        Args:
            until: The time, by time.monotonic() (seconds).
        """
        ...


class Worker:
    """A worker process on this machine. It ends when this process ends.

    Args:
        args: Model and limits.
        launch: The rank of the worker and the number of workers.
        peers: Sockets from the worker to other workers; None if the workers connect to each other.

    Attributes:
        channel: The connection to the worker.
    """

    def __init__(self, args: EngineArgs, launch: Launch, peers: list[socket.socket] | None) -> None:
        ours, theirs = socket.socketpair()
        descriptors = None if peers is None else tuple(peer.fileno() for peer in peers)
        with theirs:
            command = [sys.executable, "-c", _WORKER, json.dumps([sys.path, theirs.fileno()])]
            passed = (theirs.fileno(), *(descriptors or ()))
            # gloo prints messages, which must not appear in the output of the user's program.
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": _STDERR}
            self._process = subprocess.Popen(command, pass_fds=passed, **pipes)
        self.channel = Channel(ours)
        send_task(self.channel, args, launch, descriptors)

    def stop(self) -> None:
        """Tells the worker to end, without waiting for its end."""
        self.channel.close()

    def close(self, *, until: float) -> None:
        """Ends the worker and waits for its end. Kills it if it is still running at a given time.

        Args:
            until: The time, by time.monotonic() (seconds).
        """
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0))
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Waits for the end of the process. Returns its exit status."""
        return self._process.wait()


class WorkerTeam:
    """The workers that one or several engines share.

    All calls go to the first worker, which tells the others which programs to run. If one worker is lost,
    all of them are ended, and all engines receive the reason.

    Args:
        num_engines: Number of engines. Their indices are 0, 1, ...

    Attributes:
        workers: The workers, the first one first; empty until they have been started.
        replies: The replies of the first worker, by engine. A reply that is an exception has to be raised.
        progress: The number of programs that the first worker has compiled, and the number of all programs.
        failure: Why the workers have ended; None while they are running.
    """

    def __init__(self, num_engines: int) -> None:
        self.workers: Sequence[StartedWorker] = ()
        self.replies: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(num_engines)]
        self.progress = 0, 0
        self.failure: str | None = None
        self._callbacks: list[list[Callable[[str], None]]] = [[] for _ in range(num_engines)]
        self._engines: set[int] = set()
        self._failing = threading.Lock()

    def begin(self, workers: Sequence[StartedWorker]) -> None:
        """Sets the workers, in the order of their ranks, and starts to receive replies of the first one."""
        self.workers = workers
        threading.Thread(target=self._read, args=(workers[0].channel,), daemon=True).start()

    def add_engine(self, engine: int) -> None:
        """Adds an engine. The workers run until every engine has left."""
        self._engines.add(engine)

    def send(self, engine: int, name: str, args: tuple[Any, ...]) -> None:
        """Sends a call of a method of an engine's executor to the first worker.

        Args:
            engine: Index of the engine.
            name: The method.
            args: Its arguments.

        Raises:
            EngineDeadError: If the workers have ended.
            OSError: If they end during the call.
        """
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        self.workers[0].channel.send([engine, name], [packed(args)])

    def on_failure(self, engine: int, callback: Callable[[str], None]) -> None:
        """Registers a function that is called with the reason, in any thread, when a worker is lost.

        If a worker is already lost, the function is called at once.
        """
        self._callbacks[engine].append(callback)
        if self.failure is not None:
            callback(self.failure)

    def fail(self, reason: str, *, until: float = 0) -> None:
        """Ends all workers and sends the reason to all engines. Only the first call has an effect.

        Args:
            reason: Why the workers are ended.
            until: The time at which workers that are still running are killed, by time.monotonic() (seconds).
        """
        with self._failing:
            if self.failure is not None:
                return
            self.failure = reason
        for replies in self.replies:
            replies.put(EngineDeadError(reason))
        for worker in reversed(self.workers):
            worker.stop()
        for worker in self.workers:
            worker.close(until=until)
        for callback in [callback for callbacks in self._callbacks for callback in callbacks]:
            callback(reason)

    def remove_engine(self, engine: int) -> None:
        """Removes an engine. Ends the workers if no engine is left."""
        self._callbacks[engine].clear()
        self._engines.discard(engine)
        if not self._engines:
            self.fail("the engine is closed", until=time.monotonic() + CLOSING_S)
            for worker in self.workers:
                # Another thread may still be in `fail`; this waits until the worker has ended.
                worker.close(until=0)

    def _read(self, channel: Channel) -> None:
        """Receives the messages of the first worker, in a thread of its own."""
        try:
            while True:
                (engine, progress), arrays = channel.receive()
                if progress is not None:
                    self.progress = progress[0], progress[1]
                if arrays:
                    value = pickle.loads(arrays[0].data)
                    # Workers report the loss or the failure of a worker as a RuntimeError.
                    if isinstance(value, RuntimeError):
                        return self.fail(str(value))
                    self.replies[engine].put(value)
        except TimeoutError as error:
            self.fail(f"worker 0 does not respond, or its host is unreachable: {error}")
        except OSError:
            self.fail("worker 0 has ended")


def send_task(channel: Channel, args: EngineArgs, launch: Launch, peers: tuple[int, ...] | None) -> None:
    """Sends a worker its task.

    Args:
        channel: The connection to the worker.
        args: Model and limits.
        launch: The rank of the worker and the number of workers.
        peers: File descriptors of the worker's sockets to other workers; None if the workers connect to each
            other.
    """
    timeout_s = args.distributed_timeout_seconds
    channel.set_limits(sending_s=timeout_s, receiving_s=silence_limit_s(timeout_s))
    task = Task(args, launch, peers, logging.getLogger().getEffectiveLevel())
    channel.send("task", [packed(task)])


def packed(value: Any) -> np.ndarray:
    """Returns a value, pickled, as an array of bytes that a channel can send."""
    return np.frombuffer(pickle.dumps(value), np.uint8)

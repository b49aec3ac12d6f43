"""The workers of an executor, or of those of a pipeline: they start, answer and end together."""

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
# For workers to end by themselves.
CLOSING_S = 1.0
_STDERR = 2


class StartedWorker(Protocol):
    """What an executor knows of a worker.

    Attributes:
        channel: To it.
    """

    @property
    def channel(self) -> Channel: ...

    def stop(self) -> None:
        """Has it end; does not wait."""
        ...

    def close(self, *, until: float) -> None:
        """Ends it, by force if it has not ended at a time of time.monotonic."""
        ...


class Worker:
    """A process that was started here, and ends when this one does.

    Args:
        args: Model and limits.
        launch: Which of the workers it is.
        peers: Its sockets to other workers; None if they are to find each other.

    Attributes:
        channel: To it.
    """

    def __init__(self, args: EngineArgs, launch: Launch, peers: list[socket.socket] | None) -> None:
        ours, theirs = socket.socketpair()
        descriptors = None if peers is None else tuple(peer.fileno() for peer in peers)
        with theirs:
            command = [sys.executable, "-c", _WORKER, json.dumps([sys.path, theirs.fileno()])]
            passed = (theirs.fileno(), *(descriptors or ()))
            # What gloo prints is no output of the user's program.
            pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": _STDERR}
            self._process = subprocess.Popen(command, pass_fds=passed, **pipes)
        self.channel = Channel(ours)
        begin(self.channel, args, launch, descriptors)

    def stop(self) -> None:
        """Has it end; does not wait."""
        self.channel.close()

    def close(self, *, until: float) -> None:
        """Ends it, by force if it has not ended at a time of time.monotonic."""
        self.stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(until - time.monotonic(), 0))
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Waits until it ends; returns its exit status."""
        return self._process.wait()


class WorkerTeam:
    """The workers of several engines, or of one: when one is lost, all end, and everybody is told why.

    Args:
        num_engines: How many engines have a say; they are called 0, 1, ...

    Attributes:
        workers: Once they are started.
        replies: What the first worker answers, by engine; an error to be raised, if it is one.
        progress: How many programs the first worker has compiled, and how many there are.
        failure: Why they have ended; None while they run.
    """

    def __init__(self, num_engines: int) -> None:
        self.workers: Sequence[StartedWorker] = ()
        self.replies: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(num_engines)]
        self.progress = 0, 0
        self.failure: str | None = None
        self._noters: list[list[Callable[[str], None]]] = [[] for _ in range(num_engines)]
        self._present: set[int] = set()
        self._failing = threading.Lock()

    def begin(self, workers: Sequence[StartedWorker]) -> None:
        """Takes workers that are started, the first of all first."""
        self.workers = workers
        threading.Thread(target=self._read, args=(workers[0].channel,), daemon=True).start()

    def join(self, engine: int) -> None:
        """Keeps the workers until an engine leaves."""
        self._present.add(engine)

    def send(self, engine: int, name: str, args: tuple[Any, ...]) -> None:
        """Calls a method of the first worker's executor of an engine.

        Raises:
            EngineDeadError: If the workers have ended.
            OSError: If they end now.
        """
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        self.workers[0].channel.send([engine, name], [packed(args)])

    def when_failed(self, engine: int, note: Callable[[str], None]) -> None:
        """Calls a function with the reason, from any thread, when a worker is lost, or at once if one is."""
        self._noters[engine].append(note)
        if self.failure is not None:
            note(self.failure)

    def fail(self, reason: str, *, until: float = 0) -> None:
        """Ends all workers, unless this was done, and tells everybody why."""
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
        for note in [note for noters in self._noters for note in noters]:
            note(reason)

    def leave(self, engine: int) -> None:
        """Ends the workers, if no other engine has them."""
        self._noters[engine].clear()
        self._present.discard(engine)
        if not self._present:
            self.fail("the engine is closed", until=time.monotonic() + CLOSING_S)
            for worker in self.workers:
                worker.close(until=0)  # which another thread may still be at

    def _read(self, channel: Channel) -> None:
        """Takes what the first worker says, in a thread of its own."""
        try:
            while True:
                (engine, progress), arrays = channel.receive()
                if progress is not None:
                    self.progress = progress[0], progress[1]
                if arrays:
                    value = pickle.loads(arrays[0].data)
                    if isinstance(value, RuntimeError):
                        return self.fail(str(value))
                    self.replies[engine].put(value)
        except TimeoutError as error:
            self.fail(f"worker 0 has stalled, or its host is gone: {error}")
        except OSError:
            self.fail("worker 0 has ended")


def begin(channel: Channel, args: EngineArgs, launch: Launch, peers: tuple[int, ...] | None) -> None:
    """Tells a worker what it is started for.

    Args:
        channel: To it.
        args: Model and limits.
        launch: Which of the workers it is.
        peers: As Task takes them.
    """
    timeout_s = args.distributed_timeout_seconds
    channel.set_limits(sending_s=timeout_s, receiving_s=silence_limit_s(timeout_s))
    task = Task(args, launch, peers, logging.getLogger().getEffectiveLevel())
    channel.send("task", [packed(task)])


def packed(value: Any) -> np.ndarray:
    """Returns a value as bytes that a channel takes."""
    return np.frombuffer(pickle.dumps(value), np.uint8)

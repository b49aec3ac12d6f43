"""Executors whose devices are those of other processes, the workers; this process has none, and no JAX."""

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
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from jax_paged.checks import check
from jax_paged.config import EngineArgs, EngineConfig
from jax_paged.core.runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import BlockTables, InspectionInput, SchedulerOutput
from jax_paged.engine.errors import EngineDeadError
from jax_paged.launch import Launch
from jax_paged.worker.channel import Channel
from jax_paged.worker.task import Task

if TYPE_CHECKING:
    from jax_paged.models.exchange import NewWeights
    from jax_paged.worker.compilation import CompileRecord

_WORKER = """
import json, sys
sys.path[:], descriptor = json.loads(sys.argv[1])
from jax_paged.worker.process import main
main(descriptor)
"""
# For workers to end by themselves.
_CLOSING_S = 1.0
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


class MultiprocessExecutor:
    """Runs steps in processes that it starts on this machine, one for each device. It is an Executor.

    The first of them does what LocalExecutor does; the others do on their devices what it does on its own.

    Args:
        args: Model and limits.

    Raises:
        ValueError: If the model can't be loaded, or a limit does not fit it.
        EngineDeadError: If a worker ends before it is ready.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._args, self._limit_s = args, args.distributed_timeout_seconds
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: str | None = None
        self._noters: list[Callable[[str], None]] = []
        self._failing = threading.Lock()
        self._progress = 0, 0
        self._workers: Sequence[StartedWorker] = ()
        self._workers = self._start(args)
        threading.Thread(target=self._read, args=(self._workers[0].channel,), daemon=True).start()
        try:
            self._config, self._buckets = self._reply(None)
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """What the engine has come to: sizes, limits, names."""
        return self._config

    @property
    def buckets(self) -> tuple[str, ...]:
        """Names of the shapes that steps are padded to."""
        return self._buckets

    @property
    def compile_progress(self) -> tuple[int, int]:
        """How many programs the first worker has compiled, and how many there are; from any thread."""
        return self._progress

    def dispatch(self, output: SchedulerOutput) -> None:
        """Begins a step; returns as soon as the first worker is sure to get it."""
        self._send("dispatch", output)

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was dispatched and whose result was not asked for yet.

        Raises:
            EngineDeadError: If a worker is lost, or the step takes longer than distributed_timeout_seconds.
        """
        self._send("result")
        return self._reply(self._limit_s)

    def read_memory(self, blocks: list[int], host_blocks: list[int], *, with_weights: bool) -> NoReturn:
        """Raises ValueError, as no process has whole blocks."""
        self._refuse("to save or load a state")

    def write_memory(
        self,
        blocks: list[int],
        host_blocks: list[int],
        arrays: "dict[str, np.ndarray]",
        *,
        with_weights: bool,
    ) -> NoReturn:
        """Raises ValueError, as no process has whole blocks."""
        self._refuse("to save or load a state")

    def fingerprint(self) -> NoReturn:
        """Raises ValueError, as no process has whole weights."""
        self._refuse("to save or load a state")

    def read_kv(self, layer: int, block_tables: BlockTables, num_tokens: list[int]) -> NoReturn:
        """Raises ValueError, as no process has whole blocks."""
        self._refuse("to read keys and values")

    def inspect(self, query: InspectionInput) -> NoReturn:
        """Raises ValueError, as no process has whole blocks."""
        self._refuse("to inspect requests")

    def compile_plan(self) -> str:
        """Returns a table of what the first worker compiles: shapes, seconds and bytes."""
        return self._call("compile_plan")

    def compile_report(self) -> "list[CompileRecord]":
        """Returns what the table of `compile_plan` says, as records."""
        return self._call("compile_report")

    def wait_until_compiled(self) -> None:
        """Returns when the first worker has compiled everything; takes no steps meanwhile."""
        self._send("wait_until_compiled")
        self._reply(None)

    def when_failed(self, note: Callable[[str], None]) -> None:
        """Calls a function with the reason, from any thread, when a worker is lost."""
        self._noters.append(note)

    def update_weights(self, new: "NewWeights") -> NoReturn:
        """Raises ValueError, as each process has read its part of the weights."""
        self._refuse("to exchange weights")

    def check_weights(self) -> None:
        """Does nothing, as the weights are nobody else's."""

    def free_memory(self, *, keeps_weights: bool) -> NoReturn:
        """Raises ValueError, as only this process's engine could sleep."""
        self._refuse("to sleep")

    def restore_weights(self) -> NoReturn:
        """Raises ValueError, as nothing was freed."""
        self._refuse("to wake up")

    def restore_pool(self) -> NoReturn:
        """Raises ValueError, as nothing was freed."""
        self._refuse("to wake up")

    def close(self) -> None:
        """Ends the workers."""
        self._noters.clear()
        self._fail("the engine is closed", until=time.monotonic() + _CLOSING_S)
        for worker in self._workers:
            worker.close(until=0)  # which another thread may still be at

    def _start(self, args: EngineArgs) -> Sequence[StartedWorker]:
        """Starts the workers that this process has to, the first of all first."""
        size = args.tensor_parallel_size
        pairs = [socket.socketpair() for _ in range(size - 1)]
        ends = [[ours for ours, _ in pairs], *([theirs] for _, theirs in pairs)]
        workers: list[Worker] = []
        try:
            for rank, peers in enumerate(ends):
                launch = Launch(rank, size, "127.0.0.1", 0, local_rank=rank)
                workers.append(Worker(args, launch, peers))
        except BaseException:
            for worker in workers:
                worker.close(until=0)
            raise
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()
        return workers

    def _call(self, name: str, *args: Any) -> Any:
        self._send(name, *args)
        return self._reply(self._limit_s)

    def _send(self, name: str, *args: Any) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        try:
            self._workers[0].channel.send(name, [packed(args)])
        except BlockingIOError:
            self._hang()
        except OSError:
            self._reply(self._limit_s)  # tells why

    def _reply(self, limit_s: float | None) -> Any:
        try:
            value = self._replies.get(timeout=limit_s)
        except queue.Empty:
            self._hang()
        if isinstance(value, Exception):
            raise value
        return value

    def _hang(self) -> NoReturn:
        reason = f"the workers hang: a step takes more than {self._limit_s:g} s (distributed_timeout_seconds)"
        self._fail(reason)
        raise EngineDeadError(reason)

    def _read(self, channel: Channel) -> None:
        """Takes what the first worker says, in a thread of its own."""
        try:
            while True:
                progress, arrays = channel.receive()
                if progress is not None:
                    self._progress = progress[0], progress[1]
                if arrays:
                    value = pickle.loads(arrays[0].data)
                    if isinstance(value, RuntimeError):
                        return self._fail(str(value))
                    self._replies.put(value)
        except OSError:
            self._fail("worker 0 has ended")

    def _fail(self, reason: str, *, until: float = 0) -> None:
        """Ends all workers, unless this was done, and tells everybody why."""
        with self._failing:
            if self._failure is not None:
                return
            self._failure = reason
        self._replies.put(EngineDeadError(reason))
        for worker in reversed(self._workers):
            worker.stop()
        for worker in self._workers:
            worker.close(until=until)
        for note in self._noters:
            note(reason)

    def _refuse(self, what: str) -> NoReturn:
        backend = self._args.distributed_executor_backend
        check(False, "distributed_executor_backend", backend, f"'uni' {what}")
        raise AssertionError("it has raised")


class ExternalExecutor(MultiprocessExecutor):
    """Runs steps in processes that a launcher has started, on any machines: this one is the first of them.

    In every other process the constructor does not return: it follows the first, and ends with it.

    Args:
        args: Model and limits; all processes have got the same.
        launch: What the launcher says of them.

    Raises:
        ValueError: As MultiprocessExecutor; or if the processes differ or do not find each other.
        EngineDeadError: If a worker ends before it is ready.
        SystemExit: If this is not the first process, when the first has ended.
    """

    def __init__(self, args: EngineArgs, launch: Launch) -> None:
        if launch.rank > 0:
            follow(args, launch)
        self._launch = launch
        super().__init__(args)

    def _start(self, args: EngineArgs) -> Sequence[StartedWorker]:
        """Starts the first worker; the others are other processes'."""
        return [Worker(args, self._launch, None)]


def follow(args: EngineArgs, launch: Launch) -> NoReturn:
    """Does what the first of several processes does, on the devices of this one, until that ends.

    Args:
        args: Model and limits; those of the first.
        launch: What the launcher says of this process.

    Raises:
        ValueError: If the processes differ or do not find each other, or the model can't be loaded.
        SystemExit: When the first has ended.
    """
    worker = Worker(args, launch, None)
    try:
        _, arrays = worker.channel.receive()
        raise pickle.loads(arrays[0].data)
    except OSError:
        sys.exit(worker.wait())
    finally:
        worker.close(until=time.monotonic() + _CLOSING_S)


def begin(channel: Channel, args: EngineArgs, launch: Launch, peers: tuple[int, ...] | None) -> None:
    """Tells a worker what it is started for.

    Args:
        channel: To it.
        args: Model and limits.
        launch: Which of the workers it is.
        peers: As Task takes them.
    """
    channel.set_limits(sending_s=args.distributed_timeout_seconds)
    task = Task(args, launch, peers, logging.getLogger().getEffectiveLevel())
    channel.send("task", [packed(task)])


def packed(value: Any) -> np.ndarray:
    """Returns a value as bytes that a channel takes."""
    return np.frombuffer(pickle.dumps(value), np.uint8)

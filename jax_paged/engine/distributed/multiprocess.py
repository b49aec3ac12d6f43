"""Executors whose devices are those of other processes, the workers; this process has none, and no JAX."""

import pickle
import queue
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.config.launch import Launch
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.distributed.worker_team import CLOSING_S, StartedWorker, Worker, WorkerTeam
from jax_paged.engine.errors import EngineDeadError
from jax_paged.errors import ArgumentError

if TYPE_CHECKING:
    from jax_paged.worker.compilation.compiler import CompileRecord


def _rejected(what: str) -> Callable[..., NoReturn]:
    """Returns a method of an executor that raises ValueError.

    Args:
        what: What can't be done with the devices of other processes.
    """

    def reject(self: "MultiprocessExecutor", *_: Any, **__: Any) -> NoReturn:
        backend = self._args.distributed_executor_backend
        raise ArgumentError("distributed_executor_backend", backend, f"'uni' {what}")

    return reject


class MultiprocessExecutor:
    """Runs steps in processes that it starts on this machine. It is an Executor.

    There is one for each device; of a pipeline, one for each stage. The first of them does what LocalExecutor
    does; the others do on their devices what it does on its own.

    Args:
        args: Model and limits.
        engine: Which of the engines of a pipeline it is for.
        beside: The executor of the first of them, whose processes it shares.

    Raises:
        ValueError: If the model can't be loaded, or a limit does not fit it.
        EngineDeadError: If a worker ends before it is ready.
    """

    def __init__(
        self, args: EngineArgs, engine: int = 0, beside: "MultiprocessExecutor | None" = None
    ) -> None:
        self._args, self._limit_s = args, args.distributed_timeout_seconds
        self._engine = engine
        self._team = beside._team if beside else WorkerTeam(args.num_engines)
        if beside is None:
            self._team.begin(self._start(args))
        self._team.join(engine)
        weakref.finalize(self, self._team.leave, engine).atexit = False
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
        return self._team.progress

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
        self._team.when_failed(self._engine, note)

    def check_weights(self) -> None:
        """Does nothing, as the weights are nobody else's."""

    # No process has whole blocks or weights.
    read_memory = _rejected("to save or load a state")
    write_memory = _rejected("to save or load a state")
    fingerprint = _rejected("to save or load a state")
    read_kv = _rejected("to read keys and values")
    inspect = _rejected("to inspect requests")
    update_weights = _rejected("to exchange weights")
    free_memory = _rejected("to sleep")
    restore_weights = _rejected("to wake up")
    restore_pool = _rejected("to wake up")

    def close(self) -> None:
        """Ends the workers, when the executors of all engines that share them are closed."""
        self._team.leave(self._engine)

    def _start(self, args: EngineArgs) -> Sequence[StartedWorker]:
        """Starts the workers that this process has to, the first of all first."""
        num_stages = args.pipeline_parallel_size
        size = num_stages if num_stages > 1 else args.tensor_parallel_size
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
        try:
            self._team.send(self._engine, name, args)
        except BlockingIOError:
            self._hang()
        except OSError:
            self._reply(self._limit_s)  # tells why

    def _reply(self, limit_s: float | None) -> Any:
        try:
            value = self._team.replies[self._engine].get(timeout=limit_s)
        except queue.Empty:
            self._hang()
        if isinstance(value, Exception):
            raise value
        return value

    def _hang(self) -> NoReturn:
        reason = f"the workers hang: a step takes more than {self._limit_s:g} s (distributed_timeout_seconds)"
        self._team.fail(reason)
        raise EngineDeadError(reason)


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
        EngineDeadError: If this process's worker stalls.
        SystemExit: When the first has ended.
    """
    worker = Worker(args, launch, None)
    try:
        _, arrays = worker.channel.receive()
        raise pickle.loads(arrays[0].data)
    except TimeoutError as error:
        worker.close(until=0)
        raise EngineDeadError(f"worker {launch.rank} has stalled: {error}") from error
    except OSError:
        sys.exit(worker.wait())
    finally:
        worker.close(until=time.monotonic() + CLOSING_S)

"""Executors that run steps in worker processes. The engine's process has no devices and no JAX."""

import pickle
import queue
import socket
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.config.launch import Launch
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.distributed.worker_team import CLOSING_S, StartedWorker, Worker, WorkerTeam
from jax_paged.engine.errors import EngineDeadError
from jax_paged.errors import ArgumentError

if TYPE_CHECKING:
    from jax_paged.worker.compilation.compiler import CompileRecord


def _rejected(what: str) -> Callable[..., NoReturn]:
    """Returns an executor method that raises ValueError.

    Args:
        what: The purpose of the method, for the error message.
    """

    def reject(self: "MultiprocessExecutor", *_: Any, **__: Any) -> NoReturn:
        backend = self._args.distributed_executor_backend
        raise ArgumentError("distributed_executor_backend", backend, f"'uni' {what}")

    return reject


class MultiprocessExecutor:
    """Executor that runs steps in worker processes, which it starts on this machine.

    There is one worker for each device, or for each stage of a pipeline. The first worker does what
    LocalExecutor does. The other workers run the same steps on their own devices.

    Args:
        args: Model and limits.
        engine: Index of the engine in its pipeline.
        leader: The executor of the pipeline's first engine, whose workers are shared; None for the first
            engine.

    Raises:
        ValueError: If the model can't be loaded, or a limit does not fit it.
        EngineDeadError: If a worker ends before it is ready.
    """

    def __init__(
        self, args: EngineArgs, engine: int = 0, leader: "MultiprocessExecutor | None" = None
    ) -> None:
        self._args, self._limit_s = args, args.distributed_timeout_seconds
        self._engine = engine
        self._team = leader._team if leader else WorkerTeam(args.num_engines)
        if leader is None:
            self._team.begin(self._start(args))
        self._team.add_engine(engine)
        weakref.finalize(self, self._team.remove_engine, engine).atexit = False
        try:
            self._config, self._buckets = self._reply(None)
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """The settings of the engine, completed for the model and the devices."""
        return self._config

    @property
    def buckets(self) -> tuple[str, ...]:
        """The names of the shapes that steps are padded to."""
        return self._buckets

    @property
    def compile_progress(self) -> tuple[int, int]:
        """The number of programs that the first worker has compiled, and the number of all programs.

        Any thread may read it.
        """
        return self._team.progress

    def dispatch(self, output: SchedulerOutput) -> None:
        """Starts a step. Returns as soon as the step has been sent to the first worker."""
        self._send("dispatch", output)

    def result(self) -> ModelRunnerOutput:
        """Waits for the oldest dispatched step whose result has not been returned, and returns its result.

        Raises:
            EngineDeadError: If a worker is lost, or the step takes longer than distributed_timeout_seconds.
        """
        self._send("result")
        return self._reply(self._limit_s)

    def compile_plan(self) -> str:
        """Returns a table of the first worker's programs; see LLMEngine.compile_plan."""
        return self._call("compile_plan")

    def compile_report(self) -> "list[CompileRecord]":
        """Returns the contents of the table of `compile_plan` as records."""
        return self._call("compile_report")

    def wait_until_compiled(self) -> None:
        """Waits until the first worker has compiled all programs. No step can run meanwhile."""
        self._send("wait_until_compiled")
        self._reply(None)

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """Registers a function that is called with the reason, in any thread, when a worker is lost."""
        self._team.on_failure(self._engine, callback)

    def check_weights(self) -> None:
        """Does nothing, because callers can't change the weights of worker processes."""

    # No process has whole blocks or weights, so these methods are not supported.
    read_memory = _rejected("to save or load a state")
    write_memory = _rejected("to save or load a state")
    fingerprint = _rejected("to save or load a state")
    read_kv = _rejected("to read keys and values")
    inspect = _rejected("to inspect requests")
    update_weights = _rejected("to update weights")
    free_memory = _rejected("to sleep")
    restore_weights = _rejected("to wake up")
    restore_pool = _rejected("to wake up")

    def close(self) -> None:
        """Ends the workers as soon as the executors of all engines that share them are closed."""
        self._team.remove_engine(self._engine)

    def _start(self, args: EngineArgs) -> Sequence[StartedWorker]:
        """Starts the workers of this process. Returns them in the order of their ranks."""
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
            self._raise_timeout()
        except OSError:
            self._reply(self._limit_s)  # raises the error that explains why

    def _reply(self, limit_s: float | None) -> Any:
        try:
            value = self._team.replies[self._engine].get(timeout=limit_s)
        except queue.Empty:
            self._raise_timeout()
        if isinstance(value, Exception):
            raise value
        return value

    def _raise_timeout(self) -> NoReturn:
        reason = f"the workers have not responded for {self._limit_s:g} s (distributed_timeout_seconds)"
        self._team.fail(reason)
        raise EngineDeadError(reason)


class ExternalExecutor(MultiprocessExecutor):
    """Executor that runs steps in processes that a launcher has started, on one or several machines.

    This process is the first of them. In every other process the constructor does not return: that process
    follows the first one and ends with it.

    Args:
        args: Model and limits; equal in all processes.
        launch: The launcher's information about this process.

    Raises:
        ValueError: If the model can't be loaded, a limit does not fit it, the arguments of the processes
            differ, or the processes can't connect.
        EngineDeadError: If a worker ends before it is ready.
        SystemExit: In every process except the first, when the first one has ended.
    """

    def __init__(self, args: EngineArgs, launch: Launch) -> None:
        if launch.rank > 0:
            follow(args, launch)
        self._launch = launch
        super().__init__(args)

    def _start(self, args: EngineArgs) -> Sequence[StartedWorker]:
        """Starts the first worker. The launcher's other processes start the others."""
        return [Worker(args, self._launch, None)]


def follow(args: EngineArgs, launch: Launch) -> NoReturn:
    """Runs the worker of a process that is not the first, until the first process ends. Does not return.

    Args:
        args: Model and limits; equal in all processes.
        launch: The launcher's information about this process.

    Raises:
        ValueError: If the model can't be loaded, the arguments of the processes differ, or the processes
            can't connect.
        EngineDeadError: If the worker of this process stalls.
        RuntimeError: If the worker of this process fails.
        SystemExit: When the first process has ended.
    """
    worker = Worker(args, launch, None)
    try:
        # A worker that is not the first one sends a message only if it fails.
        _, arrays = worker.channel.receive()
        raise pickle.loads(arrays[0].data)
    except TimeoutError as error:
        worker.close(until=0)
        raise EngineDeadError(f"worker {launch.rank} does not respond: {error}") from error
    except OSError:
        sys.exit(worker.wait())
    finally:
        worker.close(until=time.monotonic() + CLOSING_S)

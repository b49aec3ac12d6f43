"""The main function of a worker process.

A worker owns some of an engine's devices. Its owner, the process that started it, sends the task and then
calls methods of the executors in worker 0. A worker ends when the connection to its owner is closed.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import Launch
from jax_paged.errors import ArgumentError, ArgumentErrors, check
from jax_paged.pallas_kernels.jax_settings import apply_to_process
from jax_paged.worker.distributed.channel import Channel
from jax_paged.worker.distributed.follower import Follower, follow_leader
from jax_paged.worker.distributed.handshake import follow, lead
from jax_paged.worker.distributed.leader import Followers, Leader
from jax_paged.worker.distributed.task import Task
from jax_paged.worker.executor import LocalExecutor
from jax_paged.worker.model_runner import ModelRunner
from jax_paged.worker.pipeline.stage_links import StageLinks

_LOGGER = logging.getLogger(__name__)
# _REPORT_DELAY_S: delay before an error is reported. Another thread may report the cause, the loss of a
# worker, in this time. _EXIT_DELAY_S: delay before worker 0 exits, in which the other workers exit (seconds).
_REPORT_DELAY_S, _EXIT_DELAY_S = 0.5, 0.2

# Calls of an executor: name of the method, and an array with its pickled arguments.
type Calls = queue.SimpleQueue[tuple[str, list[np.ndarray]]]


def main(descriptor: int) -> NoReturn:
    """Runs a worker until its owner closes the connection.

    Args:
        descriptor: File descriptor of the socket to the owner.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the owner handles it
    owner = Channel(socket.socket(fileno=descriptor))
    owner.start_heartbeat()
    apply_to_process()  # the inherited environment may set other values
    task: Task = pickle.loads(owner.receive()[1][0].data)
    logging.basicConfig(level=task.log_level, format=f"worker {task.launch.rank}: %(message)s")
    calls: list[Calls] = [queue.SimpleQueue() for _ in range(task.args.num_engines)]
    peers: list[Channel] = []
    threading.Thread(target=_listen, args=(owner, calls, peers), daemon=True).start()
    fail = functools.partial(_fail, task.launch.rank, owner)
    try:
        if task.launch.rank == 0:
            _lead(task, owner, calls, peers, fail)
        _follow(task, fail)
    except Exception as error:
        fail(error)


def _fail(rank: int, owner: Channel, error: Exception) -> NoReturn:
    """Reports an error to the owner and ends the process; may be called from any thread.

    Args:
        rank: Rank of this worker.
        owner: Channel to the owner.
        error: The error.
    """
    if isinstance(error, ValueError):
        # Other subclasses of ValueError may not exist in the owner, which unpickles the error.
        _reply(owner, error if isinstance(error, ArgumentError | ArgumentErrors) else ValueError(str(error)))
    else:
        # If another worker is lost, the collectives in this worker fail. The thread that watches the lost
        # worker reports a better reason, so it gets the time to do so first.
        time.sleep(_REPORT_DELAY_S)
        _LOGGER.error("the worker has failed", exc_info=error)
        _reply(owner, RuntimeError(f"worker {rank} has failed: {error!r}"))
    _end(1)


def _lead(
    task: Task,
    owner: Channel,
    calls: list[Calls],
    peers: list[Channel],
    fail: Callable[[Exception], NoReturn],
) -> NoReturn:
    """Runs worker 0: executes the owner's calls with the help of the other workers.

    Args:
        task: The task of this worker.
        owner: Channel to the owner.
        calls: Calls from the owner, one queue per engine.
        peers: List to which the channels to the other workers are added.
        fail: Reports an error and ends the process.
    """
    channels, address = lead(task)
    peers += channels
    _init_distributed(task, address)
    links = _links(task, channels[0], fail) if task.args.pipeline_parallel_size > 1 else None

    def on_lost_worker(reason: str) -> None:
        with contextlib.suppress(OSError):  # the connection to the owner may be closed already
            _reply(owner, RuntimeError(reason))
        _end(1)

    followers, executors = Followers(channels, on_lost_worker, links), list[LocalExecutor]()
    for engine in range(task.args.num_engines):
        group = Leader(followers, engine)
        executors.append(LocalExecutor(task.args, group=group, shared_with=executors[0] if engine else None))
    compiled = executors[0].runner.compiled
    compiled.on_compiled(lambda _: owner.send([0, compiled.progress]))
    served = list(enumerate(zip(executors, calls, strict=True)))
    for engine, (executor, engine_calls) in served[1:]:
        threading.Thread(
            target=_serve, args=(engine, executor, owner, engine_calls, fail), daemon=True
        ).start()
    _serve(0, executors[0], owner, calls[0], fail)


def _serve(
    engine: int, executor: LocalExecutor, owner: Channel, calls: Calls, fail: Callable[[Exception], NoReturn]
) -> NoReturn:
    """Executes the owner's calls of the executor of one engine.

    Args:
        engine: Index of the engine.
        executor: The executor of the engine.
        owner: Channel to the owner.
        calls: Calls from the owner for this engine.
        fail: Reports an error and ends the process.
    """
    try:
        _reply(owner, (executor.config, executor.buckets), executor, engine)
        while True:
            name, (packed,) = calls.get()
            args = pickle.loads(packed.data)
            if name == "dispatch":  # the owner does not wait for a reply
                executor.dispatch(*args)
            else:
                _reply(owner, getattr(executor, name)(*args), executor, engine)
    except Exception as error:
        fail(error)


def _follow(task: Task, fail: Callable[[Exception], NoReturn]) -> NoReturn:
    """Runs a worker other than worker 0: executes the programs that worker 0 announces."""
    channel, address = follow(task)
    try:
        _init_distributed(task, address)
        links = _links(task, channel, fail) if task.args.pipeline_parallel_size > 1 else None
        groups = [Follower(channel, engine, links) for engine in range(task.args.num_engines)]
        # A follower compiles everything that worker 0 may use. Only worker 0 applies max_compile_s.
        args, first = dataclasses.replace(task.args, max_compile_s=None), None
        for group in groups:
            first = ModelRunner(args, group=group, shared_with=first)
    except ValueError as error:
        channel.send({"error": str(error)})
        raise
    follow_leader(channel, groups, _end)


def _links(task: Task, channel: Channel, fail: Callable[[Exception], NoReturn]) -> StageLinks:
    """Returns the links to the other pipeline stages; all messages between stages pass through worker 0."""
    return StageLinks(task.launch.rank, task.args.pipeline_parallel_size, channel.send, fail)


def _init_distributed(task: Task, address: str) -> None:
    """Initializes JAX's distributed service, so that the devices of all workers form one mesh.

    With pipeline parallelism, each worker has its own mesh instead and JAX only sees its local devices.

    Raises:
        ValueError: If the number of devices does not fit tensor_parallel_size.
    """
    launch, args = task.launch, task.args
    if args.pipeline_parallel_size > 1:
        return _select_devices(launch, args)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM must end the process
    jax.distributed.initialize(
        address,
        launch.world_size,
        launch.rank,
        launch.local_rank,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, round(args.distributed_timeout_seconds)),
        coordinator_bind_address=address,
    )
    size, num_devices = args.tensor_parallel_size, jax.local_device_count() * launch.world_size
    devices = f"{launch.world_size} processes with {jax.local_device_count()} devices each"
    check(size == num_devices, "tensor_parallel_size", size, f"{num_devices}, for {devices}")


def _select_devices(launch: Launch, args: EngineArgs) -> None:
    """Selects the GPUs of this worker's pipeline stage; other workers on the machine use the others.

    Raises:
        ValueError: If the number of processes is not the number of stages, or the number of devices is not
            tensor_parallel_size.
    """
    num_stages, size = args.pipeline_parallel_size, args.tensor_parallel_size
    allowed = f"{launch.world_size}, the number of processes (WORLD_SIZE)"
    check(num_stages == launch.world_size, "pipeline_parallel_size", num_stages, allowed)
    if launch.local_rank is not None:
        first = launch.local_rank * size
        for platform in ("cuda", "rocm"):
            names = ",".join(map(str, range(first, first + size)))
            jax.config.update(f"jax_{platform}_visible_devices", names)
    seen = jax.local_device_count()
    check(
        size == seen, "tensor_parallel_size", size, f"{seen}, the number of devices of each stage's process"
    )


def _listen(owner: Channel, calls: list[Calls], peers: list[Channel]) -> None:
    """Receives the owner's calls; ends the process when the owner has closed the connection.

    Runs in its own thread, so that the process also ends while other threads wait for the device.

    Args:
        owner: Channel to the owner.
        calls: One queue per engine, to which the calls are added.
        peers: Channels to the other workers, which end before this worker.
    """
    try:
        while True:
            (engine, name), arrays = owner.receive()
            calls[engine].put((name, arrays))
    except OSError:
        for peer in peers:
            peer.close()
        # If the first process of JAX's distributed service exits, JAX aborts the others with long error
        # messages. The delay lets them exit before.
        time.sleep(_EXIT_DELAY_S if peers else 0)
        _end(0)


def _reply(owner: Channel, value: Any, executor: LocalExecutor | None = None, engine: int = 0) -> None:
    """Sends the result of a call to the owner, with the progress of compilation.

    Args:
        owner: Channel to the owner.
        value: The result, or an error to raise.
        executor: Executor whose compilation progress is reported; None reports no progress.
        engine: Index of the engine.
    """
    progress = None if executor is None else executor.compile_progress
    owner.send([engine, progress], [np.frombuffer(pickle.dumps(value), np.uint8)])


def _end(code: int) -> NoReturn:
    """Ends the process immediately. A normal exit would wait for other JAX processes and for compilations."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)

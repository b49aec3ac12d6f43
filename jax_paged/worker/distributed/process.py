"""A worker: a process that has some of an engine's devices, and ends with whoever has started it."""

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
# For another thread to tell why a collective has failed, and for other workers to end.
_REASON_S, _FAREWELL_S = 0.5, 0.2

# Names of an executor's methods, and their arguments.
type Calls = queue.SimpleQueue[tuple[str, list[np.ndarray]]]


def main(descriptor: int) -> NoReturn:
    """Works for whoever is at the other end of a socket, until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    owner = Channel(socket.socket(fileno=descriptor))
    owner.start_heartbeat()
    apply_to_process()  # the environment, which workers inherit, may set others
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
    """Tells the owner what has failed, and ends; any thread."""
    if isinstance(error, ValueError):
        # Other ValueErrors may be of a type that the owner can't unpickle.
        _tell(owner, error if isinstance(error, ArgumentError | ArgumentErrors) else ValueError(str(error)))
    else:
        # Where another worker is lost, this one's collectives fail: who watches that one knows it better.
        time.sleep(_REASON_S)
        _LOGGER.error("it has failed", exc_info=error)
        _tell(owner, RuntimeError(f"worker {rank} has failed: {error!r}"))
    _end(1)


def _lead(
    task: Task,
    owner: Channel,
    calls: list[Calls],
    peers: list[Channel],
    fail: Callable[[Exception], NoReturn],
) -> NoReturn:
    """Runs the steps that the owner asks for, with all other workers, which are added to `peers`."""
    channels, address = lead(task)
    peers += channels
    _meet(task, address)
    links = _links(task, channels[0], fail) if task.args.pipeline_parallel_size > 1 else None

    def lose(reason: str) -> None:
        with contextlib.suppress(OSError):  # it may be the end of all of them
            _tell(owner, RuntimeError(reason))
        _end(1)

    followers, executors = Followers(channels, lose, links), list[LocalExecutor]()
    for engine in range(task.args.num_engines):
        group = Leader(followers, engine)
        executors.append(LocalExecutor(task.args, group=group, beside=executors[0] if engine else None))
    compiled = executors[0].runner.compiled
    compiled.when_compiled(lambda _: owner.send([0, compiled.progress]))
    served = list(enumerate(zip(executors, calls, strict=True)))
    for engine, (executor, asked) in served[1:]:
        threading.Thread(target=_serve, args=(engine, executor, owner, asked, fail), daemon=True).start()
    _serve(0, executors[0], owner, calls[0], fail)


def _serve(
    engine: int, executor: LocalExecutor, owner: Channel, calls: Calls, fail: Callable[[Exception], NoReturn]
) -> NoReturn:
    """Calls the methods of the executor of one engine that the owner asks for."""
    try:
        _tell(owner, (executor.config, executor.buckets), executor, engine)
        while True:
            name, (packed,) = calls.get()
            args = pickle.loads(packed.data)
            if name == "dispatch":  # which nobody waits for
                executor.dispatch(*args)
            else:
                _tell(owner, getattr(executor, name)(*args), executor, engine)
    except Exception as error:
        fail(error)


def _follow(task: Task, fail: Callable[[Exception], NoReturn]) -> NoReturn:
    """Runs what the first worker announces."""
    channel, address = follow(task)
    try:
        _meet(task, address)
        links = _links(task, channel, fail) if task.args.pipeline_parallel_size > 1 else None
        groups = [Follower(channel, engine, links) for engine in range(task.args.num_engines)]
        # Whatever the first one uses has to be there: it alone minds the time.
        args, first = dataclasses.replace(task.args, max_compile_s=None), None
        for group in groups:
            first = ModelRunner(args, group=group, beside=first)
    except ValueError as error:
        channel.send({"error": str(error)})
        raise
    follow_leader(channel, groups, _end)


def _links(task: Task, channel: Channel, fail: Callable[[Exception], NoReturn]) -> StageLinks:
    """Returns links between stages: the first worker hands on what others send to each other."""
    return StageLinks(task.launch.rank, task.args.pipeline_parallel_size, channel.send, fail)


def _meet(task: Task, address: str) -> None:
    """Makes the devices of all workers one mesh's; stages have a mesh each, and JAX knows of one alone.

    Raises:
        ValueError: If this one has another number of devices than it should.
    """
    launch, args = task.launch, task.args
    if args.pipeline_parallel_size > 1:
        return _take_devices(launch, args)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is to end it
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
    devices = f"{launch.world_size} processes with {jax.local_device_count()} each"
    check(size == num_devices, "tensor_parallel_size", size, f"{num_devices}, the devices of {devices}")


def _take_devices(launch: Launch, args: EngineArgs) -> None:
    """Leaves the GPUs of a machine to those of its processes that have other stages.

    Raises:
        ValueError: If there are more or fewer processes than stages, or devices than a stage has.
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
    check(size == seen, "tensor_parallel_size", size, f"{seen}, the devices of each stage's process")


def _listen(owner: Channel, calls: list[Calls], peers: list[Channel]) -> None:
    """Takes the messages of the owner, and ends with it and after the peers, whatever it waits for."""
    try:
        while True:
            (engine, name), arrays = owner.receive()
            calls[engine].put((name, arrays))
    except OSError:
        for peer in peers:
            peer.close()
        # Where the first process of JAX is gone, it aborts the others, with many words.
        time.sleep(_FAREWELL_S if peers else 0)
        _end(0)


def _tell(owner: Channel, value: Any, executor: LocalExecutor | None = None, engine: int = 0) -> None:
    """Answers the owner's call for an engine, and says how far the compilation is."""
    progress = None if executor is None else executor.compile_progress
    owner.send([engine, progress], [np.frombuffer(pickle.dumps(value), np.uint8)])


def _end(code: int) -> NoReturn:
    """Ends the process at once: JAX would wait for other processes, and threads for their compilations."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)

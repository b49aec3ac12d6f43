"""A worker: a process that has some of an engine's devices, and ends with whoever has started it."""

import contextlib
import dataclasses
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

import jax
import numpy as np

from jax_paged.checks import check
from jax_paged.worker.channel import Channel
from jax_paged.worker.executor import LocalExecutor
from jax_paged.worker.follower import Follower
from jax_paged.worker.handshake import follow, lead
from jax_paged.worker.leader import Leader
from jax_paged.worker.model_runner import ModelRunner
from jax_paged.worker.task import Task

_LOGGER = logging.getLogger(__name__)
# For another thread to tell why a collective has failed, and for other workers to end.
_REASON_S, _FAREWELL_S = 0.5, 0.2

# Names of the executor's methods, and their arguments.
type Calls = queue.SimpleQueue[tuple[str, list[np.ndarray]]]


def main(descriptor: int) -> NoReturn:
    """Works for whoever is at the other end of a socket, until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    owner = Channel(socket.socket(fileno=descriptor))
    task: Task = pickle.loads(owner.receive()[1][0].data)
    logging.basicConfig(level=task.log_level, format=f"worker {task.launch.rank}: %(message)s")
    calls: Calls = queue.SimpleQueue()
    peers: list[Channel] = []
    threading.Thread(target=_listen, args=(owner, calls, peers), daemon=True).start()
    try:
        if task.launch.rank == 0:
            _lead(task, owner, calls, peers)
        _follow(task)
    except ValueError as error:
        _tell(owner, ValueError(str(error)))
    except Exception as error:
        # Where another worker is lost, this one's collectives fail: who watches that one knows it better.
        time.sleep(_REASON_S)
        _LOGGER.exception("it has failed")
        _tell(owner, RuntimeError(f"worker {task.launch.rank} has failed: {error!r}"))
    _end(1)


def _lead(task: Task, owner: Channel, calls: Calls, peers: list[Channel]) -> NoReturn:
    """Runs the steps that the owner asks for, with all other workers, which are added to `peers`."""
    channels, address = lead(task)
    peers += channels
    _meet(task, address)

    def fail(reason: str) -> None:
        with contextlib.suppress(OSError):  # it may be the end of all of them
            _tell(owner, RuntimeError(reason))
        _end(1)

    executor = LocalExecutor(task.args, group=Leader(channels, fail))
    compiled = executor.runner.compiled
    compiled.when_compiled(lambda _: owner.send(compiled.progress))
    _tell(owner, (executor.config, executor.buckets), executor)
    while True:
        name, (packed,) = calls.get()
        args = pickle.loads(packed.data)
        if name == "dispatch":  # which nobody waits for
            executor.dispatch(*args)
        else:
            _tell(owner, getattr(executor, name)(*args), executor)


def _follow(task: Task) -> NoReturn:
    """Runs what the first worker announces."""
    channel, address = follow(task)
    group = Follower(channel, lambda: _end(0))
    try:
        _meet(task, address)
        # Whatever the first one uses has to be there: it alone minds the time.
        ModelRunner(dataclasses.replace(task.args, max_compile_s=None), group=group)
    except ValueError as error:
        channel.send({"error": str(error)})
        raise
    group.follow()


def _meet(task: Task, address: str) -> None:
    """Makes the devices of all workers one mesh's.

    Raises:
        ValueError: If this one has another number of devices than it should.
    """
    launch, args = task.launch, task.args
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
    devices = f"{launch.world_size} processes with {jax.local_device_count()} devices each"
    check(size == num_devices, "tensor_parallel_size", size, f"{num_devices}, as there are {devices}")


def _listen(owner: Channel, calls: Calls, peers: list[Channel]) -> None:
    """Takes the messages of the owner, and ends with it and after the peers, whatever it waits for."""
    try:
        while True:
            calls.put(owner.receive())
    except OSError:
        for peer in peers:
            peer.close()
        # Where the first process of JAX is gone, it aborts the others, with many words.
        time.sleep(_FAREWELL_S if peers else 0)
        _end(0)


def _tell(owner: Channel, value: Any, executor: LocalExecutor | None = None) -> None:
    """Answers the owner, and says how far the compilation is."""
    progress = None if executor is None else executor.compile_progress
    owner.send(progress, [np.frombuffer(pickle.dumps(value), np.uint8)])


def _end(code: int) -> NoReturn:
    """Ends the process at once: JAX would wait for other processes, and threads for their compilations."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)

"""A worker: a process that the engine starts, and that has some of its devices."""

import dataclasses
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

import numpy as np

from jax_paged.config import EngineArgs
from jax_paged.worker.channel import Channel


@dataclasses.dataclass(frozen=True)
class Task:
    """What a worker is started for.

    Args:
        args: Model and limits.
        rank: Which of the workers it is.
        num_workers: How many there are.
        peers: Sockets: of the first worker to each other, of others to the first.
        log_level: Of its messages.
    """

    args: EngineArgs
    rank: int
    num_workers: int
    peers: tuple[int, ...]
    log_level: int


def main(descriptor: int) -> NoReturn:
    """Works for the engine at the other end of a socket until that is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the engine ends this
    engine = Channel(socket.socket(fileno=descriptor))
    task: Task = pickle.loads(engine.receive()[1][0].data)
    logging.basicConfig(level=task.log_level, format=f"worker {task.rank}: %(message)s")
    peers = [Channel(socket.socket(fileno=peer)) for peer in task.peers]
    try:
        (_lead if task.rank == 0 else _follow)(task, engine, peers)
    except BaseException as error:
        _LOGGER.debug("it ends", exc_info=True)
        reply(engine, error)
        for peer in peers:
            peer.send({"error": str(error)})
    end(1)


_LOGGER = logging.getLogger(__name__)


def end(code: int) -> NoReturn:
    """Ends the process at once: JAX would wait for the others, and threads for their compilations."""
    sys.stderr.flush()
    os._exit(code)


def reply(channel: Channel, value: Any) -> None:
    channel.send("reply", [np.frombuffer(pickle.dumps(value), np.uint8)])


def _initialize(task: Task, address: str) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        address, task.num_workers, task.rank, cluster_detection_method="deactivate",
        coordinator_bind_address=address,
    )


def _lead(task: Task, engine: Channel, peers: list[Channel]) -> None:
    from jax_paged.worker.executor import LocalExecutor
    from jax_paged.worker.leader import Leader

    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for peer in peers:
        peer.send({"coordinator": address})
    _initialize(task, address)

    def fail(reason: str) -> None:
        reply(engine, RuntimeError(reason))
        end(1)

    executor = LocalExecutor(task.args, group=Leader(peers, fail))
    reply(engine, (executor.config, executor.buckets))
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def read() -> None:
        try:
            while True:
                calls.put(engine.receive())
        except OSError:
            end(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        name, (packed,) = calls.get()
        args, kwargs = pickle.loads(packed.data)
        if name == "dispatch":
            executor.dispatch(*args)
            continue
        try:
            value = getattr(executor, name)(*args, **kwargs)
        except ValueError as error:
            value = error
        reply(engine, value)


def _follow(task: Task, engine: Channel, peers: list[Channel]) -> None:
    from jax_paged.worker.follower import Follower
    from jax_paged.worker.model_runner import ModelRunner

    (leader,) = peers
    _initialize(task, leader.receive()[0]["coordinator"])
    group = Follower(leader, lambda: end(0))
    runner = ModelRunner(task.args, group=group)
    group.follow()

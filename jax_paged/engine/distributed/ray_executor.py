"""RayExecutor: an executor whose workers are actors of Ray, on any machines of its cluster. Requires Ray."""

import contextlib
import dataclasses
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util import placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import Launch
from jax_paged.engine.distributed.multiprocess import MultiprocessExecutor
from jax_paged.engine.distributed.worker_team import StartedWorker, send_task
from jax_paged.errors import ArgumentError, check
from jax_paged.worker.distributed.channel import Channel

_STDOUT, _STDERR = 1, 2
# Time (seconds) for a process that connects to an actor to send the secret.
_HELLO_S = 5
# Delay (seconds) before a lost actor is reported. Other workers often report the cause earlier, because their
# connections notice a lost worker before Ray does.
_REASON_S = 1.0
# Time (seconds) for Ray to kill an actor.
_KILLING_S = 5.0


class RayExecutor(MultiprocessExecutor):
    """Executor that runs steps in actors of Ray.

    All actors have the same number of GPUs, as many as possible; the GPUs of one actor are on one host. If
    the cluster has no GPUs, each actor has one CPU core. Ray finds the hosts, starts the actors and reports
    lost actors. Steps are sent over separate connections.

    Args:
        args: Model and limits.

    Raises:
        ValueError: If the model can't be loaded, a limit does not fit it, the cluster has no room, or Ray
            can't start the actors.
        EngineDeadError: If a worker ends before it is ready.
    """

    def _start(self, args: EngineArgs) -> Sequence[StartedWorker]:
        if not ray.is_initialized():
            ray.init()
        bundles = _bundles(args.tensor_parallel_size, ray.nodes())
        group = placement_group(bundles)
        try:
            limit_s = args.distributed_timeout_seconds
            size = args.tensor_parallel_size
            allowed = "at most the number of devices that are free in the Ray cluster"
            remedy = f". Ray could not reserve {bundles} within {limit_s:g} s (distributed_timeout_seconds)"
            check(group.wait(limit_s), "tensor_parallel_size", size, allowed, remedy=remedy)
            actors = [_actor(group, place, bundle) for place, bundle in enumerate(bundles)]
            addresses = ray.get([actor.address.remote() for actor in actors], timeout=limit_s)
            secret = secrets.token_hex()
            workers = [
                RayWorker(actor.work.remote(secret), _connected(address, secret, limit_s), group, actor)
                for actor, address in zip(actors, addresses, strict=True)
            ]
            for rank, worker in enumerate(workers):
                send_task(worker.channel, args, Launch(rank, len(workers), *addresses[0]), None)
                worker.work.future().add_done_callback(self._failure_callback(rank))
            return workers
        except BaseException as error:
            remove_placement_group(group)
            if isinstance(error, RayError | OSError):
                allowed = "another backend because Ray could not start the actors"
                name, remedy = "distributed_executor_backend", f": {error}"
                raise ArgumentError(name, "ray", allowed, remedy=remedy) from error
            raise

    def _failure_callback(self, rank: int) -> Callable[[Any], None]:
        """Returns a function that Ray calls when an actor is lost.

        Ray calls it in a thread that must not wait for Ray, so it starts another thread.
        """
        reason = f"worker {rank} has ended, or its host is unreachable"

        def note(_: Any) -> None:
            timer = threading.Timer(_REASON_S, self._team.fail, args=(reason,))
            timer.daemon = True
            with contextlib.suppress(RuntimeError):  # no thread can be started at interpreter exit
                timer.start()

        return note


@dataclasses.dataclass(frozen=True)
class RayWorker:
    """A worker that runs in an actor of Ray. It is a StartedWorker.

    Args:
        work: Ray's reference to the result of WorkerActor.work. It is ready when the actor has ended.
        channel: The connection to the worker.
        group: The placement group of all workers.
        actor: Ray's handle of the actor.
    """

    work: Any
    channel: Channel
    group: Any
    actor: Any

    def stop(self) -> None:
        """Kills the actor, without waiting for its end."""
        # Without this call, Ray prints long messages about an actor that ends by itself.
        if ray.is_initialized():
            ray.kill(self.actor)

    def close(self, *, until: float) -> None:
        """Ends the worker: waits until it has ended by itself or until a given time, then kills all workers.

        Args:
            until: The latest time to wait for, by time.monotonic() (seconds).
        """
        self.channel.close()
        if ray.is_initialized():
            ray.wait([self.work], timeout=max(until - time.monotonic(), 0))
            remove_placement_group(self.group)
            ray.wait([self.work], timeout=_KILLING_S)


class WorkerActor:
    """Ray actor that reports its address and then becomes a worker."""

    def __init__(self) -> None:
        address = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)

    def address(self) -> tuple[str, int]:
        """Returns the address of the actor's host, and a port that it has reserved there."""
        address, port, *_ = self._listener.getsockname()
        return address, port

    def work(self, secret: str) -> NoReturn:
        """Accepts the first connection that sends the secret, becomes its worker, and ends with it."""
        with self._listener:
            while (connection := _accepted(self._listener, secret)) is None:
                pass
        # The listener is closed now. If this is the first worker, the other workers connect to its port.
        connection.sendall(b".")
        from jax_paged.worker.distributed.process import main

        # gloo prints messages, which must not appear in the output of the user's program.
        os.dup2(_STDERR, _STDOUT)
        main(connection.detach())


def _bundles(size: int, nodes: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Returns the resources of each actor, as bundles of a placement group.

    Args:
        size: Number of devices of the engine.
        nodes: The nodes of the cluster, as ray.nodes returns them.

    Raises:
        ValueError: If there are not enough GPUs, or not enough CPU cores if there are no GPUs.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    kind = "GPU" if any(of.get("GPU") for of in resources) else "CPU"
    counts = [int(of.get(kind, 0)) for of in resources]
    allowed = f"at most {sum(counts)}, the number of {kind}s in the Ray cluster"
    check(size <= sum(counts), "tensor_parallel_size", size, allowed)
    if kind == "CPU":
        return [{"CPU": 1.0}] * size
    # All workers have the same number of GPUs.
    each = max(n for n in range(1, size + 1) if size % n == 0 and sum(c // n for c in counts) >= size // n)
    return [{"CPU": 1.0, "GPU": float(each)}] * (size // each)


def _actor(group: Any, place: int, bundle: dict[str, float]) -> Any:
    """Starts an actor in a bundle of a placement group."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    make = ray.remote(num_cpus=1, num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy)
    return make(WorkerActor).remote()


def _connected(address: tuple[str, int], secret: str, limit_s: float) -> Channel:
    """Connects to an actor that runs WorkerActor.work, and returns a channel to it."""
    connection = socket.create_connection(address, timeout=limit_s)
    connection.sendall(secret.encode())
    if not connection.recv(1):
        raise ConnectionResetError(f"the actor at {address} has ended")
    connection.settimeout(None)
    return Channel(connection)


def _accepted(listener: socket.socket, secret: str) -> socket.socket | None:
    """Accepts a connection. Returns it if it sends the secret, else None."""
    connection, _ = listener.accept()
    connection.settimeout(_HELLO_S)
    try:
        with connection.makefile("rb") as stream:
            said = stream.read(len(secret))
    except OSError:
        said = b""
    if hmac.compare_digest(said, secret.encode()):
        connection.settimeout(None)
        return connection
    connection.close()
    return None

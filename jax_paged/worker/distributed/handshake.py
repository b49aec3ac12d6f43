"""Connection of the workers of an engine at startup.

Each worker sends a fingerprint of its arguments, versions and checkpoint to worker 0 (`follow`). Worker 0
compares the fingerprints (`lead`) and answers with an error, or with the address of JAX's distributed
service.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import socket
import time
from typing import Any

import jax

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import Launch
from jax_paged.errors import ArgumentError, check
from jax_paged.models.checkpoint import read_config, resolve_model_dir
from jax_paged.models.weights import stored_tensors
from jax_paged.worker.distributed.channel import Channel, silence_limit_s
from jax_paged.worker.distributed.task import Task

_RETRY_S = 0.1
# Time limit for the first message of a connection (seconds).
_HELLO_S = 5


def fingerprint(args: EngineArgs, num_workers: int) -> dict[str, str]:
    """Returns the values that must be the same in all workers, by name.

    These are the versions of jax and jax-paged, a hash of the checkpoint's config and tensor headers, the
    number of workers, and the engine's arguments.

    Args:
        args: Arguments of the engine.
        num_workers: Number of workers.

    Raises:
        ValueError: If the checkpoint does not exist.
    """
    folder = resolve_model_dir(args.model)
    digest = hashlib.sha256(json.dumps(read_config(folder, {}), sort_keys=True).encode())
    for key, tensor in sorted(stored_tensors(folder).items()):
        digest.update(f"{key} {tensor.file.name} {tensor.offset} {tensor.shape} {tensor.dtype}\n".encode())
    return {
        "jax": jax.__version__,
        "jax-paged": importlib.metadata.version("jax-paged"),
        "checkpoint hash (config.json, tensor headers)": digest.hexdigest()[:16],
        "WORLD_SIZE": str(num_workers),
        **{field.name: repr(getattr(args, field.name)) for field in dataclasses.fields(args)},
    }


def lead(task: Task) -> tuple[list[Channel], str]:
    """Waits for all other workers and checks that their fingerprints are equal to this worker's.

    Args:
        task: The task of worker 0.

    Returns:
        Channels to the other workers, in order of their ranks; and the address of JAX's distributed service.

    Raises:
        ValueError: If workers are missing, or their fingerprints differ. All connected workers receive the
            message about differences.
    """
    launch, ours = task.launch, fingerprint(task.args, task.launch.world_size)
    if task.peers is None:
        found = _accept_workers(launch, task.args.distributed_timeout_seconds)
    else:
        found = _read_hellos(task.peers, task.args.distributed_timeout_seconds)
    found = dict(sorted(found.items()))
    problems = [
        f"`{name}` of worker {rank} must be {ours.get(name)}, as in worker 0, got {theirs}"
        for rank, (_, hello) in found.items()
        for name, theirs in hello.get("fingerprint", {}).items()
        if theirs != ours.get(name)
    ]
    problems += [f"worker {rank}: {hello['error']}" for rank, (_, hello) in found.items() if "error" in hello]
    channels = [channel for channel, _ in found.values()]
    if problems:
        for channel in channels:
            channel.send({"error": "\n".join(problems)})
        raise ValueError("\n".join(problems))
    address = _free_address(launch.address)
    for channel in channels:
        channel.set_limits(receiving_s=silence_limit_s(task.args.distributed_timeout_seconds))
        channel.start_heartbeat()
        channel.send({"address": address})
    return channels, address


def follow(task: Task) -> tuple[Channel, str]:
    """Connects to worker 0 and sends it this worker's fingerprint.

    Args:
        task: The task of this worker.

    Returns:
        A channel to worker 0, and the address of JAX's distributed service.

    Raises:
        ValueError: If worker 0 can't be reached, or the fingerprints of the workers differ.
    """
    limit_s = task.args.distributed_timeout_seconds
    hello: dict[str, Any] = {"rank": task.launch.rank}
    try:
        hello["fingerprint"] = fingerprint(task.args, task.launch.world_size)
    except ValueError as error:
        hello["error"] = str(error)
    # Connects after the fingerprint is computed. Worker 0 only waits a few seconds for the first message, and
    # reading the headers may take longer.
    if task.peers is None:
        channel = _connect(task.launch, limit_s)
    else:
        channel = Channel(socket.socket(fileno=task.peers[0]))
    channel.send(hello)
    channel.set_limits(receiving_s=limit_s)
    try:
        answer = channel.receive()[0]
    except OSError as error:
        raise ValueError(f"no reply from worker 0: {error}") from error
    if "error" in answer:
        raise ValueError(answer["error"])
    channel.set_limits(receiving_s=silence_limit_s(limit_s))
    channel.start_heartbeat()
    return channel, answer["address"]


def _read_hellos(peers: tuple[int, ...], limit_s: float) -> dict[int, tuple[Channel, dict[str, Any]]]:
    """Reads the first messages of the other workers from connected sockets.

    Args:
        peers: File descriptors of the sockets, in order of the workers' ranks.
        limit_s: Time limit for each message (seconds).

    Returns:
        The channel to each worker and its message, by rank.
    """
    found: dict[int, tuple[Channel, dict[str, Any]]] = {}
    for rank, peer in enumerate(peers, 1):
        channel = Channel(socket.socket(fileno=peer))
        channel.set_limits(receiving_s=limit_s)
        try:
            found[rank] = channel, channel.receive()[0]
        except TimeoutError as error:
            limit = f"{limit_s:g} s (distributed_timeout_seconds)"
            raise ValueError(f"no message from worker {rank} within {limit}") from error
    return found


def _accept_workers(launch: Launch, limit_s: float) -> dict[int, tuple[Channel, dict[str, Any]]]:
    """Accepts connections from all other workers and reads their first messages.

    Args:
        launch: The address to listen at, and the number of workers.
        limit_s: Time limit for all connections (seconds).

    Returns:
        The channel to each worker and its message, by rank.
    """
    given = f"{launch.address} (MASTER_ADDR), port {launch.port} (MASTER_PORT)"
    found: dict[int, tuple[Channel, dict[str, Any]]] = {}
    try:
        family = socket.AF_INET6 if ":" in launch.address else socket.AF_INET
        listener = socket.create_server((launch.address, launch.port), family=family)
    except OSError as error:
        hint = "set MASTER_ADDR to an address of this machine, and MASTER_PORT to a free port"
        raise ValueError(f"worker 0 can't listen at {given}: {error.strerror}; {hint}") from error
    deadline = time.monotonic() + limit_s
    with listener:
        while len(found) < launch.world_size - 1:
            listener.settimeout(max(deadline - time.monotonic(), _RETRY_S))
            try:
                connection, _ = listener.accept()
            except TimeoutError as error:
                ranks = [0, *sorted(found)]
                allowed = f"the number of started processes ({len(ranks)})"
                remedy = f". Only ranks {ranks} connected to {given} within {limit_s:g} s"
                raise ArgumentError("WORLD_SIZE", launch.world_size, allowed, remedy=remedy) from error
            connection.settimeout(None)
            channel = Channel(connection)
            channel.set_limits(receiving_s=_HELLO_S)
            try:
                hello = channel.receive()[0]
                rank = hello["rank"]
                is_unused = rank in range(1, launch.world_size) and rank not in found
                check(is_unused, "rank", rank, "the unused rank of a worker")
                found[rank] = channel, hello
            except (OSError, ValueError, TypeError, KeyError):
                channel.close()  # the connection is not from a worker of this engine
    return found


def _connect(launch: Launch, limit_s: float) -> Channel:
    """Returns a channel to worker 0; retries until `limit_s` seconds have passed."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            connection = socket.create_connection((launch.address, launch.port), timeout=limit_s)
        except OSError as error:
            if time.monotonic() > deadline:
                allowed = "the address of the machine with RANK 0"
                remedy = f". No worker 0 listened at MASTER_PORT {launch.port} within {limit_s:g} s: {error}"
                raise ArgumentError("MASTER_ADDR", launch.address, allowed, remedy=remedy) from error
            time.sleep(_RETRY_S)
        else:
            connection.settimeout(None)
            return Channel(connection)


def _free_address(host: str) -> str:
    """Returns an address with an unused port of the host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

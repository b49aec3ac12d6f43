"""Workers find each other, and begin only if all are to do the same."""

import dataclasses
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.ports import reserved_port

from jax_paged import EngineArgs
from jax_paged.config.launch import Launch, launch_of_environment
from jax_paged.worker.distributed import channel, handshake
from jax_paged.worker.distributed.channel import Channel
from jax_paged.worker.distributed.follower import Follower, follow_leader
from jax_paged.worker.distributed.leader import Followers, Leader
from jax_paged.worker.distributed.task import Task


@pytest.fixture
def tasks(checkpoint: Path) -> Iterator[list[Task]]:
    """Two workers that are to find each other."""
    args = EngineArgs(model=str(checkpoint), skip_tokenizer_init=True, distributed_timeout_seconds=120)
    with reserved_port() as port:
        yield [Task(args, Launch(rank, 2, "127.0.0.1", port), None, 0) for rank in range(2)]


def both(*calls: Callable[[], Any]) -> list[Any]:
    """Returns what calls beside each other return or raise."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(result, calls))


def changed(task: Task, **settings: Any) -> Task:
    return dataclasses.replace(task, args=dataclasses.replace(task.args, **settings))


def test_equal_workers_meet(tasks: list[Task]) -> None:
    (channels, ours), (channel, theirs) = both(
        lambda: handshake.lead(tasks[0]), lambda: handshake.follow(tasks[1])
    )
    assert ours == theirs
    channels[0].send("hello")
    assert channel.receive() == ("hello", [])


def test_all_that_differs_is_named_in_both(tasks: list[Task]) -> None:
    other = changed(tasks[1], seed=3, block_size=8)
    errors = both(lambda: handshake.lead(tasks[0]), lambda: handshake.follow(other))
    for error in errors:
        assert isinstance(error, ValueError)
        assert str(error).splitlines() == [
            "`block_size` of worker 1 must be 16, as in worker 0, got 8",
            "`seed` of worker 1 must be 0, as in worker 0, got 3",
        ]


@pytest.mark.parametrize("name", ["jax", "jax-paged", "checkpoint hash (config.json, tensor headers)"])
def test_other_versions_and_checkpoints(
    tasks: list[Task], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = handshake.fingerprint

    def fingerprint(args: EngineArgs, num_workers: int) -> dict[str, str]:
        return make(args, num_workers) | ({name: "9.9"} if threading.current_thread() is follower else {})

    monkeypatch.setattr(handshake, "fingerprint", fingerprint)
    found: list[Any] = []
    follower = threading.Thread(target=lambda: found.extend(both_in_place(tasks[1])))
    follower.start()
    with pytest.raises(ValueError) as error:
        handshake.lead(tasks[0])
    follower.join()
    assert str(error.value).startswith(f"`{name}` of worker 1 must be ")
    assert str(found[0]) == str(error.value)


def both_in_place(task: Task) -> list[Any]:
    try:
        return [handshake.follow(task)]
    except ValueError as error:
        return [error]


def test_a_checkpoint_that_one_worker_lacks(tasks: list[Task], tmp_path: Path) -> None:
    other = changed(tasks[1], model=str(tmp_path))
    errors = both(lambda: handshake.lead(tasks[0]), lambda: handshake.follow(other))
    assert all("worker 1: " in str(error) and "config.json" in str(error) for error in errors)


def test_foreigners_are_turned_away(tasks: list[Task]) -> None:
    def disturb() -> tuple[Channel, str]:
        launch = tasks[1].launch
        for message in (b"GET / HTTP/1.1\r\n\r\n", b"\x02\x00\x00\x00[]", b"\x07\x00\x00\x00[{}, []"):
            with handshake._connect(launch, 120)._socket as foreigner:
                foreigner.sendall(message)
        handshake._connect(launch, 120).send({"rank": 7})
        return handshake.follow(tasks[1])

    led, followed = both(lambda: handshake.lead(tasks[0]), disturb)
    assert led[1] == followed[1]


def test_a_port_that_is_taken(tasks: list[Task]) -> None:
    port = tasks[0].launch.port
    message = rf"worker 0 can't listen at 127.0.0.1 \(MASTER_ADDR\), port {port} \(MASTER_PORT\):"
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=message):
        handshake.lead(tasks[0])


def test_those_that_do_not_come(tasks: list[Task]) -> None:
    alone, lost = (changed(task, distributed_timeout_seconds=0.3) for task in tasks)
    with pytest.raises(
        ValueError,
        match=r"`WORLD_SIZE` must be the number of started processes \(1\), got 2. Only ranks \[0\] conn",
    ):
        handshake.lead(alone)
    with pytest.raises(
        ValueError, match=r"`MASTER_ADDR` must be .*got '127.0.0.1'. No worker 0 listened at MASTER_PORT \d+"
    ):
        handshake.follow(lost)


def test_a_worker_of_this_machine_that_says_nothing(tasks: list[Task]) -> None:
    ours, theirs = socket.socketpair()
    task = dataclasses.replace(changed(tasks[0], distributed_timeout_seconds=0.1), peers=(ours.detach(),))
    with theirs, pytest.raises(ValueError, match=r"no message from worker 1 within 0.1 s"):
        handshake.lead(task)


def test_the_least_that_any_worker_has() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    leader = Leader(Followers([Channel(ours) for ours, _ in pairs], lambda reason: None))
    followers = [Follower(Channel(theirs)) for _, theirs in pairs]
    groups = zip([leader, *followers], (700, 900, 400), strict=True)
    assert both(*(lambda g=g, n=n: g.min_over_processes(n) for g, n in groups)) == [400, 400, 400]


def test_a_follower_that_stalls_while_it_compiles() -> None:
    ours, _theirs = socket.socketpair()
    follower = Channel(ours)
    follower.set_limits(receiving_s=0.1)
    with pytest.raises(RuntimeError, match=r"worker 1 has stalled, or its host is gone: no message within"):
        Followers([follower], lambda reason: None).wait()


def test_a_leader_that_stalls() -> None:
    ours, _theirs = socket.socketpair()
    leader, ended = Channel(ours), queue.SimpleQueue[int]()
    leader.set_limits(receiving_s=0.1)
    threading.Thread(target=follow_leader, args=(leader, [], ended.put), daemon=True).start()
    assert ended.get(timeout=60) == 1


def test_all_workers_send_heartbeats_to_each_other(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_HEARTBEAT_INTERVAL_S", 0.02)
    ([leader], _), (follower, _) = both(lambda: handshake.lead(tasks[0]), lambda: handshake.follow(tasks[1]))
    for end in (leader, follower):
        assert end._receiving_s >= 60
        assert end._socket.recv(4, socket.MSG_WAITALL) == bytes(4)


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError) as error:
        launch_of_environment()
    names = ["WORLD_SIZE", "RANK", "MASTER_PORT", "MASTER_ADDR"]
    assert [line.split("`")[1] for line in str(error.value).splitlines()] == names
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert launch_of_environment() == Launch(1, 2, "node0", 29500)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert launch_of_environment() == Launch(1, 2, "node0", 29501, local_rank=1)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(ValueError, match=r"`RANK` must be an integer in \[0, 1\].*got 2"):
        launch_of_environment()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ValueError, match=r"`RANK` must be an integer in \[0, 1\].*got 'one'"):
        launch_of_environment()

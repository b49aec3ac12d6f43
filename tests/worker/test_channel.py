"""What goes over a channel arrives as it was; what is lost or foreign is an error."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.worker.distributed import channel
from jax_paged.worker.distributed.channel import Channel


@pytest.fixture
def ends():
    channels = [Channel(end) for end in socket.socketpair()]
    yield channels
    for end in channels:
        end.close()


def test_headers_and_arrays_of_any_type_and_shape(ends: list[Channel]) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        np.int32(7),
        rng.integers(0, 99, (3, 0, 2)),
        rng.normal(size=(300, 400)).astype(np.float32).T,
        np.asarray(jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4)),
        rng.integers(0, 2, (5, 5)).astype(bool),
    ]
    header = ["decode 8", ["weights", None, 3], []]
    thread = threading.Thread(target=ends[0].send, args=(header, [np.asarray(x) for x in arrays]))
    thread.start()
    got, found = ends[1].receive()
    thread.join()
    assert got == header
    for a, b in zip(arrays, found, strict=True):
        assert (b.dtype, b.shape) == (a.dtype, a.shape)
        np.testing.assert_array_equal(a, b)


def test_messages_come_in_order(ends: list[Channel]) -> None:
    for i in range(50):
        ends[0].send(i, [np.full(i, i)])
    for i in range(50):
        header, (array,) = ends[1].receive()
        assert header == i
        assert array.tolist() == [i] * i


def test_a_message_of_more_arrays_than_the_system_takes_at_once(ends: list[Channel]) -> None:
    ends[0].send(
        "an adapter", [np.full(i % 3, i) for i in range(2500)]
    )  # little enough to wait in the socket
    header, arrays = ends[1].receive()
    assert header == "an adapter"
    assert [array.tolist() for array in arrays] == [[i] * (i % 3) for i in range(2500)]


def test_an_end_that_is_closed_is_noticed(ends: list[Channel]) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ends[0].receive)
        time.sleep(0.05)  # mostly it waits then; else it finds the socket closed
        ends[0].close()
        assert isinstance(waiting.exception(60), OSError)
    with pytest.raises(ConnectionResetError, match="the other end is closed"):
        ends[1].receive()


def test_limits_of_time(ends: list[Channel]) -> None:
    ends[0].set_limits(sending_s=0.1, receiving_s=0.1)
    large = [np.zeros(2**24, np.uint8)]
    for wait, error in ((ends[0].receive, TimeoutError), (lambda: ends[0].send("", large), BlockingIOError)):
        start = time.monotonic()
        with pytest.raises(error):
            wait()
        assert time.monotonic() - start > 0.05


def test_what_is_no_message(ends: list[Channel]) -> None:
    ends[0]._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="a header must have at most 16777216 bytes, got 542393671"):
        ends[1].receive()


def test_heartbeats_show_that_the_other_end_runs(
    ends: list[Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_HEARTBEAT_INTERVAL_S", 0.02)
    ends[0].set_limits(receiving_s=2)
    ends[1].start_heartbeat()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ends[0].receive)
        with pytest.raises(FutureTimeoutError):
            waiting.result(timeout=4)  # twice the limit: heartbeats have reset it
        ends[1].send("message", [np.arange(3)])
        header, (array,) = waiting.result(timeout=60)
    assert (header, array.tolist()) == ("message", [0, 1, 2])


def test_heartbeats_never_block_a_message(ends: list[Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_HEARTBEAT_INTERVAL_S", 0.0005)
    ends[1].start_heartbeat()
    time.sleep(0.5)  # nobody reads: the socket is full of heartbeats
    assert ends[1]._sending.acquire(timeout=60), "a heartbeat waits for the reader and keeps the lock"
    ends[1]._sending.release()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(ends[0].receive)
        ends[1].send("message")
        assert waiting.result(timeout=60)[0] == "message"


def test_keepalive_finds_hosts_that_have_vanished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Channel(socket.create_connection(listener.getsockname()))
        assert ours._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (ours._socket.getsockopt(socket.IPPROTO_TCP, x) for x in options)
        assert idle + interval * count <= 30
        ours.close()

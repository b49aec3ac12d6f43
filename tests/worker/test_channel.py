"""What goes over a channel arrives as it was; what is lost or foreign is an error."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from jax_paged.worker.channel import Channel


@pytest.fixture
def ends():
    channels = [Channel(end) for end in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


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
    for wait in (ends[0].receive, lambda: ends[0].send("", [np.zeros(2**24, np.uint8)])):
        start = time.monotonic()
        with pytest.raises(BlockingIOError):
            wait()
        assert time.monotonic() - start > 0.05


def test_what_is_no_message(ends: list[Channel]) -> None:
    ends[0]._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ValueError, match="a header has 542393671 bytes; allowed: at most 16777216"):
        ends[1].receive()

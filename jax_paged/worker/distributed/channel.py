"""Messages between the processes of an engine: a JSON header and NumPy arrays, over a socket."""

import contextlib
import json
import math
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np

_LENGTH = struct.Struct("<I")
# Maximum size of a header. A longer header does not come from a process of an engine.
_MAX_HEADER_BYTES = 2**24
# Maximum number of buffers per system call; the limit of Linux is 1024. An adapter of a model with 80 layers
# has 1120 arrays.
_MAX_PARTS = 1000
# An empty message, which only shows that the sending process is alive.
_HEARTBEAT = _LENGTH.pack(0)
_HEARTBEAT_INTERVAL_S = 2.0
# Lower bound of the limit: a worker sends its first heartbeat after importing JAX, which is slow on some
# disks.
_MIN_SILENCE_S = 60.0
# TCP keepalive detects a lost host 10 + 4 * 5 seconds after its last packet.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 4}


def silence_limit_s(timeout_s: float) -> float:
    """Returns how long a process that sends heartbeats may be silent before it counts as lost (seconds).

    Args:
        timeout_s: The engine's distributed_timeout_seconds.
    """
    return max(timeout_s, _MIN_SILENCE_S) + 2 * _HEARTBEAT_INTERVAL_S


class Channel:
    """One end of a connection between two processes.

    Any thread may send, but only one thread may receive. A channel parses received data as JSON and numbers
    and executes none of it. Only a worker and its owner unpickle arrays that they receive from each other.

    Args:
        connection: A connected stream socket, which the channel owns.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self._receiving_s = 0.0
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, header: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message.

        Args:
            header: A value that JSON can represent.
            arrays: Arrays of any dtype and shape.

        Raises:
            OSError: If the other end is closed, or accepts no data within the limit of `set_limits`.
        """
        shapes = [(str(array.dtype), array.shape) for array in arrays]
        text = json.dumps([header, shapes], separators=(",", ":")).encode()
        parts: list[Any] = [_LENGTH.pack(len(text)), text]
        parts += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
        with self._sending:
            while parts:
                num_sent = self._socket.sendmsg(parts[:_MAX_PARTS])
                while parts and num_sent >= len(parts[0]):
                    num_sent -= len(parts.pop(0))
                if parts:
                    parts[0] = memoryview(parts[0])[num_sent:]

    def receive(self) -> tuple[Any, list[np.ndarray]]:
        """Waits for a message and returns its header and arrays; heartbeats are skipped.

        Raises:
            TimeoutError: If no message and no heartbeat arrives within the limit of `set_limits`.
            OSError: If the other end is closed.
            ValueError: If the received bytes are not a message.
        """
        length = 0
        while length == 0:
            (length,) = _LENGTH.unpack(self._read(bytearray(_LENGTH.size)))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header must have at most {_MAX_HEADER_BYTES} bytes, got {length}")
        header, shapes = json.loads(self._read(bytearray(length)))
        arrays = []
        for dtype, shape in shapes:
            buffer = np.empty(math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
            self._read(buffer.data)
            arrays.append(buffer.view(dtype).reshape(shape))
        return header, arrays

    def set_limits(self, *, sending_s: float = 0, receiving_s: float = 0) -> None:
        """Limits the time that sending and receiving may wait for the other end.

        Args:
            sending_s: Limit for sending (seconds); 0 for no limit.
            receiving_s: Limit for receiving (seconds); 0 for no limit.
        """
        self._receiving_s = receiving_s
        for option, seconds in ((socket.SO_SNDTIMEO, sending_s), (socket.SO_RCVTIMEO, receiving_s)):
            whole = int(seconds)
            timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)

    def start_heartbeat(self) -> None:
        """Starts a thread that sends heartbeats until the channel is closed.

        Heartbeats show the other end that this process is alive while it computes or compiles and sends no
        messages.
        """
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    def close(self) -> None:
        """Closes the connection; receivers at both ends get an OSError."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(_HEARTBEAT_INTERVAL_S):
            if not self._sending.acquire(blocking=False):
                continue  # another thread is sending a message
            try:
                # Does not block: a receiver that has not read the previous heartbeats needs no further one.
                num_sent = self._socket.send(_HEARTBEAT, socket.MSG_DONTWAIT)
                self._socket.sendall(_HEARTBEAT[num_sent:])
            except BlockingIOError:
                pass
            except OSError:
                return
            finally:
                self._sending.release()

    def _read[T: bytearray | memoryview](self, buffer: T) -> T:
        """Fills a buffer from the socket and returns it."""
        view = memoryview(buffer)
        while view:
            try:
                num_read = self._socket.recv_into(view)
            except BlockingIOError as error:
                raise TimeoutError(f"no message within {self._receiving_s:g} s") from error
            if not num_read:
                raise ConnectionResetError("the other end is closed")
            view = view[num_read:]
        return buffer

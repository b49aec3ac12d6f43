"""The server process, and an HTTP client that uses little processor time."""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Answer:
    """Response to a request.

    Args:
        status: HTTP status; 0 if the connection ended before the status arrived.
        body: The bytes after the head, including the chunk sizes of a stream.
        first_s: Time to the first byte of the response (seconds).
        total_s: Time to the end of the response (seconds).
    """

    status: int = 0
    body: bytes = b""
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def events(self) -> list[str]:
        """The data fields of the server-sent events in the body."""
        return re.findall(r"^data: (.*)$", self.body.decode(), re.MULTILINE)

    def json(self) -> Any:
        """Returns the body, parsed as JSON."""
        return json.loads(self.body)


@dataclasses.dataclass(frozen=True)
class Client:
    """Client of a server on 127.0.0.1.

    Args:
        port: Port of the server.
    """

    port: int

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        until: Callable[[bytes], bool] = lambda data: False,
        timeout_s: float = 300,
    ) -> Answer:
        """Sends a request and returns the response.

        Args:
            path: Path of the route.
            body: Body of a POST request: bytes, or an object that is sent as JSON. None sends a GET request.
            until: Function of the body received so far; if it returns True, the connection is closed.
            timeout_s: Time limit for the whole exchange (seconds).

        Raises:
            TimeoutError: If the exchange takes longer than `timeout_s` seconds.
        """
        answer, start = Answer(), time.perf_counter()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(timeout_s), self.connection() as (reader, writer):
                writer.write(_request(path, body))
                # If the server rejects a request without reading all of it, its response can still be read.
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                received = await reader.read(65536)
                answer.first_s = time.perf_counter() - start
                while b"\r\n\r\n" not in received:
                    received += await reader.readexactly(1)
                first, _, answer.body = received.partition(b"\r\n\r\n")
                answer.status = int(first.split()[1])
                while not until(answer.body) and (part := await reader.read(65536)):
                    answer.body += part
        answer.total_s = time.perf_counter() - start
        return answer

    async def never_read(self, path: str, body: Any, stop: asyncio.Event) -> None:
        """Sends a request and does not read the response; closes the connection when `stop` is set."""
        data, opened = _request(path, body), socket.create_connection(("127.0.0.1", self.port))
        with opened:
            opened.sendall(data)
            await stop.wait()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Opens a connection, which is closed at the end of the block."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()


@dataclasses.dataclass(frozen=True)
class Server(Client):
    """A running server with the built-in model.

    Args:
        process: The process of the server.
        log: File with its standard error.
    """

    process: subprocess.Popen[str]
    log: Path

    async def storm(
        self, path: str, body: bytes, num_clients: int, seconds: float
    ) -> tuple[dict[int, int], float]:
        """Repeats a request in a separate process.

        Args:
            path: Path of the route.
            body: Body of the POST request.
            num_clients: Number of clients, each of which sends one request at a time.
            seconds: Time in which requests are sent.

        Returns:
            The number of requests by status (0 without a response; see Answer), and the time until the last
            response (seconds).
        """
        arguments = (str(self.port), path, str(num_clients), str(seconds))
        clients = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "server_load.storm_clients", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT / "benchmarks",
        )
        output, _ = await clients.communicate(body)
        statuses, elapsed_s = json.loads(output)
        return {int(status): number for status, number in statuses.items()}, elapsed_s

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        text = (await self.ask("/metrics")).body.decode()
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", text, re.MULTILINE)))

    async def wait_until_idle(self, timeout_s: float = 60) -> float:
        """Waits until there are no requests and all blocks are free; returns the elapsed time (seconds).

        Raises:
            RuntimeError: If this takes longer than `timeout_s` seconds.
        """
        start = time.perf_counter()
        names = (
            "jax_paged_num_requests_running",
            "jax_paged_num_requests_waiting",
            "jax_paged_kv_cache_usage_ratio",
        )
        while any([await self.metric(name) for name in names]):
            if time.perf_counter() - start > timeout_s:
                raise RuntimeError(f"the server still has requests or used blocks after {timeout_s} s")
            await asyncio.sleep(0.02)
        return time.perf_counter() - start

    async def wait_until_compiled(self) -> None:
        """Waits until the server has compiled its programs: until it uses almost no processor time."""
        process, idle = psutil.Process(self.process.pid), 0
        process.cpu_percent()
        while idle < 2:
            await asyncio.sleep(0.5)
            idle = idle + 1 if process.cpu_percent() < 5 else 0

    def memory_mib(self) -> float:
        """Returns the resident memory of the server (MiB)."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


def _request(path: str, body: Any) -> bytes:
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1",
        "Host: localhost",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    return "\r\n".join((*head, "", "")).encode() + data


@contextlib.contextmanager
def serving(*options: str):
    """Starts a server, yields it as soon as it listens, and kills it at the end of the block.

    Args:
        options: Options of serve.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "serve.py", "--port", "0", *options],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            assert process.stdout is not None
            while (
                found := re.search(r"http://127\.0\.0\.1:(\d+)", line := process.stdout.readline())
            ) is None:
                if not line:
                    raise RuntimeError(f"the server did not start: {log.read_text()}")
            yield Server(int(found.group(1)), process, log)
        finally:
            process.kill()
            process.communicate()

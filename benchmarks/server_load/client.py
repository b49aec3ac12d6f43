"""An HTTP client that is small enough not to disturb what it measures, and the server process."""

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
    """What came back: the status is 0 if the connection broke before one.

    Args:
        body: The bytes after the head, chunk sizes of a stream included.
        first_s: Seconds until the first byte of the answer.
        total_s: Seconds until its end.
    """

    status: int = 0
    body: bytes = b""
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def events(self) -> list[str]:
        """The data of server-sent events."""
        return re.findall(r"^data: (.*)$", self.body.decode(), re.MULTILINE)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclasses.dataclass(frozen=True)
class Client:
    """Asks a server on a port of 127.0.0.1."""

    port: int

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        until: Callable[[bytes], bool] = lambda data: False,
        timeout_s: float = 300,
    ) -> Answer:
        """Sends a request and reads the answer to its end, or until what was read is enough.

        Args:
            path: Of the route.
            body: Of a POST: bytes, or what becomes JSON; None sends a GET.
            until: Told all that was read; True leaves.
            timeout_s: Of the whole.
        """
        answer, start = Answer(), time.perf_counter()
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(timeout_s), self.connection() as (reader, writer):
                writer.write(_request(path, body))
                with contextlib.suppress(ConnectionError):  # refused unread: the answer is there all the same
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

    async def never_read(self, path: str, body: Any, until: asyncio.Event) -> None:
        """Sends a request, and leaves the answer in the socket."""
        data, opened = _request(path, body), socket.create_connection(("127.0.0.1", self.port))
        with opened:
            opened.sendall(data)
            await until.wait()

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.close()


@dataclasses.dataclass(frozen=True)
class Server(Client):
    """A server of the built-in model.

    Args:
        process: Of the server.
        log: What it prints to stderr.
    """

    process: subprocess.Popen[str]
    log: Path

    async def storm(self, path: str, body: bytes, num_clients: int, seconds: float) -> dict[int, int]:
        """Lets a process of clients repeat a request; returns how many answers there were of each status."""
        arguments = (str(self.port), path, str(num_clients), str(seconds))
        clients = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "server_load.storm_clients", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT / "benchmarks",
        )
        output, _ = await clients.communicate(body)
        return {int(status): number for status, number in json.loads(output).items()}

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        text = (await self.ask("/metrics")).body.decode()
        return sum(map(float, re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)", text, re.MULTILINE)))

    async def wait_until_idle(self, timeout_s: float = 60) -> float:
        """Waits until nothing runs and all blocks are free; returns the seconds that it took."""
        start = time.perf_counter()
        names = (
            "jax_paged_num_requests_running",
            "jax_paged_num_requests_waiting",
            "jax_paged_kv_cache_usage_ratio",
        )
        while any([await self.metric(name) for name in names]):
            if time.perf_counter() - start > timeout_s:
                raise RuntimeError("requests run that nobody has asked for")
            await asyncio.sleep(0.02)
        return time.perf_counter() - start

    async def wait_until_compiled(self) -> None:
        """Waits until the process has nothing to do: its programs are compiled in the background."""
        process, idle = psutil.Process(self.process.pid), 0
        process.cpu_percent()
        while idle < 2:
            await asyncio.sleep(0.5)
            idle = idle + 1 if process.cpu_percent() < 5 else 0

    def memory_mib(self) -> float:
        """Returns the resident memory of the process."""
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
    """Starts a server, waits until it listens and has compiled everything, and ends it."""
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
                    raise RuntimeError(f"no server came up: {log.read_text()}")
            yield Server(int(found.group(1)), process, log)
        finally:
            process.kill()
            process.communicate()

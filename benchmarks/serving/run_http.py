"""A server with the OpenAI API and its clients, as a process that runs scenarios."""

import asyncio
import http.client
import itertools
import json
import socket
import subprocess
import time

import uvloop

from serving import runner
from serving.runner import Answer, Settings
from serving.workloads import Request

NAME = "benchmark"
STARTUP_S = 900


class Server(runner.Engine):
    """A server process, and one client connection for each request.

    Args:
        settings: `arguments` has only the entry "command", the command of the server without its port.
    """

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [*settings.arguments["command"], "--port", str(self._port)]
        self._process = subprocess.Popen(command)  # is killed together with the group of this process
        self._runs = itertools.count()
        deadline = time.monotonic() + STARTUP_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: {command}")
            time.sleep(0.5)

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Streams the outputs of all requests, each of which is sent at its arrival time."""
        salt = str(next(self._runs))
        return uvloop.run(self._ask_all(requests, salt))

    async def _ask_all(self, requests: list[Request], salt: str) -> list[Answer]:
        messages = [_message(request, salt) for request in requests]
        start = time.perf_counter()
        arrivals = [request.arrival_s for request in requests]
        streams = await asyncio.gather(*map(self._stream, messages, arrivals, [start] * len(requests)))
        # Parsed after all streams have ended, because clients and server share the cores.
        return [_answer_of(parts) for parts in streams]

    async def _stream(self, message: bytes, arrival_s: float, start: float) -> list[tuple[float, bytes]]:
        """Sends a request; returns the received parts with their times (seconds)."""
        await asyncio.sleep(max(0.0, arrival_s - (time.perf_counter() - start)))
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(lambda: _Reader(start), "127.0.0.1", self._port)
        transport.write(message)
        await reader.ended
        received = b"".join(part for _, part in reader.parts)
        if b" 200 " not in received[:20]:
            raise RuntimeError(f"the response must have status 200, got {received[:500]!r}")
        return reader.parts

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/v1/models")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _message(request: Request, salt: str) -> bytes:
    """Returns the HTTP request for a stream: head and body."""
    body = {
        "model": NAME,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    return "\r\n".join((*head, "", "")).encode() + data


class _Reader(asyncio.BufferedProtocol):
    """Protocol that records the parts of a response and their times.

    All connections use one buffer, because asyncio's streams would allocate 256 KiB for each part.

    Args:
        start: Start of the scenario, a value of time.perf_counter().
    """

    _buffer = memoryview(bytearray(2**16))  # can be shared, because its contents are copied immediately

    def __init__(self, start: float) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._start = start

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.parts.append((time.perf_counter() - self._start, bytes(self._buffer[:nbytes])))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


def _answer_of(parts: list[tuple[float, bytes]]) -> Answer:
    """Returns the answer in the parts of a stream. An event has the time of the part that ends its line."""
    answer, pieces, line = Answer("", 0, []), [], b""
    for seconds, part in parts:
        *ended, line = (line + part).split(b"\n")
        for text in ended:
            if not text.startswith(b"data: {"):
                continue
            event = json.loads(text[6:])
            if event["choices"]:
                answer.times.append(seconds)
                pieces.append(event["choices"][0]["text"])
            if event.get("usage"):
                answer.num_tokens = event["usage"]["completion_tokens"]
    answer.output = "".join(pieces)
    return answer


if __name__ == "__main__":
    runner.main(Server, "")

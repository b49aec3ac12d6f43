"""A server of the OpenAI API and its clients, as a process that answers scenarios."""

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


class Server:
    """A server process, and a client with its own connection for every request.

    settings.arguments: "command", which starts the server, but for its port.
    """

    def __init__(self, settings: Settings) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [*settings.arguments["command"], "--port", str(self._port)]
        self._process = subprocess.Popen(command)  # ends with this process's group
        self._runs = itertools.count()
        deadline = time.monotonic() + STARTUP_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no server came up: {command}")
            time.sleep(0.5)

    def __call__(self, requests: list[Request], prefix_caching: bool) -> list[Answer]:
        """Streams all requests at once, each from its arrival on."""
        salt = str(next(self._runs))
        return uvloop.run(self._ask_all(requests, salt))

    async def _ask_all(self, requests: list[Request], salt: str) -> list[Answer]:
        messages = [_message(request, salt) for request in requests]
        start = time.perf_counter()
        arrivals = [request.arrival_s for request in requests]
        streams = await asyncio.gather(*map(self._stream, messages, arrivals, [start] * len(requests)))
        # Only now: what the clients compute meanwhile is taken from the server's cores.
        return [_answer_of(parts) for parts in streams]

    async def _stream(self, message: bytes, arrival_s: float, start: float) -> list[tuple[float, bytes]]:
        """Asks for a stream; returns what has come, and when, in seconds."""
        await asyncio.sleep(max(0.0, arrival_s - (time.perf_counter() - start)))
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(lambda: _Reader(start), "127.0.0.1", self._port)
        transport.write(message)
        await reader.ended
        received = b"".join(part for _, part in reader.parts)
        if b" 200 " not in received[:20]:
            raise RuntimeError(f"the server answered: {received[:500]!r}")
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
    """Returns what a client sends: the head and the body."""
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
    """Notes what comes, and when, into one buffer: asyncio's streams take a new one of 256 KiB for each part.

    Args:
        start: Seconds of time.perf_counter that times count from.
    """

    _buffer = memoryview(bytearray(2**16))  # of all connections: what is in it is copied at once

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
    """Reads the events of a stream from its parts; an event has come with the end of its line."""
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

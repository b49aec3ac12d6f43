"""Clients that are slow, many or do not read; and that documents, help and options name the same limits."""

import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.listening import listening
from helpers.raw_http import KEY, Answer, ask, connect, head, post, receive

from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.limits import BodyLimits
from jax_paged.server.launch.cli import make_parser
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.preprocessing import ThrottledLock
from jax_paged.server.protocol.responses import ApiError

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 0.6
OPTIONS = ServerOptions(
    port=0,
    api_key=(KEY.decode(),),
    max_connections=8,
    max_body_bytes=4096,
    max_buffered_bytes=8192,
    head_timeout=TIMEOUT_S,
    body_timeout=TIMEOUT_S,
    write_timeout=TIMEOUT_S,
    keep_alive_timeout=TIMEOUT_S,
)
GOOD = b'{"prompt": "a", "max_tokens": 1}'


@pytest.fixture(scope="module")
def port(served: Any) -> Iterator[int]:
    with listening(OpenAIServer(served.server.engine, "pagelet", OPTIONS), send_buffer_bytes=16384) as port:
        yield port


def drip(connection: socket.socket, data: bytes) -> Answer:
    """Sends a byte now and then until there is an answer."""
    connection.settimeout(0.05)
    for i in range(len(data)):
        connection.sendall(data[i : i + 1])
        try:
            connection.recv(1, socket.MSG_PEEK)
            break
        except TimeoutError:
            pass
    connection.settimeout(30)
    return receive(connection)


@pytest.mark.parametrize("begin", [b"P", head()[:40], head(), b"\r\n"])
def test_a_head_that_stalls(port: int, begin: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(begin)
        start = time.monotonic()
        answer = receive(connection)
    assert (answer.status, answer.is_closed) == (408, True)
    assert "the headers were not complete after 0.6 s" in answer.error["message"]
    assert time.monotonic() - start > TIMEOUT_S / 2


def test_a_head_that_drips(port: int) -> None:
    with connect(port) as connection:
        assert drip(connection, head() + b"X: " + b"a" * 200).status == 408


def test_the_second_head_of_a_connection_stalls(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(post(GOOD))
        assert receive(connection).status == 200
        connection.sendall(b"GET /he")
        assert receive(connection).status == 408


def test_a_connection_without_a_word_is_closed_without_one(port: int) -> None:
    with connect(port) as connection:
        assert connection.recv(1) == b""


def test_a_connection_without_a_second_request_is_closed(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(post(GOOD))
        assert receive(connection).status == 200
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "begin",
    [
        head("POST", "/v1/completions", "Content-Length: 100") + b"\r\n",
        head("POST", "/v1/completions", "Content-Length: 100") + b"\r\n{",
        head("POST", "/v1/completions", "Transfer-Encoding: chunked") + b"\r\n1\r\n{\r\n",
        head("POST", "/nothing", "Content-Length: 100") + b"\r\n{",
    ],
)
def test_a_body_that_stalls(port: int, begin: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(begin)
        answer = receive(connection)
    assert (answer.status, answer.is_closed) == (408, True)
    assert "the body was not complete after 0.6 s" in answer.error["message"]


def test_a_body_that_drips(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(head("POST", "/v1/completions", "Content-Length: 1000") + b"\r\n")
        assert drip(connection, b" " * 900).status == 408


def test_a_refused_body_that_drips_does_not_keep_its_connection(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(head("POST", "/v1/completions", "Content-Length: 1000", key=False) + b"\r\n")
        assert receive(connection, to_end=False).status == 401
        start = time.monotonic()
        while not is_closed(connection):
            connection.sendall(b" ")
            time.sleep(0.05)
            assert time.monotonic() - start < 9


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(65536) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.fixture
def refusing(served: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that answers before it reads."""
    server = OpenAIServer(served.server.engine, "pagelet", dataclasses.replace(OPTIONS, api_key=()))
    error = ApiError("not now", status=429)
    with listening(server) as port:
        monkeypatch.setattr(server.lifecycle, "rejection", lambda: error)
        yield port


def test_an_answer_before_the_body_does_not_end_the_connection(refusing: int) -> None:
    with connect(refusing) as connection:
        for _ in range(3):
            connection.sendall(
                head("POST", "/v1/completions", f"Content-Length: {len(GOOD)}") + b"\r\n" + GOOD[:5]
            )
            assert receive(connection).status == 429
            time.sleep(TIMEOUT_S / 3)
            connection.sendall(GOOD[5:])
            time.sleep(TIMEOUT_S / 3)
        start = time.monotonic()
        assert connection.recv(1) == b"", "closed without a word"
        assert time.monotonic() - start < 5


def test_a_body_behind_its_answer_stalls(refusing: int) -> None:
    with connect(refusing) as connection:
        connection.sendall(head("POST", "/v1/completions", "Content-Length: 100") + b"\r\n{")
        assert receive(connection).status == 429
        for _ in range(200):
            try:
                connection.sendall(b" ")
            except OSError:
                return
            time.sleep(0.05)
    pytest.fail("the connection stays open")


def test_a_client_waits_for_a_word_before_it_sends_a_body(port: int) -> None:
    for length, expected in ((len(GOOD), b"HTTP/1.1 100 Continue\r\n\r\n"), (5000, b"HTTP/1.1 413")):
        with connect(port) as connection:
            headers = f"Content-Length: {length}", "Expect: 100-continue"
            connection.sendall(head("POST", "/v1/completions", *headers) + b"\r\n")
            assert connection.recv(len(expected)) == expected
            if length == len(GOOD):
                connection.sendall(GOOD)
                assert receive(connection).status == 200


def test_bodies_that_are_received_are_few_together(port: int, served: Any) -> None:
    begin = head("POST", "/v1/completions", "Content-Length: 4096") + b"\r\n" + b" " * 4000
    connections = []
    for _ in range(3):
        connections.append(connect(port))
        connections[-1].sendall(begin)
    answers = [receive(connection) for connection in connections]
    assert sorted(answer.status for answer in answers) == [408, 408, 503]
    assert ask(port, post(GOOD)).status == 200


def test_too_many_connections(port: int, served: Any) -> None:
    idle = [connect(port) for _ in range(8)]
    with connect(port) as connection:
        answer = receive(connection)
    assert (answer.status, answer.headers["retry-after"], answer.is_closed) == (503, "1", True)
    assert "too many open connections" in answer.error["message"]
    for connection in idle:
        connection.close()
    served.wait_until(lambda: is_served(port), "there is room again")


def is_served(port: int) -> bool:
    with connect(port) as connection:
        connection.sendall(post(GOOD))
        return receive(connection).status == 200


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_reads(port: int, served: Any, stream: bool) -> None:
    body = {"prompt": "a", "n": 16, "logprobs": 20, "max_tokens": 80, "ignore_eos": True, "stream": stream}
    manager = served.engine.scheduler.block_manager
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(post(json.dumps(body).encode()))
    served.wait_until(served.engine.has_unfinished_requests, "the request runs")
    served.wait_until(lambda: not served.engine.has_unfinished_requests(), "the request has ended", 60)
    served.wait_until(lambda: manager.num_free_blocks == manager.num_usable_blocks, "all blocks are free")
    time.sleep(4 * TIMEOUT_S)  # a whole answer begins to be written only now
    connection.settimeout(30)
    data = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            data += part
    assert data.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in data
    assert not data.endswith(b"}")


def test_a_slow_reader_gets_all(port: int) -> None:
    body = {"prompt": "a", "n": 16, "logprobs": 20, "max_tokens": 60, "ignore_eos": True}
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    with connection, connection.makefile("rb", buffering=0) as stream:
        connection.sendall(post(json.dumps(body).encode()))
        data = stream.read(16384)
        length = int(re.search(rb"content-length: (\d+)", data, re.IGNORECASE)[1])  # pyright: ignore
        while len(data) < length:
            time.sleep(0.02)
            part = stream.read(32768)
            assert part
            data += part
    assert data.rstrip().endswith(b"}")


# Documents, help and options.


def limits() -> dict[str, Any]:
    return {
        f"--{field.name.replace('_', '-')}": field.default
        for field in dataclasses.fields(ServerOptions)
        if field.name.startswith("max_") or field.name.endswith("_timeout")
    }


def test_the_table_of_limits_is_that_of_the_options() -> None:
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[\w-]+)` \| (\S+) \|", text, re.MULTILINE)
    assert len(rows) == len(dict(rows))
    assert dict(rows) == {name: str(default) for name, default in limits().items()}


def test_help_names_all_limits_with_their_values() -> None:
    text = re.sub(r"\s+", " ", make_parser().format_help())
    for name, default in limits().items():
        pattern = rf"{name} {name[2:].replace('-', '_').upper()} [^()]*\(default: {re.escape(str(default))}\)"
        assert re.search(pattern, text), name


SECTIONS = {
    "README.md": "## Security",
    "docs/security.md": "# Security",
    "docs/server.md": "## API keys and HTTPS",
}


@pytest.mark.parametrize("file", SECTIONS)
def test_options_that_documents_name_exist(file: str) -> None:
    text = "\n" + (ROOT / file).read_text(encoding="utf-8")
    section = text[text.index(f"\n{SECTIONS[file]}") :]
    section = section[: section.find("\n## ", 1)]
    named = set(re.findall(r"--[a-z][\w-]+", section))
    options = {option for action in make_parser()._actions for option in action.option_strings}
    assert {"--api-key-file", "--allow-unauthenticated"} <= named
    assert named <= options


def test_a_long_body_counts_as_buffered_until_its_turn_and_its_client_may_leave():
    async def check():
        lane = ThrottledLock()
        parsed = []

        async def app(scope, receive, send):
            parsed.append((await receive())["body"])

        limits = BodyLimits(app, ServerOptions(max_body_bytes=10**6, max_buffered_bytes=10**6), lane)
        left = asyncio.Event()
        sent = []

        def client(gone):
            messages = [{"type": "http.request", "body": b"a" * 600_000}]

            async def receive():
                if messages:
                    return messages.pop()
                await gone.wait()
                return {"type": "http.disconnect"}

            return receive

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "headers": [], "path": "/"}
        await lane._lock.acquire()
        waits = asyncio.create_task(limits(scope, client(left), send))
        await asyncio.sleep(0.01)
        await limits(scope, client(asyncio.Event()), send)
        assert sent[0]["status"] == 503
        left.set()
        await waits
        assert parsed == []
        lane._lock.release()
        await limits(scope, client(asyncio.Event()), send)
        assert parsed == [b"a" * 600_000]

    asyncio.run(check())

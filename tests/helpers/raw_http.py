"""A client that sends bytes, right or wrong."""

import dataclasses
import json
import socket
from typing import Any

KEY = b"a-key"


@dataclasses.dataclass
class Answer:
    """What came back: the first answer, and whether the connection was closed after it."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_closed: bool

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's envelope, which must be whole."""
        error = json.loads(self.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}, error
        assert error["message"], error
        assert "Traceback" not in error["message"], error
        return error


def head(
    method: str = "POST", path: str = "/v1/completions", *headers: str | bytes, key: bool = True
) -> bytes:
    """Returns the head of a request, without the empty line at its end."""
    lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: test"]
    if key:
        lines.append(b"Authorization: Bearer " + KEY)
    if method == "POST":
        lines.append(b"Content-Type: application/json")
    lines += [header.encode() if isinstance(header, str) else header for header in headers]
    return b"".join(line + b"\r\n" for line in lines)


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    """Returns a whole request."""
    return head("POST", path, f"Content-Length: {len(body)}") + b"\r\n" + body


def connect(port: int, timeout_s: float = 30) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)


def receive(connection: socket.socket, *, has_body: bool = True, to_end: bool = True) -> Answer:
    """Reads one answer, with a length or in chunks, and up to its end a connection that is to be closed."""
    with connection.makefile("rb") as stream:
        status_line = stream.readline()
        assert status_line.startswith(b"HTTP/1.1 "), status_line
        headers = {}
        while (line := stream.readline().rstrip()) != b"":
            name, _, value = line.decode("latin-1").partition(": ")
            assert name.lower() not in headers, f"{name} comes twice"
            headers[name.lower()] = value
        body = b""
        if has_body and "content-length" in headers:
            body = stream.read(int(headers["content-length"]))
        elif has_body:
            while (size := int(stream.readline(), 16)) > 0:
                body += stream.read(size)
                stream.readline()
            stream.readline()
        is_closed = to_end and headers.get("connection") == "close" and stream.read() == b""
    return Answer(int(status_line.split()[1]), headers, body, is_closed)


def ask(port: int, data: bytes) -> Answer:
    """Sends bytes on a connection of their own, and returns the answer."""
    with connect(port) as connection:
        connection.sendall(data)
        return receive(connection, has_body=not data.startswith(b"HEAD"))

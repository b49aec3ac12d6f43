"""HTTP/1 connection protocol: uvicorn's httptools protocol with limits on sizes and times.

uvicorn alone has no limit on the size of headers and on the time until they are complete, processes pipelined
requests, treats trailers as headers, and waits forever for a client that does not read. This protocol rejects
requests that exceed a limit before the application is called, drops pipelined requests and trailers, and
closes connections that are too slow.
"""

import asyncio
import functools
import uuid
from collections.abc import Callable
from typing import Any, NoReturn, cast

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol.responses import ApiError

# Time (seconds) for which input is read and dropped after a rejected request. Closing the connection at once
# would reset it, and the client might not receive the response.
LINGER_S = 2


# Key of the BodyWriter in the extensions of a request's ASGI scope.
BODY_WRITER = "jax_paged.body_writer"


def limited_protocol(options: ServerOptions) -> Callable[..., asyncio.Protocol]:
    """Returns a factory of connection protocols for uvicorn's `http` setting."""
    return functools.partial(_LimitedProtocol, options, _WriteBatch())


class _WriteBatch:
    """Batch of the writes of all connections in one iteration of the event loop.

    Each write wakes the client, which may take a CPU core from the engine. If a client reads several streams,
    writing to all of them in quick succession wakes it only once.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[asyncio.Transport, bytes]] = []

    def add(self, transport: asyncio.Transport, data: bytes) -> None:
        """Queues data, which is written before any callback that is scheduled after this call."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._write)
        self._pending.append((transport, data))

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        for transport, data in pending:
            if not transport.is_closing():
                transport.write(data)


class BodyWriter:
    """Writer for parts of a chunked response body that needs no coroutine for each part.

    The response must have been started, and must not have a Content-Length.

    Args:
        cycle: The request and its response in uvicorn.
        writes: Batches the writes of all connections.

    Attributes:
        on_resume: Callback for when the client reads again after `is_paused` was True; None for no callback.
    """

    def __init__(self, cycle: RequestResponseCycle, writes: _WriteBatch) -> None:
        self.on_resume: Callable[[], None] | None = None
        self._cycle = cycle
        self._writes = writes

    @property
    def is_paused(self) -> bool:
        """Whether the caller should not write because the client reads too slowly."""
        return self._cycle.flow.write_paused

    def write(self, part: bytes) -> None:
        """Writes a non-empty part of the body. The part is dropped if the client has disconnected."""
        if not self._cycle.disconnected:
            self._writes.add(self._cycle.transport, b"%x\r\n%b\r\n" % (len(part), part))


class _RejectedRequestError(Exception):
    """Exception with which a callback of the parser rejects the request."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.error = error


class _LimitedProtocol(HttpToolsProtocol):
    def __init__(self, options: ServerOptions, writes: _WriteBatch, **settings: Any) -> None:
        super().__init__(**settings)
        self._options = options
        self._writes = writes
        self._body_writer: BodyWriter | None = None
        self._is_rejected = False
        # Whether the next request or its headers are expected. False from the end of the headers until the
        # response is complete, which may be before the end of the body.
        self._in_head = True
        self._num_head_bytes = 0  # bytes of complete headers, trailers and the first line
        # Bytes received since the start of the headers or since the parser last reported a part of the body.
        self._num_unreported_bytes = 0
        self._has_received = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # Connection events.

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        """Starts the timeout for the first request, or closes the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._options.max_connections:
            self._send_error("the server has too many open connections; try again later", 503, linger_s=0)
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timers."""
        self._stop_head_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses received data. Data that arrives before the previous request has been answered is dropped.

        The connection is then closed after the response. HTTP allows a server to answer only the first of
        several pipelined requests.
        """
        if self._is_rejected:
            return
        self._has_received = True
        if self._is_answering():
            self.cycle.keep_alive = False
            return
        self._unset_keepalive_if_required()
        if self._in_head and self._head_timer is None:
            self._start_head_timer()
        self._num_unreported_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._on_parser_error(error)
        if self._num_unreported_bytes > self._options.max_header_bytes and not self._is_rejected:
            self._send_error(self._too_long(), 431)

    def _on_parser_error(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__  # the exception that a callback of the parser has raised
        if isinstance(cause, _RejectedRequestError):
            self._send_error(str(cause), cause.error.status)
        elif self._is_answering():  # A pipelined request follows in the same data.
            self.cycle.keep_alive = False
        else:
            self._send_error(f"the request is not valid HTTP/1.1: {cause or error}", 400)

    def _is_answering(self) -> bool:
        """Returns whether a request is complete but its response is not."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Starts a new request, or stops the parser if the previous request is still being answered."""
        if self._is_answering():
            raise RuntimeError("a pipelined request has started")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Adds a part of the URL."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header. Trailers, which follow the body, are dropped."""
        self._count_head(len(name) + len(value) + 4)  # plus ": " and the line break
        if not self._in_head:
            self._num_unreported_bytes = 0
            return
        super().on_header(name, value)
        if len(self.headers) > (limit := self._options.max_headers):
            _reject(f"the request must have at most {limit} headers", 431)

    def on_headers_complete(self) -> None:
        """Checks the headers and starts the application."""
        self._num_unreported_bytes = 0
        self._check_headers()
        if not self.parser.should_upgrade():
            self._stop_head_timer()
            self._in_head = False
            super().on_headers_complete()
            self._body_writer = BodyWriter(self.cycle, self._writes)
            cast("dict[str, Any]", self.cycle.scope)["extensions"] = {BODY_WRITER: self._body_writer}

    def on_body(self, body: bytes) -> None:
        """Adds a part of the body."""
        self._num_unreported_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends the body of the request."""
        if not self._in_head:
            super().on_message_complete()
        elif not self.parser.should_upgrade():
            # The response was complete before this end of the body, so the connection is idle from now on.
            self.cycle.more_body = False
            self._num_head_bytes = self._num_unreported_bytes = 0
            self._stop_head_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self._options.max_header_bytes:
            _reject(self._too_long(), 431)

    def _too_long(self) -> str:
        return f"the request line and headers must have at most {self._options.max_header_bytes} bytes"

    def _check_headers(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            _reject(f"the HTTP version must be 1.0 or 1.1, got {version}", 505)
        if self.parser.get_method() == b"CONNECT":
            _reject("the method CONNECT is not supported because this server is not a proxy", 405)
        values = {name: [v for n, v in self.headers if n == name] for name in (b"host", b"transfer-encoding")}
        num_hosts, encodings = len(values[b"host"]), values[b"transfer-encoding"]
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            _reject(f"the request must have exactly one Host header, got {num_hosts}")
        # The parser itself rejects Content-Length next to Transfer-Encoding, but accepts a list of encodings
        # that ends with chunked.
        if encodings and (version == "1.0" or [e.strip().lower() for e in encodings] != [b"chunked"]):
            _reject("Transfer-Encoding must be chunked, and needs HTTP/1.1")

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Parses a request again without its Upgrade header, and then the data that follows the request.

        The parser skips the body of a request for a protocol upgrade. Some clients, such as Java's, ask for
        an upgrade in every request and expect that a server may ignore it.

        Args:
            rest: Data that the parser has not consumed.
        """
        version, dropped = (
            self.parser.get_http_version().encode(),
            (b"upgrade", b"http2-settings", b"connection"),
        )
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name not in dropped]
        if not self.parser.should_keep_alive():
            lines.append(b"connection: close")
        self.parser = httptools.HttpRequestParser(self)
        self._num_head_bytes = self._num_unreported_bytes = 0
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    # Timeouts.

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._options.head_timeout, self._on_late_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        self._head_timer = None
        # The timer also runs while the rest of a body is read after its response was complete. The client
        # then gets no second response.
        is_answered = self.cycle is not None and self.cycle.more_body
        if self._has_received and not is_answered:
            self._send_error(f"the headers were not complete after {self._options.head_timeout:g} s", 408)
        else:  # Browsers open spare connections that they may never use.
            self.transport.close()

    def pause_writing(self) -> None:
        """Starts the write timeout, because the client reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        """Stops the write timeout, because the client has caught up."""
        self._stop_write_timer()
        super().resume_writing()
        if self._body_writer is not None and self._body_writer.on_resume is not None:
            self._body_writer.on_resume()

    def on_response_complete(self) -> None:
        """Prepares for the next request."""
        super().on_response_complete()
        self._in_head = True
        self._num_head_bytes = self._num_unreported_bytes = 0
        # The write timeout also applies to a connection that is about to be closed.
        if self.transport.get_write_buffer_size() > 0:
            self._watch_writes()

    def _watch_writes(self) -> None:
        if self._write_timer is None:
            size = self.transport.get_write_buffer_size()
            self._write_timer = self.loop.call_later(self._options.write_timeout, self._check_writes, size)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_writes(self, size_before: int) -> None:
        self._write_timer = None
        size = self.transport.get_write_buffer_size()
        if size >= size_before:
            self.transport.abort()
        elif size > 0:
            self._watch_writes()

    # Rejected requests.

    def _send_error(self, message: str, status: int, *, linger_s: float = LINGER_S) -> None:
        """Closes the connection, after an error response if no response has been started.

        Args:
            message: Message of the error.
            status: HTTP status.
            linger_s: Time (seconds) for which further input is read and dropped before the connection is
                closed.
        """
        self._is_rejected = True
        self._stop_head_timer()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # To the application, the client has disconnected.
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        self.transport.write(_answer(ApiError(message, status=status)))
        if self.transport.can_write_eof():  # TLS connections cannot be closed in one direction.
            self.transport.write_eof()
        self.loop.call_later(linger_s, self.transport.close)


def _reject(message: str, status: int = 400) -> NoReturn:
    raise _RejectedRequestError(ApiError(message, status=status))


def _answer(error: ApiError) -> bytes:
    body = orjson.dumps(error.body())
    lines = [
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"x-request-id: " + uuid.uuid4().hex.encode(),
        b"connection: close",
    ]
    if error.status == 503:
        lines.append(b"retry-after: 1")
    return STATUS_LINE[error.status] + b"\r\n".join([*lines, b"", body])

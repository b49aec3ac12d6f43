"""Limits on request bodies that are checked before any work: size, time, JSON structure and field lengths."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_paged.arguments.shown_values import one_of
from jax_paged.errors import ArgumentError, check_int
from jax_paged.server.http.http_protocol import LINGER_S
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.preprocessing import LONG_BODY, ThrottledLock
from jax_paged.server.protocol.responses import ApiError

# Change of the nesting depth at each structural byte of JSON, as an int8. 0 marks a quotation mark, which
# starts or ends a string.
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1, '"': 0}
_STEP_TABLE = bytes(_STEPS.get(chr(i), 0) % 256 for i in range(256))
_WITHOUT_STEP = bytes(i for i in range(256) if chr(i) not in _STEPS)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Larger bodies (bytes) are parsed in a thread, so that the event loop is not blocked.
_SMALL_BYTES = 64 * 1024
# Roles accepted in chat messages. Other roles are rejected because a chat template may turn the role into
# control tokens.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def send_error(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an error response in place of the application's response.

    If the request has a body, which may not have been read, the connection is closed after the response.
    Before that, the rest of the body is read and dropped for a short time.

    Args:
        error: The error to send.
        scope: ASGI scope of the request.
        receive: Receives the body.
        send: Sends the response.
    """
    body = orjson.dumps(error.body())
    has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
    all_headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()),
        *([(b"connection", b"close")] if has_body else ()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    if has_body:
        try:
            async with asyncio.timeout(LINGER_S):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        except TimeoutError:
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class BodyLimits:
    """ASGI middleware that reads the whole body within size and time limits, then calls the application.

    Args:
        app: The next ASGI application.
        options: The limits.
        cpu_lock: Lock that long bodies must acquire before they are parsed.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, cpu_lock: ThrottledLock) -> None:
        self._app = app
        self._options = options
        self._lock = cpu_lock
        self._num_buffered = 0  # bytes of bodies that are being received or wait to be parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await send_error(error, scope, receive, send)
            return
        if body is None:  # the client has disconnected
            return
        try:
            if len(body) > LONG_BODY and not await _done_first(self._lock.body_turn(len(body)), receive()):
                return  # The client has disconnected while the body waited.
        finally:
            self._num_buffered -= len(body)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def read() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, read, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        limit, timeout = self._options.max_body_bytes, self._options.body_timeout
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and int(lengths[0]) > limit:
            raise _too_large(f"{int(lengths[0])} bytes", limit)
        parts: list[bytes] = []
        num_bytes, is_whole = 0, False
        try:
            async with asyncio.timeout(timeout):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    part = message.get("body", b"")
                    parts.append(part)
                    num_bytes += len(part)
                    self._num_buffered += len(part)
                    if num_bytes > limit:
                        raise _too_large(f"more than {limit} bytes", limit)
                    if self._num_buffered > self._options.max_buffered_bytes:
                        raise ApiError(
                            "the server is receiving too many bytes (--max-buffered-bytes); try again later",
                            status=503,
                            headers={"Retry-After": "1"},
                        )
                    if not message.get("more_body", False):
                        is_whole = True
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(f"the body was not complete after {timeout:g} s", status=408) from None
        finally:
            if not is_whole:
                self._num_buffered -= num_bytes


async def _done_first(wanted: Awaitable[object], other: Awaitable[object]) -> bool:
    """Waits for the first of two awaitables, cancels the other one, and returns whether `wanted` is done."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


def json_route(limits: ServerOptions) -> type[APIRoute]:
    """Returns a route class that parses JSON bodies with `parse_json`.

    Bodies that `parse_json` rejects are reported like invalid JSON.
    """

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def serve(request: Request) -> Response:
                return await handler(_JsonRequest(request.scope, request.receive, limits))

            return serve

    return JsonRoute


class _JsonRequest(Request):
    def __init__(self, scope: Scope, receive: Receive, limits: ServerOptions) -> None:
        super().__init__(scope, receive)
        self._limits = limits

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= _SMALL_BYTES:
            return parse_json(body, self._limits)
        return await asyncio.to_thread(parse_json, body, self._limits)


def parse_json(body: bytes, limits: ServerOptions) -> Any:
    """Returns the value of a JSON document, with stricter rules than Python's parser.

    Args:
        body: The document in UTF-8, without a byte order mark.
        limits: Maximum nesting depth and number of arrays and objects.

    Raises:
        json.JSONDecodeError: If the document is invalid or exceeds a limit, an object has a duplicate key, a
            string is not valid Unicode, or a number is NaN or infinite or has thousands of digits.
    """
    try:
        text = body.decode()
        _check_nesting(body, limits)
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
        if _SURROGATE.search(body):
            _check_surrogates(body)
        return value
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        _not_json(f"it is not UTF-8: {error.reason} at byte {error.start}")
    except ValueError:  # Python raises ValueError for an integer with too many digits.
        _not_json("a number has too many digits")


def check_sizes(body: Any, options: ServerOptions) -> None:
    """Checks the number of prompts, messages and stop strings of a request, and the roles of its messages.

    Args:
        body: A request with any of the fields prompt, messages and stop.
        options: The limits.

    Raises:
        ValueError: If a limit is exceeded, or a message has an unknown role.
    """
    prompt, messages, stop = (getattr(body, name, None) for name in ("prompt", "messages", "stop"))
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        check_int("prompt", len(prompt), 0, options.max_prompts, aspect="the number of prompts in")
    if isinstance(messages, list):
        check_int("messages", len(messages), 0, options.max_messages, aspect="the length of")
        for i, message in enumerate(messages):
            role = message.get("role")
            if isinstance(role, str) and role not in _ROLES:
                raise ArgumentError(f"messages[{i}].role", role, one_of(_ROLES))
    stops = [stop] if isinstance(stop, str) else stop or []
    check_int("stop", len(stops), 0, options.max_stop_strings, aspect="the number of strings in")
    aspect = "the total length of the strings in"
    check_int("stop", sum(map(len, stops)), 0, options.max_stop_characters, aspect=aspect)


def _check_nesting(body: bytes, limits: ServerOptions) -> None:
    """Checks the nesting depth and the number of arrays and objects in linear time, without recursion."""
    # After escaped backslashes and quotation marks are removed, each quotation mark starts or ends a string.
    # (Backslashes outside of strings are invalid JSON, which the parser rejects afterwards.)
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEP_TABLE, _WITHOUT_STEP)
    steps = np.frombuffer(marks, np.int8)
    steps = steps * (np.cumsum(steps == 0) % 2 == 0)
    if steps.cumsum(dtype=np.int32).max(initial=0) > limits.max_json_depth:
        _not_json(f"it must have at most {limits.max_json_depth} levels of nesting")
    if (steps == 1).sum() > limits.max_json_containers:
        _not_json(f"it must have at most {limits.max_json_containers} arrays and objects")


def _check_surrogates(body: bytes) -> None:
    try:
        orjson.loads(body)  # Unlike Python's parser, orjson rejects unpaired surrogates.
    except orjson.JSONDecodeError as error:
        _not_json(f"a string is not valid Unicode: {error.msg}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _not_json("an object has a duplicate key")
    return found


def _no_constant(name: str) -> NoReturn:
    _not_json(f"{name} is not a JSON number")


def _not_json(problem: str) -> NoReturn:
    raise json.JSONDecodeError(problem, "", 0)


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(f"the body must have at most {limit} bytes, got {size}", status=413)

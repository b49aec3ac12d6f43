"""Limits on what a client sends, before any work: the size, the time and the form of a body."""

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
from jax_paged.server.protocol.responses import ApiError
from jax_paged.server.text_reader import LONG_BODY, Lane

# What a byte of JSON does to the depth, as an int8; a quotation mark begins or ends what does nothing.
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1, '"': 0}
_STEP_TABLE = bytes(_STEPS.get(chr(i), 0) % 256 for i in range(256))
_WITHOUT_STEP = bytes(i for i in range(256) if chr(i) not in _STEPS)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Larger bodies are parsed in a thread, so that the event loop goes on.
_SMALL_BYTES = 64 * 1024
# Who may speak in a chat. A template may make control tokens of the role, so that no other text is one.
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with an error instead of the application.

    If there is a body, which need not have been read, the connection is closed at the end; what comes of it
    until then is dropped.

    Args:
        error: The answer.
        scope: Of the request, as ASGI passes it; so are the next two.
        receive: Gives the body.
        send: Takes the answer.
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
    """Reads a request's body, within limits of size and time, before the application is called.

    Args:
        app: What is behind.
        options: The limits.
        lane: Where long bodies wait for their turn, once they are there.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions, lane: Lane) -> None:
        self._app = app
        self._options = options
        self._lane = lane
        self._num_buffered = 0  # bytes of bodies that are being received, or wait to be parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        if body is None:  # the client has left
            return
        try:
            if len(body) > LONG_BODY and not await _is_first(self._lane.body_turn(len(body)), receive()):
                return  # it has left while it waited
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
                        raise _too_large("more", limit)
                    if self._num_buffered > self._options.max_buffered_bytes:
                        raise ApiError(
                            "the server receives too much at the same time; try again later",
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


async def _is_first(wanted: Awaitable[object], other: Awaitable[object]) -> bool:
    """Waits for the first of two, cancels the second, and returns whether the wanted one has ended."""
    tasks = [asyncio.ensure_future(wanted), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


def json_route(limits: ServerOptions) -> type[APIRoute]:
    """Returns the class of routes whose body is strict JSON; all else is answered as broken JSON is."""

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
    """Returns the value of JSON, more strictly than Python's parser reads it.

    Args:
        body: In UTF-8, without a byte order mark.
        limits: How deep arrays and objects may be nested, and how many there may be.

    Raises:
        json.JSONDecodeError: If it is no JSON, or beyond the limits, or if an object has a key twice, or a
            string is not valid Unicode, or a number is none of JSON's or has thousands of digits.
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
    except ValueError:  # an integer of more digits than Python reads
        _not_json("a number has too many digits")


def check_sizes(body: Any, options: ServerOptions) -> None:
    """Checks how many things a request has.

    Args:
        body: A completion request or a chat request.
        options: The limits.

    Raises:
        ValueError: If it has too many, or if a message is of a role that no chat has.
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
    """Checks the depth and the number of arrays and objects; linear in time, and without a recursion."""
    # Without escaped characters each quotation mark begins or ends a string. (Outside of strings there are no
    # backslashes; where there are, the parser stops.)
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEP_TABLE, _WITHOUT_STEP)
    steps = np.frombuffer(marks, np.int8)
    steps = steps * (np.cumsum(steps == 0) % 2 == 0)
    if steps.cumsum(dtype=np.int32).max(initial=0) > limits.max_json_depth:
        _not_json(f"it must have at most {limits.max_json_depth} nested levels")
    if (steps == 1).sum() > limits.max_json_containers:
        _not_json(f"it must have at most {limits.max_json_containers} arrays and objects")


def _check_surrogates(body: bytes) -> None:
    try:
        orjson.loads(body)  # unlike Python's parser it refuses halves of characters
    except orjson.JSONDecodeError as error:
        _not_json(f"a string is not valid Unicode: {error.msg}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        _not_json("an object has a key twice")
    return found


def _no_constant(name: str) -> NoReturn:
    _not_json(f"{name} is no number of JSON's")


def _not_json(problem: str) -> NoReturn:
    raise json.JSONDecodeError(problem, "", 0)


def _too_large(size: str, limit: int) -> ApiError:
    return ApiError(f"the body must have at most {limit} bytes, got {size}", status=413)

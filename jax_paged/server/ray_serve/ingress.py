"""Ingress in front of several replicas: sends them HTTP requests, and retries with another one on failure."""

import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response

from jax_paged.server.http.event_stream import EventStream
from jax_paged.server.observability.metrics import with_replicas
from jax_paged.server.protocol.responses import ApiError, json_response
from jax_paged.server.ray_serve.continuation import (
    Progress,
    ReplicaCall,
    ReplicaLostError,
    ResponsePart,
    ResponseStart,
)

# Maximum number of replicas that are tried for a request, because the request itself may be the cause of the
# failures.
_MAX_ATTEMPTS = 3
# Plain prompts are routed by their first characters or tokens, up to this number.
_PREFIX_LENGTH = 256
_HEALTH_PATHS = ("/health", "/ping", "/ready")
_LOGGER = logging.getLogger(__name__)

ResponseStream = AsyncGenerator[ResponseStart | ResponsePart]


class Ingress:
    """Handler of HTTP requests that distributes them to replicas and hides the failure of a replica.

    A response that is not streamed comes from a single replica and is requested again if that replica fails.
    A stream is continued by another replica. It has the same tokens as without the failure, because each
    sampled token depends only on the seed and the position.

    Args:
        send: Sends a request to a replica. The generator raises ReplicaLostError if the replica has failed.
        count: Returns the number of running replicas and the number of replicas that should run.
        max_body_bytes: Maximum size of a request's body (bytes).
    """

    def __init__(
        self,
        send: Callable[[ReplicaCall], ResponseStream],
        count: Callable[[], Awaitable[tuple[int, int]]],
        max_body_bytes: int,
    ) -> None:
        self._send = send
        self._count = count
        self._max_body_bytes = max_body_bytes

    async def answer(self, request: Request) -> Response:
        """Returns the response to a request; a stream is returned when its first event is available."""
        try:
            if request.scope["path"] in _HEALTH_PATHS:
                return await self._health()
            if request.scope["path"] == "/metrics":
                return await self._metrics(_call(request, b""))
            parts = self._parts(_call(request, await self._body(request)))
            begin = await anext(parts)
            assert isinstance(begin, ResponseStart), "a response does not begin with its ResponseStart"
            bodies = _bodies(parts)
            if not begin.is_stream:
                return _response(begin, b"".join([body async for body in bodies]))
            stream = EventStream(await anext(bodies), bodies)
            stream.raw_headers = list(begin.headers)
            return stream
        except ApiError as error:
            return error.response()

    async def _health(self) -> Response:
        num_running, num_wanted = await self._count()
        counts = {"running": num_running, "wanted": num_wanted}
        if not num_running:
            raise _unavailable(f"0 of {num_wanted} replicas are running")
        return json_response({"status": "ok", "replicas": counts})

    async def _metrics(self, call: ReplicaCall) -> Response:
        """Requests the metrics of all replicas, and distinguishes them by the label "replica".

        The router does not select a replica twice for the same call, so repeated calls reach all replicas.
        """
        texts: dict[str, str] = {}
        num_running, _ = await self._count()
        for _ in range(num_running):
            with contextlib.suppress(ReplicaLostError):
                begin, *parts = [part async for part in self._send(call)]
                assert isinstance(begin, ResponseStart), "a response does not begin with its ResponseStart"
                body = b"".join(part.body for part in parts if isinstance(part, ResponsePart))
                if begin.status != 200:
                    return _response(begin, body)
                texts[call.progress.tried_replicas[-1]] = body.decode()
        if not texts:
            raise _unavailable("no replica has responded")
        return Response(with_replicas(texts), media_type="text/plain; version=0.0.4")

    async def _body(self, request: Request) -> bytes:
        body, limit = bytearray(), self._max_body_bytes
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(f"the body must have at most {limit} bytes", status=413)
        return bytes(body)

    async def _parts(self, call: ReplicaCall) -> ResponseStream:
        """Yields the start and the parts of a response, from several replicas in turn if some of them fail.

        Raises:
            ApiError: If the response fails before its start. A stream that cannot be continued ends with an
                error event.
        """
        progress = call.progress
        first: ResponseStart | None = None  # start of the stream, if it has begun
        failure = _unavailable("the request was not sent to any replica")
        for _ in range(_MAX_ATTEMPTS):
            begin, held = None, []
            try:
                async with contextlib.aclosing(self._send(call)) as parts:
                    async for part in parts:
                        if isinstance(part, ResponseStart):
                            begin = part
                            if begin.is_stream and first is None:
                                first = begin
                                yield begin
                            elif first is not None and begin.version != first.version:
                                raise _unavailable("the remaining replicas have other settings")
                        elif begin is not None and begin.is_stream:
                            progress.add(part)
                            yield part
                        else:
                            held.append(part)
            except ReplicaLostError as error:
                if progress.is_whole:
                    return
                _LOGGER.warning("%s %s: a replica was lost: %s", call.method, call.path, error)
                failure = _unavailable(f"{_MAX_ATTEMPTS} replicas were lost; last error: {error}")
                continue
            except ApiError as error:
                failure = error
                break
            except Exception:
                _LOGGER.exception("%s %s: a replica has failed", call.method, call.path)
                failure = ApiError("a replica has failed; see the log of the server", status=500)
                break
            if first is not None and held:  # The other replica has rejected the request.
                yield ResponsePart(_error_event(call, orjson.loads(b"".join(part.body for part in held))))
            elif first is None:
                assert begin is not None, "a replica has sent no ResponseStart"
                yield begin
                for part in held:
                    yield part
            return
        if first is None:
            raise failure
        yield ResponsePart(_error_event(call, failure.body()))


async def _bodies(parts: ResponseStream) -> AsyncGenerator[bytes, object]:
    async with contextlib.aclosing(parts):
        async for part in parts:
            assert isinstance(part, ResponsePart), "a response has a second ResponseStart"
            yield part.body


def _response(begin: ResponseStart, body: bytes) -> Response:
    response = Response(body, begin.status)
    response.raw_headers = list(begin.headers)
    return response


def _call(request: Request, body: bytes) -> ReplicaCall:
    progress, headers = Progress.begin(), request.headers.raw
    if "x-request-id" not in request.headers:  # All replicas log the same request id.
        headers = [*headers, (b"x-request-id", progress.answer_id.encode())]
    path, query = request.scope["path"], request.scope["query_string"]
    key = prefix_key(body) if request.method == "POST" else None
    # Ray Serve's HTTP proxy removes the body from the response to HEAD.
    method = "GET" if request.method == "HEAD" else request.method
    return ReplicaCall(method, path, query, tuple(headers), body, progress, key)


def prefix_key(body: bytes) -> str | None:
    """Returns a key that is equal for requests with the same beginning; None if the body has no prompt.

    The beginning of a conversation is its messages up to the first user message.
    """
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None  # The replica will reject the request.
    if not isinstance(fields, dict):
        return None
    text = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), None)
    if isinstance(text, list) and isinstance(text[0], dict):
        users = [i for i, m in enumerate(text) if isinstance(m, dict) and m.get("role") == "user"]
        text = text[: users[0] + 1] if users else text
    elif isinstance(text, list) and isinstance(text[0], list | str):
        text = text[0]
    if isinstance(text, str) or (isinstance(text, list) and isinstance(text[0], int)):
        text = text[:_PREFIX_LENGTH]
    if not text:
        return None
    whose = [fields.get(name) for name in ("model", "cache_salt", "instructions", "tools")]
    return hashlib.blake2b(orjson.dumps([*whose, text]), digest_size=16).hexdigest()


def _unavailable(message: str) -> ApiError:
    return ApiError(message, status=503, headers={"Retry-After": "1"})


def _error_event(call: ReplicaCall, body: dict[str, Any]) -> bytes:
    """Returns the final error event of a stream, in the format of the requested API."""
    if not call.path.endswith("/responses"):
        return b"data: " + orjson.dumps(body) + b"\n\n"
    error = body["error"]
    number = {"sequence_number": call.progress.num_events}
    event = {"type": "error", "code": error["type"], "message": error["message"], "param": None, **number}
    return b"event: error\ndata: " + orjson.dumps(event) + b"\n\n"

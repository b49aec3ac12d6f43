"""ASGI middleware in front of the application: request id, HEAD, root path, CORS and API key."""

import re
import uuid
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_paged.server.http.api_keys import KeyCheck
from jax_paged.server.http.paths import set_root_path
from jax_paged.server.launch.options import ServerOptions

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def with_middleware(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Returns the application wrapped in all middleware."""
    app = KeyCheck(app, options.api_key)
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "X-Ignored-Fields", "Retry-After", "Warning"),
        )
    return _RequestMiddleware(app, options.root_path)


class _RequestMiddleware:
    """Middleware that sets the request id and root path, and serves HEAD requests as GET without a body.

    The id is the client's X-Request-Id header if it is short and has only harmless characters, and random
    otherwise. The response has it in the same header.

    Args:
        app: The next ASGI application.
        root_path: Path under which a proxy serves the application.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        set_root_path(scope, self._root_path)
        request_id = _request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        is_head = scope["method"] == "HEAD"
        if is_head:  # Every GET route supports HEAD, with the same headers.
            scope["method"] = "GET"

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    given = [value for name, value in headers if name == b"x-request-id"]
    is_harmless = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
    return given[0] if is_harmless else uuid.uuid4().hex.encode()

"""What every request passes before the application: its id, its root path, other origins, the key."""

import re
import uuid
from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_paged.server.keys import KeyCheck
from jax_paged.server.options import ServerOptions

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def guarded(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """Returns an application behind what it lets clients do."""
    app = KeyCheck(app, options.api_key, options.root_path)
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return _Front(app, options.root_path)


class _Front:
    """Gives each request an id, which the answer bears: the client's X-Request-Id, if it is harmless."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["root_path"] = self._root_path  # paths are found with it and without it
        request_id = _request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    given = [value for name, value in headers if name == b"x-request-id"]
    is_harmless = len(given) == 1 and _REQUEST_ID.fullmatch(given[0])
    return given[0] if is_harmless else uuid.uuid4().hex.encode()

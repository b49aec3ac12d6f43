"""API keys: where they are read from, and the middleware that checks them."""

import dataclasses
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from jax_paged.errors import ArgumentError
from jax_paged.server.http.limits import send_error
from jax_paged.server.http.paths import route_path
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol.responses import ApiError

# Paths that need no key. Monitoring systems do not have one, and the page at / asks the user for one.
OPEN_PATHS = ("/health", "/ping", "/ready", "/")


def with_all_keys(options: ServerOptions, environment_key: str | None) -> ServerOptions:
    """Returns options whose `api_key` has the keys from the command line, the key file and the environment.

    Args:
        options: Options as given on the command line.
        environment_key: Value of JAX_PAGED_API_KEY; None if it is not set.

    Raises:
        ValueError: If a key has invalid characters or length, or the file cannot be read or is empty. The
            message never contains a key.
    """
    keys = [_checked(key, "`api_key`") for key in options.api_key]
    if environment_key is not None:
        keys.append(_checked(environment_key, "`JAX_PAGED_API_KEY`"))
    if options.api_key_file is not None:
        keys += _read(options.api_key_file)
    return dataclasses.replace(options, api_key=tuple(dict.fromkeys(keys)), api_key_file=None)


def _read(name: str) -> list[str]:
    try:
        lines = Path(name).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise ArgumentError("api_key_file", name, f"a readable file ({reason})") from error
    keys = [_checked(line.strip(), f"a line of {name!r}") for line in lines if line.strip()]
    if not keys:
        raise ArgumentError("api_key_file", name, "a file with API keys", remedy=", which is empty")
    return keys


def _checked(key: str, name: str) -> str:
    if not (key.isascii() and key.isprintable() and " " not in key and 0 < len(key) <= 1024):
        raise ValueError(
            f"{name} must be 1 to 1024 printable ASCII characters without spaces, got an "
            f"invalid key of {len(key)} characters"
        )
    return key


class KeyCheck:
    """ASGI middleware that rejects requests without a valid API key.

    It stores the name of the client as state["client"] in the scope: "key 0" for the first key, and so on. If
    the server has no keys, every request passes and the name is "".

    Args:
        app: The next ASGI application.
        keys: The valid API keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] == "http":
            number = self._number(scope["headers"]) if self._digests else None
            if self._digests and number is None and route_path(scope) not in OPEN_PATHS:
                error = ApiError(
                    "the API key is missing or invalid: send one header 'Authorization: Bearer KEY'",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await send_error(error, scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = "" if number is None else f"key {number}"
        await self._app(scope, receive, send)

    def _number(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return None
        digest, number = _digest(token.strip(b" ")), None
        # Compares with all keys, each in constant time, so that the duration reveals nothing about the keys.
        for i, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                number = i
        return number


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""API keys: where they come from, and who may ask."""

import dataclasses
import hashlib
import hmac
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from jax_paged.server.http.limits import refuse
from jax_paged.server.http.paths import route_path
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol.responses import ApiError

# Who watches over a server has no key, and the page asks for one.
OPEN_PATHS = ("/health", "/ping", "/ready", "/")


def with_all_keys(options: ServerOptions, environment_key: str | None) -> ServerOptions:
    """Returns options whose api_key are the keys of the command line, of the file and of the environment.

    Args:
        options: As the command line gave them.
        environment_key: What the environment says; None if it says nothing.

    Raises:
        ValueError: If a key can't be one, or the file can't be read or has none. No message holds a key.
    """
    keys = [_checked(key, "api_key") for key in options.api_key]
    if environment_key is not None:
        keys.append(_checked(environment_key, "JAX_PAGED_API_KEY"))
    if options.api_key_file is not None:
        keys += _read(options.api_key_file)
    return dataclasses.replace(options, api_key=tuple(dict.fromkeys(keys)), api_key_file=None)


def _read(name: str) -> list[str]:
    try:
        lines = Path(name).read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ValueError(f"api_key_file is {name!r}; allowed: a file that can be read ({reason})") from error
    keys = [_checked(line.strip(), f"a line of {name!r}") for line in lines if line.strip()]
    if not keys:
        raise ValueError(f"api_key_file is {name!r}, which is empty; allowed: a file with a key per line")
    return keys


def _checked(key: str, name: str) -> str:
    if not (key.isascii() and key.isprintable() and " " not in key and 0 < len(key) <= 1024):
        raise ValueError(
            f"{name} has {len(key)} characters that are no key; allowed: 1 to 1024 printable ASCII "
            "characters without spaces"
        )
    return key


class KeyCheck:
    """Lets those pass who show a key, and names the client after it: state["client"] is then "key 0".

    Without keys everybody passes, and has no name.

    Args:
        app: What is behind.
        keys: The keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request."""
        if scope["type"] == "http":
            number = self._number(scope["headers"]) if self._digests else None
            if self._digests and number is None and route_path(scope) not in OPEN_PATHS:
                error = ApiError(
                    "the API key is missing or wrong; allowed: one header Authorization: Bearer KEY",
                    status=401,
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = "" if number is None else f"key {number}"
        await self._app(scope, receive, send)

    def _number(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer":
            return None
        digest, number = _digest(token.strip(b" ")), None
        # All are compared, each in constant time: how long it takes says nothing about any key.
        for i, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                number = i
        return number


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

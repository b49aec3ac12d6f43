"""Checks of request fields: rejects unsupported fields, and lists ignored fields in response headers."""

import functools
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable

from fastapi import Request
from fastapi.responses import Response

from jax_paged.arguments.shown_values import shortened
from jax_paged.server.protocol.requests import Body
from jax_paged.server.protocol.responses import ApiError

IGNORED_FIELDS = "X-Ignored-Fields"
# HTTP's Warning header as Kubernetes uses it: code 299 (persistent warning) and the agent "-".
WARNING = "Warning"
_MAX_LENGTH = 1000  # characters of a header's value


def with_known_fields[B: Body](
    handler: Callable[[B, Request], Awaitable[Response]], *, strict: bool
) -> Callable[[B, Request], Awaitable[Response]]:
    """Returns a route handler that checks the fields of the body before it calls `handler`.

    Unsupported fields (`Body.unsupported`) with a value that would change the response are rejected. Unknown
    fields are listed in the response header X-Ignored-Fields, and warnings in the header Warning.

    Args:
        handler: Handler of a route.
        strict: Whether unknown fields are rejected too.
    """

    @functools.wraps(handler)
    async def checked(body: B, request: Request) -> Response:
        body.check_unsupported()
        unknown = body.unknown_fields()
        if unknown and strict:
            name = shortened(unknown[0])
            raise ApiError(f"`{name}` is an unknown field (--strict)", param=name.partition(".")[0])
        response = await handler(body, request)
        if unknown:
            # The name comes from the client and may contain any character, such as line breaks.
            names = ", ".join(urllib.parse.quote(name, safe="") for name in unknown)
            response.headers[IGNORED_FIELDS] = names[:_MAX_LENGTH]
        if warnings := [*body.warnings(), *getattr(request.state, "warnings", ())]:
            response.headers[WARNING] = _warnings(warnings)
        return response

    return checked


def _warnings(texts: Iterable[str]) -> str:
    """Returns the value of a Warning header with as many of the texts as fit."""
    value = ""
    for text in texts:
        # The text may contain patterns from the client's schema, and therefore any character.
        escaped = re.sub(r'(["\\])', r"\\\1", re.sub(r"[^ -~]", "?", shortened(text, 200)))
        more = f'{value}{", " if value else ""}299 - "{escaped}"'
        if len(more) > _MAX_LENGTH:
            break
        value = more
    return value

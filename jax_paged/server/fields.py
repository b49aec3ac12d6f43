"""Fields of a request that are not built, which are errors, and unknown fields, which a header names."""

import functools
import urllib.parse
from collections.abc import Awaitable, Callable

from fastapi import Request
from fastapi.responses import Response

from jax_paged.server.protocol import Body
from jax_paged.server.responses import ApiError, shortened

IGNORED_FIELDS = "X-Ignored-Fields"
_MAX_LENGTH = 1000  # of the header's value


def with_known_fields[B: Body](
    handler: Callable[[B, Request], Awaitable[Response]], *, strict: bool
) -> Callable[[B, Request], Awaitable[Response]]:
    """Returns a handler that also checks the fields of a body which the server does not have.

    Fields that are not built (`Body.unsupported`) are errors, unless their value leaves them off.

    Args:
        handler: Of a route.
        strict: Whether fields that the server does not know are errors, too.
    """

    @functools.wraps(handler)
    async def checked(body: B, request: Request) -> Response:
        body.check_unsupported()
        unknown = body.unknown_fields()
        if unknown and strict:
            name = shortened(unknown[0])
            raise ApiError(f"{name} is not a field that this server knows", param=name.partition(".")[0])
        response = await handler(body, request)
        if unknown:
            response.headers[IGNORED_FIELDS] = _header(unknown)
        return response

    return checked


def _header(names: list[str]) -> str:
    # A name may hold anything, line breaks included.
    return ", ".join(urllib.parse.quote(name, safe="") for name in names)[:_MAX_LENGTH]

"""Fields of a request that are not built (errors), unknown or not enforced (headers of the answer)."""

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
# As Kubernetes has it: 299 is a persistent warning, and "-" an agent without a name.
WARNING = "Warning"
_MAX_LENGTH = 1000  # of a header's value


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
            raise ApiError(f"`{name}` is not a field that this server knows", param=name.partition(".")[0])
        response = await handler(body, request)
        if unknown:
            # A name may hold anything, line breaks included.
            names = ", ".join(urllib.parse.quote(name, safe="") for name in unknown)
            response.headers[IGNORED_FIELDS] = names[:_MAX_LENGTH]
        if warnings := [*body.warnings(), *getattr(request.state, "warnings", ())]:
            response.headers[WARNING] = _warnings(warnings)
        return response

    return checked


def _warnings(texts: Iterable[str]) -> str:
    """Returns the value of a header with a warning per text, as many as there is room for."""
    value = ""
    for text in texts:
        # A text may hold patterns of a client's schema, and so anything.
        escaped = re.sub(r'(["\\])', r"\\\1", re.sub(r"[^ -~]", "?", shortened(text, 200)))
        more = f'{value}{", " if value else ""}299 - "{escaped}"'
        if len(more) > _MAX_LENGTH:
            break
        value = more
    return value

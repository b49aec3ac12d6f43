"""The OpenAPI document: adds the error statuses and the streamed formats that FastAPI does not know."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from jax_paged.server.protocol.schemas import ErrorResponse

_DESCRIPTION = (
    "OpenAI-compatible API with vLLM's extensions. Unknown fields of a request are ignored and listed in the "
    "response header X-Ignored-Fields; with --strict they are rejected."
)
# Description of each error status, and the HTTP methods whose routes may return it.
_ERRORS = {
    400: ("The request is invalid; `param` is the invalid field, if it is a single one.", ("post",)),
    401: ("The API key is missing or invalid.", ("get", "post")),
    403: ("Web pages of this origin are not allowed to send this request.", ()),
    404: ("The model does not exist.", ("post",)),
    408: ("The request was not received in time.", ("get", "post")),
    413: ("The body is too large.", ("post",)),
    429: ("Too many requests are waiting. Retry-After has the seconds to wait.", ("post",)),
    431: ("The headers are too large.", ("get", "post")),
    500: ("The server failed to process the request.", ("get", "post")),
    503: ("The server is shutting down, sleeping, overloaded or has failed.", ("get", "post")),
}
# Schema of a server-sent event. The data are a string here; their content is described by OpenAI's API.
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_CHUNKS = (
    "The response. If `stream` is true, a stream of server-sent events: each contains a chunk of the "
    "response, and the last one is [DONE]. If the request fails after the stream has started, the last event "
    "contains the error, and there is no [DONE]."
)
# Descriptions of the responses that can be streamed.
_STREAMED = {
    "/v1/completions": _CHUNKS,
    "/v1/chat/completions": _CHUNKS,
    "/v1/responses": (
        "The response. If `stream` is true, a stream of typed server-sent events, of which the last one is "
        "response.completed, response.incomplete or response.failed."
    ),
}


def response_docs(model: Any, *more: int) -> dict[str, Any]:
    """Returns keyword arguments for a FastAPI route that describe its responses.

    Args:
        model: Type of the response body.
        more: Additional error statuses.
    """
    described = {status: {"description": _ERRORS[status][0], "model": ErrorResponse} for status in more}
    return {"responses": {200: {"description": "The response.", "model": model}, **described}}


def install_document(app: FastAPI, version: str) -> None:
    """Replaces an application's OpenAPI document by one that describes its error responses.

    Args:
        app: The application, with all its routes.
        version: Version of the server.
    """

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, version)
        return app.openapi_schema

    app.openapi = document


def _document(app: FastAPI, version: str) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=version, description=_DESCRIPTION, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    # FastAPI's own error schemas, which this server does not use.
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    schema = TypeAdapter(ErrorResponse).json_schema(ref_template="#/components/schemas/{model}")
    components |= {**schema.pop("$defs"), "ErrorResponse": schema}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            for status, (text, methods) in _ERRORS.items():
                if method in methods:
                    operation["responses"].setdefault(str(status), _error(text))
            if path in _STREAMED:
                operation["responses"]["200"]["description"] = _STREAMED[path]
                operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    return document


def _error(text: str) -> dict[str, Any]:
    content = {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}
    return {"description": text, "content": {"application/json": content}}

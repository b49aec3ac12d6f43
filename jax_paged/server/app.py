"""The application: which route is answered by whom, and how errors are answered."""

import functools
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from jax_paged.engine.async_engine import AsyncLLMEngine
from jax_paged.server.answers import (
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    HealthAnswer,
    ModelCard,
    ModelList,
    ResponseAnswer,
    TokenizeAnswer,
    VersionAnswer,
)
from jax_paged.server.docs_page import docs_page
from jax_paged.server.fields import with_known_fields
from jax_paged.server.generation import GenerationRoutes, check_running
from jax_paged.server.information import InformationRoutes
from jax_paged.server.metrics import Metrics
from jax_paged.server.openapi import answers, describe
from jax_paged.server.options import ServerOptions
from jax_paged.server.responses import ApiError, json_response, validation_error
from jax_paged.server.responses_api import ResponsesRoute
from jax_paged.server.streaming import RequestRunner


class OpenAIServer:
    """The server of one model.

    Args:
        engine: Runs the requests. The caller closes it.
        model_name: The model's name for clients.
        options: What clients may do.
    """

    def __init__(self, engine: AsyncLLMEngine, model_name: str, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.model_name = model_name
        self.options = options or ServerOptions()
        self.metrics = Metrics(engine.engine)
        runner = RequestRunner(engine, self.metrics)
        self._generation = GenerationRoutes(engine, runner, model_name)
        self._responses = ResponsesRoute(engine, runner, model_name)
        self._information = InformationRoutes(engine, model_name)

    def app(self) -> FastAPI:
        """Returns the application."""
        app = FastAPI(title="jax-paged", docs_url=None, redoc_url=None)
        generation, information = self._generation, self._information
        known = functools.partial(with_known_fields, strict=self.options.strict)
        app.post("/v1/completions", **answers(CompletionAnswer))(known(generation.completions))
        app.post("/v1/chat/completions", **answers(ChatAnswer))(known(generation.chat_completions))
        app.post("/v1/responses", **answers(ResponseAnswer))(known(self._responses.responses))
        app.post("/tokenize", **answers(TokenizeAnswer))(known(information.tokenize))
        app.post("/detokenize", **answers(DetokenizeAnswer))(known(information.detokenize))
        app.get("/v1/models", **answers(ModelList))(information.models)
        # A model's name may be a path.
        app.get("/v1/models/{model:path}", **answers(ModelCard, 404))(information.model)
        app.get("/version", **answers(VersionAnswer))(information.version)
        app.get("/health", **answers(HealthAnswer))(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        app.head("/metrics", include_in_schema=False)(self.prometheus)
        app.exception_handler(ApiError)(_on_api_error)
        app.exception_handler(RequestValidationError)(_on_validation_error)
        app.exception_handler(HTTPException)(_on_http_error)
        app.exception_handler(Exception)(_on_any_error)
        describe(app, information.version_name)
        app.get("/docs", include_in_schema=False)(lambda: docs_page(app.openapi()))
        return app

    async def health(self) -> Response:
        """GET /health: 200 while the engine runs, 503 once it has stopped."""
        check_running(self.engine)
        return json_response({"status": "ok"})

    async def prometheus(self) -> Response:
        """GET /metrics: counters and gauges in Prometheus' text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


async def _on_api_error(_: Request, error: Any) -> Response:
    return error.response()


async def _on_validation_error(_: Request, error: Any) -> Response:
    return validation_error(error.errors()).response()


async def _on_http_error(request: Request, error: Any) -> Response:
    refused = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    response = refused.response()
    response.headers.update(error.headers or {})  # such as Allow, with 405
    return response


async def _on_any_error(_: Request, error: Exception) -> Response:
    return ApiError(str(error) or repr(error), status=500).response()

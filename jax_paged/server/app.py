"""The ASGI application: routes, middleware and exception handlers."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from jax_paged.engine.errors import EngineAsleepError, EngineDeadError
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.http.limits import BodyLimits, json_route
from jax_paged.server.http.middleware import with_middleware
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.lifecycle import Gate, Lifecycle
from jax_paged.server.observability.access import AccessLog
from jax_paged.server.observability.logs import log_statistics
from jax_paged.server.observability.metrics import Metrics
from jax_paged.server.preprocessing import Preprocessor, ThrottledLock
from jax_paged.server.protocol import schemas
from jax_paged.server.protocol.fields import with_known_fields
from jax_paged.server.protocol.openapi import install_document, response_docs
from jax_paged.server.protocol.responses import ApiError, asleep_error, json_response, validation_error
from jax_paged.server.routes.developer import DeveloperRoutes
from jax_paged.server.routes.docs_page import docs_page
from jax_paged.server.routes.generation import GenerationRoutes
from jax_paged.server.routes.information import InformationRoutes
from jax_paged.server.routes.models import ServedModels
from jax_paged.server.routes.pooling import PoolingRoutes
from jax_paged.server.routes.responses import ResponsesRoute
from jax_paged.server.routes.status_page import StatusPageRoutes
from jax_paged.server.streaming import RequestRunner
from jax_paged.server.waiting_queue import WaitingQueue

_TICK_S = 0.1


class OpenAIServer:
    """The HTTP API of one engine.

    Args:
        engine: Runs the requests. The caller closes it.
        model_name: Name of the model in the API.
        options: Options of the server. None uses the defaults.

    Attributes:
        lifecycle: Decides whether requests are accepted and when the server ends.
        metrics: Metrics of the requests and of the engine.

    Raises:
        ValueError: If a LoRA adapter in options.lora_modules cannot be loaded, or options.api_key_file cannot
            be read.
    """

    def __init__(self, engine: ServingEngine, model_name: str, options: ServerOptions | None = None) -> None:
        self.engine = engine
        self.model_name = model_name
        self.options = with_all_keys(options or ServerOptions(), None)
        self.lifecycle = Lifecycle(
            engine,
            shutdown_timeout=self.options.shutdown_timeout,
            step_timeout=self.options.step_timeout,
            stay=self.options.stay_on_engine_failure,
        )
        # A few sequences more than can run at once: they wait in the engine, so that it can fill a free batch
        # slot in the next step.
        max_num_seqs = len(engine.replicas) * engine.engine.config.max_num_seqs
        self._waiting_queue = WaitingQueue(
            max_num_seqs + max(4, max_num_seqs // 4), self.options.max_num_waiting
        )
        self.metrics = Metrics(engine, model_name, lambda: self._waiting_queue.num_waiting)
        runner = RequestRunner(engine, self._waiting_queue, self.metrics)
        self._cpu_lock = ThrottledLock()
        preprocessor = Preprocessor(self._cpu_lock)
        self._models = ServedModels(engine, model_name, self.options.lora_modules)
        self._generation = GenerationRoutes(engine, runner, preprocessor, self._models, self.options)
        self._pooling = PoolingRoutes(engine, runner, preprocessor, self._models, self.options)
        self._responses = ResponsesRoute(engine, runner, preprocessor, self._models, self.options)
        self._information = InformationRoutes(engine, preprocessor, self._models, self.options)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None]:
        """Watches the engine while another application, in which `app()` is mounted, is running.

        `jax-paged serve` does this itself. Within the context, a hung step of the engine makes all requests
        fail, and statistics are logged. When the context ends, new requests are rejected. The caller closes
        the engine.
        """

        async def watch() -> None:
            while True:
                self.lifecycle.tick(time.monotonic())
                await asyncio.sleep(_TICK_S)

        statistics = log_statistics(self.engine, self.metrics.num_waiting)
        tasks = [asyncio.create_task(watch()), asyncio.create_task(statistics)]
        try:
            yield
        finally:
            self.lifecycle.end(time.monotonic())
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def app(self) -> ASGIApp:
        """Returns the ASGI application, to be served itself or mounted in another application.

        Mount it with `outer.mount(path, app)`, and enter `lifespan` in the lifespan of the outer application.
        """
        app = FastAPI(title="jax-paged", docs_url=None, redoc_url=None, redirect_slashes=False)
        app.router.route_class = json_route(self.options)
        known = functools.partial(with_known_fields, strict=self.options.strict)
        generating = {
            "/v1/completions": (self._generation.completions, schemas.CompletionResponse),
            "/v1/chat/completions": (self._generation.chat_completions, schemas.ChatCompletionResponse),
            "/v1/responses": (self._responses.responses, schemas.ResponsesResponse),
        }
        pooling = {
            "/v1/embeddings": (self._pooling.embeddings, schemas.EmbeddingResponse),
            "/pooling": (self._pooling.pooling, schemas.PoolingResponse),
            "/classify": (self._pooling.classify, schemas.ClassificationResponse),
            **dict.fromkeys(("/score", "/v1/score"), (self._pooling.score, schemas.ScoreResponse)),
            **dict.fromkeys(
                ("/rerank", "/v1/rerank", "/v2/rerank"), (self._pooling.rerank, schemas.RerankResponse)
            ),
        }
        inference = generating | pooling
        for path, (handler, model) in inference.items():
            app.post(path, **response_docs(model))(known(handler))
        app.add_middleware(BodyLimits, options=self.options, cpu_lock=self._cpu_lock)
        app.add_middleware(Gate, lifecycle=self.lifecycle, waiting_queue=self._waiting_queue, paths=inference)  # pyright: ignore
        information = self._information
        app.post("/tokenize", **response_docs(schemas.TokenizeResponse))(known(information.tokenize))
        app.post("/detokenize", **response_docs(schemas.DetokenizeResponse))(known(information.detokenize))
        if self.options.allow_runtime_lora_updating:
            text: Any = {"response_class": PlainTextResponse}
            app.post("/v1/load_lora_adapter", **text)(known(self._models.load))
            app.post("/v1/unload_lora_adapter", **text)(known(self._models.unload))
        app.get("/v1/models", **response_docs(schemas.ModelList))(information.models)
        # The name of a model may contain slashes.
        app.get("/v1/models/{model:path}", **response_docs(schemas.ModelCard, 404))(information.model)
        app.get("/version", **response_docs(schemas.VersionResponse))(information.version)
        app.get("/health", **response_docs(schemas.HealthResponse))(self.health)
        app.get("/ping", **response_docs(schemas.HealthResponse))(self.health)
        app.get("/ready", **response_docs(schemas.HealthResponse))(self.ready)
        app.get("/metrics", response_class=PlainTextResponse)(self.prometheus)
        if self.options.developer_routes:
            developer = DeveloperRoutes(self.engine, self.options)
            app.post("/sleep", **response_docs(schemas.SleepResponse, 403))(developer.sleep)
            app.post("/wake_up", **response_docs(schemas.SleepResponse, 403))(developer.wake_up)
            app.get("/is_sleeping", **response_docs(schemas.SleepResponse))(developer.is_sleeping)
            weights = known(developer.update_weights)
            app.post("/update_weights", **response_docs(schemas.WeightVersionResponse, 403))(weights)
            app.get("/weight_version", **response_docs(schemas.WeightVersionResponse))(
                developer.weight_version
            )
        if self.options.ui:
            page = StatusPageRoutes(self.engine, self.metrics, self.model_name)
            app.get("/", include_in_schema=False)(page.page)
            app.get("/ui/state", include_in_schema=False)(page.state)
        app.exception_handler(HTTPException)(_on_http_error)
        for error_class, to_api_error in _API_ERRORS.items():
            app.exception_handler(error_class)(_answer_with(to_api_error))
        install_document(app, information.version_name)
        app.get("/docs", include_in_schema=False)(lambda: docs_page(app.openapi()))
        routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
        return AccessLog(with_middleware(app, self.options), self.metrics, routes)

    async def health(self) -> Response:
        """GET /health: Status 200 while the engine is running, 503 after it has stopped."""
        if self.engine.error is not None and (error := self.lifecycle.rejection()) is not None:
            raise error
        return json_response({"status": "ok"})

    async def ready(self) -> Response:
        """GET /ready: Status 200 while requests are accepted, 503 otherwise.

        Requests are not accepted during a shutdown, while the engine sleeps, and after it has stopped.
        """
        if (error := self.lifecycle.rejection()) is not None:
            raise error
        return json_response({"status": "ready"})

    async def prometheus(self) -> Response:
        """GET /metrics: Metrics in the Prometheus text format."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")


_API_ERRORS: dict[type[Exception], Callable[[Any], ApiError]] = {
    ApiError: lambda error: error,
    EngineDeadError: lambda error: ApiError(str(error), status=503),
    EngineAsleepError: asleep_error,
    RequestValidationError: lambda error: validation_error(error.errors()),
    Exception: lambda error: ApiError(str(error) or repr(error), status=500),
}


def _answer_with(to_api_error: Callable[[Any], ApiError]) -> Callable[[Request, Any], Awaitable[Response]]:
    """Returns an exception handler that responds with an error of the API.

    Args:
        to_api_error: Converts an exception to an ApiError.
    """

    async def handle(_: Request, error: Any) -> Response:
        return to_api_error(error).response()

    return handle


async def _on_http_error(request: Request, error: Any) -> Response:
    refused = ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    response = refused.response()
    headers = dict(error.headers or {})
    if "GET" in headers.get("Allow", ""):  # The middleware turns HEAD into GET before routing.
        headers["Allow"] += ", HEAD"
    response.headers.update(headers)
    return response

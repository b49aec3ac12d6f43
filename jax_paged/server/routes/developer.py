"""Routes for the operator of the server, not for its clients: sleep, wake-up and weight updates."""

import logging
import os
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response
from pydantic import Field

from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.errors import Problems, check, check_choice
from jax_paged.server.http.event_stream import response_unless_disconnected
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.protocol.requests import Body
from jax_paged.server.protocol.responses import ApiError, json_response
from jax_paged.server.routes.generation import value_errors_as_400

_LOGGER = logging.getLogger(__name__)


class UpdateWeightsRequest(Body):
    """Body of POST /update_weights."""

    model_path: str = Field(description="Path of a checkpoint folder on the server's machine.")
    running: str = Field("error", description="How running requests are handled: error, recompute or keep.")
    weight_version: str | None = Field(None, description="Name of the weights; null: the number of updates.")


class DeveloperRoutes:
    """Handlers of the developer routes. Clients that can call them can interrupt the service.

    Args:
        engine: The engine.
        options: Options of the server, for the allowed origins.
    """

    def __init__(self, engine: ServingEngine, options: ServerOptions) -> None:
        self._engine = engine
        self._options = options

    async def sleep(self, request: Request, level: int = 1, mode: str = "wait") -> Response:
        """POST /sleep: Releases the memory of weights and KV cache, and responds when it is free.

        With `level` 1, the weights are copied to host memory; with `level` 2, they are dropped. `mode`
        decides about running requests: "wait" lets them finish, "keep" pauses them until the engine wakes up,
        and "abort" ends them.
        """
        self._check(request, ("level", "mode"))

        async def answer() -> Response:
            await self._done(self._engine.sleep(level, mode))  # pyright: ignore[reportArgumentType]
            return json_response({"is_sleeping": True})

        return await response_unless_disconnected(request, answer())

    async def wake_up(self, request: Request, tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """POST /wake_up: Allocates the released memory again.

        `tags` can limit this to "weights" or "kv_cache". Requests are accepted again when both are awake.
        """
        self._check(request, ("tags",))
        await self._done(self._engine.wake_up(tags))
        return json_response({"is_sleeping": await self._engine.is_sleeping()})

    async def is_sleeping(self) -> Response:
        """GET /is_sleeping: Returns whether any part of the memory is released."""
        return json_response({"is_sleeping": await self._engine.is_sleeping()})

    async def update_weights(self, body: UpdateWeightsRequest, request: Request) -> Response:
        """POST /update_weights: Loads weights from a folder and uses them from the next step on.

        The checkpoint must have the same architecture and sizes. `running` decides about running requests:
        "error" rejects the update if there are any, "recompute" computes their tokens again, and "keep"
        continues with their old keys and values.
        """
        self._check(request, ())
        with value_errors_as_400(body):
            problems, folder = Problems(), Path(os.path.expanduser(body.model_path))
            choices = "error", "recompute", "keep"
            problems.note(check, folder.is_dir(), "model_path", body.model_path, "a folder on this machine")
            problems.note(check_choice, "running", body.running, choices)
            problems.raise_if_any()
        running: Any = body.running
        update = self._engine.update_weights(folder, running=running, weight_version=body.weight_version)
        await self._done(update)
        return await self.weight_version()

    async def weight_version(self) -> Response:
        """GET /weight_version: Returns the name of the weights that are being served."""
        return json_response({"weight_version": self._engine.engine.weight_version})

    def _check(self, request: Request, names: tuple[str, ...]) -> None:
        """Rejects requests from web pages of other origins, and query parameters with unknown names.

        Browsers ask the server first (CORS preflight) only for requests with a JSON body, which most of these
        routes do not need.

        Args:
            request: The request.
            names: Allowed query parameters.
        """
        origin, allowed = request.headers.get("origin"), self._options.allowed_origins
        if origin is not None and origin not in allowed and "*" not in allowed:
            raise ApiError("requests from other origins are rejected; see --allowed-origins", status=403)
        unknown = sorted(set(request.query_params).difference(names))
        if unknown:
            raise ApiError(f"the query parameters of this route must be among {list(names)}, got {unknown}")

    async def _done(self, work: Any) -> None:
        """Awaits a method of the engine, and converts its rejections to errors with status 400."""
        try:
            await work
        except ValueError as error:
            _LOGGER.warning("%s", error)  # ApiError shortens long messages.
            raise ApiError(str(error)) from error
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # errors of the engine or of XLA
                raise
            raise ApiError(str(error)) from error

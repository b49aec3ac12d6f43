"""Names that clients can use as the model: the model itself and its LoRA adapters."""

import asyncio
import itertools
import json
import time
from typing import Any

from fastapi import Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field

from jax_paged.arguments.shown_values import shortened
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.errors import ArgumentError, first_argument_error
from jax_paged.lora_request import LoRARequest
from jax_paged.server.protocol.requests import Body
from jax_paged.server.protocol.responses import ApiError, unknown_model


class LoadAdapter(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str = Field(description="Name of the adapter in requests.", min_length=1, max_length=256)
    lora_path: str = Field(description="Folder on the server's machine.", min_length=1, max_length=4096)


class UnloadAdapter(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=256)


class ServedModels:
    """The model and its LoRA adapters by name. All methods must be called in the same event loop.

    Args:
        engine: The engine.
        model_name: Name of the model in the API.
        lora_modules: LoRA adapters to load first, in the format of ServerOptions.lora_modules.

    Raises:
        ValueError: If an adapter cannot be loaded.
    """

    def __init__(self, engine: ServingEngine, model_name: str, lora_modules: tuple[str, ...] = ()) -> None:
        self._engine = engine
        self.model_name = model_name
        self._created = int(time.time())
        self._adapters: dict[str, LoRARequest] = {}
        self._times: dict[str, int] = {}
        self._ids = itertools.count(1)
        self._changing = asyncio.Lock()
        for text in lora_modules:
            request = LoRARequest(*_parse_module(text, next(self._ids)))
            self._check_new(request.lora_name)
            engine.engine.add_lora(request)
            self._keep(request)

    def adapter_of(self, body: Body) -> LoRARequest | None:
        """Returns the LoRA adapter that a request names as its model; None if it uses the model itself.

        Raises:
            ApiError: If the name is unknown.
        """
        if body.model in (None, "", self.model_name):
            return None
        if body.model not in self._adapters:
            raise unknown_model(str(body.model), *self.names)
        return self._adapters[body.model]

    @property
    def names(self) -> list[str]:
        """The names of the model and its adapters."""
        return [self.model_name, *self._adapters]

    def cards(self) -> list[dict[str, Any]]:
        """Returns descriptions of the model and its adapters for GET /v1/models, the model first."""
        max_model_len = self._engine.engine.config.max_model_len
        card = {"object": "model", "owned_by": "jax-paged", "max_model_len": max_model_len}
        model = {"id": self.model_name, "created": self._created, **card}
        more = {"parent": self.model_name, **card}
        return [model, *({"id": name, "created": self._times[name], **more} for name in self._adapters)]

    async def load(self, body: LoadAdapter, request: Request) -> Response:
        """POST /v1/load_lora_adapter: Loads a LoRA adapter, which requests can then select as their model."""
        async with self._changing:
            try:
                self._check_new(body.lora_name)
                new = LoRARequest(body.lora_name, next(self._ids), body.lora_path)
                await self._engine.add_lora(new)
            except ValueError as error:
                # Errors about the files of the adapter do not name an argument.
                cause = first_argument_error(error)
                param = "lora_path" if cause is None else cause.name if body.has_field(cause.name) else None
                raise ApiError(shortened(str(error), 2000), param=param) from error
            self._keep(new)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, body: UnloadAdapter, request: Request) -> Response:
        """POST /v1/unload_lora_adapter: Removes a LoRA adapter. Running requests that use it continue."""
        async with self._changing:
            known = self._adapters.pop(body.lora_name, None)
            if known is None:
                names = ", ".join(map(repr, self._adapters)) or "none"
                message = str(ArgumentError("lora_name", body.lora_name, f"a loaded adapter ({names})"))
                raise ApiError(message, status=404, param="lora_name")
            del self._times[body.lora_name]
            await self._engine.remove_lora(known.lora_int_id)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    def _check_new(self, name: str) -> None:
        if name in self.names:
            raise ArgumentError("lora_name", name, "a name that is not in use")

    def _keep(self, request: LoRARequest) -> None:
        self._adapters[request.lora_name] = request
        self._times[request.lora_name] = int(time.time())


def _parse_module(text: str, number: int) -> tuple[str, int, str]:
    """Returns the name, id and path of a LoRA adapter.

    Args:
        text: "name=path", or a JSON object with the keys name and path.
        number: Id of the adapter.
    """
    name, is_pair, path = text.partition("=")
    if text.startswith("{"):
        try:
            given = json.loads(text)
            name, path = given["name"], given["path"]
            is_pair = isinstance(name, str) and isinstance(path, str)
        except (ValueError, TypeError, KeyError):
            is_pair = ""
    if not (is_pair and name and path):
        allowed = 'name=path or {"name": ..., "path": ...}'
        raise ArgumentError("lora_modules", text, allowed, aspect="each of")
    return name, number, path

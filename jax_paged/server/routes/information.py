"""Routes that do not run the model: models, version, tokenization and detokenization."""

import asyncio
import importlib.metadata
from typing import ClassVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from jax_paged.arguments.ignored import OFF, Ignored
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.server.http.limits import check_sizes
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.preprocessing import Preprocessor
from jax_paged.server.protocol.messages import messages_for
from jax_paged.server.protocol.nested_objects import Integers
from jax_paged.server.protocol.requests import Body, Messages
from jax_paged.server.protocol.responses import json_response, unknown_model
from jax_paged.server.routes.generation import tokenizer_of, value_errors_as_400
from jax_paged.server.routes.models import ServedModels


class TokenizeRequest(Body):
    """Body of POST /tokenize, with either a text or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
            ]
        }
    )

    # These fields would change the tokens of a conversation.
    unsupported: ClassVar[Ignored] = {**Body.unsupported, "chat_template_kwargs": OFF, "tools": OFF}

    prompt: str | None = Field(None, examples=["def fibonacci(n):"])
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for prompt, false for messages.")
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    prompt_field = "tokens"

    tokens: Integers = Field(examples=[[5, 6]])


class InformationRoutes:
    """Handlers of the routes that do not run the model.

    Args:
        engine: The engine, for its configuration and tokenizer.
        preprocessor: Tokenizes the texts of requests.
        models: Names of the model and its LoRA adapters.
        options: Options of the server, with the limits on requests.
    """

    def __init__(
        self, engine: ServingEngine, preprocessor: Preprocessor, models: ServedModels, options: ServerOptions
    ) -> None:
        self._engine = engine
        self._preprocessor = preprocessor
        self._options = options
        self._max_model_len = engine.engine.config.max_model_len
        self._models = models
        self.version_name = importlib.metadata.version("jax-paged")

    async def models(self) -> Response:
        """GET /v1/models: Lists the model and its LoRA adapters."""
        return json_response({"object": "list", "data": self._models.cards()})

    async def model(self, model: str) -> Response:
        """GET /v1/models/{model}: Describes the model or a LoRA adapter."""
        for card in self._models.cards():
            if card["id"] == model:
                return json_response(card)
        raise unknown_model(model, *self._models.names)

    async def version(self) -> Response:
        """GET /version: Returns the version of jax-paged."""
        return json_response({"version": self.version_name})

    async def tokenize(self, body: TokenizeRequest, request: Request) -> Response:
        """POST /tokenize: Returns the token ids of a text or a conversation."""
        self._models.adapter_of(body)
        with value_errors_as_400(body):
            tokenizer = tokenizer_of(self._engine)
            check_sizes(body, self._options)
            texts = [body.prompt, body.messages]
            token_ids = await self._preprocessor.run(texts, lambda: _token_ids(tokenizer, body))
        strings = tokenizer.tokens(token_ids) if body.return_token_strs else None
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, body: DetokenizeRequest, request: Request) -> Response:
        """POST /detokenize: Returns the text of token ids, including special tokens."""
        self._models.adapter_of(body)
        with value_errors_as_400(body):
            tokenizer, last = tokenizer_of(self._engine), self._engine.engine.config.vocab_size - 1
            longest = self._engine.engine.config.max_model_len
            check_int("tokens", len(body.tokens), 0, longest, aspect="the length of")
            for i, token_id in enumerate(body.tokens):
                if not 0 <= token_id <= last:
                    check_int(f"tokens[{i}]", token_id, 0, last)
            text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})


def _token_ids(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        text = body.prompt
        if text is None:
            raise ArgumentError("prompt", None, "a string unless messages is set")
        return tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False)
    check(body.prompt is None, "prompt", body.prompt, "unset if messages is set")
    check(
        not body.add_special_tokens, "add_special_tokens", True, "False because the chat template adds them"
    )
    continues = bool(body.continue_final_message)
    adds_prompt = (not continues) if body.add_generation_prompt is None else body.add_generation_prompt
    check(not (continues and adds_prompt), "continue_final_message", True, "False with add_generation_prompt")
    return tokenizer.encode_chat(
        messages_for(tokenizer, body.messages),
        add_generation_prompt=adds_prompt,
        continue_final_message=continues,
    )

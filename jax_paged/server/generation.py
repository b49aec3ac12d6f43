"""The routes that generate text: completions and chats."""

import contextlib
import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from jax_paged.checks import check
from jax_paged.engine.async_engine import AsyncLLMEngine
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.inputs import Prompt, as_prompts
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.server.limits import check_sizes
from jax_paged.server.options import ServerOptions
from jax_paged.server.protocol import ChatRequest, CompletionRequest
from jax_paged.server.responses import (
    ApiError,
    chat_deltas,
    chat_messages,
    chat_roles,
    completion_choices,
    json_response,
    shortened,
)
from jax_paged.server.streaming import Call, EventStream, RequestRunner, unless_gone
from jax_paged.server.text_reader import TextReader


class GenerationRoutes:
    """Checks what clients ask for, runs it, and answers whole or as a stream.

    Args:
        engine: Runs the requests.
        runner: Counts them, and aborts those whose client has left.
        texts: Tokenizes them.
        model_name: The model's name for clients.
        options: Limits of what they ask for.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        runner: RequestRunner,
        texts: TextReader,
        model_name: str,
        options: ServerOptions,
    ) -> None:
        self._engine = engine
        self._config = engine.engine.config
        self._runner = runner
        self._model_name = model_name
        self._texts = texts
        self._options = options

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions: continues one or more prompts."""
        self._check_model(body.model)
        with _bad_input(body):
            check_sizes(body, self._options)
            params = body.sampling_params(self._config.sampling_defaults)
            is_prompt = isinstance(body.prompt, str | list | dict)
            check(is_prompt, "prompt", body.prompt, "text, a list of token ids, or a list of prompts")
            prompts = as_prompts(body.prompt)
            check(bool(prompts), "prompt", prompts, "at least one prompt")
            checked = await self._texts.read("prompt", list(prompts), self._check_all, prompts, params, body)
        n = body.num_outputs
        choice = completion_choices(len(checked) * n)
        head = self._head("cmpl", "text_completion")
        call = Call(checked, n, head, choice, request.state.record, client_of(request))
        return await unless_gone(request, self._stream(call, body) if body.stream else self._whole(call))

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions: answers a conversation."""
        self._check_model(body.model)
        tokenizer = self._engine.engine.tokenizer
        with _bad_input(body):
            check_sizes(body, self._options)
            if tokenizer is None:
                raise ValueError("chat needs a tokenizer, and the server runs without one")
            params = body.sampling_params(self._config.sampling_defaults)
            checked = await self._texts.read(
                "messages", [body.messages], self._check_chat, tokenizer, params, body
            )
        n, num_top = body.num_outputs, body.top_logprobs or 0
        if body.stream:
            head = self._head("chatcmpl", "chat.completion.chunk")
            call = Call(checked, n, head, chat_deltas(num_top), request.state.record, client_of(request))
            return await unless_gone(request, self._stream(call, body, chat_roles(n)))
        head = self._head("chatcmpl", "chat.completion")
        call = Call(checked, n, head, chat_messages(num_top), request.state.record, client_of(request))
        return await unless_gone(request, self._whole(call))

    async def _whole(self, call: Call) -> Response:
        return json_response(await self._runner.answer(call))

    async def _stream(
        self, call: Call, body: CompletionRequest | ChatRequest, first: list[dict[str, Any]] | None = None
    ) -> Response:
        events = self._runner.events(call, first=first or (), include_usage=body.include_usage)
        return await EventStream.begin(events)

    # These two tokenize: TextReader calls them.

    def _check_chat(
        self, tokenizer: Tokenizer, params: SamplingParams | BeamSearchParams, body: ChatRequest
    ) -> list[CheckedRequest]:
        return self._check_all([tokenizer.encode_chat(body.messages)], params, body)

    def _check_all(
        self,
        prompts: list[Prompt],
        params: SamplingParams | BeamSearchParams,
        body: CompletionRequest | ChatRequest,
    ) -> list[CheckedRequest]:
        salt, priority = body.cache_salt or "", body.priority or 0
        check = self._engine.engine.check_request
        requests = [check(prompt, params, cache_salt=salt, priority=priority) for prompt in prompts]
        for request in requests:
            if params.max_tokens not in (None, request.params.max_tokens):  # the engine has cut it
                n, limit = len(request.prompt_token_ids), self._config.max_model_len
                raise ValueError(
                    f"the prompt has {n} tokens and max_tokens is {params.max_tokens}: "
                    f"{n + params.max_tokens} tokens in all; allowed: max_model_len, {limit}"
                )
        return requests

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._model_name):
            raise ApiError(
                f"model is {name!r}; allowed: {self._model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model_name,
        }


def client_of(request: Request) -> str:
    """Returns who sends a request; "" where no key tells."""
    return getattr(request.state, "client", "")


@contextlib.contextmanager
def _bad_input(body: CompletionRequest | ChatRequest) -> Iterator[None]:
    """Turns a ValueError about what the client sent into an answer with status 400."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise ApiError(shortened(message, 600), param=_wrong_field(message, body)) from error


def _wrong_field(message: str, body: CompletionRequest | ChatRequest) -> str | None:
    """Returns the field of a body that an error message is about, or None if it names none.

    By convention the subject of a message names the argument: "n is 0", "the number of stop strings is 65".
    """
    subject = re.match(r".*?(?= is | has )|\S*", message)
    assert subject is not None, "the second alternative matches everything"
    fields = type(body).model_fields
    prompt = "prompt" if "prompt" in fields else "messages"
    for word in re.findall(r"\w+", subject.group()):
        name = prompt if word in ("prompt", "prompt_token_ids") else word
        if name in fields:
            return name
    return None

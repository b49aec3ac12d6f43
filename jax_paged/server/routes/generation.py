"""Routes for completions and chats, and helper functions for all routes that run the model."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from jax_paged.arguments.shown_values import shortened
from jax_paged.engine.errors import EngineAsleepError
from jax_paged.engine.features.multimodal.image_messages import Conversation, extract_images
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.prompt_reader import as_prompts
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError, TooLongError, check, first_argument_error
from jax_paged.inputs import Prompt
from jax_paged.lora_request import LoRARequest
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.server.generation_call import GenerationCall
from jax_paged.server.http.event_stream import EventStream, response_unless_disconnected
from jax_paged.server.http.limits import check_sizes
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.preprocessing import Preprocessor
from jax_paged.server.protocol.logprobs import Echo, TokenBytes
from jax_paged.server.protocol.messages import messages_for
from jax_paged.server.protocol.requests import Body, ChatRequest, CompletionRequest, Generation
from jax_paged.server.protocol.responses import (
    ApiError,
    MakeChoice,
    chat_choices,
    chat_delta_choices,
    chat_role_choices,
    completion_choices,
    json_response,
    too_long,
    unknown_model,
)
from jax_paged.server.ray_serve.continuation import Journal, Progress
from jax_paged.server.routes.models import ServedModels
from jax_paged.server.streaming import RequestRunner
from jax_paged.server.tools.chat_settings import ChatSettings, ModelFormats, grammar_errors_as_tool_errors


class TextRoutes:
    """Base class of the routes that run the model.

    Args:
        engine: The engine.
        runner: Runs the requests, and aborts them if the client disconnects.
        preprocessor: Tokenizes the texts of requests.
        models: Names of the model and its LoRA adapters.
        options: Options of the server, with the limits on requests.
    """

    def __init__(
        self,
        engine: ServingEngine,
        runner: RequestRunner,
        preprocessor: Preprocessor,
        models: ServedModels,
        options: ServerOptions,
    ) -> None:
        self._engine = engine
        self._config = engine.engine.config
        self._runner = runner
        self._preprocessor = preprocessor
        self._models, self._model_name = models, models.model_name
        self._options = options
        self._formats = ModelFormats(options)

    def _call(
        self,
        request: Request,
        checked: Sequence[CheckedRequest],
        head: dict[str, Any],
        choice: MakeChoice,
        *,
        num_outputs: int = 1,
        **options: Any,
    ) -> GenerationCall:
        """Returns the generation call of an HTTP request. See GenerationCall for the arguments."""
        record, client, journal = request.state.record, client_of(request), journal_of(request)
        return GenerationCall(checked, num_outputs, head, choice, record, client, journal=journal, **options)


class GenerationRoutes(TextRoutes):
    """Handlers of /v1/completions and /v1/chat/completions."""

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions: Continues one or more prompts."""
        adapter = self._models.adapter_of(body)
        with value_errors_as_400(body):
            check_sizes(body, self._options)
            params = body.sampling_params(self._config.sampling_defaults)
            echo = self._echo(body)
            is_prompt = isinstance(body.prompt, str | list | dict)
            check(is_prompt, "prompt", body.prompt, "a string, a list of token ids, or a list of prompts")
            prompts = as_prompts(body.prompt)
            check(bool(prompts), "prompt", prompts, "at least one prompt")
            _check_no_images(prompts)
            checked = await self._preprocessor.run(
                list(prompts),
                lambda: check_all(self._engine, prompts, params, body, adapter),
                with_grammar=has_grammar(params),
            )
        note_warnings(request, checked)
        n = body.num_outputs
        call = self._call(
            request,
            checked,
            self._head("cmpl", "text_completion", adapter, request),
            completion_choices(len(checked) * n, token_bytes_of(self._engine, checked), echo),
            num_outputs=n,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            counts_output=not body.only_prompt,
            token_ids_in="choice" if body.return_token_ids else None,
        )
        answer = self._stream(call, body) if body.stream else self._full_response(call)
        return await response_unless_disconnected(request, answer)

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions: Generates the next message of a conversation."""
        adapter = self._models.adapter_of(body)
        with value_errors_as_400(body):
            tokenizer = tokenizer_of(self._engine)
            check_sizes(body, self._options)
            params = body.sampling_params(self._config.sampling_defaults)
            settings = self._formats.settings_of(body)
            chat = extract_images(body.messages, self._config, urls_only=True)
            if chat.has_remote_images:
                chat = await self._preprocessor.fetch(chat.with_fetched_images)
            texts = [chat.messages, *filter(None, (settings and settings.tools, body.chat_template_kwargs))]
            checked = await self._preprocessor.run(
                texts,
                lambda: self._check_chat(tokenizer, params, body, chat, settings, adapter),
                with_grammar=has_grammar(params) or bool(settings and settings.forced),
                has_images=bool(chat.images),
            )
        note_warnings(request, checked, settings)
        n, num_top, stream = body.num_outputs, body.top_logprobs or 0, bool(body.stream)
        token_bytes = token_bytes_of(self._engine, checked)
        choice = chat_delta_choices(num_top, token_bytes) if stream else chat_choices(num_top, token_bytes)
        if settings is not None:
            prompt = checked[0].prompt_token_ids
            constrained = checked[0].params.structured_outputs is not None
            choice = settings.choices(choice, n, tokenizer, prompt, stream=stream, has_grammar=constrained)
        kind = "chat.completion.chunk" if stream else "chat.completion"
        call = self._call(
            request,
            checked,
            self._head("chatcmpl", kind, adapter, request),
            choice,
            num_outputs=n,
            with_prompt_logprobs=body.prompt_logprobs is not None,
            token_ids_in="answer" if body.return_token_ids else None,
        )
        answer = self._stream(call, body, chat_role_choices(n)) if stream else self._full_response(call)
        return await response_unless_disconnected(request, answer)

    async def _full_response(self, call: GenerationCall) -> Response:
        return json_response(await self._runner.answer(call))

    async def _stream(
        self,
        call: GenerationCall,
        body: CompletionRequest | ChatRequest,
        first: list[dict[str, Any]] | None = None,
    ) -> Response:
        events = self._runner.events(
            call,
            first=first or (),
            include_usage=body.include_usage,
            continuous_usage=body.continuous_usage,
        )
        return await EventStream.begin(events)

    def _echo(self, body: CompletionRequest) -> Echo | None:
        if not body.echo:
            return None
        if self._config.decoder_start_token_id is not None:
            raise ArgumentError("echo", True, "False because the model is an encoder-decoder model")
        return Echo(tokenizer_of(self._engine), body.only_prompt, body.truncate_prompt_tokens is not None)

    def _check_chat(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams | BeamSearchParams,
        body: ChatRequest,
        chat: Conversation,
        settings: ChatSettings | None,
        adapter: LoRARequest | None,
    ) -> list[CheckedRequest]:
        messages = messages_for(tokenizer, list(chat.messages))
        tools, variables = settings.tools if settings else None, body.chat_template_kwargs
        max_len = max_prompt_len(self._engine, body)
        token_ids = tokenizer.encode_chat(
            messages, tools=tools, template_kwargs=variables, max_model_len=max_len
        )
        prompt = chat.prompt(token_ids)
        with grammar_errors_as_tool_errors(settings):
            if settings is not None:
                params = settings.params(params, tokenizer)
            return check_all(self._engine, [prompt], params, body, adapter)

    def _head(self, prefix: str, kind: str, adapter: LoRARequest | None, request: Request) -> dict[str, Any]:
        progress = progress_of(request)
        return {
            "id": f"{prefix}-{progress.answer_id}",
            "object": kind,
            "created": progress.created,
            "model": adapter.lora_name if adapter else self._model_name,
        }


def check_all(
    engine: ServingEngine,
    prompts: list[Prompt],
    params: SamplingParams | BeamSearchParams,
    body: Generation,
    adapter: LoRARequest | None = None,
) -> list[CheckedRequest]:
    """Tokenizes and checks the prompts of a request.

    Raises:
        ValueError: If the engine cannot run the request, or a prompt and max_tokens together exceed the
            maximum length.
    """
    more = {"cache_salt": body.cache_salt or "", "priority": body.priority or 0, "lora_request": adapter}
    requests = [engine.engine.check_request(prompt, params, **more) for prompt in prompts]
    if getattr(body, "echo", None) and any(request.request.prompt_embeds for request in requests):
        raise ArgumentError("echo", True, "False with prompt_embeds because they have no text")
    for request in requests:
        # The engine has reduced max_tokens, which is an error if the client has set it.
        if body.sets_max_tokens and params.max_tokens not in (None, request.params.max_tokens):
            num_tokens = len(request.prompt_token_ids) + params.max_tokens
            aspect = f"`max_tokens` ({params.max_tokens}) plus the number of tokens of"
            raise TooLongError(num_tokens, engine.engine.config.max_model_len, aspect=aspect)
    return requests


def token_bytes_of(engine: ServingEngine, requests: Sequence[CheckedRequest]) -> TokenBytes:
    """Returns the TokenBytes of a call. All requests of a call have the same parameters."""
    return TokenBytes(engine.engine.tokenizer, requests[0].params.skip_special_tokens)


def max_prompt_len(engine: ServingEngine, body: Generation) -> int | None:
    """Returns the maximum length of a prompt (tokens); None if the request truncates its prompt."""
    return engine.engine.config.max_model_len if body.truncate_prompt_tokens is None else None


def _check_no_images(prompts: list[Prompt]) -> None:
    """Raises ValueError if a prompt has images in multi_modal_data, because JSON cannot contain images."""
    for prompt in prompts:
        data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        if isinstance(data, dict) and data.get("image") not in (None, []):
            allowed = "empty because JSON cannot contain images"
            remedy = ". Send images to /v1/chat/completions as image_url"
            raise ArgumentError("prompt.multi_modal_data", data, allowed, remedy=remedy)


def has_grammar(params: SamplingParams | BeamSearchParams) -> bool:
    """Returns whether the output is constrained by a grammar, which takes time to compile."""
    return isinstance(params, SamplingParams) and params.structured_outputs is not None


def note_warnings(
    request: Request, checked: Sequence[CheckedRequest], settings: ChatSettings | None = None
) -> None:
    """Stores warnings about unenforced constraints. `with_known_fields` adds them to the response."""
    found = [*(settings.warnings if settings else ())]
    found += [warning for one in checked[:1] if one.grammar is not None for warning in one.grammar.warnings]
    request.state.warnings = found


def tokenizer_of(engine: ServingEngine) -> Tokenizer:
    """Returns the engine's tokenizer.

    Raises:
        ValueError: If the engine has no tokenizer.
    """
    if engine.engine.tokenizer is None:
        raise ValueError(
            "the server runs without a tokenizer: send token ids to /v1/completions, without echo"
        )
    return engine.engine.tokenizer


def check_model(body: Body, model_name: str) -> None:
    """Checks that a request names the model that is served, or no model.

    Raises:
        ApiError: If the request names another model.
    """
    if body.model not in (None, "", model_name):
        raise unknown_model(str(body.model), model_name)


def client_of(request: Request) -> str:
    """Returns the name of the client that has sent a request; "" if the server has no API keys."""
    return getattr(request.state, "client", "")


def journal_of(request: Request) -> Journal | None:
    """Returns the journal of the response to a request; None if there are no other replicas."""
    return getattr(request.state, "journal", None)


def progress_of(request: Request) -> Progress:
    """Returns the progress of the response to a request, which is empty if there are no other replicas."""
    journal = journal_of(request)
    return Progress.begin() if journal is None else journal.progress


@contextlib.contextmanager
def value_errors_as_400(body: Body) -> Iterator[None]:
    """Converts a ValueError within the context to an error response with status 400."""
    try:
        yield
    except EngineAsleepError:
        raise  # The request itself is valid.
    except ValueError as error:
        message, cause = str(error), first_argument_error(error)
        param = cause and _wrong_field(cause.name, body)
        if isinstance(error, TooLongError):
            raise too_long(message, error.max_model_len, param) from error
        raise ApiError(shortened(message, 600), param=param) from error


def _wrong_field(path: str, body: Body) -> str | None:
    """Returns the field of a body that contains an argument such as `messages[1].content`, or None."""
    name = path.partition(".")[0].partition("[")[0]
    if name in ("prompt", "prompt_token_ids"):
        name = body.prompt_field
    return name if body.has_field(name) else None

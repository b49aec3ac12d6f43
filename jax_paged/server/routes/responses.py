"""Route of OpenAI's Responses API: text input and output, optionally streamed, without storage."""

import contextlib
import itertools
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import check_int
from jax_paged.lora_request import LoRARequest
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.sampling_params import SamplingParams
from jax_paged.server.generation_call import GenerationCall
from jax_paged.server.http.event_stream import EventStream, response_unless_disconnected
from jax_paged.server.http.limits import check_sizes
from jax_paged.server.protocol.logprobs import TokenBytes, chat_logprobs
from jax_paged.server.protocol.messages import messages_for, messages_of_input
from jax_paged.server.protocol.nested_objects import Integer, NestedObject
from jax_paged.server.protocol.requests import Generation, ranged_field
from jax_paged.server.protocol.response_format import TextFormat
from jax_paged.server.protocol.responses import ApiError, json_response, usage
from jax_paged.server.ray_serve.continuation import Progress
from jax_paged.server.routes.generation import (
    TextRoutes,
    check_all,
    has_grammar,
    max_prompt_len,
    note_warnings,
    progress_of,
    token_bytes_of,
    tokenizer_of,
    value_errors_as_400,
)
from jax_paged.server.tools.chat_settings import ChatSettings
from jax_paged.server.tools.formats import CONTENT, REASONING
from jax_paged.server.tools.parsed_chat import OutputParser

_LOGPROBS = "message.output_text.logprobs"  # value of the field `include`


def _refuse_stored(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("not_stored", "it must be null because responses are not stored")


def _refuse_tools(value: Any) -> Any:
    if value not in (None, []):
        raise PydanticCustomError("no_tools", "it must be empty because only /v1/chat/completions has tools")
    return value


_Stored = Annotated[None, BeforeValidator(_refuse_stored)]


class TextOptions(NestedObject):
    """Options of the output text."""

    format: TextFormat | None = None


class ResponsesRequest(Generation):
    """Body of POST /v1/responses."""

    prompt_field = "input"

    input: str | list[dict[str, Any]] = Field(
        description="Text of a user message, or a list of messages.", examples=["What is a block table?"]
    )
    instructions: str | None = None
    max_output_tokens: Integer | None = ranged_field(1)
    include: list[str] | None = Field(None, description=f"The only supported value is {_LOGPROBS}.")
    top_logprobs: Integer | None = ranged_field(0)
    text: TextOptions | None = None
    tools: Annotated[list[Any] | None, BeforeValidator(_refuse_tools)] = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: _Stored = None
    conversation: _Stored = None
    prompt: None = None
    # Accepted because clients send them; they have no effect.
    parallel_tool_calls: Any = None
    reasoning: Any = None

    @property
    def sets_max_tokens(self) -> bool:
        """Whether the request sets the maximum number of output tokens. If not, a default applies."""
        return self.max_output_tokens is not None

    @property
    def with_logprobs(self) -> bool:
        """Whether the response includes the log-probabilities of the output tokens."""
        return _LOGPROBS in (self.include or ())

    @property
    def _format(self) -> TextFormat | None:
        return self.text and self.text.format

    @property
    def text_format(self) -> dict[str, Any]:
        """The format of the text, as the response returns it."""
        given = self._format
        return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """Returns the sampling parameters of the request.

        Args:
            defaults: Default values of the model for fields that the request does not set.

        Raises:
            ValueError: If a value is out of range. The message names the field, its value and the range.
        """
        if self.max_output_tokens is not None:
            check_int("max_output_tokens", self.max_output_tokens, 1)
        given = self._explicit_params((self.top_logprobs or 0) if self.with_logprobs else None)
        # If neither the request nor the model has a limit, the output may fill the context.
        limit = {"max_tokens": self.max_output_tokens} if self.sets_max_tokens else {}
        return SamplingParams(**{"max_tokens": None, **defaults, **given, **limit})


class ResponsesRoute(TextRoutes):
    """Handler of /v1/responses."""

    async def responses(self, body: ResponsesRequest, request: Request) -> Response:
        """POST /v1/responses: Generates a response to a text or a conversation."""
        adapter = self._models.adapter_of(body)
        with value_errors_as_400(body):
            tokenizer = tokenizer_of(self._engine)
            check_sizes(body, self._options)
            if isinstance(body.input, list):
                check_int("input", len(body.input), 0, self._options.max_messages, aspect="the length of")
            params = body.sampling_params(self._config.sampling_defaults)
            reasoning = self._formats.reasoning
            settings = None if reasoning is None else ChatSettings(None, None, (), True, reasoning)
            checked = await self._preprocessor.run(
                [body.instructions, body.input],
                lambda: self._check(tokenizer, params, body, settings, adapter),
                with_grammar=has_grammar(params),
            )
        note_warnings(request, checked)
        constrained = checked[0].params.structured_outputs is not None
        parser = settings and settings.parser(tokenizer, checked[0].prompt_token_ids, has_grammar=constrained)
        name = adapter.lora_name if adapter else self._model_name
        token_bytes = token_bytes_of(self._engine, checked)
        builder = _ResponseBuilder(body, token_bytes, checked[0].params, name, parser, progress_of(request))
        call = self._call(request, checked, {"id": builder.response_id}, builder.item)
        answer = self._stream(builder, call) if body.stream else self._full_response(builder, call)
        return await response_unless_disconnected(request, answer)

    def _check(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        body: ResponsesRequest,
        settings: ChatSettings | None,
        adapter: LoRARequest | None,
    ) -> list[CheckedRequest]:
        messages = messages_of_input(body.input, body.instructions)
        prompt = tokenizer.encode_chat(
            messages_for(tokenizer, messages), max_model_len=max_prompt_len(self._engine, body)
        )
        adapted = settings.params(params, tokenizer) if settings else params
        return check_all(self._engine, [prompt], adapted, body, adapter)

    async def _full_response(self, builder: "_ResponseBuilder", call: GenerationCall) -> Response:
        output = [part async for part in self._runner.parts(call, whole=True)][-1]
        builder.take(output.outputs[0])
        return json_response(builder.ended(output))

    async def _stream(self, builder: "_ResponseBuilder", call: GenerationCall) -> Response:
        return await EventStream.begin(self._events(builder, call))

    async def _events(
        self, builder: "_ResponseBuilder", call: GenerationCall
    ) -> AsyncGenerator[bytes, object]:
        """Runs a call and yields its events, encoded as server-sent events.

        The events of one part of the output are yielded together, and the final events together with the last
        part. Therefore a client always has complete parts of the output if another replica has to continue
        the stream. The first events are yielded with the first part of the output.
        """
        journal = call.journal
        encoder = _EventEncoder(journal.progress.num_events if journal is not None else 0)
        whole: RequestOutput | None = None
        try:
            async with contextlib.aclosing(self._runner.parts(call)) as parts:
                async for part in parts:
                    is_prior = whole is None and call.has_begun
                    events = [] if whole is not None else builder.beginning()
                    for one in self._runner.split_end_token(part.outputs[0], call.requests[0].params):
                        events += builder.deltas(one)
                    if whole is None:
                        whole = part
                    else:
                        whole.extend(part)
                    if part.finished:
                        events += builder.ending(whole)
                        if journal is not None:
                            journal.end()
                    if events and not is_prior:
                        yield b"".join(map(encoder.event, events))
        except ApiError as error:
            if whole is None or call.continues_elsewhere(error):
                raise
            if journal is not None:
                journal.end()
            yield encoder.event(builder.failure(error))


class _EventEncoder:
    """Encoder of events as server-sent events with consecutive sequence numbers.

    Args:
        first: Sequence number of the first event.
    """

    def __init__(self, first: int) -> None:
        self._next = first

    def event(self, content: dict[str, Any]) -> bytes:
        numbered = {**content, "sequence_number": self._next}
        self._next += 1
        return f"event: {content['type']}\ndata: ".encode() + orjson.dumps(numbered) + b"\n\n"


class _ResponseBuilder:
    """Builder of the response object of one request and of its stream of events.

    Args:
        body: Body of the request.
        token_bytes: Bytes of the output tokens.
        params: Sampling parameters of the request.
        model_name: Name of the model or the LoRA adapter in the API.
        parser: Separates reasoning from text; None if the whole output is text.
        progress: Ids and time of the response.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        token_bytes: TokenBytes,
        params: SamplingParams,
        model_name: str,
        parser: OutputParser | None,
        progress: Progress,
    ) -> None:
        self.response_id = f"resp_{progress.answer_id}"
        self._item_id = f"msg_{progress.answer_id}"
        self._reasoning_id = f"rs_{progress.answer_id}"
        self._num_top = body.top_logprobs or 0
        self._token_bytes = token_bytes
        self._parser = parser
        self._reasoning = self._text = ""
        self._has_message = False  # whether the events that add the message have been created
        self._fields = {
            "id": self.response_id,
            "object": "response",
            "created_at": progress.created,
            "model": model_name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": self._num_top,
            "text": {"format": body.text_format},
            "tools": [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": True,
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "reasoning": None,
            "user": body.user,
        }

    def ended(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the response object for a finished output."""
        (completion,) = output.outputs
        counts = usage([output], len(completion.token_ids))
        is_cut = completion.finish_reason == "length"
        return {
            **self._fields,
            "status": "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [
                *([self._reasoning_item("completed")] if self._reasoning else []),
                self.item(0, completion, output),
            ],
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens(completion)},
                "total_tokens": counts["total_tokens"],
            },
        }

    def _num_reasoning_tokens(self, completion: CompletionOutput) -> int:
        """Returns the number of output tokens whose text belongs to the reasoning, at least in part."""
        text = completion.text
        spans = self._parser.reasoning_spans(text) if self._parser else []
        byte_spans = [(len(text[:i].encode()), len(text[:j].encode())) for i, j in spans]
        sizes = self._token_bytes.sizes(completion.token_ids) if spans else []
        ends = itertools.accumulate(sizes)
        pairs = zip(sizes, ends, strict=True)
        return sum(any(end - size < j and end > i for i, j in byte_spans) for size, end in pairs)

    def take(self, new: CompletionOutput) -> tuple[str, str]:
        """Returns the reasoning and the text that a new part of the output adds."""
        found = self._parser.take(new) if self._parser else {CONTENT: new.text}
        reasoning, text = found.get(REASONING, ""), found.get(CONTENT, "")
        self._reasoning += reasoning
        self._text += text
        return reasoning, text

    def beginning(self) -> list[dict[str, Any]]:
        """Returns the events before the output."""
        response = {**self._unfinished("in_progress"), "error": None}
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def deltas(self, new: CompletionOutput) -> list[dict[str, Any]]:
        """Returns the events for a new part of the output."""
        has_reasoning = bool(self._reasoning)
        reasoning, text = self.take(new)
        logprobs = [] if reasoning else chat_logprobs(new, self._num_top, self._token_bytes) or []
        events = []
        if reasoning:
            if not has_reasoning:
                item = self._reasoning_item()
                events.append(self._reasoning_event("response.output_item.added", item=item))
            delta = {"content_index": 0, "delta": reasoning}
            events.append(self._reasoning_event("response.reasoning_text.delta", **delta))
        # Without a parser, a token without text (an end token) gets an event for its log-probabilities. With
        # one, such a token may belong to a tag.
        if text or (logprobs and not self._parser):
            delta = {**self._position, "delta": text, "logprobs": logprobs}
            events += [*self._opening(), {"type": "response.output_text.delta", **delta}]
        return events

    def _opening(self) -> list[dict[str, Any]]:
        """Returns the events between the reasoning and the text; empty if they have been returned before."""
        if self._has_message:
            return []
        self._has_message = True
        events = []
        if self._reasoning:
            text, item = {"content_index": 0, "text": self._reasoning}, self._reasoning_item("completed")
            events.append(self._reasoning_event("response.reasoning_text.done", **text))
            events.append(self._reasoning_event("response.output_item.done", item=item))
        message = {**self._message("in_progress"), "content": []}
        return [
            *events,
            {
                "type": "response.output_item.added",
                "output_index": self._position["output_index"],
                "item": message,
            },
            {"type": "response.content_part.added", **self._position, "part": self._part(None)},
        ]

    def ending(self, output: RequestOutput) -> list[dict[str, Any]]:
        """Returns the events after the output."""
        response, part = self.ended(output), self._part(output.outputs[0])
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        index = self._position["output_index"]
        return [
            *self._opening(),
            {"type": "response.output_text.done", **self._position, **text},
            {"type": "response.content_part.done", **self._position, "part": part},
            {"type": "response.output_item.done", "output_index": index, "item": response["output"][index]},
            {"type": f"response.{response['status']}", "response": response},
        ]

    def item(self, _: int, completion: CompletionOutput, __: RequestOutput) -> dict[str, Any]:
        """Returns the message item for a finished output."""
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        return {**self._message(status), "content": [self._part(completion)]}

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": int(bool(self._reasoning)), "content_index": 0}

    def _reasoning_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        head = {"output_index": 0} if "item" in fields else {"item_id": self._reasoning_id, "output_index": 0}
        return {"type": kind, **head, **fields}

    def _reasoning_item(self, status: str = "in_progress") -> dict[str, Any]:
        parts = [] if status == "in_progress" else [{"type": "reasoning_text", "text": self._reasoning}]
        return {
            "id": self._reasoning_id,
            "type": "reasoning",
            "summary": [],
            "content": parts,
            "status": status,
        }

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Returns the event for a response that has failed after its first part."""
        details = {"code": "server_error", "message": str(error)}
        return {"type": "response.failed", "response": {**self._unfinished("failed"), "error": details}}

    def _unfinished(self, status: str) -> dict[str, Any]:
        return {**self._fields, "status": status, "incomplete_details": None, "output": [], "usage": None}

    def _message(self, status: str) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status}

    def _part(self, completion: CompletionOutput | None) -> dict[str, Any]:
        text, logprobs = "", None
        if completion is not None:
            text, logprobs = self._text, chat_logprobs(completion, self._num_top, self._token_bytes)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}

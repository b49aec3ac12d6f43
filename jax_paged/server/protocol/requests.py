"""Request bodies of the OpenAI API, and their conversion to sampling parameters."""

import abc
import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from jax_paged.arguments.ignored import ANY, OFF, Ignored, refusal
from jax_paged.arguments.shown_values import Text
from jax_paged.config.ignored_args import UNSUPPORTED_BY_REQUESTS
from jax_paged.errors import ArgumentError, check_int
from jax_paged.sampling_params import IGNORED as SAMPLING_IGNORED
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.server.protocol.nested_objects import (
    Integer,
    Integers,
    NamedTool,
    NestedObject,
    StreamOptions,
    Tool,
    as_integers,
)
from jax_paged.server.protocol.response_format import ResponseFormat, constraint_of, ignored_guided
from jax_paged.server.protocol.responses import ApiError

_SAMPLING_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name not in ("logit_bias", "logprobs", "max_tokens", "structured_outputs")
)
# Fields that may be set with beam search. n is the number of returned hypotheses, and seed has no effect.
_BEAM_FIELDS = ("temperature", "ignore_eos", "n", "seed")


# Fields of OpenAI's and vLLM's APIs that would change the output or its format. A request with one of them is
# rejected unless the type of its body defines the field. The field is not ignored like an unknown one,
# because the client would receive a wrong response.
_UNSUPPORTED = (
    "audio",
    "background",
    "best_of",
    "chat_template",
    "continue_final_message",
    "documents",
    "echo",
    "function_call",
    "functions",
    "kv_transfer_params",
    "logits_processors",
    "prompt_embeds",
    "return_tokens_as_token_ids",
)


# Names that chat_template_kwargs must not set: the arguments that the server itself passes to a chat
# template, and the template.
_TEMPLATE_ARGUMENTS = frozenset(
    ("add_generation_prompt", "chat_template", "continue_final_message", "documents", "messages", "tools")
)

# JSON schemas for the OpenAPI document of fields that the engine validates with its own error messages.
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
_PROMPTS = [
    _TEXT,
    {"type": "array", "items": _TEXT, "minItems": 1},
    _TOKEN_IDS,
    {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
    {"type": "object", "description": "A prompt as a dictionary in the format of LLM.generate."},
]
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _TEXT_PART}]}
_CALLED = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object", "null"]}},
}
_CALL = {"type": "object", "required": ["function"], "properties": {"function": _CALLED}}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": _CONTENT,
        "tool_calls": {"type": ["array", "null"], "items": _CALL},
    },
    "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
}
_QUESTION = {"role": "user", "content": "What is a block table?"}
Prompts = Annotated[Any, BeforeValidator(as_integers), WithJsonSchema({"anyOf": _PROMPTS})]
Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1, "examples": [[_QUESTION]]}),
]


class Body(BaseModel):
    """Request body. A field with the value null is treated like an absent field.

    Attributes:
        prompt_field: Name of the prompt's field in error messages.
        unsupported: Fields that are not supported, each with its allowed values. A request with another value
            is rejected.
        model: Name of the model or of a LoRA adapter.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    prompt_field: ClassVar[str] = "prompt"
    unsupported: ClassVar[Ignored] = {**dict.fromkeys(_UNSUPPORTED, OFF), **UNSUPPORTED_BY_REQUESTS}

    model: str | None = None

    def unknown_fields(self) -> list[str]:
        """Returns the names of the fields that the server does not know."""
        # Fields that the engine ignores with any value count as unknown.
        names = [name for name in self.model_extra or () if self.unsupported.get(name, ANY) is ANY]
        for name, value in self:
            if isinstance(value, NestedObject) or (
                isinstance(value, ResponseFormat) and value.type != "structural_tag"
            ):
                names += [f"{name}.{inner}" for inner in value.model_extra or ()]
        return names

    def warnings(self) -> list[str]:
        """Returns a sentence for each field that is ignored because another field is set."""
        return []

    def is_neutral(self, name: str, value: Any) -> bool:
        """Returns whether the value of an unsupported field has the same effect as leaving the field out."""
        return value is None

    def check_unsupported(self) -> None:
        """Raises ApiError if an unsupported field has a value that would change the response."""
        for name, value in (self.model_extra or {}).items():
            choices = refusal(value, self.unsupported.get(name, ANY))
            if choices is not None and not self.is_neutral(name, value):
                allowed = f"{choices} because other values are not supported"
                raise ApiError(str(ArgumentError(name, value, allowed)), param=name)

    def has_field(self, name: str) -> bool:
        """Returns whether a name is a field of this type of body or an additional field of this request."""
        return name in type(self).model_fields or name in (self.model_extra or ())


def ranged_field(minimum: float, maximum: float | None = None, **more: float) -> Any:
    """Returns an optional field whose range is part of the OpenAPI document.

    The range is not validated here but by the engine, whose error messages name the value and the range.

    Args:
        minimum: Minimum of the value.
        maximum: Maximum of the value; None for no maximum.
        more: Further keywords of the JSON schema, such as exclusiveMinimum.
    """
    bounds = {"minimum": minimum, "maximum": maximum, **more}
    return Field(None, json_schema_extra={k: v for k, v in bounds.items() if v is not None})


class Generation(Body, abc.ABC):
    """Fields that all requests for generated text have in common."""

    # The fields that SamplingParams rejects are rejected here too.
    unsupported: ClassVar[Ignored] = {
        **Body.unsupported,
        **SAMPLING_IGNORED,
        "guided_whitespace_pattern": (None,),
        "modalities": (["text"],),
        "vllm_xargs": (None, {}),
    }

    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Allowed only if stream is true.")
    temperature: float | None = ranged_field(0, 1e6)
    top_p: float | None = ranged_field(0, 1, exclusiveMinimum=0)
    presence_penalty: float | None = ranged_field(-2, 2)
    frequency_penalty: float | None = ranged_field(-2, 2)
    seed: Integer | None = ranged_field(-1, 2**63 - 1)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    # Additional fields of vLLM's API.
    top_k: Integer | None = ranged_field(-1, 2**31 - 1)
    min_p: float | None = ranged_field(0, 1)
    repetition_penalty: float | None = ranged_field(1e-6, 1e6)
    stop_token_ids: Integers | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: Integers | None = Field(None, json_schema_extra={"minItems": 1})
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = ranged_field(0)
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Integer | None = None
    priority: Integer | None = None
    cache_salt: str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Accepted because clients send them; they have no effect.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def num_outputs(self) -> int:
        """The number of choices per prompt."""
        return 1

    @property
    def sets_max_tokens(self) -> bool:
        """Whether the request sets the maximum number of output tokens. If not, a default applies."""
        return True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has token counts."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def _format(self) -> ResponseFormat | None:
        """The response format of the request, or None."""
        return None

    @property
    def _guided(self) -> dict[str, Any]:
        """The values of vLLM's deprecated `guided_...` fields, by the part of the name after "guided_"."""
        return {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}

    def warnings(self) -> list[str]:
        """Returns a sentence for each deprecated field that is ignored because structured_outputs is set."""
        ignored = ignored_guided(self.structured_outputs, self._guided)
        return [f"{name} is ignored because structured_outputs is set" for name in ignored]

    @abc.abstractmethod
    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams | BeamSearchParams:
        """Returns the sampling parameters of the request.

        Args:
            defaults: Default values of the model for fields that the request does not set.

        Raises:
            ValueError: If a value is out of range. The message names the field, its value and the range.
        """

    def is_neutral(self, name: str, value: Any) -> bool:
        """Returns whether the value of an unsupported field has the same effect as leaving the field out."""
        # Some clients set all fields and send these values.
        neutral = {"best_of": (1, self.num_outputs), "function_call": ("none", "auto")}
        return super().is_neutral(name, value) or value in neutral.get(name, ())

    def _explicit_params(self, logprobs: int | None) -> dict[str, Any]:
        """Returns the sampling parameters that the request sets, by name.

        Args:
            logprobs: Value of the parameter logprobs.
        """
        if self.stream_options is not None and self.stream_options.has_any and not self.stream:
            raise ArgumentError("stream_options", Text("a value"), "unset unless stream is true")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise ArgumentError("stream_options.include_obfuscation", True, "False")
        fields = type(self).model_fields  # excludes additional fields of this request
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS if name in fields}
        values |= {"logit_bias": _int_keys(self.logit_bias), "logprobs": logprobs}
        values["structured_outputs"] = constraint_of(self._format, self.structured_outputs, self._guided)
        return {k: v for k, v in values.items() if v is not None}


class _CompletionOrChatRequest(Generation):
    """Fields that completion and chat requests have in common."""

    max_tokens: Integer | None = ranged_field(0)
    n: Integer | None = ranged_field(1)
    prompt_logprobs: Integer | None = ranged_field(-1)
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    return_token_ids: bool | None = Field(
        None, description="Whether the response contains the token ids of the prompt and of the outputs."
    )
    beam_width: Integer | None = ranged_field(1)
    length_penalty: float | None = ranged_field(-10, 10)

    @property
    def _format(self) -> ResponseFormat | None:
        return self.response_format

    def _params(
        self, defaults: dict[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams | BeamSearchParams:
        given = self._explicit_params(logprobs)
        if self.use_beam_search:
            return self._beam_params(given, max_tokens)
        for name, neutral in (("beam_width", (None, 1, self.num_outputs)), ("length_penalty", (None, 1))):
            if getattr(self, name) not in neutral:
                raise ArgumentError(name, getattr(self, name), "unset unless use_beam_search is true")
        params = SamplingParams(**{**defaults, **given, "max_tokens": max_tokens})
        if self.stream and params.best_of is not None and params.best_of > params.n:
            allowed = f"{params.n} (n) if stream is true because the best outputs are known only at the end"
            raise ArgumentError("best_of", params.best_of, allowed)
        if self.stream and self.prompt_logprobs is not None:
            raise ArgumentError("prompt_logprobs", self.prompt_logprobs, "unset if stream is true")
        return params

    def _beam_params(self, given: dict[str, Any], max_tokens: int | None) -> BeamSearchParams:
        neutral = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
        # Further values that have no effect.
        also = {"top_k": (-1,), "best_of": (self.num_outputs,)}
        for name, value in given.items():
            is_neutral = value in (neutral[name], [], {}, *also.get(name, ()))
            if name not in _BEAM_FIELDS and not is_neutral:
                raise ArgumentError(name, value, f"{neutral[name]!r} with use_beam_search")
        check_int("n", self.num_outputs, 1)
        values = {
            "beam_width": self.num_outputs if self.beam_width is None else self.beam_width,
            "max_tokens": max_tokens,
            "ignore_eos": self.ignore_eos,
            "length_penalty": self.length_penalty,
            "temperature": self.temperature,
        }
        params = BeamSearchParams(**{k: v for k, v in values.items() if v is not None})
        check_int("n", self.num_outputs, 1, params.beam_width, condition="(beam_width)")
        if self.stream:
            allowed = "False if stream is true because the best outputs are known only at the end"
            raise ArgumentError("use_beam_search", True, allowed)
        return params

    @property
    def num_outputs(self) -> int:
        """The number of choices per prompt."""
        return 1 if self.n is None else self.n


class CompletionRequest(_CompletionOrChatRequest):
    """Body of POST /v1/completions, with fields of OpenAI's and vLLM's APIs."""

    prompt: Prompts = Field(
        description="A string, a list of strings, a list of token ids, or a list of lists of token ids.",
        examples=["def fibonacci(n):"],
    )
    logprobs: Integer | None = ranged_field(-1)
    best_of: Integer | None = ranged_field(1)
    echo: bool | None = Field(
        None, description="Whether the prompt is included in front of the output text and its logprobs."
    )
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = Field(None, description="false is not supported.")

    @property
    def only_prompt(self) -> bool:
        """Whether the response contains only the prompt, with its log-probabilities if requested."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams | BeamSearchParams:
        """Returns the sampling parameters of the request.

        Args:
            defaults: Default values of the model for fields that the request does not set.

        Raises:
            ValueError: If a value is out of range. The message names the field, its value and the range.
        """
        if self.add_special_tokens is False:
            raise ArgumentError("add_special_tokens", False, "True")
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        if self.only_prompt and not self.use_beam_search:
            max_tokens = 1  # The engine always samples a token, which the response omits.
        return self._params(defaults, max_tokens, self.logprobs)

    def _explicit_params(self, logprobs: int | None) -> dict[str, Any]:
        given = super()._explicit_params(logprobs)
        if self.echo and logprobs is not None and given.setdefault("prompt_logprobs", logprobs) != logprobs:
            raise ArgumentError("prompt_logprobs", self.prompt_logprobs, f"{logprobs} (logprobs) with echo")
        return given


class ChatRequest(_CompletionOrChatRequest):
    """Body of POST /v1/chat/completions, with fields of OpenAI's and vLLM's APIs."""

    prompt_field = "messages"

    messages: Messages
    max_completion_tokens: Integer | None = ranged_field(1)
    logprobs: bool | None = None
    top_logprobs: Integer | None = ranged_field(-1)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="false allows only one tool call.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(None, description="false is not supported.")
    add_special_tokens: bool | None = Field(None, description="true is not supported.")

    @property
    def sets_max_tokens(self) -> bool:
        """Whether the request sets the maximum number of output tokens. If not, a default applies."""
        return self.max_tokens is not None or self.max_completion_tokens is not None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams | BeamSearchParams:
        """Returns the sampling parameters of the request.

        Args:
            defaults: Default values of the model for fields that the request does not set.

        Raises:
            ValueError: If a value is out of range. The message names the field, its value and the range.
        """
        if self.top_logprobs and not self.logprobs:
            raise ArgumentError("top_logprobs", self.top_logprobs, "unset unless logprobs is true")
        if self.add_generation_prompt is False:
            raise ArgumentError("add_generation_prompt", False, "True")
        if self.add_special_tokens:
            raise ArgumentError("add_special_tokens", True, "False because the chat template adds them")
        for name in _TEMPLATE_ARGUMENTS & (self.chat_template_kwargs or {}).keys():
            allowed = "unset because the server sets it"
            raise ArgumentError(f"chat_template_kwargs[{name!r}]", Text("a value"), allowed)
        limits = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        max_tokens = min(limits, default=defaults.get("max_tokens"))
        if self.use_beam_search and max_tokens is None:
            raise ArgumentError("max_tokens", None, "an integer of at least 1 with use_beam_search")
        return self._params(defaults, max_tokens, self.top_logprobs or 0 if self.logprobs else None)


def _int_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise ArgumentError("logit_bias", bias, "an object whose keys are token ids") from error

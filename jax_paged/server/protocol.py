"""The OpenAI API's requests and answers, and what they are in the engine's terms."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jax_paged.checks import check_int
from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "skip_special_tokens",
    "n",
    "best_of",
)
# What a beam search takes of these: n is how many hypotheses it returns, and a seed changes nothing.
_BEAM_FIELDS = ("temperature", "ignore_eos", "n", "seed")


class ApiError(Exception):
    """An error as clients see it.

    Args:
        message: What is wrong.
        status: HTTP status.
        param: The field that is wrong, if one is.
        code: A word for programs, such as "model_not_found".
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Returns the error as OpenAI's envelope."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
        }


class StreamOptions(BaseModel):
    """How a stream is sent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Request(BaseModel):
    """What both kinds of requests have. null is the same as nothing; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    # What vLLM adds to OpenAI's API.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    # What clients send along and what changes no output.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(
        self, defaults: dict[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams | BeamSearchParams:
        values = {name: getattr(self, name, None) for name in _SAMPLING_FIELDS}
        values |= {"logit_bias": _int_keys(self.logit_bias), "logprobs": logprobs}
        given = {k: v for k, v in values.items() if v is not None}
        if self.use_beam_search:
            return self._beam_params(given, max_tokens)
        for name in ("beam_width", "length_penalty"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; allowed: nothing, unless use_beam_search is true"
                )
        params = SamplingParams(**{**defaults, **given}, max_tokens=max_tokens)
        if self.stream and params.best_of is not None and params.best_of > params.n:
            raise ValueError(
                f"best_of is {params.best_of}; allowed with stream: {params.n}, which is n, as the best are "
                f"known at the end only"
            )
        return params

    def _beam_params(self, given: dict[str, Any], max_tokens: int | None) -> BeamSearchParams:
        neutral = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
        for name, value in given.items():
            if name not in _BEAM_FIELDS and value != neutral[name]:
                raise ValueError(
                    f"{name} is {shortened(repr(value))}; allowed with use_beam_search: {neutral[name]!r}"
                )
        check_int("n", self.num_outputs, 1)
        values = {
            "beam_width": self.num_outputs if self.beam_width is None else self.beam_width,
            "max_tokens": max_tokens,
            "ignore_eos": self.ignore_eos,
            "length_penalty": self.length_penalty,
            "temperature": self.temperature,
        }
        params = BeamSearchParams(**{k: v for k, v in values.items() if v is not None})
        check_int(f"n (beam_width is {params.beam_width})", self.num_outputs, 1, params.beam_width)
        if self.stream:
            raise ValueError(
                "use_beam_search is True; allowed with stream: False, as the best are known at the end only"
            )
        return params

    @property
    def num_outputs(self) -> int:
        """Choices of each prompt."""
        return 1 if self.n is None else self.n


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: Any = Field(
        description="Text, a list of texts, a list of token ids, or a list of such lists.",
        examples=["def fibonacci(n):"],
    )
    logprobs: int | None = None
    best_of: int | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams | BeamSearchParams:
        """Fills in the model's defaults; raises ValueError if a value is out of range."""
        return self._params(defaults, 16 if self.max_tokens is None else self.max_tokens, self.logprobs)


class ResponseFormat(BaseModel):
    """The only format there is."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(examples=[[{"role": "user", "content": "What is a block table?"}]])
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Any = None

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams | BeamSearchParams:
        """Fills in the model's defaults; raises ValueError if a value is out of range."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(
                f"top_logprobs is {self.top_logprobs}; allowed: nothing, unless logprobs is true"
            )
        limits = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        max_tokens = min(limits, default=None)
        if self.use_beam_search and max_tokens is None:
            raise ValueError("max_tokens is None; allowed with use_beam_search: an integer of at least 1")
        return self._params(defaults, max_tokens, self.top_logprobs or 0 if self.logprobs else None)


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Returns the error of a body that is not of the right form; of several, of the first field."""
    kind, location = errors[0]["type"], [str(part) for part in errors[0]["loc"][1:]]
    if kind == "json_invalid":
        return ApiError(f"the body is not JSON: {errors[0]['ctx']['error']}")
    if not location:
        if isinstance(errors[0]["input"], bytes):  # FastAPI reads JSON only where this header says so
            return ApiError(
                "the body can't be read; allowed: JSON, with the header Content-Type: application/json"
            )
        return ApiError("the body is not a JSON object")
    param = location[0]
    if kind == "extra_forbidden":
        return ApiError(f"{'.'.join(location)} is not a field that this server knows", param=param)
    if kind == "missing":
        return ApiError(f"{'.'.join(location)} is missing", param=param)
    # A field of several types has an error for each of them.
    messages = dict.fromkeys(e["msg"] for e in errors if str(e["loc"][1]) == param)
    return ApiError(
        f"{param} is {shortened(repr(errors[0]['input']))}: {'; or: '.join(messages)}", param=param
    )


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Returns the token counts of an answer."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def prompt_logprobs(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None] | None:
    """Returns vLLM's form of prompt log-probabilities; JSON's keys are strings."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if entry is None else {str(i): dataclasses.asdict(x) for i, x in entry.items()}
        for entry in output.prompt_logprobs
    ]


def completion_logprobs(output: CompletionOutput, text_offset: int) -> dict[str, Any] | None:
    """Returns log-probabilities as /v1/completions gives them; the tokens' texts start at `text_offset`."""
    if output.logprobs is None:
        return None
    entries = [list(entry.values()) for entry in output.logprobs]
    tokens = [entry[0].decoded_token or "" for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry[0].logprob for entry in entries],
        "top_logprobs": [{x.decoded_token or "": x.logprob for x in entry} for entry in entries],
        "text_offset": offsets,
    }


def chat_logprobs(output: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """Returns log-probabilities as /v1/chat/completions gives them."""
    if output.logprobs is None:
        return None
    content = []
    for entry in output.logprobs:
        sampled, *_ = entry.values()
        top = sorted(entry.values(), key=lambda x: x.rank or 0)[:num_top]
        content.append({**_chat_logprob(sampled), "top_logprobs": [_chat_logprob(x) for x in top]})
    return {"content": content}


def _chat_logprob(logprob: Logprob) -> dict[str, Any]:
    token = logprob.decoded_token or ""
    return {"token": token, "logprob": logprob.logprob, "bytes": list(token.encode())}


def _int_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise ValueError(
            f"logit_bias is {shortened(repr(bias))}; allowed: keys that are token ids"
        ) from error


def shortened(text: str, length: int = 100) -> str:
    """Returns `text`, without its middle if it is longer than about `length` characters."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"

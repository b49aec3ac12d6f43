"""The requests of the OpenAI API, and the sampling parameters that they ask for."""

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jax_paged.checks import check_int
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.server.responses import shortened

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
# The fields that a beam search accepts: n is the number of hypotheses it returns, and a seed changes nothing.
_BEAM_FIELDS = ("temperature", "ignore_eos", "n", "seed")


class StreamOptions(BaseModel):
    """What a streamed answer holds in addition to its choices."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Request(BaseModel):
    """The fields that both kinds of requests have.

    null means the same as leaving a field out; unknown fields are errors.
    """

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
    # vLLM's additions to OpenAI's API.
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
    # Accepted because clients send them; they change no output.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether a streamed answer ends with the token counts."""
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
                f"best_of is {params.best_of}; allowed with stream: {params.n}, the value of n, because the "
                "best outputs are known only at the end"
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
                "use_beam_search is True; allowed with stream: False, because the best outputs are known "
                "only at the end"
            )
        return params

    @property
    def num_outputs(self) -> int:
        """Choices per prompt."""
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
        """Returns the parameters that the request asks for.

        Args:
            defaults: The model's values for fields that the request leaves out.

        Raises:
            ValueError: If a value is out of range; the message names the field, its value and the range.
        """
        return self._params(defaults, 16 if self.max_tokens is None else self.max_tokens, self.logprobs)


class ResponseFormat(BaseModel):
    """The form of the output; plain text is the only one."""

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
        """Returns the parameters that the request asks for.

        Args:
            defaults: The model's values for fields that the request leaves out.

        Raises:
            ValueError: If a value is out of range; the message names the field, its value and the range.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(
                f"top_logprobs is {self.top_logprobs}; allowed: nothing, unless logprobs is true"
            )
        limits = [x for x in (self.max_tokens, self.max_completion_tokens) if x is not None]
        max_tokens = min(limits, default=None)
        if self.use_beam_search and max_tokens is None:
            raise ValueError("max_tokens is None; allowed with use_beam_search: an integer of at least 1")
        return self._params(defaults, max_tokens, self.top_logprobs or 0 if self.logprobs else None)


def _int_keys(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(key): value for key, value in bias.items()}
    except ValueError as error:
        raise ValueError(
            f"logit_bias is {shortened(repr(bias))}; allowed: keys that are token ids"
        ) from error

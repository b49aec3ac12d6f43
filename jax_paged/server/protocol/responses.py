"""Parts of responses: choices, token counts, and errors in OpenAI's format."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi.responses import Response

from jax_paged.arguments.shown_values import one_of, shortened, shown
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED
from jax_paged.errors import ArgumentError
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.server.protocol.logprobs import (
    Echo,
    TextOffsets,
    TokenBytes,
    chat_logprobs,
    completion_logprobs,
    joined,
)

# Function that makes one entry of "choices". Its arguments are the index of the choice in the response, an
# output or the newest part of one, and the RequestOutput that contains this output.
MakeChoice = Callable[[int, CompletionOutput, RequestOutput], dict[str, Any]]


class ApiError(Exception):
    """An error that is returned to the client.

    Args:
        message: Description of the problem. It is shortened to 800 characters.
        status: HTTP status.
        param: Field of the request that is invalid; None if it is not a single field.
        code: Error code for programs, such as "model_not_found".
        headers: Additional headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        # A long value from the request must not make the response long.
        super().__init__(shortened(message, 800))
        self.status = status
        self.param = param and shortened(param)
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Returns the response body in OpenAI's error format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
        }

    def response(self) -> Response:
        """Returns a response with the error."""
        return json_response(self.body(), self.status, self.headers)


def too_long(message: str, max_model_len: int, param: str | None) -> ApiError:
    """Returns the error for a prompt that is too long, alone or with its output.

    The message starts like OpenAI's, which clients recognize.

    Args:
        message: Description of the length that exceeds the limit.
        max_model_len: Maximum length (tokens).
        param: Field of the request.
    """
    return ApiError(
        f"This model's maximum context length is {max_model_len} tokens: {message}",
        param=param,
        code="context_length_exceeded",
    )


def asleep_error(error: Exception) -> ApiError:
    """Returns the error for a request that arrives while the engine sleeps. The client should try again."""
    return ApiError(str(error), status=503, code="sleeping", headers={"Retry-After": "1"})


def unknown_model(name: str, *served: str) -> ApiError:
    """Returns the error for a model name that is not served."""
    return ApiError(
        str(ArgumentError("model", name, one_of(served))),
        status=404,
        param="model",
        code="model_not_found",
    )


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with a JSON body."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Returns the error for a body that does not match its schema.

    Args:
        errors: Errors from pydantic. Those of the first invalid field are reported.
    """
    kind, location = errors[0]["type"], [str(part) for part in errors[0]["loc"][1:]]
    if kind == "json_invalid":
        return ApiError(f"the body is not valid JSON: {errors[0]['ctx']['error']}")
    if not location:
        # FastAPI parses JSON only if the header says that it is JSON.
        if isinstance(errors[0]["input"], bytes):
            return ApiError("the body must be JSON, and its header must be Content-Type: application/json")
        return ApiError("the body must be a JSON object")
    param = location[0]
    if kind == "extra_forbidden":
        return ApiError(f"`{'.'.join(location)}` is an unknown field", param=param)
    if kind == "missing":
        return ApiError(f"`{'.'.join(location)}` is missing", param=param)
    # A field with a union type has one error for each type.
    messages = dict.fromkeys(e["msg"] for e in errors if str(e["loc"][1]) == param)
    return ApiError(
        f"`{param}` is invalid: {'; or: '.join(messages)}, got {shown(errors[0]['input'])}", param=param
    )


def request_error(output: RequestOutput) -> ApiError | None:
    """Returns the error with which a request has ended, or None if it has not failed."""
    for completion in output.outputs:
        reason = completion.stop_reason
        text = reason if completion.finish_reason == "abort" and isinstance(reason, str) else ""
        if text.startswith(f"{NO_TOKEN_ALLOWED}: "):
            return ApiError(f"the structured output cannot be continued: {shortened(text, 300)}")
        if text == NO_TOKEN_ALLOWED:
            return ApiError(
                "no token is allowed: allowed_token_ids, bad_words, min_tokens and the structured output "
                "together exclude all tokens"
            )
        if completion.finish_reason == "abort":
            return ApiError(f"the request was aborted: {reason or 'no reason given'}", status=500)
        if completion.finish_reason == "error":
            return ApiError(
                f"the request could not be scheduled: {reason}. Shorten the prompt, reduce n, or start the "
                "server with fewer pinned prefixes or a larger KV cache (--kv-cache-memory-bytes, "
                "--num-gpu-blocks-override)",
                status=503,
            )
    return None


def num_prompt_tokens(output: RequestOutput) -> int:
    """Returns the number of tokens in the prompt that the client sent."""
    # For encoder-decoder models, this is the encoder's prompt. The decoder's prompt is a single start token.
    return len(output.encoder_prompt_token_ids or output.prompt_token_ids)


def usage(outputs: Sequence[RequestOutput], num_output_tokens: int) -> dict[str, Any]:
    """Returns the token counts of a response.

    Args:
        outputs: One output per prompt.
        num_output_tokens: Number of generated tokens of all choices together.
    """
    num_prompt = sum(num_prompt_tokens(output) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def completion_choices(num_choices: int, token_bytes: TokenBytes, echo: Echo | None = None) -> MakeChoice:
    """Returns a function that makes the choices of a /v1/completions response, streamed or not.

    Args:
        num_choices: Number of choices in the response.
        token_bytes: Bytes of the output tokens.
        echo: The prompt to put in front of each choice; None for no prompt.
    """
    # Position of the next token in the text of each choice; None before its first part.
    text_offsets: list[TextOffsets | None] = [None] * num_choices

    def choice(index: int, completion: CompletionOutput, output: RequestOutput) -> dict[str, Any]:
        offsets = text_offsets[index]
        front = echo if offsets is None else None
        prompt = front.text(output) if front else ""
        if offsets is None:
            offsets = text_offsets[index] = TextOffsets(len(prompt))
        text, logprobs = completion.text, None
        if completion.logprobs is not None:
            logprobs = completion_logprobs(completion.logprobs, offsets, token_bytes)
            if front:
                of_prompt = front.logprobs(output)
                logprobs = of_prompt if front.only_prompt else joined(of_prompt, logprobs)
        if echo and echo.only_prompt:
            text = ""
        return {"index": index, "text": prompt + text, "logprobs": logprobs, **_finish(completion)}

    return choice


def chat_choices(num_top: int, token_bytes: TokenBytes) -> MakeChoice:
    """Returns a function that makes the choices of a chat response that is not streamed.

    Args:
        num_top: Number of most likely tokens to list for each token, if log-probabilities were requested.
        token_bytes: Bytes of the output tokens.
    """

    def choice(index: int, completion: CompletionOutput, _: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text}
        logprobs = _chat_logprobs(completion, num_top, token_bytes)
        return {"index": index, "message": message, "logprobs": logprobs, **_finish(completion)}

    return choice


def chat_delta_choices(num_top: int, token_bytes: TokenBytes) -> MakeChoice:
    """Returns a function that makes the choices of a streamed chat response.

    The choices from `chat_role_choices` must be sent first.

    Args:
        num_top: Number of most likely tokens to list for each token, if log-probabilities were requested.
        token_bytes: Bytes of the output tokens.
    """

    def choice(index: int, completion: CompletionOutput, _: RequestOutput) -> dict[str, Any]:
        delta = {"content": completion.text} if completion.text else {}
        logprobs = _chat_logprobs(completion, num_top, token_bytes)
        return {"index": index, "delta": delta, "logprobs": logprobs, **_finish(completion)}

    return choice


def chat_role_choices(num_choices: int) -> list[dict[str, Any]]:
    """Returns the first choices of a streamed chat response, which contain only the role."""
    role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return [{"index": index, **role} for index in range(num_choices)]


def _finish(completion: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _chat_logprobs(
    completion: CompletionOutput, num_top: int, token_bytes: TokenBytes
) -> dict[str, Any] | None:
    content = chat_logprobs(completion, num_top, token_bytes)
    return None if content is None else {"content": content}

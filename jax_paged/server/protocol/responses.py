"""What the server answers: choices, token counts, log-probabilities, and errors in OpenAI's envelope."""

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

# Makes one entry of "choices" from its index in the answer, an output or the newest part of one, and the
# request's output that this is part of.
MakeChoice = Callable[[int, CompletionOutput, RequestOutput], dict[str, Any]]


class ApiError(Exception):
    """An error as clients see it.

    Args:
        message: What is wrong.
        status: HTTP status.
        param: The field of the request that is wrong; None if it is not a single field.
        code: A name for programs to compare with, such as "model_not_found".
        headers: Of the answer, beside those that every answer has.
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
        # Whoever sends much does not get all of it back.
        super().__init__(shortened(message, 800))
        self.status = status
        self.param = param and shortened(param)
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """Returns the error in OpenAI's envelope."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
        }

    def response(self) -> Response:
        """Returns the error as a whole answer."""
        return json_response(self.body(), self.status, self.headers)


def too_long(message: str, max_model_len: int, param: str | None) -> ApiError:
    """Returns the error for a prompt that is too long, alone or with its output; clients know OpenAI's words.

    Args:
        message: What is too long.
        max_model_len: The limit, in tokens.
        param: The field of the request.
    """
    return ApiError(
        f"This model's maximum context length is {max_model_len} tokens: {message}",
        param=param,
        code="context_length_exceeded",
    )


def asleep_error(error: Exception) -> ApiError:
    """Returns the error for a request that comes while the engine sleeps: its sender tries again."""
    return ApiError(str(error), status=503, code="sleeping", headers={"Retry-After": "1"})


def unknown_model(name: str, *served: str) -> ApiError:
    """Returns the error for a name that is not one of those that are served."""
    return ApiError(
        str(ArgumentError("model", name, one_of(served))),
        status=404,
        param="model",
        code="model_not_found",
    )


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns an answer whose body is JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def validation_error(errors: Sequence[Any]) -> ApiError:
    """Returns the error for a body that does not have the right form.

    Args:
        errors: The errors that pydantic found; those of the first wrong field are reported.
    """
    kind, location = errors[0]["type"], [str(part) for part in errors[0]["loc"][1:]]
    if kind == "json_invalid":
        return ApiError(f"the body is not JSON: {errors[0]['ctx']['error']}")
    if not location:
        if isinstance(errors[0]["input"], bytes):  # FastAPI reads JSON only where this header says so
            return ApiError("the body must be JSON, with the header Content-Type: application/json")
        return ApiError("the body is not a JSON object")
    param = location[0]
    if kind == "extra_forbidden":
        return ApiError(f"`{'.'.join(location)}` is not a field that this server knows", param=param)
    if kind == "missing":
        return ApiError(f"`{'.'.join(location)}` is missing", param=param)
    # A field of several types has an error for each of them.
    messages = dict.fromkeys(e["msg"] for e in errors if str(e["loc"][1]) == param)
    return ApiError(
        f"`{param}` is invalid: {'; or: '.join(messages)}, got {shown(errors[0]['input'])}", param=param
    )


def request_error(output: RequestOutput) -> ApiError | None:
    """Returns the error that a request has ended with, or None."""
    for completion in output.outputs:
        reason = completion.stop_reason
        text = reason if completion.finish_reason == "abort" and isinstance(reason, str) else ""
        if text.startswith(f"{NO_TOKEN_ALLOWED}: "):
            return ApiError(f"the form of the output can't be followed any further: {shortened(text, 300)}")
        if text == NO_TOKEN_ALLOWED:
            return ApiError(
                "the request leaves no token: allowed_token_ids, bad_words, min_tokens and the form of the "
                "output exclude all"
            )
        if completion.finish_reason == "abort":
            return ApiError(f"the request was aborted: {reason or 'by the server'}", status=500)
        if completion.finish_reason == "error":
            return ApiError(
                f"the request never ran: {reason}. Shorten the prompt, ask for fewer outputs, or start the "
                "server with fewer pinned prefixes or a larger pool (--kv-cache-memory-bytes, "
                "--num-gpu-blocks-override)",
                status=503,
            )
    return None


def num_prompt_tokens(output: RequestOutput) -> int:
    """Returns the number of tokens that the client sent."""
    # Of an encoder-decoder model, the encoder's: the decoder's prompt is one token that nobody sent.
    return len(output.encoder_prompt_token_ids or output.prompt_token_ids)


def usage(outputs: Sequence[RequestOutput], num_output_tokens: int) -> dict[str, Any]:
    """Returns the token counts of an answer.

    Args:
        outputs: One output per prompt.
        num_output_tokens: Tokens of all choices together.
    """
    num_prompt = sum(num_prompt_tokens(output) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def completion_choices(num_choices: int, token_bytes: TokenBytes, echo: Echo | None = None) -> MakeChoice:
    """Returns a function that makes the choices of a /v1/completions answer, streamed or not.

    Args:
        num_choices: Of the whole answer.
        token_bytes: Of the outputs.
        echo: Puts the prompt in front of each choice; None for nothing.
    """
    # Where the next part of each choice begins in the choice's text; None before the first.
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
                own = front.logprobs(output)
                logprobs = own if front.only_prompt else joined(own, logprobs)
        if echo and echo.only_prompt:
            text = ""
        return {"index": index, "text": prompt + text, "logprobs": logprobs, **_finish(completion)}

    return choice


def chat_messages(num_top: int, token_bytes: TokenBytes) -> MakeChoice:
    """Returns a function that makes the choices of a chat answer.

    Args:
        num_top: Most likely tokens to list beside each token, if log-probabilities were asked for.
        token_bytes: Of the outputs.
    """

    def choice(index: int, completion: CompletionOutput, _: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": completion.text}
        logprobs = _chat_logprobs(completion, num_top, token_bytes)
        return {"index": index, "message": message, "logprobs": logprobs, **_finish(completion)}

    return choice


def chat_deltas(num_top: int, token_bytes: TokenBytes) -> MakeChoice:
    """Returns a function that makes the choices of a streamed chat answer; those of `chat_roles` come first.

    Args:
        num_top: Most likely tokens to list beside each token, if log-probabilities were asked for.
        token_bytes: Of the outputs.
    """

    def choice(index: int, completion: CompletionOutput, _: RequestOutput) -> dict[str, Any]:
        delta = {"content": completion.text} if completion.text else {}
        logprobs = _chat_logprobs(completion, num_top, token_bytes)
        return {"index": index, "delta": delta, "logprobs": logprobs, **_finish(completion)}

    return choice


def chat_roles(num_choices: int) -> list[dict[str, Any]]:
    """Returns the choices that a streamed chat answer begins with: who speaks."""
    role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    return [{"index": index, **role} for index in range(num_choices)]


def _finish(completion: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}


def _chat_logprobs(
    completion: CompletionOutput, num_top: int, token_bytes: TokenBytes
) -> dict[str, Any] | None:
    content = chat_logprobs(completion, num_top, token_bytes)
    return None if content is None else {"content": content}

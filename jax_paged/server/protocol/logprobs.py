"""Log-probabilities in the forms of the API, and prompts that are repeated in front of their outputs."""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobDict


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """The bytes that tokens add to the text of an output.

    Args:
        tokenizer: Of the model; None if the engine has none.
        skip_special_tokens: Whether special tokens add nothing.
    """

    tokenizer: Tokenizer | None
    skip_special_tokens: bool

    def of(self, token_id: int, logprob: Logprob) -> bytes:
        """Returns the bytes of a token; none if the text leaves it out."""
        text, tokenizer = logprob.decoded_token or "", self.tokenizer
        if tokenizer is None:
            return text.encode()
        if not tokenizer.adds_text(token_id, skip_special_tokens=self.skip_special_tokens):
            return b""
        # At the start of a text, a tokenizer may leave out the leading space that the token has elsewhere.
        return tokenizer.token_bytes(token_id) if "\ufffd" in text else text.encode()

    def sizes(self, token_ids: Sequence[int]) -> list[int]:
        """Returns how many bytes each token of an output adds to its text."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return [0] * len(token_ids)
        skip = self.skip_special_tokens
        return [
            len(tokenizer.token_bytes(i)) if tokenizer.adds_text(i, skip_special_tokens=skip) else 0
            for i in token_ids
        ]


class TextOffsets:
    """The character of a text in which each token begins.

    Args:
        start: Characters before the first token.
    """

    def __init__(self, start: int) -> None:
        self._num_characters = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> int:
        """Returns where a token begins, and goes on to its end.

        Args:
            data: The bytes of the token. They may be a part of a character.
        """
        start = self._num_characters
        self._num_characters += len(self._decoder.decode(data))
        return start


@dataclasses.dataclass(frozen=True)
class Echo:
    """What a request with `echo` gets in front of each of its outputs: the prompt.

    Args:
        tokenizer: The engine's.
        only_prompt: Whether the output is left out: the engine draws a token where max_tokens is 0.
        is_cut: Whether the prompt may have lost tokens of its text.
    """

    tokenizer: Tokenizer
    only_prompt: bool
    is_cut: bool

    def text(self, output: RequestOutput) -> str:
        """Returns the prompt's text."""
        if output.prompt is not None and not self.is_cut:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def logprobs(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the prompt's log-probabilities, if they were asked for; the first token has none."""
        entries = output.prompt_logprobs
        assert entries is not None, "echo with logprobs asks for prompt_logprobs"
        text = self.text(output)
        return {
            "tokens": [self.tokenizer.token_text(token_id) for token_id in output.prompt_token_ids],
            "token_logprobs": [entry and next(iter(entry.values())).logprob for entry in entries],
            "top_logprobs": [entry and _by_text(entry) for entry in entries],
            "text_offset": self._offsets(text.encode(), output.prompt_token_ids, len(text)),
        }

    def _offsets(self, text: bytes, token_ids: Sequence[int], most: int) -> list[int]:
        """Returns the character of a prompt in which each of its tokens begins, at most `most`."""
        offsets, result, end = TextOffsets(0), [], 0
        for token_id in token_ids:
            is_special = not self.tokenizer.adds_text(token_id, skip_special_tokens=True)
            data = _bytes_in(text, end, self.tokenizer.token_bytes(token_id), is_special)
            result.append(min(offsets.take(data), most))
            end += len(data)
        return result


def completion_logprobs(
    logprobs: Sequence[TokenLogprobDict], offsets: TextOffsets, token_bytes: TokenBytes
) -> dict[str, Any]:
    """Returns the log-probabilities of a completion, or of the newest part of one.

    Args:
        logprobs: One per token.
        offsets: Where the tokens begin; goes on to the end of the last one.
        token_bytes: Of the completion.
    """
    sampled = [next(iter(entry.items())) for entry in logprobs]
    return {
        "tokens": [x.decoded_token or "" for _, x in sampled],
        "token_logprobs": [x.logprob for _, x in sampled],
        "top_logprobs": [_by_text(entry) for entry in logprobs],
        "text_offset": [offsets.take(token_bytes.of(*pair)) for pair in sampled],
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the log-probabilities of a completion from those of its two parts."""
    return {name: values + second[name] for name, values in first.items()}


def chat_logprobs(
    output: CompletionOutput, num_top: int, token_bytes: TokenBytes
) -> list[dict[str, Any]] | None:
    """Returns the log-probabilities of a chat's answer, one per token; None if they were not asked for.

    Args:
        output: The answer, or the newest part of it.
        num_top: Most likely tokens to list beside each token; -1 lists all that there are.
        token_bytes: Of the answer.
    """
    if output.logprobs is None:
        return None

    def described(token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = list(token_bytes.of(token_id, logprob))
        return {"token": logprob.decoded_token or "", "logprob": logprob.logprob, "bytes": data}

    content = []
    for entry in output.logprobs:
        sampled, *_ = entry.items()
        top = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        top = top if num_top == -1 else top[:num_top]
        content.append({**described(*sampled), "top_logprobs": [described(*x) for x in top]})
    return content


def prompt_logprobs(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None] | None:
    """Returns the prompt's log-probabilities in vLLM's form, or None if they were not asked for."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if entry is None else {str(i): dataclasses.asdict(x) for i, x in entry.items()}
        for entry in output.prompt_logprobs
    ]


def _bytes_in(text: bytes, start: int, token: bytes, is_special: bool) -> bytes:
    """Returns the bytes of a prompt's text, from `start` on, that one of its tokens stands for."""
    if text.startswith(token, start):
        return token
    if is_special:
        return b""  # the tokenizer has added it
    # Some tokenizers put a space in front of the text.
    is_space = token.startswith(b" ") and text.startswith(token[1:], start)
    return token[is_space:]


def _by_text(entry: TokenLogprobDict) -> dict[str, float]:
    top: dict[str, float] = {}
    for logprob in entry.values():
        # Tokens that are parts of characters have the same text: the likeliest of them is shown.
        text = logprob.decoded_token or ""
        top[text] = max(logprob.logprob, top.get(text, logprob.logprob))
    return top

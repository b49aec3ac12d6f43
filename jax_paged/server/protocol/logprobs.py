"""Log-probabilities in the formats of the API, and prompts that are echoed in front of their outputs."""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobDict


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """The bytes that each token adds to the text of an output.

    Args:
        tokenizer: Tokenizer of the model; None if the engine has none.
        skip_special_tokens: Whether special tokens are omitted from the text.
    """

    tokenizer: Tokenizer | None
    skip_special_tokens: bool

    def bytes_of(self, token_id: int, logprob: Logprob) -> bytes:
        """Returns the bytes that a token adds to the text; empty if the text omits the token."""
        text, tokenizer = logprob.decoded_token or "", self.tokenizer
        if tokenizer is None:
            return text.encode()
        if not tokenizer.adds_text(token_id, skip_special_tokens=self.skip_special_tokens):
            return b""
        # The token's bytes are used only if the decoded text has incomplete characters. Otherwise the text is
        # better, because the bytes may include a leading space that the tokenizer omits at the start of an
        # output.
        return tokenizer.token_bytes(token_id) if "\ufffd" in text else text.encode()

    def sizes(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the number of bytes that each token adds to the text of an output."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return [0] * len(token_ids)
        skip = self.skip_special_tokens
        return [
            len(tokenizer.token_bytes(i)) if tokenizer.adds_text(i, skip_special_tokens=skip) else 0
            for i in token_ids
        ]


class TextOffsets:
    """Positions (in characters) of consecutive tokens in a text.

    Args:
        start: Number of characters before the first token.
    """

    def __init__(self, start: int) -> None:
        self._num_characters = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> int:
        """Returns the position of the next token, and advances to the end of that token.

        Args:
            data: Bytes of the token. A character may be divided between tokens.
        """
        start = self._num_characters
        self._num_characters += len(self._decoder.decode(data))
        return start


@dataclasses.dataclass(frozen=True)
class Echo:
    """The prompt that a request with `echo` receives in front of each output.

    Args:
        tokenizer: Tokenizer of the model.
        only_prompt: Whether the output is omitted because max_tokens is 0. (The engine samples a token
            anyway.)
        is_cut: Whether the prompt may have been truncated, so that its original text cannot be used.
    """

    tokenizer: Tokenizer
    only_prompt: bool
    is_cut: bool

    def text(self, output: RequestOutput) -> str:
        """Returns the text of the prompt."""
        if output.prompt is not None and not self.is_cut:
            return output.prompt
        return self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def logprobs(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the prompt's log-probabilities. The first token has none.

        The request must have prompt_logprobs.
        """
        entries = output.prompt_logprobs
        assert entries is not None, "output of a request with echo and logprobs has no prompt_logprobs"
        text = self.text(output)
        return {
            "tokens": [self.tokenizer.token_text(token_id) for token_id in output.prompt_token_ids],
            "token_logprobs": [entry and next(iter(entry.values())).logprob for entry in entries],
            "top_logprobs": [entry and _by_text(entry) for entry in entries],
            "text_offset": self._offsets(text.encode(), output.prompt_token_ids, len(text)),
        }

    def _offsets(self, text: bytes, token_ids: Sequence[int], most: int) -> list[int]:
        """Returns the position (in characters) of each token of a prompt.

        Args:
            text: Text of the prompt in UTF-8.
            token_ids: Tokens of the prompt.
            most: Number of characters of the text, the maximum of a position.
        """
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
    """Returns the log-probabilities of a completion, or of a part of it, in the format of /v1/completions.

    Args:
        logprobs: One entry per token, whose first item is the sampled token.
        offsets: Positions of the tokens. It is advanced to the end of the last token.
        token_bytes: Bytes of the tokens.
    """
    sampled = [next(iter(entry.items())) for entry in logprobs]
    return {
        "tokens": [x.decoded_token or "" for _, x in sampled],
        "token_logprobs": [x.logprob for _, x in sampled],
        "top_logprobs": [_by_text(entry) for entry in logprobs],
        "text_offset": [offsets.take(token_bytes.bytes_of(*pair)) for pair in sampled],
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the log-probabilities of two consecutive parts of a completion as one."""
    return {name: values + second[name] for name, values in first.items()}


def chat_logprobs(
    output: CompletionOutput, num_top: int, token_bytes: TokenBytes
) -> list[dict[str, Any]] | None:
    """Returns the log-probabilities of a chat response, one entry per token; None if they were not requested.

    Args:
        output: The output or a part of it.
        num_top: Number of most likely tokens to list for each token; -1 lists all that the engine has
            returned.
        token_bytes: Bytes of the tokens.
    """
    if output.logprobs is None:
        return None

    def described(token_id: int, logprob: Logprob) -> dict[str, Any]:
        data = list(token_bytes.bytes_of(token_id, logprob))
        return {"token": logprob.decoded_token or "", "logprob": logprob.logprob, "bytes": data}

    content = []
    for entry in output.logprobs:
        sampled, *_ = entry.items()
        top = sorted(entry.items(), key=lambda item: item[1].rank or 0)
        top = top if num_top == -1 else top[:num_top]
        content.append({**described(*sampled), "top_logprobs": [described(*x) for x in top]})
    return content


def prompt_logprobs(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None] | None:
    """Returns the prompt's log-probabilities in vLLM's format, or None if they were not requested."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if entry is None else {str(i): dataclasses.asdict(x) for i, x in entry.items()}
        for entry in output.prompt_logprobs
    ]


def _bytes_in(text: bytes, start: int, token: bytes, is_special: bool) -> bytes:
    """Returns the bytes in the text of a prompt that belong to one of its tokens.

    Args:
        text: Text of the prompt in UTF-8.
        start: Position in the text (bytes) after the previous token.
        token: Bytes of the token.
        is_special: Whether the token is a special token.
    """
    if text.startswith(token, start):
        return token
    if is_special:
        return b""  # The tokenizer has added the token; it is not in the text.
    # Some tokenizers add a space at the start of the text.
    is_space = token.startswith(b" ") and text.startswith(token[1:], start)
    return token[is_space:]


def _by_text(entry: TokenLogprobDict) -> dict[str, float]:
    top: dict[str, float] = {}
    for logprob in entry.values():
        # Several tokens that are incomplete characters have the same text. The largest log-probability is
        # shown.
        text = logprob.decoded_token or ""
        top[text] = max(logprob.logprob, top.get(text, logprob.logprob))
    return top

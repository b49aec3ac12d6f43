"""Log-probabilities in the forms of the API, and prompts that are repeated in front of their outputs."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobDict


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
        text, offset, offsets = self.text(output), 0, []
        tokens = [self.tokenizer.token_text(token_id) for token_id in output.prompt_token_ids]
        for token_id, token in zip(output.prompt_token_ids, tokens, strict=True):
            offsets.append(offset)
            is_special = not self.tokenizer.adds_text(token_id, skip_special_tokens=True)
            offset = min(offset + _length_in(text, offset, token, is_special), len(text))
        return {
            "tokens": tokens,
            "token_logprobs": [entry and next(iter(entry.values())).logprob for entry in entries],
            "top_logprobs": [entry and _by_text(entry) for entry in entries],
            "text_offset": offsets,
        }


def completion_logprobs(logprobs: Sequence[TokenLogprobDict], text_offset: int) -> dict[str, Any]:
    """Returns the log-probabilities of a completion, or of the newest part of one.

    Args:
        logprobs: One per token.
        text_offset: Where the text of the first token begins.
    """
    sampled = [next(iter(entry.values())) for entry in logprobs]
    tokens = [x.decoded_token or "" for x in sampled]
    return {
        "tokens": tokens,
        "token_logprobs": [x.logprob for x in sampled],
        "top_logprobs": [_by_text(entry) for entry in logprobs],
        "text_offset": list(itertools.accumulate(map(len, tokens), initial=text_offset))[:-1],
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Returns the log-probabilities of a completion from those of its two parts."""
    return {name: values + second[name] for name, values in first.items()}


def chat_logprobs(output: CompletionOutput, num_top: int) -> list[dict[str, Any]] | None:
    """Returns the log-probabilities of a chat's answer, one per token; None if they were not asked for.

    Args:
        output: The answer, or the newest part of it.
        num_top: Most likely tokens to list beside each token; -1 lists all that there are.
    """
    if output.logprobs is None:
        return None
    content = []
    for entry in output.logprobs:
        sampled, *_ = entry.values()
        top = sorted(entry.values(), key=lambda x: x.rank or 0)
        top = top if num_top == -1 else top[:num_top]
        content.append({**_chat_logprob(sampled), "top_logprobs": [_chat_logprob(x) for x in top]})
    return content


def prompt_logprobs(output: RequestOutput) -> list[dict[str, dict[str, Any]] | None] | None:
    """Returns the prompt's log-probabilities in vLLM's form, or None if they were not asked for."""
    if output.prompt_logprobs is None:
        return None
    return [
        None if entry is None else {str(i): dataclasses.asdict(x) for i, x in entry.items()}
        for entry in output.prompt_logprobs
    ]


def _length_in(text: str, offset: int, token: str, is_special: bool) -> int:
    """Returns how many characters of a prompt's text one of its tokens stands for."""
    if text.startswith(token, offset):
        return len(token)
    if is_special:
        return 0  # the tokenizer has added it
    # Some tokenizers put a space in front of the text.
    is_space = token.startswith(" ") and text.startswith(token[1:], offset)
    return len(token) - is_space


def _by_text(entry: TokenLogprobDict) -> dict[str, float]:
    top: dict[str, float] = {}
    for logprob in entry.values():
        # Tokens that are parts of characters have the same text: the likeliest of them is shown.
        text = logprob.decoded_token or ""
        top[text] = max(logprob.logprob, top.get(text, logprob.logprob))
    return top


def _chat_logprob(logprob: Logprob) -> dict[str, Any]:
    token = logprob.decoded_token or ""
    return {"token": token, "logprob": logprob.logprob, "bytes": list(token.encode())}

"""Token ids to text while they come in: characters split over tokens, and stop strings."""

from collections.abc import Sequence
from typing import Any

from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.engine.text.text_codec import TextCodec

_REPLACEMENT = "\ufffd"
# Tokens that a token is decoded after, unless the last piece of text had more.
_MAX_CONTEXT = 5
# Tokens of an incomplete character: UTF-8 has at most four bytes.
_MAX_INCOMPLETE = 3
# What changes while text comes in.
_VALUES = ("text", "_stop_state", "_num_tokens", "_finished", "_context", "_context_text", "_pending")


class Detokenizer:
    """The text of one output, one token at a time; the cost of a token does not grow with the text.

    `text` is what has been decoded. It may end with the start of a stop string; the first `num_visible`
    characters are final, and may be shown.

    Args:
        tokenizer: The tokenizer of the model.
        prompt_token_ids: The prompt, which the output's first token may depend on (leading spaces).
        stop: Strings that end the output; they and what follows are cut off. None for none.
        skip_special_tokens: Whether special tokens add nothing to the text.
        min_tokens: Output tokens before which no stop string counts.
        include_stop: Whether a stop string stays in the text.
    """

    def __init__(
        self,
        tokenizer: TextCodec,
        prompt_token_ids: Sequence[int],
        *,
        stop: StopStrings | None = None,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._stop_state = stop.start if stop else 0
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self._finished = False
        # `text` ends with the decoded `_context`; `_pending` tokens have not (wholly) been added to it.
        self._context = list(prompt_token_ids[-_MAX_CONTEXT:])
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    @property
    def num_visible(self) -> int:
        """Characters of `text` that no later token can take back."""
        if self._finished or self._stop is None:
            return len(self.text)
        return len(self.text) - self._stop.num_open(self._stop_state)

    @property
    def is_at_start(self) -> bool:
        """Whether the next token is the first one with text, whose leading space some tokenizers drop.

        A token before it may have become no text at all: a space that was dropped.
        """
        return not (self.text or self._pending or any(map(self._adds_text, self._context)))

    def values(self) -> dict[str, Any]:
        """Returns how far it is, as values that JSON can hold."""
        return {name: getattr(self, name) for name in _VALUES}

    def restore(self, values: dict[str, Any]) -> None:
        """Goes on from where another one of the same arguments was when `values` were taken."""
        for name in _VALUES:
            setattr(self, name, values[name])

    def append(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string that the text now holds (and was cut before), or None."""
        self._num_tokens += 1
        if not self._adds_text(token_id):
            return None
        self._pending.append(token_id)
        text = self._decode([*self._context, *self._pending])
        if not text.endswith(_REPLACEMENT):
            new = self._new_text(text)
            context = self._pending if new else [*self._context, *self._pending][-_MAX_CONTEXT:]
            return self._add(new, context)
        if len(self._pending) <= _MAX_INCOMPLETE:
            return None
        # Bytes that are no text. Only the last character can still become one.
        return self._add(self._new_text(text)[:-1], self._pending[-_MAX_INCOMPLETE:], keep=1)

    def finish(self) -> str | None:
        """Adds what was held back; returns the stop string as `append` does.

        The U+FFFD that stands for an incomplete last character is shown, but no stop string can match it,
        because the model has not generated it.
        """
        if self._finished:
            return None
        new = self._new_text(self._decode([*self._context, *self._pending]))
        complete = new.rstrip(_REPLACEMENT)
        stop = self._add(complete, [])
        self._finished = True
        if stop is None:
            self.text += new[len(complete) :]
        return stop

    def _adds_text(self, token_id: int) -> bool:
        return self._tokenizer.adds_text(token_id, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _new_text(self, text: str) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._pending)  # bytes that are no text have changed how their run is decoded

    def _add(self, new: str, context: list[int], *, keep: int = 0) -> str | None:
        """Adds text and makes `context` the tokens that the next ones are decoded after."""
        self._context, self._pending = context, []
        text = self._decode(context)
        self._context_text = text[: len(text) - keep]
        self.text += new
        if self._stop is None:
            return None
        self._stop_state, match = self._stop.feed(self._stop_state, new)
        if match is None or self._num_tokens <= self._min_tokens:
            return None
        end = match.start + len(match.stop) if self._include_stop else match.start
        self.text = self.text[: len(self.text) - len(new) + end]
        self._finished = True
        return match.stop

"""Detokenizer: converts the tokens of an output to text as they arrive, and cuts it off at stop strings."""

from collections.abc import Sequence
from typing import Any

from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.engine.text.text_codec import TextCodec

_REPLACEMENT = "\ufffd"
# Maximum number of tokens that are decoded in front of a new token as its context.
_MAX_CONTEXT = 5
# Maximum number of tokens of an incomplete character: a character in UTF-8 has at most four bytes.
_MAX_INCOMPLETE = 3
# The attributes that change when a token is added.
_VALUES = ("text", "_stop_state", "_num_tokens", "_finished", "_context", "_context_text", "_pending")


class Detokenizer:
    """Text of one output, which grows token by token. The cost of a token does not grow with the text.

    A token's text may depend on the tokens before it, so each new token is decoded together with the last few
    tokens (`_context`), whose own text is then removed. If the new text ends in U+FFFD, the last character
    may be incomplete; its tokens then wait in `_pending`.

    `text` is the text so far. It may end with the beginning of a stop string. Its first `num_visible`
    characters are final and may be shown.

    Args:
        tokenizer: The tokenizer of the model.
        prompt_token_ids: The prompt. The text of the first output token may depend on it (leading spaces).
        stop: Strings that end the output; None for none. The text is cut off before the stop string.
        skip_special_tokens: Whether to leave special tokens out of the text.
        min_tokens: Stop strings that are complete after at most this number of output tokens are ignored.
        include_stop: Whether the text is cut off after the stop string instead of before it.
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
        # `_context_text` is the text of the tokens in `_context`. It belongs to the prompt or is part of
        # `text`. The text of the tokens in `_pending` is not part of `text` yet.
        self._context = list(prompt_token_ids[-_MAX_CONTEXT:])
        self._context_text = self._decode(self._context)
        self._pending: list[int] = []

    @property
    def num_visible(self) -> int:
        """The number of characters of `text` that no later token can remove."""
        if self._finished or self._stop is None:
            return len(self.text)
        return len(self.text) - self._stop.num_held_back(self._stop_state)

    @property
    def is_at_start(self) -> bool:
        """Whether the next token is the first one with text, whose leading space some tokenizers drop.

        Tokens before it may have produced no text, for example a space that was dropped.
        """
        return not (self.text or self._pending or any(map(self._adds_text, self._context)))

    def values(self) -> dict[str, Any]:
        """Returns the state as JSON-compatible values."""
        return {name: getattr(self, name) for name in _VALUES}

    def restore(self, values: dict[str, Any]) -> None:
        """Restores the state from the result of `values`, for a detokenizer with the same arguments."""
        for name in _VALUES:
            setattr(self, name, values[name])

    def append(self, token_id: int) -> str | None:
        """Adds a token. Returns the stop string at which the text was cut off, or None."""
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
        # The tokens are not valid UTF-8. Only the last character can still become valid.
        return self._add(self._new_text(text)[:-1], self._pending[-_MAX_INCOMPLETE:], keep=1)

    def finish(self) -> str | None:
        """Adds the text that was held back. Returns the stop string at which the text was cut off, or None.

        An incomplete last character is shown as U+FFFD. No stop string can match it, because the model has
        not generated U+FFFD.
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
        # Invalid bytes have changed how the tokens before them are decoded.
        return self._decode(self._pending)

    def _add(self, new: str, context: list[int], *, keep: int = 0) -> str | None:
        """Adds text. Returns the stop string at which the text was cut off, or None.

        Args:
            new: The new text.
            context: The tokens that are decoded in front of the next token.
            keep: Number of characters at the end of the context's text that are not part of `text` yet.
        """
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

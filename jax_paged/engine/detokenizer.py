"""Token ids to text while they come in: characters split over tokens, and stop strings."""

from collections.abc import Sequence

from jax_paged.engine.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 5  # tokens that a token is decoded after, unless the last piece of text had more
_MAX_INCOMPLETE = 3  # tokens of an incomplete character: UTF-8 has at most four bytes


class Detokenizer:
    """The text of one output, a token at a time at constant cost.

    `text` is what has been decoded. Its end may be the start of a stop string; `num_visible` characters of
    it can't be, and may be shown.

    Args:
        tokenizer: The tokenizer of the model.
        prompt_token_ids: The prompt, which the output's first token may depend on (leading spaces).
        stop: Strings that end the output; they and what follows are cut off.
        skip_special_tokens: Whether special tokens add nothing to the text.
        min_tokens: Output tokens before which no stop string counts.
        include_stop: Whether a stop string stays in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
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
        if self._finished or not self._stop:
            return len(self.text)
        return min(_partial_match(self.text, stop) for stop in self._stop)

    def append(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string that the text now holds (and was cut before), or None."""
        self._num_tokens += 1
        if not self._tokenizer.adds_text(token_id, skip_special_tokens=self._skip_special_tokens):
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
        """Adds what was held back; returns the stop string as `append` does."""
        stop = self._add(self._new_text(self._decode([*self._context, *self._pending])), [])
        self._finished = True
        return stop

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
        return self._cut_at_stop(len(new)) if self._num_tokens > self._min_tokens else None

    def _cut_at_stop(self, num_new: int) -> str | None:
        """Cuts the text before the stop string that starts first."""
        first, found = len(self.text), None
        for stop in self._stop:
            position = self.text.find(stop, max(0, len(self.text) - num_new - len(stop) + 1))
            if position >= 0 and (position < first or found is None):
                first, found = position, stop
        if found is not None:
            self.text = self.text[: first + len(found) if self._include_stop else first]
            self._finished = True
        return found


def _partial_match(text: str, stop: str) -> int:
    """Returns where the longest end of `text` that `stop` could start with begins; len(text) for none."""
    position = max(0, len(text) - len(stop) + 1)
    while (position := text.find(stop[0], position)) >= 0:
        if stop.startswith(text[position:]):
            return position
        position += 1
    return len(text)

"""Keeps what people write text: the control tokens of a chat come from its template alone.

A template joins its own control tokens and the messages into one text, in which a tokenizer can't tell
"<|end|>" of the template from "<|end|>" that a user has typed. So the latter are marked inside before the
template is rendered: what still is a control token then is the template's.
"""

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from jax_paged.errors import ArgumentError

# Of private use: characters that texts hardly have; one that the messages at hand do not have is the mark.
_MARKS = tuple(map(chr, range(0xF0000, 0xF0100)))


class ControlTokens:
    """The control tokens of a tokenizer, which are those that it calls special; thread-safe.

    Args:
        backend: The tokenizer; not changed later.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.ids = frozenset(i for i, token in added.items() if token.special)
        self._backend = backend
        self._texts = {i: added[i].content for i in self.ids}
        texts = sorted({text for text in self._texts.values() if len(text) > 1})
        # The first character of a control token; characters that none begins with are passed quickly.
        starts = "".join(sorted({re.escape(text[0]) for text in texts}))
        pattern = f"[{starts}](?<=(?={_any_of(texts)}).)" if texts else "(?!)"
        self._begin = re.compile(pattern, re.DOTALL)
        self._beginnings = tuple({text[:k] for text in texts for k in range(1, len(text))})

    @functools.cached_property
    def text_backend(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that takes control tokens for text; the first use makes it."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = True
        return backend

    def id_of(self, text: str) -> int | None:
        """Returns the id of a control token; None if a text is none."""
        return next((i for i, own in self._texts.items() if own == text), None)

    def marked[T](self, value: T) -> tuple[T, str]:
        """Marks every control token in a text, and a beginning of one at its end.

        Args:
            value: A string, or lists and dicts of whatever; not changed.

        Returns:
            A value with marked texts, and the mark; the value as it was and "", if there is nothing to mark.
        """
        texts = list(_texts(value))
        if not any(text.endswith(self._beginnings) or self._begin.search(text) for text in texts):
            return value, ""
        mark = next((m for m in _MARKS if not any(m in text for text in texts)), None)
        if mark is None:
            allowed = "texts without at least one of the characters U+F0000 to U+F00FF"
            raise ArgumentError("messages", value, allowed)
        return self._with_marks(value, mark), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Returns the ids of a rendered template; what is marked in it is text, and the marks are left out.

        Args:
            text: In Unicode that is valid.
            mark: As `marked` returned it; not "".
        """
        clean = text.replace(mark, "")
        # Unlike encode, this lets other Python threads run meanwhile.
        whole, marked = self._backend.encode_batch([clean, text], add_special_tokens=False)
        own = self._found(text, marked)
        if [i for i, *_ in own] == [i for i, *_ in self._found(clean, whole)]:
            return whole.ids  # what was marked is no control token without its mark either
        ids, end_of_last = [], 0
        for token_id, begin, end in own:
            ids += [*self._encode_text(text[end_of_last:begin], mark), token_id]
            end_of_last = end
        return ids + self._encode_text(text[end_of_last:], mark)

    def _encode_text(self, text: str, mark: str) -> list[int]:
        ids = self.text_backend.encode(text.replace(mark, ""), add_special_tokens=False).ids
        if self.ids.isdisjoint(ids):
            return ids
        # Some models of tokenizers (Unigram) know control tokens as words, and only in parts they are none.
        parts = [self.text_backend.encode(part, add_special_tokens=False).ids for part in text.split(mark)]
        return [token_id for part in parts for token_id in part]

    def _found(self, text: str, encoding: tokenizers.Encoding) -> list[tuple[int, int, int]]:
        """Returns the control tokens that a text spells out: (id, begin, end), with swallowed spaces."""
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [
            (i, begin, end)
            for i, (begin, end) in pairs
            if i in self.ids and text[begin:end].strip() == self._texts[i].strip()
        ]

    def _with_marks(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            text = self._begin.sub(lambda found: found.group() + mark, value)
            return text + mark if text.endswith(self._beginnings) else text
        if isinstance(value, dict):
            return {self._with_marks(k, mark): self._with_marks(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            items = [self._with_marks(item, mark) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value


def _any_of(texts: list[str]) -> str:
    """Returns a pattern of what begins with any of some texts, which looks at each character once."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        by_first.setdefault(text[0], []).append(text[1:])
    choices = [re.escape(first) + _any_of(rest) for first, rest in by_first.items()]
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)

"""Protection of chats from control tokens in messages.

A chat template renders its own control tokens, such as "<|end|>", and the messages into one text. If a user
writes "<|end|>" in a message, the tokenizer can't tell it from the one of the template. Therefore, before the
template is rendered, `ControlTokens.marked` inserts a mark into every control token in the messages, after
its first character. The control tokens that are intact in the rendered text then belong to the template.
`ControlTokens.encode` removes the marks and encodes the marked text as ordinary text.
"""

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from jax_paged.errors import ArgumentError

# Private-use characters, which are rare in text. The first one that the messages do not contain is the mark.
_MARKS = tuple(map(chr, range(0xF0000, 0xF0100)))


class ControlTokens:
    """The control tokens of a tokenizer, which are its special tokens. Thread-safe.

    Args:
        backend: The tokenizer. It must not change later.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        self.ids = frozenset(i for i, token in added.items() if token.special)
        self._backend = backend
        self._texts = {i: added[i].content for i in self.ids}
        texts = sorted({text for text in self._texts.values() if len(text) > 1})
        # Matches the first character of a control token. The character class comes first because it skips
        # other text quickly.
        starts = "".join(sorted({re.escape(text[0]) for text in texts}))
        pattern = f"[{starts}](?<=(?={_trie_regex(texts)}).)" if texts else "(?!)"
        self._control_token_regex = re.compile(pattern, re.DOTALL)
        self._prefixes = tuple({text[:k] for text in texts for k in range(1, len(text))})

    @functools.cached_property
    def text_backend(self) -> tokenizers.Tokenizer:
        """A copy of the tokenizer that encodes control tokens as ordinary text, made on first access."""
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = True
        return backend

    def id_of(self, text: str) -> int | None:
        """Returns the id of a control token; None if the text is not a control token."""
        return next((i for i, content in self._texts.items() if content == text), None)

    def marked[T](self, value: T) -> tuple[T, str]:
        """Returns a value with a mark in every control token, and the mark.

        A mark is also added to a text that ends with the beginning of a control token, because the template
        might complete the control token.

        Args:
            value: A string, or nested lists and dicts that contain strings. It is not changed.

        Returns:
            The marked value and the mark; or the value itself and "" if there is nothing to mark.

        Raises:
            ValueError: If the texts contain all characters that may be marks.
        """
        texts = list(_texts(value))
        if not any(text.endswith(self._prefixes) or self._control_token_regex.search(text) for text in texts):
            return value, ""
        mark = next((m for m in _MARKS if not any(m in text for text in texts)), None)
        if mark is None:
            allowed = "texts that do not contain all characters from U+F0000 to U+F00FF"
            raise ArgumentError("messages", value, allowed)
        return self._with_marks(value, mark), mark

    def encode(self, text: str, mark: str) -> list[int]:
        """Returns the token ids of a rendered template, without marks. Marked text becomes ordinary text.

        Args:
            text: The rendered template, in valid Unicode.
            mark: The mark that `marked` returned; not "".
        """
        clean = text.replace(mark, "")
        # Unlike encode, encode_batch lets other Python threads run meanwhile.
        whole, marked = self._backend.encode_batch([clean, text], add_special_tokens=False)
        from_template = self._control_tokens_in(text, marked)
        if [i for i, *_ in from_template] == [i for i, *_ in self._control_tokens_in(clean, whole)]:
            return whole.ids  # removing the marks creates no control tokens
        ids, end_of_last = [], 0
        for token_id, begin, end in from_template:
            ids += [*self._encode_text(text[end_of_last:begin], mark), token_id]
            end_of_last = end
        return ids + self._encode_text(text[end_of_last:], mark)

    def _encode_text(self, text: str, mark: str) -> list[int]:
        ids = self.text_backend.encode(text.replace(mark, ""), add_special_tokens=False).ids
        if self.ids.isdisjoint(ids):
            return ids
        # Unigram models may have control tokens as ordinary entries of their vocabulary. Text that is split
        # at the marks does not contain these entries.
        parts = [self.text_backend.encode(part, add_special_tokens=False).ids for part in text.split(mark)]
        return [token_id for part in parts for token_id in part]

    def _control_tokens_in(self, text: str, encoding: tokenizers.Encoding) -> list[tuple[int, int, int]]:
        """Returns (id, begin, end) of each control token that the text contains.

        The range includes spaces that the tokenizer strips around the control token.
        """
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [
            (i, begin, end)
            for i, (begin, end) in pairs
            if i in self.ids and text[begin:end].strip() == self._texts[i].strip()
        ]

    def _with_marks(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            text = self._control_token_regex.sub(lambda found: found.group() + mark, value)
            return text + mark if text.endswith(self._prefixes) else text
        if isinstance(value, dict):
            return {self._with_marks(k, mark): self._with_marks(v, mark) for k, v in value.items()}
        if isinstance(value, list | tuple):
            items = [self._with_marks(item, mark) for item in value]
            return items if isinstance(value, list) else tuple(items)
        return value


def _trie_regex(texts: list[str]) -> str:
    """Returns a regular expression that matches the texts and examines each character only once.

    If one of the texts is the beginning of another, the expression only matches the shorter one.
    """
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        by_first.setdefault(text[0], []).append(text[1:])
    choices = [re.escape(first) + _trie_regex(rest) for first, rest in by_first.items()]
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

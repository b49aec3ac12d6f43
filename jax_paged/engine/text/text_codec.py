"""TextCodec: converts text to token ids and back."""

import functools
from collections.abc import Sequence

import tokenizers
from tokenizers import normalizers

from jax_paged.arguments.shown_values import Text
from jax_paged.engine.text.control_tokens import ControlTokens
from jax_paged.engine.text.vocabulary import Vocabulary
from jax_paged.errors import ArgumentError, TooLongError

# Length (characters) of text that is tokenized in less than 2 ms.
_SHORT_TEXT = 2048


class TextCodec:
    """Converter between text and token ids. Thread-safe.

    Args:
        backend: The tokenizer. Its padding and truncation are turned off.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._control = ControlTokens(backend)
        self._vocabulary = Vocabulary(backend)
        self._token_texts: dict[int, str] = {}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_model_len: int | None = None
    ) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: The text, in valid Unicode.
            add_special_tokens: Whether to add the special tokens that the tokenizer itself adds.
            max_model_len: Maximum number of tokens; None for no limit. Text that certainly has more tokens is
                not tokenized.

        Raises:
            TooLongError: If the text certainly has more than `max_model_len` tokens.
            ValueError: If the text is not valid Unicode.
        """
        self.check_length(text, max_model_len)
        check_unicode(text)
        if len(text) <= _SHORT_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # Unlike encode, encode_batch_fast lets other Python threads run. 100,000 characters take 80 ms.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Ids that the tokenizer does not know are skipped."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def adds_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Returns whether `decode` converts a token to text: it is known to the tokenizer and not skipped."""
        skipped = skip_special_tokens and token_id in self._control.ids
        return not skipped and self._backend.id_to_token(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, with its leading space; U+FFFD for a part of a character."""
        text = self._token_texts.get(token_id)
        if text is None:
            anchor, start = self._decode_prefix
            text = self.decode([*anchor, token_id], skip_special_tokens=False)[start:]
            self._token_texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes of the text of one token, with its leading space.

        Unlike `token_text`, it returns the exact bytes of a token that is a part of a character.
        """
        text = self.token_text(token_id)
        own = self._vocabulary.raw_bytes(token_id) if "\ufffd" in text else None
        return text.encode() if own is None else own

    def token_id(self, text: str) -> int | None:
        """Returns the id of an entry of the vocabulary; None if there is no such entry."""
        return self._backend.token_to_id(text)

    def control_token_id(self, text: str) -> int | None:
        """Returns the id of a control token, such as "<|end|>"; None if the text is not a control token."""
        return self._control.id_of(text)

    def tokens(self, token_ids: Sequence[int]) -> list[str | None]:
        """Returns the vocabulary entries of token ids, which are not decoded text; None for unknown ids."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def min_num_tokens_of(self, text: str) -> int:
        """Returns a lower bound for the number of tokens of a text; 0 if none is known for the tokenizer."""
        max_characters = self._vocabulary.max_characters
        if max_characters is None:
            return 0
        num = sum(map(len, text.split())) if self._vocabulary.may_drop_space else len(text)
        return -(-num // max_characters)

    def encode_pair(
        self, first: str, second: str, *, max_model_len: int | None = None
    ) -> tuple[list[int], int | None]:
        """Returns the token ids of two texts as one sequence, and where the second text begins.

        Args:
            first: The first text, in valid Unicode.
            second: The second text, in valid Unicode.
            max_model_len: Maximum number of tokens; None for no limit.

        Returns:
            The token ids, and the index of the second text's first token; None in place of the index if the
            tokenizer has no token types.

        Raises:
            TooLongError: If one of the texts certainly has more than `max_model_len` tokens.
            ValueError: If one of the texts is not valid Unicode.
        """
        for text in (first, second):
            self.check_length(text, max_model_len)
        check_unicode(first + second)
        encoding = self._backend.encode(first, second)
        return encoding.ids, encoding.type_ids.index(1) if 1 in encoding.type_ids else None

    def check_length(self, text: str, max_model_len: int | None) -> None:
        """Raises TooLongError if a text certainly has too many tokens, without tokenizing it.

        Tokenizing a long text is expensive. A text that passes this check may still have too many tokens.

        Args:
            text: The text.
            max_model_len: Maximum number of tokens; None for no limit.

        Raises:
            TooLongError: If `min_num_tokens_of` the text exceeds `max_model_len`.
        """
        if max_model_len is not None:
            least = self.min_num_tokens_of(text)
            if least > max_model_len:
                raise TooLongError(Text(f"at least {least}"), max_model_len)

    @functools.cached_property
    def special_tokens_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        encoding = self._backend.encode("a")
        mask = encoding.special_tokens_mask
        num_before = mask.index(0) if 0 in mask else len(mask)
        num_after = mask[::-1].index(0) if 0 in mask else 0
        return encoding.ids[:num_before], encoding.ids[len(mask) - num_after :]

    def lowercase_input(self) -> None:
        """Makes the tokenizer convert text to lower case, except for special tokens in the text.

        Must be called before the tokenizer is used.
        """
        given = self._backend.normalizer
        first = normalizers.Lowercase()
        self._backend.normalizer = first if given is None else normalizers.Sequence([first, given])

    def to_json(self) -> str:
        """Returns the tokenizer in the format of tokenizer.json."""
        return self._backend.to_str()

    @functools.cached_property
    def _decode_prefix(self) -> tuple[list[int], int]:
        """Token ids that precede a single token when it is decoded, and the length of their text.

        Some decoders strip the first space of a text, so a token must not be decoded alone.
        """
        for piece in ("a", "▁a"):
            token_id = self._backend.token_to_id(piece)
            if token_id is not None:
                return [token_id], len(self.decode([token_id]))
        return [], 0


def check_unicode(text: str) -> None:
    """Raises ArgumentError if a text is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError("prompt", text, f"valid Unicode ({error})") from error

"""Properties of a tokenizer's vocabulary: the bytes of tokens, and the number of characters per token."""

import functools
import itertools
import json
import re
from typing import Any

import tokenizers
from tokenizers.models import BPE

# Normalizers that delete no characters, with the largest number of characters that they combine into one.
_NORMALIZERS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that delete no characters (_KEEP_ALL), and pre-tokenizers that delete only white space.
_KEEP_ALL = frozenset({"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"})
_DELETE_SPACE = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


class Vocabulary:
    """The vocabulary of a tokenizer. Thread-safe.

    Args:
        backend: The tokenizer. It must not change later.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def raw_bytes(self, token_id: int) -> bytes | None:
        """Returns the exact bytes of a token.

        The bytes need not be valid UTF-8, because a token may be a part of a character.

        Args:
            token_id: The token.

        Returns:
            The bytes; None if the tokenizer does not decode this token byte by byte.
        """
        piece = self._backend.id_to_token(token_id) or ""
        types = self._decoder_types
        found = _BYTE_PIECE.fullmatch(piece) if "ByteFallback" in types else None
        if found:
            return bytes.fromhex(found.group(1))
        if "ByteLevel" in types and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        return None

    @functools.cached_property
    def _decoder_types(self) -> frozenset[str]:
        return frozenset(part["type"] for part in _parts(self._backend.decoder))

    @functools.cached_property
    def may_drop_space(self) -> bool:
        """Whether the tokenizer may drop white space, so that no token contains it."""
        added = self._backend.get_added_tokens_decoder().values()
        types = {part["type"] for part in _parts(self._backend.pre_tokenizer)}
        return any(token.lstrip or token.rstrip for token in added) or not types.isdisjoint(_DELETE_SPACE)

    @functools.cached_property
    def max_characters(self) -> int | None:
        """The maximum number of characters that one token encodes; None if there is no maximum.

        There is no maximum if a component may delete characters or may combine any number of them into one
        token, as WordPiece does with an unknown word.
        """
        factor = 1
        for part in _parts(self._backend.normalizer):
            joined = _num_joined(part)
            if joined is None:
                return None
            factor *= joined
        if not all(_deletes_no_text(part) for part in _parts(self._backend.pre_tokenizer)):
            return None
        if not self._encodes_every_character():
            return None
        return factor * max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def _encodes_every_character(self) -> bool:
        """Returns whether each character of a normalized text becomes a token or a part of a token."""
        model = self._backend.model
        if not isinstance(model, BPE):
            return False
        if model.byte_fallback:
            names = (f"<0x{byte:02X}>" for byte in range(256))
            if all(model.token_to_id(name) is not None for name in names):
                return True
        parts = itertools.chain(_parts(self._backend.normalizer), _parts(self._backend.pre_tokenizer))
        is_byte_level = any(part["type"] == "ByteLevel" for part in parts)
        if is_byte_level and all(model.token_to_id(character) is not None for character in _BYTE_OF):
            return True
        return model.unk_token is not None and not model.fuse_unk


def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character of byte-level vocabularies stands for (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    pairs = [*zip(shown, shown, strict=True), *((0x100 + i, byte) for i, byte in enumerate(hidden))]
    return {chr(character): byte for character, byte in pairs}


_BYTE_OF = _byte_characters()


def _parts(component: Any) -> list[dict[str, Any]]:
    """Returns the settings of a normalizer, pre-tokenizer or decoder, one entry per component."""
    return [] if component is None else _flat(json.loads(component.__getstate__()))


def _flat(settings: dict[str, Any]) -> list[dict[str, Any]]:
    if settings["type"] != "Sequence":
        return [settings]
    (inner,) = (value for value in settings.values() if isinstance(value, list))
    return [part for item in inner for part in _flat(item)]


def _num_joined(normalizer: dict[str, Any]) -> int | None:
    """Returns the maximum number of characters that a normalizer combines into one; None for no maximum.

    A normalizer that may delete characters has no maximum either.
    """
    if normalizer["type"] != "Replace":
        return _NORMALIZERS.get(normalizer["type"])
    pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
    if not pattern or not content:  # a regular expression may match any number of characters
        return None
    return -(-len(pattern) // len(content))


def _deletes_no_text(pre_tokenizer: dict[str, Any]) -> bool:
    """Returns whether a pre-tokenizer deletes no characters except white space."""
    kind = pre_tokenizer["type"]
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer["behavior"] != "Removed"
    return kind in _KEEP_ALL or kind in _DELETE_SPACE

"""The tokenizer of a GGUF file, made for the tokenizers library.

A file has the vocabulary and the name of an algorithm: "gpt2" for byte-level BPE, or "llama" for
SentencePiece's BPE, which has scores in place of merges. For byte-level BPE, tokenizer.ggml.pre names a
regular expression.

Source: llama.cpp's llama-vocab.cpp for the meaning of the metadata; the regular expressions are those of the
models' tokenizer.json.
"""

import dataclasses
from array import array
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from jax_paged.arguments.shown_values import one_of, shown
from jax_paged.models.loading.gguf.header import GgufHeader, read_header

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPECIAL_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that begin with any number of upper case letters, and words of upper case letters.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
# In Phi-3, white space after all special tokens except these is ignored.
_PHI3_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """How byte-level BPE divides a text into words.

    Args:
        regex: Expression that matches the words; None for GPT-2's.
        splits_digits: Whether each digit is a word.
        is_nfc: Whether the text is normalized to Unicode's form NFC.
        ignores_merges: Whether a word that is an entry of the vocabulary is never divided.
        adds_bos: Whether a text begins with the start token if the file does not say.
    """

    regex: str | None = None
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = rf"{_CONTRACTION}|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}"
_QWEN2 = _PreTokenizer(rf"{_CONTRACTION}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_REST}", is_nfc=True)
_GPT_4O = (
    rf"{_LOWER_WORDS}{_CONTRACTION}?|{_UPPER_WORDS}{_CONTRACTION}?|"
    rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
)
_TEKKEN = rf"{_LOWER_WORDS}|{_UPPER_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}"
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "exaone4"), _PreTokenizer()),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _PreTokenizer(splits_digits=True),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"),
        _PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PreTokenizer(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _PreTokenizer(_GPT_4O)),
    "tekken": _PreTokenizer(_TEKKEN, ignores_merges=True, adds_bos=True),
}


@dataclasses.dataclass(frozen=True, eq=False)
class _Vocabulary:
    """The vocabulary of a file.

    Args:
        file: The file, for messages.
        metadata: The metadata of the file.
        tokens: The text of each token.
        types: The type of each token.
        ids: The id of each text.
    """

    file: Path
    metadata: dict[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, header: GgufHeader) -> "_Vocabulary":
        """Returns the vocabulary of a file.

        Raises:
            ValueError: If the tokens are missing, or if there are not as many types as tokens.
        """
        tokens = header.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise _error(header.file, header.metadata, "tokens", "a list of strings", " or pass `tokenizer`")
        types = header.metadata.get("tokenizer.ggml.token_type")
        if types is None:
            types = array("b", [_NORMAL]) * len(tokens)
        if not isinstance(types, array) or len(types) != len(tokens):
            raise _error(header.file, header.metadata, "token_type", f"a list of {len(tokens)} numbers")
        # If several tokens have the same text, the first one is used.
        ids = {text: len(tokens) - 1 - i for i, text in enumerate(reversed(tokens))}
        return cls(header.file, header.metadata, tokens, types.tolist(), ids)

    def get(self, name: str) -> Any:
        """Returns a value of the metadata; None if it is missing."""
        return self.metadata.get(f"tokenizer.ggml.{name}")

    def error(self, name: str, allowed: str, remedy: str = "") -> ValueError:
        """Returns an error about a value of the metadata."""
        return _error(self.file, self.metadata, name, allowed, remedy)

    def flag(self, name: str, *, default: bool) -> bool:
        """Returns a flag."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "a flag")
        return default if value is None else value

    def special_tokens(self) -> dict[str, str]:
        """Returns the texts of the start, end, unknown and padding token that the file declares."""
        found = {}
        for name, key in _SPECIAL_NAMES.items():
            token_id = self.get(f"{key}_token_id")
            # Some files have -1 for none, as an unsigned number.
            if token_id is None or token_id in (-1, 2**32 - 1):
                continue
            if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
                raise self.error(f"{key}_token_id", f"an id in [0, {len(self.tokens) - 1}]")
            found[name] = self.tokens[token_id]
        return found


def _error(file: Path, metadata: dict[str, Any], name: str, allowed: str, remedy: str = "") -> ValueError:
    got = shown(metadata.get(f"tokenizer.ggml.{name}"))
    return ValueError(f"`tokenizer.ggml.{name}` of {file} must be {allowed}{remedy}, got {got}")


def read_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Returns the tokenizer of a GGUF file, and its settings.

    Args:
        file: The file.

    Returns:
        The tokenizer; and a dict with the chat template (chat_template) and the texts of the special tokens
        (bos_token, eos_token, unk_token, pad_token) that the file declares.

    Raises:
        ValueError: If the tokenizer is not supported, or if values are missing or contradict each other.
    """
    header = read_header(file)
    vocabulary = _Vocabulary.read(header)
    special, model = vocabulary.special_tokens(), vocabulary.get("model")
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if make is None:
        raise vocabulary.error("model", one_of(("gpt2", "llama")), " or pass `tokenizer`")
    try:
        backend, adds_bos = make(vocabulary, special)
    except ValueError:
        raise
    except Exception as error:  # the library raises plain exceptions
        raise ValueError(f"the tokenizer of {file} can't be loaded: {error}") from error
    strips = vocabulary.metadata.get("general.architecture") == "phi3" and model == "llama"
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and text:
            rstrip = strips and text not in _PHI3_KEEP_SPACE
            is_special = kind != _USER_DEFINED
            backend.add_tokens([AddedToken(text, special=is_special, normalized=False, rstrip=rstrip)])
    bos = special.get("bos_token") if vocabulary.flag("add_bos_token", default=adds_bos) else None
    eos = special.get("eos_token") if vocabulary.flag("add_eos_token", default=False) else None
    if bos is not None or eos is not None:
        backend.post_processor = _template(vocabulary, bos, eos)
    template = header.metadata.get("tokenizer.chat_template")
    return backend, special | ({"chat_template": template} if isinstance(template, str) else {})


def _template(vocabulary: _Vocabulary, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """Returns a post-processor that adds the start token before and the end token after each text."""

    def around(name: str) -> str:
        return " ".join(filter(None, ("BOS:0" if bos else "", f"${name}:0", "EOS:0" if eos else "")))

    given = {"BOS": bos, "EOS": eos}
    tokens = [
        {"id": name, "ids": [vocabulary.ids[text]], "tokens": [text]} for name, text in given.items() if text
    ]
    return processors.TemplateProcessing(
        single=around("A"), pair=f"{around('A')} {around('B').replace(':0', ':1')}", special_tokens=tokens
    )


def _byte_level(vocabulary: _Vocabulary, special: dict[str, str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a tokenizer of type "gpt2", and whether a text begins with the start token by default."""
    name, merges = vocabulary.get("pre"), vocabulary.get("merges")
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise vocabulary.error("pre", one_of(_PRE_TOKENIZERS), " or pass `tokenizer`")
    if not isinstance(merges, list):
        raise vocabulary.error("merges", "a list of strings")
    pre = _PRE_TOKENIZERS[name]
    pairs = [(m[:i], m[i + 1 :]) for m in merges if (i := m.find(" ", 1)) > 0]
    backend = tokenizers.Tokenizer(BPE(vocabulary.ids, pairs, ignore_merges=pre.ignores_merges))
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None)]
    if pre.regex is not None:
        parts.insert(0, pre_tokenizers.Split(Regex(pre.regex), behavior="isolated"))
    if pre.splits_digits:
        parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _sentencepiece(vocabulary: _Vocabulary, special: dict[str, str]) -> tuple[tokenizers.Tokenizer, bool]:
    """Returns a tokenizer of type "llama", and whether a text begins with the start token by default."""
    scores = vocabulary.get("scores")
    if not isinstance(scores, array) or len(scores) != len(vocabulary.tokens):
        raise vocabulary.error("scores", f"a list of {len(vocabulary.tokens)} numbers")
    has_bytes = all(f"<0x{byte:02X}>" in vocabulary.ids for byte in range(256))
    unknown = special.get("unk_token")
    model = BPE(
        vocabulary.ids,
        _merges(vocabulary, scores.tolist()),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    backend = tokenizers.Tokenizer(model)
    # SentencePiece adds a space in front of a text, and of the text after a special token.
    adds_space = vocabulary.flag("add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if adds_space else spaces
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if adds_space else [])])
    return backend, True


def _merges(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """Returns the merges that are equivalent to scores: all pairs of tokens that form a token, best first."""
    ids, found = vocabulary.ids, list[tuple[float, int, int, str, str]]()
    for text, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True):
        if kind != _NORMAL:
            continue
        for i in range(1, len(text)):
            if text[:i] in ids and text[i:] in ids:
                found.append((score, i, len(text) - i, text[:i], text[i:]))
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(first, second) for *_, first, second in found]

"""Lower bounds for the number of tokens of a text, and the bytes of tokens, for all kinds of tokenizers."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.engine.sample_output import logprob_dict
from jax_paged.engine.text.detokenizer import Detokenizer
from jax_paged.engine.text.text_codec import TextCodec
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import TooLongError
from jax_paged.outputs import CompletionOutput
from jax_paged.server.protocol.logprobs import TextOffsets, TokenBytes, chat_logprobs, completion_logprobs

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["<unk>", "a", "b", "▁", "▁a", "ab", "é", "[UNK]", "##a", "the"]


def byte_level(
    normalizer: normalizers.Normalizer | None = None, pieces: list[str] = ALPHABET, **added: bool
) -> tokenizers.Tokenizer:
    merged = [*pieces, "Ġa", "ab", "Ã©"]
    merges = [("Ġ", "a"), ("a", "b"), ("Ã", "©")]
    merges = [pair for pair in merges if set(pair) <= set(pieces)]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(merged)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", **added)])
    return backend


def sentencepiece(*, byte_fallback: bool = True, fuse_unk: bool = True) -> tokenizers.Tokenizer:
    pieces = {piece: i for i, piece in enumerate([*WORDS, *(BYTES if byte_fallback else ())])}
    settings = {"unk_token": "<unk>", "fuse_unk": fuse_unk, "byte_fallback": byte_fallback}
    backend = tokenizers.Tokenizer(models.BPE(pieces, [("▁", "a"), ("a", "b")], **settings))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in WORDS], 0))
    backend.normalizer = normalizers.Replace(Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def words(model: type[models.WordPiece] | type[models.WordLevel]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model({piece: i for i, piece in enumerate(WORDS)}, unk_token="[UNK]"))
    if model is models.WordPiece:
        backend.normalizer = normalizers.BertNormalizer()
        backend.decoder = decoders.WordPiece()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def split(behavior: str) -> tokenizers.Tokenizer:
    backend = byte_level()
    parts = [pre_tokenizers.Split(Regex("[a-z]"), behavior), pre_tokenizers.ByteLevel(use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return backend


# Tokenizers, and whether they guarantee a number of tokens per character.
BACKENDS = {
    "byte-level": (byte_level(), True),
    "byte-level, NFC": (byte_level(normalizers.NFC()), True),
    "byte-level, NFKC": (byte_level(normalizers.NFKC()), True),
    "byte-level, lower case": (byte_level(normalizers.Lowercase()), True),
    "byte-level, joins three": (byte_level(normalizers.Replace("aaa", "b")), True),
    "byte-level, deletes": (byte_level(normalizers.Replace("a", "")), False),
    "byte-level, deletes accents": (byte_level(normalizers.StripAccents()), False),
    "byte-level, strips": (byte_level(normalizers.Strip()), False),
    "byte-level, swallows spaces": (byte_level(lstrip=True, rstrip=True), True),
    "byte-level, without all bytes": (byte_level(pieces=ALPHABET[:100]), False),
    "splits": (split("isolated"), True),
    "splits and removes": (split("removed"), False),
    "byte fallback": (sentencepiece(), True),
    "unknown characters, one by one": (sentencepiece(byte_fallback=False, fuse_unk=False), True),
    "unknown characters, together": (sentencepiece(byte_fallback=False), False),
    "unigram": (unigram(), False),
    "WordPiece": (words(models.WordPiece), False),
    "WordLevel": (words(models.WordLevel), False),
}
_SPECIAL = ["   ", "<|end|>", "aaa", "\u0301", "\x00", "\ufdfa", "\ud55c", "好", "🙂", "x" * 150]


@pytest.mark.parametrize("name", BACKENDS)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.sampled_from(_SPECIAL), st.text(max_size=40)), max_size=8))
def test_no_text_has_fewer_tokens_than_its_lower_bound(name: str, parts: list[str]) -> None:
    backend, has_bound = BACKENDS[name]
    text, codec = "".join(parts), TextCodec(backend)
    least = codec.min_num_tokens_of(text)
    assert least <= len(backend.encode(text, add_special_tokens=False).ids)
    assert (codec.min_num_tokens_of("xyz" * 1000) > 0) == has_bound


def test_a_character_of_several_is_allowed_for() -> None:
    backend = byte_level(normalizers.NFKC())
    rng = random.Random(1)
    text = "".join(rng.choice("aeiou") + rng.choice("\u0301\u0300\u0308") for _ in range(100))
    assert 0 < TextCodec(backend).min_num_tokens_of(text) <= 100


@pytest.mark.parametrize("name", ["bert_embedder", "xlm_roberta_embedder", "roberta_classifier"])
def test_white_space_and_unknown_words_are_few_tokens(name: str) -> None:
    folder = Path(__file__).parent.parent / "models" / "pooling_fixtures" / name
    tokenizer = Tokenizer(str(folder))
    for text in (" " * 10_000, "x" * 10_000):
        assert len(tokenizer.encode(text, max_model_len=4)) <= 4


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(byte_level(), tmp_path_factory.mktemp("bytes"))


def tokenizer_of(backend: tokenizers.Tokenizer, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(str(folder))


def test_text_that_is_certainly_too_long_is_refused(byte_tokenizer: Tokenizer) -> None:
    longest = len("<|end|>")
    assert len(byte_tokenizer.encode("x" * longest * 5, max_model_len=5)) == longest * 5
    for encode in (byte_tokenizer.encode, lambda *args, **k: byte_tokenizer.encode_pair("a", *args, **k)):
        with pytest.raises(TooLongError, match=r"must be at most 5 \(max_model_len\), got at least 6"):
            encode("x" * (longest * 5 + 1), max_model_len=5)


@pytest.fixture(scope="module")
def generators(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Tokenizers of the kinds that models which draw tokens have."""
    backends = {
        "byte-level": byte_level(),
        "byte fallback": sentencepiece(),
        "unigram": unigram(),
    }
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in backends:
        (folder / name).mkdir()
    return {name: tokenizer_of(backend, folder / name) for name, backend in backends.items()}


@pytest.mark.parametrize("name", ["byte-level", "byte fallback", "unigram"])
@pytest.mark.parametrize("after", ["", "a"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(text=" ")
@example(text="  a")
@given(text=st.text(st.one_of(st.sampled_from("ab é好🙂\ufffd"), st.characters(codec="utf-8")), min_size=1))
def test_the_bytes_of_all_tokens_are_those_of_the_text(
    generators: dict[str, Tokenizer], name: str, after: str, text: str
) -> None:
    tokenizer = generators[name]
    prompt = tokenizer.encode(after) if after else []
    token_ids = tokenizer.encode(text)
    detokenizer, logprobs = Detokenizer(tokenizer, prompt), []
    for token_id in token_ids:
        entry = TokenLogprobs(-1.0, 1, [token_id], [-1.0])
        starts_text = detokenizer.is_at_start
        logprobs.append(logprob_dict(token_id, entry, 1, tokenizer, starts_text=starts_text))
        detokenizer.append(token_id)
    detokenizer.finish()
    token_bytes = TokenBytes(tokenizer, skip_special_tokens=True)
    output = CompletionOutput(0, detokenizer.text, token_ids, 0.0, logprobs=logprobs)
    content = chat_logprobs(output, 1, token_bytes)
    assert content is not None
    assert b"".join(bytes(token["bytes"]) for token in content) == detokenizer.text.encode()
    for token in content:
        assert token["bytes"] == token["top_logprobs"][0]["bytes"]
        assert bytes(token["bytes"]).decode(errors="replace").count("\ufffd") == token["token"].count(
            "\ufffd"
        )
    # Each token begins in the character that its first byte belongs to, whole or in parts.
    offsets = TextOffsets(7)
    parts = [completion_logprobs([entry], offsets, token_bytes)["text_offset"][0] for entry in logprobs]
    assert parts == completion_logprobs(logprobs, TextOffsets(7), token_bytes)["text_offset"]
    num_bytes = 0
    for token, offset in zip(content, parts, strict=True):
        before = detokenizer.text.encode()[:num_bytes].decode(errors="ignore")
        assert offset == 7 + len(before)
        num_bytes += len(token["bytes"])

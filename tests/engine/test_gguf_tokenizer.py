"""The tokenizers of GGUF files beside transformers' tokenizers of the same vocabularies."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf import GGUFWriter
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import ArgumentError
from jax_paged.models.checkpoint import read_json, resolve_model_dir

TEXTS = [
    "",
    " ",
    "Hello, world! It's 12345 o'clock; we'LL see 3.14159.",
    "  two  spaces\n\nand\r\n lines\t tabs   ",
    "naïve café ÀÉÎ straße ﬁ Å x\u0301",
    "中文字符 日本語 한국어 العربية हिन्दी ไทย",
    "emoji 😀👩‍👩‍👧 and \u200b zero width \ufeff",
    "snake_case camelCase HTTPServer x=y+z; // comment -> ok?",
    "a<|im_end|>b <|im_start|>user\nc <tool>d</tool>",
    "▁ lower one eighth block ▁▁",
    "'s 'S 'LL ''' \"quoted\" (parens) [a] {b}",
]
CORPUS = Path(__file__).parents[2] / "docs"


def random_texts(num: int) -> list[str]:
    rng = random.Random(0)
    alphabet = "abcXYZ 019\n\t'.,-_éß中한😀\u0301▁  "
    return ["".join(rng.choices(alphabet, k=rng.randint(0, 40))) for _ in range(num)]


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    """Returns the model of a byte-level BPE that was trained on the documents."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(CORPUS / "server.md"), str(CORPUS / "models.md")], trainer)
    return json.loads(backend.to_str())["model"]


def write(file: Path, **values: Any) -> str:
    """Writes a GGUF file that has only a tokenizer. Returns its name."""
    writer = GGUFWriter(file, values.pop("architecture", "llama"))
    for name, value in values.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(file)


def byte_level_values(model: dict[str, Any], pre: str, **values: Any) -> dict[str, Any]:
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": pre,
        "token_list": [*tokens, "<tool>"],
        "token_types": [3, 3, 3, *[1] * (len(tokens) - 3), 4],
        "token_merges": [" ".join(pair) for pair in model["merges"]],
        "eos_token_id": 2,
        "bos_token_id": 0,
    } | values


def expected_byte_level(model: dict[str, Any], name: str) -> tokenizers.Tokenizer:
    """Returns transformers' tokenizer with a vocabulary, without the tokens that transformers adds."""
    from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    made = {"qwen2": Qwen2Tokenizer, "gpt-2": GPT2Tokenizer}[name](
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    backend = made.backend_tokenizer
    backend.add_special_tokens([AddedToken(x, normalized=False) for x in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


@pytest.mark.parametrize("name", ["qwen2", "gpt-2"])
def test_byte_level_tokens_are_those_of_transformers(
    byte_level: dict[str, Any], tmp_path: Path, name: str
) -> None:
    found = Tokenizer(write(tmp_path / "model.gguf", **byte_level_values(byte_level, name)))
    want = expected_byte_level(byte_level, name)
    for text in [*TEXTS, *random_texts(300)]:
        ids = want.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids, skip_special_tokens=False) == want.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", " o", "'", "clock", "\n", "\n", "AbCD"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " o", "'clock", "\n\n", "AbCD"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " o", "'clock", "\n\n", "AbCD"]),
        ("gpt-4o", ["It's", " ", "123", "4", " o", "'clock", "\n\n", "Ab", "CD"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " o", "'clock", "\n\n", "Ab", "CD"]),
    ],
)
def test_words_of_each_pre_tokenizer(
    byte_level: dict[str, Any], tmp_path: Path, pre: str, words: list[str]
) -> None:
    """Compares the words with those that the models' tokenizer.json gives, which were divided by hand."""
    tokenizer = Tokenizer(write(tmp_path / "model.gguf", **byte_level_values(byte_level, pre)))
    text = "It's 1234 o'clock\n\nAbCD"
    divide = tokenizer._backend.pre_tokenizer
    assert divide is not None
    found = [text[begin:end] for _, (begin, end) in divide.pre_tokenize_str(text)]
    assert found == words
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.fixture(scope="module")
def pieces() -> list[tuple[str, float]]:
    """Returns the pieces of a SentencePiece BPE with their scores, which are minus their ranks."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    backend.train([str(CORPUS / "server.md")], trainer)
    model = json.loads(backend.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    letters = [text for text in model["vocab"] if text not in set(merged) and text != "<unk>"]
    unique = list(dict.fromkeys([*merged, *letters]))
    return [(text, -float(i)) for i, text in enumerate(unique)]


def sentencepiece_values(pieces: list[tuple[str, float]], **values: Any) -> dict[str, Any]:
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*first, *(text for text, _ in pieces), "<|user|>", "<pad>"]
    return {
        "tokenizer_model": "llama",
        "token_list": tokens,
        "token_scores": [*[0.0] * len(first), *(score for _, score in pieces), -1000.0, -1000.0],
        "token_types": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4, 3],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unk_token_id": 0,
    } | values


def best_merges(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Returns the tokens of a text by SentencePiece's algorithm: merges the best pair until there is none."""
    parts = list(text)
    while True:
        pairs = [(scores.get(a + b), -i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        known = [(score, i) for score, i in pairs if score is not None]
        if not known:
            break
        at = -max(known)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_tokens(tmp_path: Path, pieces: list[tuple[str, float]], *, adds_space: bool) -> None:
    values = sentencepiece_values(pieces, add_space_prefix=adds_space)
    found = Tokenizer(write(tmp_path / "model.gguf", **values))
    ids = {text: i for i, text in enumerate(values["token_list"])}
    for text in [*TEXTS, *random_texts(200)]:
        if "<" in text or not text:
            continue
        spaces = f" {text}" if adds_space else text
        want = best_merges(spaces.replace(" ", "▁"), dict(pieces), ids)
        assert found.encode(text) == [1, *want], text
        assert found.decode([1, *want]) == text.replace("▁", " ")


def test_sentencepiece_is_the_tokenizer_of_transformers(
    tmp_path: Path, pieces: list[tuple[str, float]]
) -> None:
    from transformers.models.llama.tokenization_llama import LlamaTokenizer

    values = sentencepiece_values(pieces)
    found = Tokenizer(write(tmp_path / "model.gguf", **values))
    ids, scores = {text: i for i, text in enumerate(values["token_list"])}, dict(pieces)
    merges = [
        (-score, text[:i], text[i:])
        for text, score in scores.items()
        for i in range(1, len(text))
        if text[:i] in ids and text[i:] in ids
    ]
    want = LlamaTokenizer(vocab=ids, merges=[merge[1:] for merge in sorted(merges, key=lambda x: x[0])])
    for text in random_texts(300):
        # SentencePiece adds a space to every text, and transformers only to texts that begin with none.
        text = text.lstrip(" ▁")
        tokens = want.backend_tokenizer.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False) == tokens, text
        assert found.decode(tokens) == want.decode(tokens)


@pytest.mark.parametrize(
    ("flags", "around"),
    [
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True}, ([1], [2])),
        ({"add_bos_token": False, "add_eos_token": True}, ([], [2])),
    ],
)
def test_start_and_end_tokens(
    tmp_path: Path,
    pieces: list[tuple[str, float]],
    flags: dict[str, bool],
    around: tuple[list[int], list[int]],
) -> None:
    tokenizer = Tokenizer(write(tmp_path / "model.gguf", **sentencepiece_values(pieces, **flags)))
    assert tokenizer.special_tokens_around == around
    assert tokenizer.eos_token_id == 2
    inner = tokenizer.encode("the server", add_special_tokens=False)
    assert tokenizer.encode("the server") == [*around[0], *inner, *around[1]]


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_default_of_the_start_token(
    byte_level: dict[str, Any], tmp_path: Path, pre: str, *, adds: bool
) -> None:
    tokenizer = Tokenizer(write(tmp_path / "model.gguf", **byte_level_values(byte_level, pre)))
    assert tokenizer.special_tokens_around == ([0] if adds else [], [])


def test_chats(byte_level: dict[str, Any], tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    values = byte_level_values(byte_level, "smollm", chat_template=template)
    tokenizer = Tokenizer(write(tmp_path / "model.gguf", **values))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Say <|im_end|>"}])
    text = "<|im_start|>user\nSay <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    # The control token in the message is text: only the template's own are control tokens.
    assert ids.count(2) == 1
    assert ids.count(1) == 2
    tokenizer.replace_chat_template("{{ messages[0].content }}")
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "b"}])) == "b"
    without = Tokenizer(write(tmp_path / "none.gguf", **byte_level_values(byte_level, "smollm")))
    with pytest.raises(ArgumentError, match="a tokenizer with a chat template"):
        without.encode_chat([{"role": "user", "content": "a"}])


def test_space_after_the_special_tokens_of_phi3(tmp_path: Path, pieces: list[tuple[str, float]]) -> None:
    values = sentencepiece_values(pieces, add_bos_token=False)
    plain = Tokenizer(write(tmp_path / "llama.gguf", **values))
    phi = Tokenizer(write(tmp_path / "phi.gguf", architecture="phi3", **values))
    inner = plain.encode("the server")
    user = values["token_list"].index("<|user|>")
    assert phi.encode("<|user|>\n the server") == [user, *inner]
    assert plain.encode("<|user|>\n the server") != [user, *inner]
    assert phi.encode("<s> the server") == plain.encode("<s> the server")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_model": "bert"}, r"`tokenizer.ggml.model` of .* must be 'gpt2' or 'llama' or pass"),
        ({"tokenizer_pre": "poro-chat"}, r"`tokenizer.ggml.pre` of .* must be one of .* got 'poro-chat'"),
        ({"tokenizer_pre": None}, r"`tokenizer.ggml.pre` of .* must be one of .* got None"),
        ({"token_merges": None}, r"`tokenizer.ggml.merges` of .* must be a list of strings, got None"),
        ({"token_merges": ["Ġ nosuch"]}, r"the tokenizer of .*model.gguf can't be loaded: "),
        ({"token_types": [1, 2]}, r"`tokenizer.ggml.token_type` of .* must be a list of 801 numbers"),
        ({"eos_token_id": 801}, r"`tokenizer.ggml.eos_token_id` of .* must be an id in \[0, 800\], got 801"),
        ({"token_list": None}, r"`tokenizer.ggml.tokens` of .* must be a list of strings"),
    ],
)
def test_unusable_tokenizers(
    byte_level: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "model.gguf", **byte_level_values(byte_level, "smollm", **changes))
    with pytest.raises(ValueError, match=message):
        Tokenizer(file)


def test_minus_one_is_no_token(byte_level: dict[str, Any], tmp_path: Path) -> None:
    values = byte_level_values(byte_level, "smollm", bos_token_id=2**32 - 1)
    assert Tokenizer(write(tmp_path / "model.gguf", **values)).special_tokens_around == ([], [])


def test_built_in_tokenizer_survives_the_conversion(tmp_path: Path) -> None:
    """The tokenizer of the built-in model as a GGUF file gives the same tokens."""
    folder = resolve_model_dir("pagelet")
    content = read_json(folder / "tokenizer.json")
    added = {token["content"]: token for token in content["added_tokens"]}
    vocab = content["model"]["vocab"] | {text: token["id"] for text, token in added.items()}
    tokens = sorted(vocab, key=vocab.__getitem__)
    file = write(
        tmp_path / "model.gguf",
        tokenizer_model="gpt2",
        tokenizer_pre="gpt-2",
        token_list=tokens,
        token_types=[(3 if added[t]["special"] else 4) if t in added else 1 for t in tokens],
        token_merges=[m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]],
    )
    found, want = Tokenizer(file), Tokenizer(str(folder))
    texts = [text for text in TEXTS if text.isascii()]
    assert [found.encode(text) for text in texts] == [want.encode(text) for text in texts]

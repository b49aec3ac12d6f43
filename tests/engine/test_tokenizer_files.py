"""Tokenizers in forms other than tokenizer.json: what is read, and what errors say."""

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jax_paged.engine.text import tokenizer as tokenizer_module
from jax_paged.engine.text.tokenizer import Tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def test_tekken_json_alone(tmp_path: Path) -> None:
    """As Mistral publishes its tokenizers: ranks of bytes, behind control tokens."""
    words = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b"hello"]
    control = ["<unk>", "<s>", "</s>", "<pad>"]
    tekken: dict[str, Any] = {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + len(control),
            "default_num_special_tokens": len(control),
            "version": "v3",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(w).decode(), "token_str": None}
            for i, w in enumerate(words)
        ],
        "special_tokens": [
            {"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(control)
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    config = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(str(tmp_path))
    ids = tokenizer.encode("hello")
    assert ids[-1] == words.index(b"hello") + len(control)
    assert tokenizer.decode(ids) == "hello"


@pytest.mark.parametrize(("name", "kind"), [("tokenizer.model", "Llama"), ("spiece.model", "T5")])
def test_a_sentencepiece_model_names_its_package(tmp_path: Path, name: str, kind: str) -> None:
    if importlib.util.find_spec("sentencepiece") is not None:
        pytest.skip("sentencepiece is installed")
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind.lower()}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{kind}Tokenizer"}))
    with pytest.raises(ValueError, match=rf"{name} is a SentencePiece model") as error:
        Tokenizer(str(tmp_path))
    assert "pip install sentencepiece" in str(error.value)
    assert "tiktoken" not in str(error.value)


def test_a_vocabulary_of_tiktoken_needs_no_sentencepiece(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(base64.b64encode(b"a") + b" 0\n")
    assert tokenizer_module._missing_packages(str(tmp_path)) is None
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_module._missing_packages(str(tmp_path)) is None

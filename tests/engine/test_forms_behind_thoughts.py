"""A form begins behind the tag that closes the thoughts, also where a token holds more than its end."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_paged import StructuredOutputsParams
from jax_paged.engine.grammars import Grammars
from jax_paged.engine.tokenizer import Tokenizer

# As a byte-level tokenizer has them; "ĊĊ" is a blank line.
PIECES = ["<eos>", "</th", "ink>", "ink>ĊĊ", 'ink>{"', 'a"', ":1", "ink>b"]
PIECES += sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    backend.decoder = decoders.ByteLevel()
    folder = Path(tmp_path_factory.mktemp("tokenizer"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Grammars(Tokenizer(str(folder)), len(PIECES), frozenset({0}))


@pytest.mark.parametrize(
    ("pieces", "completes"),
    [
        (["a", "</th", "ink>", "{", '"', 'a"', ":1", "}"], True),
        (["</th", "ink>ĊĊ", "{", '"', 'a"', ":1", "}"], True),
        (["</th", 'ink>{"', 'a"', ":1", "}"], True),
        (["</th", "ink>b", "}"], False),
        (["</th", "ink>b", "</th", 'ink>{"', 'a"', ":1", "}"], True),
    ],
)
def test_a_form_begins_amid_a_token(forms: Grammars, pieces: list[str], *, completes: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    form = StructuredOutputsParams(json=schema | {"additionalProperties": False}, starts_after="</think>")
    grammar = forms.compile(form)
    matcher = grammar.matcher([1], ignores_eos=False)
    token_ids = [PIECES.index(piece) for piece in pieces]
    for n in range(1, len(token_ids)):
        assert matcher.follow(token_ids[:n]) is None
    assert (matcher.follow(token_ids) == len(token_ids)) == completes
    assert not matcher.problem

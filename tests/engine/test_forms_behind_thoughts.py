"""A form begins behind the tag that closes the thoughts, also where a token holds more than its end."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jax_paged import StructuredOutputsParams
from jax_paged.engine.features.structured_output.grammars import Grammar, Grammars, Matcher
from jax_paged.engine.text.tokenizer import Tokenizer

# As a byte-level tokenizer has them; "ĊĊ" is a blank line.
PIECES = ["<eos>", "</th", "ink>", "ink>ĊĊ", 'ink>{"', 'a"', ":1", "ink>b"]
PIECES += sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT, TAG = '{"a":1}', "<think>"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}


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
    form = StructuredOutputsParams(json=SCHEMA, starts_after="</think>")
    grammar = forms.compile(form)
    matcher = grammar.matcher([1], ignores_eos=False)
    token_ids = [PIECES.index(piece) for piece in pieces]
    for n in range(1, len(token_ids)):
        assert matcher.follow(token_ids[:n]) is None
    assert (matcher.follow(token_ids) == len(token_ids)) == completes
    assert not matcher.problem


def ids_of(text: str) -> list[int]:
    return [PIECES.index(character) for character in text]


def text_of(token_ids: list[int]) -> str:
    return "".join(PIECES[i] for i in token_ids).replace("Ċ", "\n").replace("Ġ", " ")


def tagged(forms: Grammars, **form: Any) -> Grammar:
    return forms.compile(
        StructuredOutputsParams(**form or {"json": SCHEMA}, starts_after="</think>", reasoning_tag=TAG)
    )


def allowed(matcher: Matcher) -> set[int]:
    row = np.zeros(matcher.grammar.num_words, np.int32)
    matcher.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return {i for i in np.flatnonzero(bits).tolist() if i < len(PIECES)}


def followed(grammar: Grammar, text: str, prompt: str = "a") -> tuple[Matcher, int | None]:
    matcher = grammar.matcher(ids_of(prompt), ignores_eos=False)
    return matcher, matcher.follow(ids_of(text))


def test_an_output_begins_with_the_tag_or_is_the_form(forms: Grammars) -> None:
    grammar = tagged(forms)
    assert {PIECES[i] for i in allowed(followed(grammar, "")[0])} == {"<", "{"}
    assert {PIECES[i] for i in allowed(followed(grammar, "<th")[0])} == {"i"}
    assert len(allowed(followed(grammar, TAG)[0])) == len(PIECES) - 1  # all but the end token
    for text in (TEXT, f"{TAG}so{TEXT}</think>{TEXT}", f"{TAG}</think>{TEXT}"):
        assert followed(grammar, text)[1] == len(text)
        assert followed(grammar, text[:-1])[1] is None
    assert followed(grammar, TEXT)[0].forced() == []
    assert followed(grammar, '{"a')[0].forced() == ids_of('":1}')


def test_a_form_may_begin_like_the_tag(forms: Grammars) -> None:
    grammar = tagged(forms, choice=["<tool>", "<"])
    assert {PIECES[i] for i in allowed(followed(grammar, "<")[0])} == {"t", "<eos>"}
    assert {PIECES[i] for i in allowed(followed(grammar, "<t")[0])} == {"h", "o"}
    assert followed(grammar, "<tool>")[1] == 6
    assert followed(grammar, "<think>a</think><tool>")[1] == 22


@pytest.mark.parametrize("has_tag", [False, True])
def test_an_output_that_begins_amid_reasoning_may_be_the_form_alone(
    forms: Grammars, *, has_tag: bool
) -> None:
    form = StructuredOutputsParams(json=SCHEMA, starts_after="</think>")
    grammar, prompt = (tagged(forms), f"a{TAG}Ċ") if has_tag else (forms.compile(form), "a")
    for text, may_end in (
        ("", False),
        (TEXT, True),
        (f"ĊĊ{TEXT}", True),
        (TEXT[:-1], False),
        (f"{TEXT} no", False),
        (f"so {TEXT}", False),
        (f"{TEXT}</think>", False),
    ):
        text = text.replace(" ", "Ġ")
        matcher, complete = followed(grammar, text, prompt)
        assert complete is None
        assert (0 in allowed(matcher)) == may_end, text
        behind = text + "</think>" * ("</think>" not in text) + TEXT
        assert followed(grammar, behind, prompt)[1] == len(behind)


def test_an_end_token_that_is_ignored_stays_forbidden(forms: Grammars) -> None:
    matcher = tagged(forms).matcher(ids_of(f"a{TAG}"), ignores_eos=True)
    matcher.follow(ids_of(TEXT))
    assert 0 not in allowed(matcher)


@pytest.mark.parametrize("prompt", ["a", f"a{TAG}", "a</think>ĊĊ"])
def test_masks_allow_reasoning_and_the_form_or_the_form_alone(forms: Grammars, prompt: str) -> None:
    rng, grammar = random.Random(1), tagged(forms, json=SCHEMA)
    opening = {"a": f"{TAG}.*</think>", f"a{TAG}": ".*</think>", "a</think>ĊĊ": "never"}[prompt]
    pattern = re.compile(rf"({opening}\s*)?\s*{re.escape(TEXT)}", re.DOTALL)
    num_ended, num_direct = 0, 0
    for _ in range(60):
        matcher = grammar.matcher(ids_of(prompt), ignores_eos=False)
        wanted, token_ids = rng.choice([TEXT, f"b{TEXT}</think>{TEXT}", f"{TAG}</think>{TEXT}"]), []
        while len(token_ids) < 60 and matcher.follow(token_ids) is None:
            mask = allowed(matcher)
            fresh = grammar.matcher(ids_of(prompt), ignores_eos=False)
            fresh.follow(token_ids)
            assert mask == allowed(fresh) == allowed(matcher.copy())
            likely = [i for i in ids_of(wanted[len(token_ids) : len(token_ids) + 1]) or [0] if i in mask]
            token_id = rng.choice(likely or sorted(mask))
            if token_id == 0:
                break
            token_ids.append(token_id)
        else:
            if matcher.follow(token_ids) is None:
                continue  # not at its end
        num_ended += 1
        num_direct += pattern.fullmatch(text_of(token_ids)) is not None and text_of(token_ids) == TEXT
        assert pattern.fullmatch(text_of(token_ids)), text_of(token_ids)
    assert num_ended > num_direct // 2
    assert num_direct

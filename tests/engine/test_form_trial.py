"""Forms that overflow llguidance's stack, or never end compiling, are refused; the next one compiles."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jax_paged import StructuredOutputsParams
from jax_paged.engine.features.structured_output import grammars
from jax_paged.engine.features.structured_output.grammars import Grammars
from jax_paged.engine.text.tokenizer import Tokenizer

TOO_DEEP = "nested too deeply"


def references(num: int) -> dict[str, Any]:
    """Returns a schema of references, one behind the other, that is itself no deeper than four levels."""
    links = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(num)}
    return {"$defs": {**links, f"a{num}": {"type": "null"}}, "$ref": "#/$defs/a0"}


def rules(name: str, num: int) -> str:
    links = [f'{name}{i}: "b" {name}{i + 1}' for i in range(num)]
    return "\n".join([f"start: {name}0", *links, f'{name}{num}: "c"'])


SLOW: list[dict[str, Any]] = [
    {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{10 + i}}}b.*"} for i in range(40)]}},
    {"grammar": "start: X\nX: " + " & ".join(f"/(.*{i}.*)/" for i in range(200))},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("jax_paged/models/pagelet")


@pytest.fixture
def forms(tokenizer: Tokenizer) -> Iterator[Grammars]:
    forms = Grammars(tokenizer, 4096, frozenset({0}))
    yield forms
    forms.close()


@pytest.mark.parametrize(
    "form", [{"json": references(1300)}, {"grammar": rules("r", 3000)}, {"grammar": rules("R", 4000)}]
)
def test_a_form_that_overflows_the_stack_is_refused(forms: Grammars, form: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"`structured_outputs.\w+` must be compilable \(.*{TOO_DEEP}"):
        forms.compile(StructuredOutputsParams(**form))
    forms.compile(StructuredOutputsParams(json=references(150)))


@pytest.mark.parametrize("form", SLOW)
def test_a_form_that_never_compiles_is_refused(
    forms: Grammars, monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]
) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.5)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"it takes more than 0.5 s to compile"):
            forms.compile(StructuredOutputsParams(**form))
        forms.compile(StructuredOutputsParams(regex="good"))


def compile_slowly(forms: Grammars, form: dict[str, Any], errors: list[ValueError]) -> None:
    try:
        forms.compile(StructuredOutputsParams(**form))
    except ValueError as error:
        errors.append(error)


def test_waiting_behind_a_slow_form_is_no_fault(forms: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "MAX_COMPILE_S", 0.7)
    errors: list[ValueError] = []
    threads = [threading.Thread(target=compile_slowly, args=(forms, SLOW[0], errors)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(3):
        forms.compile(StructuredOutputsParams(regex=f"good{i}"))
    for thread in threads:
        thread.join()
    assert len(errors) == 3


def test_closing_ends_what_compiles(forms: Grammars) -> None:
    errors: list[ValueError] = []
    forms.compile(StructuredOutputsParams(regex="a"))
    thread = threading.Thread(target=compile_slowly, args=(forms, SLOW[1], errors))
    thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    forms.close()
    thread.join()
    assert time.monotonic() - start < 2, "it would compile for 5 s, or for ever"
    assert "closed" in str(errors[0])
    with pytest.raises(ValueError, match="closed"):
        forms.compile(StructuredOutputsParams(regex="b"))


def test_a_form_that_grows_ever_more_ambiguous_is_given_up_and_says_why(
    forms: Grammars, tokenizer: Tokenizer
) -> None:
    grammar = forms.compile(
        StructuredOutputsParams(grammar='start: e\ne: e e | /[a-z]/ | "(" e ")" | e "x" e')
    )
    matcher = grammar.matcher([], ignores_eos=False)
    (token_id,) = tokenizer.encode("a", add_special_tokens=False)
    row, token_ids = np.zeros(grammar.num_words, np.int32), []
    for _ in range(100):
        matcher.fill(row)
        if not row.any():
            break
        assert not matcher.problem
        token_ids.append(token_id)
        matcher.follow(token_ids)
    assert len(token_ids) < 70, "masks would take 72 ms each"
    assert "Too many items" in matcher.problem

"""What JSON a schema lets through: nothing that it forbids, however keys are written, and what it should."""

import json
from typing import Any

import jsonschema
import pytest

from jax_paged import StructuredOutputsParams
from jax_paged.engine.grammars import Grammars
from jax_paged.engine.tokenizer import Tokenizer

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
# As pydantic writes the schema of a model with a list of models, a default and a dict.
PYDANTIC = {
    "$defs": {
        "Tag": {
            "properties": {"name": {"title": "Name", "type": "string"}},
            "required": ["name"],
            "title": "Tag",
            "type": "object",
        }
    },
    "properties": {
        "tags": {"items": {"$ref": "#/$defs/Tag"}, "title": "Tags", "type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
        "counts": {"additionalProperties": {"type": "integer"}, "title": "Counts", "type": "object"},
    },
    "required": ["tags", "counts"],
    "title": "Page",
    "type": "object",
}
PATTERNS = {"patternProperties": {"^x_[a-c]{1,2}$": {"type": "integer"}}, "type": "object"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (NAMED, r'{"\u0061":"x"}'),
    (NAMED, r'{"a":1,"\u0061":"x"}'),
    (NAMED, '{"a":1,"a":"x"}'),
    (PATTERNS, r'{"\u0078_a":"y"}'),
    (PATTERNS, r'{"x_a":1,"x\u005fa":"y"}'),
    (PYDANTIC, r'{"tags":[],"counts":{},"not\u0065":1}'),
    ({"type": "object", "properties": {"a/b": {"const": 1}}}, r'{"a\/b":2}'),
    ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"a":1}'),
    (
        {**PATTERNS, "required": ["x_a"], "minProperties": 2, "additionalProperties": False},
        '{"x_a":1,"x_a":1}',
    ),
]
ALLOWED: list[tuple[dict[str, Any], str]] = [
    (NAMED, '{"a":1,"b":"x"}'),
    (NAMED, r'{"\n\"\\":"x\ty"}'),
    (NAMED, '{"é":[{"a":"free"}]}'),
    (PATTERNS, '{"x_a":1,"y":"z"}'),
    (PYDANTIC, '{"tags":[{"name":"n","more":1}],"note":"ß\\n","counts":{"k":2,"l":3},"extra":null}'),
    ({"type": "object", "minProperties": 1}, '{"":1}'),
    ({"type": "object", "required": ["a"], "minProperties": 2}, '{"a":1,"b":1}'),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer("jax_paged/models/pagelet")


@pytest.fixture(scope="module")
def forms(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, 4096, frozenset({0}))


def is_complete(forms: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], text: str) -> bool:
    """Returns whether an output may end behind a text."""
    grammar = forms.compile(StructuredOutputsParams(json=schema))
    state = grammar._root.deep_copy()
    return state.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and state.is_accepting()


@pytest.mark.parametrize(("schema", "text"), REFUSED)
def test_what_a_schema_forbids(
    forms: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], text: str
) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(text), schema)
    assert not is_complete(forms, tokenizer, schema, text)


@pytest.mark.parametrize(("schema", "text"), ALLOWED)
def test_what_a_schema_allows(
    forms: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], text: str
) -> None:
    jsonschema.validate(json.loads(text), schema)
    assert is_complete(forms, tokenizer, schema, text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 2},
        {**PATTERNS, "additionalProperties": False, "minProperties": 2},
        {"items": {"type": "object", "required": ["a", "a"], "minProperties": 3}},
    ],
)
def test_keys_that_can_repeat_are_not_counted(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"json has minProperties [23] beside [01] required properties"):
        StructuredOutputsParams(json=schema)

"""What JSON a schema lets through: nothing that it forbids, however keys are written, and what it should."""

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest

from jax_paged import StructuredOutputsParams
from jax_paged.engine.features.structured_output.grammars import Grammars
from jax_paged.engine.features.structured_output.json_schema import without_assertions
from jax_paged.engine.text.tokenizer import Tokenizer

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


# Schemas with a constraint that no grammar enforces, what the warning names, and a text that the rest allows.
NOT_ENFORCED: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "string", "format": "binary"}, "format binary", '"x"'),
    ({"type": "array", "uniqueItems": True}, "uniqueItems", "[1,1]"),
    ({"type": "string", "not": {"const": "x"}}, "not", '"x"'),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, "propertyNames", '{"b":1}'),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2}, "contains", "[]"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired", '{"a":1}'),
    ({"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"minimum": 2}}, "then", '"x"'),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties", '{"a":1}'),
    ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}, "oneOf", '"xy"'),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties 1", "{}"),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, "maxProperties", '{"a":1,"b":1}'),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$"}, "look-around", '"."'),
    ({"type": "string", "pattern": r"^a\b.*$"}, "word boundaries", '"ab"'),
    ({"type": "string", "pattern": r"(a|b)\1"}, "back-references", '"ab"'),
    ({"type": "object", "patternProperties": {"^(?=a).$": {"const": 1}}}, "look-around", '{"x":1}'),
    ({"type": "object", "minProperties": 2}, "minProperties 2 is enforced as 1", '{"a":1}'),
    ({"items": {"type": "object", "required": ["a", "a"], "minProperties": 3}}, "as 2", '[{"a":1,"b":2}]'),
]


@pytest.mark.parametrize(("schema", "warning", "text"), NOT_ENFORCED)
def test_a_constraint_that_is_not_enforced_is_a_warning(
    forms: Grammars,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    schema: dict[str, Any],
    warning: str,
    text: str,
) -> None:
    form = StructuredOutputsParams(json={"title": warning, **schema})  # not compiled before
    assert warning in " ".join(forms.compile(form).warnings)
    assert warning in caplog.text
    assert is_complete(forms, tokenizer, schema, text)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$"}, '"a"'),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, '["a"]'),
        ({"type": "string", "format": "binary", "maxLength": 2}, '"abc"'),
        ({"type": "object", "minProperties": 2}, "{}"),
        ({"properties": {"pattern": {"const": {"pattern": r"\b"}}}}, '{"pattern":{"pattern":""}}'),
    ],
)
def test_the_rest_of_such_a_schema_is_enforced(
    forms: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], text: str
) -> None:
    assert not is_complete(forms, tokenizer, schema, text)


def test_other_references_are_errors(forms: Grammars) -> None:
    for name in ("$dynamicRef", "$recursiveRef"):
        with pytest.raises(ValueError, match=f"the schema contains \\{name}; only \\$ref within the schema"):
            forms.compile(StructuredOutputsParams(json={"items": {name: "#"}}))


def test_a_schema_without_such_constraints_has_no_warnings(forms: Grammars) -> None:
    for schema, _ in ALLOWED:
        assert forms.compile(StructuredOutputsParams(json=schema)).warnings == ()


class Color(enum.Enum):
    RED = "red"


class Tree(pydantic.BaseModel):
    value: decimal.Decimal
    children: list["Tree"] = []


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["dog"]


FIELDS: list[Any] = [
    *(str, int, float, bool, bytes, None, Any, complex, decimal.Decimal, uuid.UUID, pathlib.Path, re.Pattern),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Interface),
    *(set[int], frozenset[str], tuple[int, str], tuple[int, ...], dict[str, int], dict[int, str]),
    *(dict[Color, int], dict[Literal["a"], int], dict[uuid.UUID, int], dict[decimal.Decimal, int]),
    *(Color, Literal["a", 1], int | None, int | str, Tree),
    *(pydantic.UUID4, pydantic.AnyUrl, pydantic.PostgresDsn, pydantic.IPvAnyAddress, pydantic.SecretStr),
    *(pydantic.SecretBytes, pydantic.Json[int], pydantic.Base64Bytes, pydantic.ByteSize, pydantic.PastDate),
    *(pydantic.AwareDatetime, pydantic.FilePath, pydantic.DirectoryPath),
    Annotated[decimal.Decimal, pydantic.Field(max_digits=5, decimal_places=2)],
    Annotated[dict[str, int], pydantic.Field(min_length=2, max_length=4)],
    Annotated[set[int], pydantic.Field(min_length=1)],
    Annotated[int, pydantic.Field(gt=0, multiple_of=5)],
    Annotated[str, pydantic.Field(min_length=1, max_length=5, pattern=r"^\w+\b")],
    Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_what_pydantic_generates(forms: Grammars, mode: Literal["validation", "serialization"]) -> None:
    """Together, as each schema that is compiled takes some milliseconds."""
    fields: dict[str, Any] = {f"field_{i}": (field, ...) for i, field in enumerate(FIELDS)}
    schema = pydantic.create_model("Everything", **fields).model_json_schema(mode=mode)
    forms.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^(?!^[-+.]*$)[+-]?\d*$", r"^(?:)[+-]?\d*$"),
        (r"(?<=a(b(c))\)])d(?=(?<!e)f)", r"(?:)d(?:)"),
        (r"\bx\B", r"(?:)x(?:)"),
        (r"[\b(?=]x\\b", r"[\b(?=]x\\b"),
        (r"(?P<n>a)(?<m>b)(?:c)\(?=", r"(?P<n>a)(?<m>b)(?:c)\(?="),
        (r"(?!(a)\1)b", r"(?:)b"),
        (r"(a)\1", None),
        (r"(?P<n>a)(?P=n)", None),
    ],
)
def test_patterns_without_assertions(pattern: str, expected: str | None) -> None:
    assert without_assertions(pattern) == expected

"""Structured output: conversion of `response_format` and vLLM's fields to StructuredOutputsParams."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jax_paged.errors import ArgumentError, check
from jax_paged.structured_outputs import StructuredOutputsParams


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`: a constraint on the format of the output."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = Field(
        None, description='For the type "json_schema": {"name": ..., "schema": {...}}.'
    )

    def constraint_args(self) -> dict[str, Any]:
        """Returns the keyword arguments of StructuredOutputsParams; an empty dict for plain text."""
        match self.type:
            case "text":
                return {}
            case "json_object":
                return {"json_object": True}
            case "json_schema":
                given = self.json_schema
                ok = given is not None and isinstance(given.get("schema"), dict)
                check(ok, "response_format.json_schema", given, 'an object with a "schema"')
                return {"json": (given or {})["schema"]}
            case "structural_tag":
                return {"structural_tag": self.model_extra or {}}


class TextFormat(ResponseFormat):
    """Value of `text.format` in OpenAI's Responses API, with the JSON schema as a field of its own."""

    type: Literal["text", "json_object", "json_schema"]  # pyright: ignore[reportIncompatibleVariableOverride]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    name: str | None = None
    strict: bool | None = None

    def constraint_args(self) -> dict[str, Any]:
        """Returns the keyword arguments of StructuredOutputsParams; an empty dict for plain text."""
        if self.type == "json_schema":
            check(self.schema_ is not None, "text.format.schema", None, "a JSON schema")
            return {"json": self.schema_}
        return super().constraint_args()


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: dict[str, Any] | None, guided: dict[str, Any]
) -> StructuredOutputsParams | None:
    """Returns the constraint on the output that a request asks for; None if there is none.

    Args:
        response_format: OpenAI's field.
        structured_outputs: vLLM's field, with arguments of StructuredOutputsParams.
        guided: vLLM's deprecated `guided_...` fields, by the part of the name after "guided_". They are
            ignored if structured_outputs is set, because clients send both to support old and new servers.

    Raises:
        ValueError: If more than one field is set, or the value is invalid.
    """
    fields = {
        "response_format": response_format.constraint_args() if response_format else {},
        "structured_outputs": _non_null_fields(structured_outputs),
    }
    if not fields["structured_outputs"]:
        fields |= {f"guided_{name}": {name: value} for name, value in guided.items() if value is not None}
    constraints = {name: args for name, args in fields.items() if args}
    if len(constraints) > 1:
        raise ValueError(f"a request must set at most one structured output field, got {list(constraints)}")
    if not constraints:
        return None
    ((name, args),) = constraints.items()
    try:
        return StructuredOutputsParams(**args)
    except TypeError as error:
        raise ArgumentError(name, args, "an object with the fields of StructuredOutputsParams") from error


def ignored_guided(structured_outputs: dict[str, Any] | None, guided: dict[str, Any]) -> list[str]:
    """Returns the names of the deprecated fields that `constraint_of` ignores."""
    if not _non_null_fields(structured_outputs):
        return []
    return [f"guided_{name}" for name, value in guided.items() if value is not None]


def _non_null_fields(structured_outputs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of structured_outputs without those that are null or a json_object of false."""
    fields = (structured_outputs or {}).items()
    return {k: v for k, v in fields if v is not None and (k, v) != ("json_object", False)}

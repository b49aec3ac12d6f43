"""The server's command line, made from the fields of EngineArgs."""

import argparse
import dataclasses
import re
import types
import typing
from typing import Any, Literal

from jax_paged.config import EngineArgs


def make_parser() -> argparse.ArgumentParser:
    """Returns a parser of the server's own arguments and of every field of EngineArgs."""
    parser = argparse.ArgumentParser(
        prog="jax-paged", description="Serves a model with the OpenAI API.", allow_abbrev=False
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (8000); 0 takes a free one")
    parser.add_argument("--served-model-name", help="the model as clients call it (as --model)")
    group = parser.add_argument_group("engine")
    texts, hints = _field_texts(), typing.get_type_hints(EngineArgs)
    for field in dataclasses.fields(EngineArgs):
        text = f"{texts[field.name]} (default: {field.default})".replace("%", "%%")
        option = "--" + field.name.replace("_", "-")
        group.add_argument(option, default=field.default, help=text, **_kind(hints[field.name]))
    return parser


def engine_args(args: argparse.Namespace) -> EngineArgs:
    """Returns the engine's part of parsed arguments.

    Raises:
        ValueError: If a value is out of range.
    """
    return EngineArgs(**{field.name: getattr(args, field.name) for field in dataclasses.fields(EngineArgs)})


def _kind(hint: Any) -> dict[str, Any]:
    """Returns what argparse needs to read a value of a field's type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
        hint = next(t for t in typing.get_args(hint) if t is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    return {"action": argparse.BooleanOptionalAction} if hint is bool else {"type": hint}


def _field_texts() -> dict[str, str]:
    """Returns what the docstring of EngineArgs says about each field."""
    section = (EngineArgs.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}

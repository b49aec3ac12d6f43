"""Command-line options made from the fields of a dataclass and its docstring."""

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from jax_paged.arguments.suggestions import suggestion, suggestions


class Parser(argparse.ArgumentParser):
    """A parser of the command line that suggests names for misspelt options and values.

    Options must be written in full: with abbreviations, a new option could change the meaning of a script.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses a command line, and ends the process if it has unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return parsed

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Ends the process with a message that names unknown arguments and the closest options."""
        options = [option for action in self._actions for option in action.option_strings]
        close = suggestions([word.split("=")[0] for word in unknown if word.startswith("-")], options)
        self.error(f"unrecognized arguments: {' '.join(unknown)}{close}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += suggestion(value, action.choices or ())
            raise


def add_options(parser: Any, cls: type) -> None:
    """Adds an option per field with a default; one that is not given is missing from the namespace.

    Args:
        parser: An ArgumentParser or a group of one.
        cls: The dataclass; its docstring says what each field is, as the option's help does.
    """
    texts, hints = _field_texts(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING:
            continue
        default = "none" if field.default in ((), "") else field.default
        text = f"{texts[field.name]} (default: {default})".replace("%", "%%")
        option = "--" + field.name.replace("_", "-")
        # SUPPRESS leaves out what is not given, so that "not given" is told from "given as the default".
        kind = _kind(hints[field.name])
        if "nargs" in field.metadata:  # several values behind one option, too
            kind |= {"action": "extend", "nargs": field.metadata["nargs"]}
        parser.add_argument(option, default=argparse.SUPPRESS, help=text, **kind)


def values_of(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the fields of a dataclass that a command line gave."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def _kind(hint: Any) -> dict[str, Any]:
    """Returns the arguments with which argparse reads a value of a field's type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
        if any(typing.get_origin(t) is dict for t in typing.get_args(hint)):
            return {"type": json.loads}
        hint = next(t for t in typing.get_args(hint) if t is not types.NoneType)
    if typing.get_origin(hint) is tuple:  # of any length: the option is given once for each
        return {"action": "append", "type": typing.get_args(hint)[0]}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    return {"action": argparse.BooleanOptionalAction} if hint is bool else {"type": hint}


def _field_texts(cls: type) -> dict[str, str]:
    """Returns what the docstring says about each field."""
    section = (cls.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}

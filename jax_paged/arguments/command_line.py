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
    """Argument parser that suggests the closest names for misspelled options and values.

    Abbreviated options are not accepted, because a new option could make an abbreviation in a script
    ambiguous.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parses a command line; prints an error and exits if it has unknown arguments."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return parsed

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Prints an error with the closest option names, and exits.

        Args:
            unknown: The unknown arguments.
        """
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
    """Adds an option for each field that has a default value.

    An option that is not given on the command line is missing from the parsed namespace.

    Args:
        parser: An ArgumentParser, or an argument group of one.
        cls: A dataclass. The text of each field in the "Args:" section of its docstring becomes the option's
            help. The section must follow the Google style, without blank lines.
    """
    texts, hints = _field_texts(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING:
            continue
        default = "none" if field.default in ((), "") else field.default
        text = f"{texts[field.name]} (default: {default})".replace("%", "%%")
        option = "--" + field.name.replace("_", "-")
        # With SUPPRESS, an option that is not given differs from an option that is given with the default
        # value.
        option_args = _option_args(hints[field.name])
        if "nargs" in field.metadata:  # the option also accepts several values at once
            option_args |= {"action": "extend", "nargs": field.metadata["nargs"]}
        parser.add_argument(option, default=argparse.SUPPRESS, help=text, **option_args)


def values_of(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the fields of a dataclass that were given on the command line, by name."""
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


def _option_args(hint: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `add_argument` for a field of the given type."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
        if any(typing.get_origin(t) is dict for t in typing.get_args(hint)):
            return {"type": json.loads}
        hint = next(t for t in typing.get_args(hint) if t is not types.NoneType)
    if typing.get_origin(hint) is tuple:  # variable length: the option is repeated for each item
        return {"action": "append", "type": typing.get_args(hint)[0]}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    return {"action": argparse.BooleanOptionalAction} if hint is bool else {"type": hint}


def _field_texts(cls: type) -> dict[str, str]:
    """Returns the text of each field from the "Args:" section of a class's docstring."""
    section = (cls.__doc__ or "").split("Args:\n")[1].split("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text) for name, text in entries}

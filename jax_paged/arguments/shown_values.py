"""Formatting of values for error messages."""

from collections.abc import Iterable
from typing import Any


class Text(str):
    """Text whose `repr` has no quotes, for error messages that describe a value, such as "at least 5000"."""

    __repr__ = str.__str__


def shortened(text: str, length: int = 100) -> str:
    """Returns `text`, with its middle cut out if it has more than about `length` characters."""
    half = length // 2
    return text if len(text) <= length else f"{text[:half]}...{text[-half:]}"


def shown(value: Any, length: int = 200) -> str:
    """Returns the `repr` of a value, with its middle cut out beyond about `length` characters."""
    try:
        return shortened(repr(value), length)
    except (RecursionError, ValueError):  # nested too deeply, or an int with too many digits
        return f"a value of type {type(value).__name__}"


def one_of(choices: Iterable[Any]) -> str:
    """Returns the choices as a phrase: "1", "1 or 2" or "one of 1, 2, 3"."""
    texts = [repr(choice) for choice in choices]
    return f"one of {', '.join(texts)}" if len(texts) > 2 else " or ".join(texts)

"""Suggestions for misspelled names of arguments, keys, choices and command-line options."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any


def suggestion(name: Any, names: Iterable[Any]) -> str:
    """Returns "; did you mean 'x'?" with the closest names, or "" if no name is close.

    Args:
        name: The name as the user wrote it.
        names: The allowed names; only strings among them are suggested.
    """
    if not isinstance(name, str):
        return ""
    # Names that differ only in case, underscores or dashes are treated as equal.
    by_normalized = {_normalized(known): known for known in names if isinstance(known, str)}
    close = difflib.get_close_matches(_normalized(name), by_normalized, n=2, cutoff=0.75)
    return f"; did you mean {' or '.join(repr(by_normalized[key]) for key in close)}?" if close else ""


def suggestions(given: Iterable[Any], names: Iterable[Any]) -> str:
    """Returns the suggestions for all names that are not allowed; "" if there are none.

    Args:
        given: The names as the user wrote them.
        names: The allowed names.
    """
    allowed = list(names)
    return "".join(suggestion(name, allowed) for name in given if name not in allowed)


def check_keywords(owner: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises TypeError with a suggestion if a keyword argument is unknown.

    Args:
        owner: Name of the class or function, for the message.
        given: Names of the keyword arguments of a call.
        names: The allowed names.
    """
    allowed = tuple(names)
    for name in given:
        if name not in allowed:
            message = f"{owner} got an unexpected keyword argument {name!r}{suggestion(name, allowed)}"
            raise TypeError(message)


def suggests_fields[T](cls: type[T]) -> type[T]:
    """Decorates a dataclass so that its constructor suggests names for misspelled arguments."""
    construct: Callable[..., None] = cls.__init__
    names = field_names(cls)

    @functools.wraps(construct)
    def __init__(self: T, *args: Any, **kwargs: Any) -> None:
        check_keywords(type(self).__name__, kwargs, names)
        construct(self, *args, **kwargs)

    # Assigned here instead of being defined as a method, so that type checkers still check argument names.
    cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
    return cls


def field_names(cls: Any) -> tuple[str, ...]:
    """Returns the names of the constructor arguments of a dataclass."""
    return tuple(field.name for field in dataclasses.fields(cls) if field.init)


def _normalized(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")

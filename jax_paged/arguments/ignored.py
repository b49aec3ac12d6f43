"""Arguments of vLLM's that have no meaning here: accepted with one warning, if they change no result."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.shown_values import one_of, shown
from jax_paged.arguments.suggestions import check_keywords, field_names, suggestion

# A warning names the user's line, even if that calls dataclasses.replace. CPython 3.12 takes prefixes only
# that are shorter than the file's name.
_SKIPPED = (str(Path(__file__).parents[1]), dataclasses.__file__.removesuffix("py"))

# The allowed values of an ignored argument; ANY allows every value.
ANY = None
Ignored = Mapping[str, tuple[Any, ...] | None]
# The allowed values of what is not built, where any value that is false leaves it off.
OFF = (None, False, 0, 0.0, "", [], {})


def refused(value: Any, allowed: tuple[Any, ...] | None) -> str | None:
    """Returns None if a value is allowed; else the allowed values, for an error message.

    Args:
        value: Of an ignored argument, or of a field of a request.
        allowed: The allowed values, or ANY.
    """
    if allowed is None or any(type(value) is type(a) and value == a for a in allowed):
        return None
    return "unset" if allowed is OFF else one_of(allowed)


def ignores[T](ignored: Ignored, *, none_is_default: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Lets a dataclass take arguments that it ignores.

    One warning names all of them that a call passes, because a user may expect them to do something. An
    argument that would change what comes out is accepted only with the values that describe what happens
    anyway.

    Unless the class is frozen, attributes that are set later are treated alike, and setting one that is
    neither a field nor ignored raises AttributeError: it would have no effect.

    An argument that is neither a field nor ignored raises TypeError with the closest names.

    Args:
        ignored: The names, each with the values that are allowed.
        none_is_default: Arguments of the class for which vLLM's scripts may pass None to get the default.

    Returns:
        A decorator of dataclasses. The constructor raises ValueError for a value that isn't allowed; the
        message names the argument, its value and what is allowed.
    """

    def decorate(cls: type[T]) -> type[T]:
        construct = cls.__init__
        allowed = (*field_names(cls), *ignored)

        @functools.wraps(construct)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            check_keywords(type(self).__name__, kwargs, allowed)
            for name in none_is_default:
                if name in kwargs and kwargs[name] is None:
                    del kwargs[name]
            names = sorted(kwargs.keys() & ignored.keys())
            if names:
                _check_and_warn(type(self).__name__, {name: kwargs.pop(name) for name in names}, ignored)
            construct(self, *args, **kwargs)

        def __setattr__(self: T, name: str, value: Any) -> None:
            fields: dict[str, Any] = type(self).__dataclass_fields__  # pyright: ignore
            if name in fields or hasattr(type(self), name):
                object.__setattr__(self, name, value)
            elif name in ignored:
                _check_and_warn(type(self).__name__, {name: value}, ignored)
            else:
                close = suggestion(name, fields)
                message = f"{type(self).__name__} has no field {name!r}, only {', '.join(fields)}{close}"
                raise AttributeError(message, name=name, obj=self)

        # Set here, not written as a method of the class: type checkers go on to check the names.
        cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
        if cls.__setattr__ is object.__setattr__:  # not frozen
            cls.__setattr__ = __setattr__  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def _check_and_warn(owner: str, values: dict[str, Any], ignored: Ignored) -> None:
    problems = []
    for name, value in plain(values).items():
        if (choices := refused(value, ignored[name])) is not None:
            allowed = f"{choices} because this engine supports nothing else"
            problems.append(f"`{name}` must be {allowed}, got {shown(value)}")
    if problems:
        raise ValueError("\n".join(problems))
    have = "which have" if len(values) > 1 else "which has"
    message = f"{owner} ignores {', '.join(values)}, {have} no meaning in this engine"
    warnings.warn(message, UserWarning, skip_file_prefixes=_SKIPPED)

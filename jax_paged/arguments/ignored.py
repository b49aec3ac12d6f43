"""Decorator for dataclasses that accept vLLM arguments without a meaning in this engine.

Such an argument is ignored with a warning if ignoring it can't change a result; otherwise it is an error.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.shown_values import one_of, shown
from jax_paged.arguments.suggestions import check_keywords, field_names, suggestion

# Stack frames of files under these paths are skipped, so that the warning shows the user's line even if the
# user called dataclasses.replace. CPython 3.12 only accepts a prefix that is shorter than the file name.
_SKIPPED = (str(Path(__file__).parents[1]), dataclasses.__file__.removesuffix("py"))

# As the allowed values of an ignored argument, ANY accepts every value.
ANY = None
Ignored = Mapping[str, tuple[Any, ...] | None]
# The allowed values of an unsupported feature: every value that turns it off.
OFF = (None, False, 0, 0.0, "", [], {})


def refusal(value: Any, allowed: tuple[Any, ...] | None) -> str | None:
    """Returns the allowed values as text for an error message if the value is not allowed, else None.

    Args:
        value: Value of an ignored argument, or of a field of a request.
        allowed: The allowed values, or ANY.
    """
    if allowed is None or any(type(value) is type(a) and value == a for a in allowed):
        return None
    return "unset" if allowed is OFF else one_of(allowed)


def ignores[T](ignored: Ignored, *, none_is_default: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Returns a decorator that makes a dataclass accept arguments which it ignores.

    The constructor of the decorated class

    - accepts the arguments in `ignored` and emits one warning that names all of them, because a user may
      expect an effect,
    - raises ValueError if an ignored argument has a value that is not in its list of allowed values, because
      such a value would change the result,
    - raises TypeError with the closest names for an argument that is neither a field nor ignored.

    If the class is not frozen, attributes that are set later are treated in the same way. Setting an
    attribute that is neither a field nor ignored raises AttributeError, because it would have no effect.

    Args:
        ignored: The allowed values of each ignored argument, by name; ANY allows every value.
        none_is_default: Fields for which None stands for the default value, because vLLM scripts may pass
            None.
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

        # Assigned here instead of being defined as a method, so that type checkers still check argument
        # names.
        cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
        if cls.__setattr__ is object.__setattr__:  # not frozen
            cls.__setattr__ = __setattr__  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def _check_and_warn(owner: str, values: dict[str, Any], ignored: Ignored) -> None:
    problems = []
    for name, value in plain(values).items():
        if (choices := refusal(value, ignored[name])) is not None:
            why = "this engine does not support " + ("it" if choices == "unset" else "other values")
            allowed = f"{choices} because {why}"
            problems.append(f"`{name}` must be {allowed}, got {shown(value)}")
    if problems:
        raise ValueError("\n".join(problems))
    have = "which have" if len(values) > 1 else "which has"
    message = f"{owner} ignores {', '.join(values)}, {have} no meaning in this engine"
    warnings.warn(message, UserWarning, skip_file_prefixes=_SKIPPED)

"""Arguments of vLLM's that have no meaning here: accepted with one warning, if they change no result."""

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parent)

# The allowed values of an ignored argument; ANY stands for whatever value.
ANY = None
Ignored = Mapping[str, tuple[Any, ...] | None]


def ignores[T](ignored: Ignored, *, none_is_default: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Lets the constructor of a class take arguments that it ignores.

    A warning names all that one call passes, because a user may expect something of them. An argument that
    would change what comes out is accepted with those values only that say what happens anyway.

    Args:
        ignored: The names, each with the values that are allowed.
        none_is_default: Arguments of the class for which vLLM's scripts may pass None to get the default.

    Returns:
        A decorator of classes. The constructor raises ValueError for a value that isn't allowed; the message
        names the argument, its value and what is allowed.
    """

    def decorate(cls: type[T]) -> type[T]:
        construct = cls.__init__

        @functools.wraps(construct)
        def __init__(self: T, *args: Any, **kwargs: Any) -> None:
            for name in none_is_default:
                if name in kwargs and kwargs[name] is None:
                    del kwargs[name]
            names = sorted(kwargs.keys() & ignored.keys())
            if names:
                _check_and_warn(type(self).__name__, {name: kwargs.pop(name) for name in names}, ignored)
            construct(self, *args, **kwargs)

        cls.__init__ = __init__  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate


def _check_and_warn(owner: str, values: dict[str, Any], ignored: Ignored) -> None:
    problems = []
    for name, value in values.items():
        allowed = ignored[name]
        if allowed is not None and not any(type(value) is type(a) and value == a for a in allowed):
            choices = " or ".join(map(repr, allowed))
            problems.append(f"{name} is {value!r}; allowed: {choices}, as this engine can do nothing else")
    if problems:
        raise ValueError("\n".join(problems))
    message = f"{owner} ignores {', '.join(values)}, which have no meaning in this engine"
    warnings.warn(message, UserWarning, skip_file_prefixes=(_PACKAGE,))

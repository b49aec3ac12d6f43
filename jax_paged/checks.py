"""Checks of arguments: a ValueError names the argument, its value and what is allowed."""

import math
from collections.abc import Callable
from typing import Any

from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.suggestions import suggestion


class TooLongError(ValueError):
    """A prompt that does not fit max_model_len, or not together with the output that is asked for.

    Args:
        message: What is too long.
        max_model_len: The limit, in tokens.
    """

    def __init__(self, message: str, max_model_len: int) -> None:
        super().__init__(f"{message}; allowed: max_model_len, {max_model_len}")
        self.max_model_len = max_model_len


def check(ok: bool, name: str, value: Any, allowed: str) -> None:
    """Raises ValueError that names the argument, its value and what is allowed, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Returns a value in plain Python.

    Raises:
        ValueError: If the value is not one of `choices` (and of the same type: True is not 1).
    """
    given, value = value, plain(value)
    ok = any(type(value) is type(c) and value == c for c in choices)
    if not ok:
        check(False, name, given, " or ".join(repr(c) for c in choices) + suggestion(value, choices))
    return value


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns an integer of any library as a Python int.

    Raises:
        ValueError: If the value is not an integer (a bool is not one) in [low, high].
    """
    given, value = value, plain(value)
    ok = type(value) is int and value >= low and (high is None or value <= high)
    if not ok:
        allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
        check(False, name, given, allowed)
    return value


def check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """Returns a real number of any library as a Python int or float.

    Raises:
        ValueError: If the value is not a finite number in [low, high], or (low, high] if `low_open`.
    """
    given, value = value, plain(value)
    ok = type(value) in (int, float)
    # NaN fails every comparison; math.isfinite would overflow on a huge int.
    ok = ok and (value > low if low_open else value >= low) and value <= high and value != math.inf
    if not ok:
        check(False, name, given, f"a finite number in {'(' if low_open else '['}{low}, {high}]")
    return value


class Problems:
    """Collects what several checks find, so that a user sees every problem at once."""

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    def note[T](self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Calls a check and returns what it does; None if it raises ValueError, which is kept."""
        try:
            return check(*args, **kwargs)
        except ValueError as error:
            self._found.append(error)
            return None

    def raise_if_any(self) -> None:
        """Raises the error of the only failed check, or one ValueError with all messages, one per line."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ValueError("\n".join(map(str, self._found)))

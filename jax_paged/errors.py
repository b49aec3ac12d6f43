"""Errors about arguments, and the checks that raise them: "`name` must be <allowed>, got <value>"."""

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.shown_values import Text, one_of, shown
from jax_paged.arguments.suggestions import suggestion


class ArgumentError(ValueError):
    """An argument with a value that is not allowed: "`name` must be <allowed>, got <value>".

    Args:
        name: Path of the argument, such as `stop` or `messages[1].content`.
        value: The value; the message shows a shortened `repr` of it.
        allowed: The allowed values as a phrase that follows "must be", such as "an integer in [0, 5]".
        aspect: What about the argument is wrong if not its value itself, such as "the length of".
        remedy: What to do about it: text that is appended to the message, with its separator.
    """

    def __init__(self, name: str, value: Any, allowed: str, *, aspect: str = "", remedy: str = "") -> None:
        super().__init__(name, value, allowed)
        self.name, self.value, self.allowed = name, value, allowed
        self.aspect, self.remedy = aspect, remedy

    def __str__(self) -> str:
        """Returns the message."""
        subject = _joined(self.aspect, f"`{self.name}`")
        return f"{subject} must be {self.allowed}, got {shown(self.value)}{self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how to copy the error; a value that can't be pickled, such as a lambda, becomes text."""
        value = self.value
        try:
            pickle.dumps(value)
        except Exception:
            value = Text(shown(value))
        make = functools.partial(ArgumentError, aspect=self.aspect, remedy=self.remedy)
        return make, (self.name, value, self.allowed)


class TooLongError(ArgumentError):
    """A prompt that does not fit into max_model_len, alone or together with the requested output.

    Args:
        num_tokens: The number of tokens; text if only its lower bound is known.
        max_model_len: The maximum number of tokens of a prompt and its output.
        num_reserved: Number of tokens that the output needs.
        aspect: What of the prompt is counted.
    """

    def __init__(
        self,
        num_tokens: int | Text,
        max_model_len: int,
        num_reserved: int = 0,
        aspect: str = "the number of tokens of",
    ) -> None:
        limit = "max_model_len" + (f" - {num_reserved}" if num_reserved else "")
        allowed = f"at most {max_model_len - num_reserved} ({limit})"
        super().__init__("prompt", num_tokens, allowed, aspect=aspect)
        self.max_model_len, self.num_reserved = max_model_len, num_reserved

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns how to copy the error."""
        return TooLongError, (self.value, self.max_model_len, self.num_reserved, self.aspect)


class ArgumentErrors(ValueError):
    """Several errors about arguments, whose messages are one per line.

    Args:
        errors: The errors, at least one.
    """

    def __init__(self, errors: tuple[ValueError, ...]) -> None:
        super().__init__(errors)
        self.errors = errors

    def __str__(self) -> str:
        """Returns the messages, one per line."""
        return "\n".join(map(str, self.errors))


def first_argument_error(error: ValueError) -> ArgumentError | None:
    """Returns the error if it is about an argument, or the first of several such; None if there is none."""
    if isinstance(error, ArgumentErrors):
        return next(filter(None, map(first_argument_error, error.errors)), None)
    return error if isinstance(error, ArgumentError) else None


def check(ok: bool, name: str, value: Any, allowed: str, *, aspect: str = "", remedy: str = "") -> None:
    """Raises ArgumentError, which has the same arguments, unless `ok`."""
    if not ok:
        raise ArgumentError(name, value, allowed, aspect=aspect, remedy=remedy)


def check_choice(
    name: str, value: Any, choices: tuple[Any, ...], *, condition: str = "", aspect: str = ""
) -> Any:
    """Returns a value in plain Python.

    Args:
        name: Path of the argument.
        value: The value.
        choices: The allowed values.
        condition: When or why only these are allowed, for the message.
        aspect: What about the argument is checked if not its value itself.

    Raises:
        ArgumentError: If the value is not one of `choices` (and of the same type: True is not 1).
    """
    given, value = value, plain(value)
    ok = any(type(value) is type(c) and value == c for c in choices)
    if not ok:
        allowed, remedy = _joined(one_of(choices), condition), suggestion(value, choices)
        raise ArgumentError(name, given, allowed, aspect=aspect, remedy=remedy)
    return value


def check_int(
    name: str, value: Any, low: int, high: int | None = None, *, condition: str = "", aspect: str = ""
) -> int:
    """Returns an integer of any library as a Python int.

    Args:
        name: Path of the argument.
        value: The value.
        low: The lowest allowed value.
        high: The highest allowed value; None if there is no limit.
        condition: When or why only these are allowed, for the message.
        aspect: What about the argument is checked if not its value itself.

    Raises:
        ArgumentError: If the value is not an integer (a bool is not one) in [low, high].
    """
    given, value = value, plain(value)
    ok = type(value) is int and value >= low and (high is None or value <= high)
    if not ok:
        allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ArgumentError(name, given, _joined(allowed, condition), aspect=aspect)
    return value


def check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """Returns a real number of any library as a Python int or float.

    Raises:
        ArgumentError: If the value is not a finite number in [low, high], or (low, high] if `low_open`.
    """
    given, value = value, plain(value)
    ok = type(value) in (int, float)
    # NaN fails every comparison; math.isfinite would overflow on a huge int.
    ok = ok and (value > low if low_open else value >= low) and value <= high and value != math.inf
    if not ok:
        raise ArgumentError(name, given, f"a finite number in {'(' if low_open else '['}{low}, {high}]")
    return value


class Problems:
    """Collects the errors of several checks, so that a user sees every problem at once."""

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    def note[T](self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Calls a check and returns its result; None if it raises ValueError, which is kept."""
        try:
            return check(*args, **kwargs)
        except ValueError as error:
            self._found.append(error)
            return None

    def raise_if_any(self) -> None:
        """Raises the error of the only failed check, or ArgumentErrors with those of all."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ArgumentErrors(tuple(self._found))


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))

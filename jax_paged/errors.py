"""Errors about arguments, and the checks that raise them.

All messages have the form "`name` must be <allowed>, got <value>".
"""

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

from jax_paged.arguments.plain_values import plain
from jax_paged.arguments.shown_values import Text, one_of, shown
from jax_paged.arguments.suggestions import suggestion


class ArgumentError(ValueError):
    """Error about an argument whose value is not allowed.

    The message is "`name` must be <allowed>, got <value>".

    Args:
        name: Path of the argument, such as `stop` or `messages[1].content`.
        value: The value; the message shows its `repr`, shortened if it is long.
        allowed: The allowed values as a phrase that follows "must be", such as "an integer in [0, 5]".
        aspect: The property of the argument that is wrong, such as "the length of"; "" if it is the value
            itself.
        remedy: Text appended to the message, including its separator, that says how to fix the problem.
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
        """Returns the values from which pickle and copy restore the error.

        A value that can't be pickled, such as a lambda, is replaced by its shortened `repr`.
        """
        value = self.value
        try:
            pickle.dumps(value)
        except Exception:
            value = Text(shown(value))
        make = functools.partial(ArgumentError, aspect=self.aspect, remedy=self.remedy)
        return make, (self.name, value, self.allowed)


class TooLongError(ArgumentError):
    """Error for a prompt that exceeds max_model_len, alone or together with the requested output.

    Args:
        num_tokens: Number of tokens of the prompt, or a Text such as "at least 5000" if only a lower bound is
            known.
        max_model_len: Maximum number of tokens of a prompt and its output together.
        num_reserved: Number of tokens reserved for the output.
        aspect: The property of the prompt that is counted.
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
        """Returns the values from which pickle and copy restore the error."""
        return TooLongError, (self.value, self.max_model_len, self.num_reserved, self.aspect)


class ArgumentErrors(ValueError):
    """Several errors about arguments; the message has one line per error.

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
    """Returns `error` if it is an ArgumentError, or the first one that it contains; None if there is none.

    Args:
        error: An ArgumentError, ArgumentErrors (searched recursively), or another ValueError.
    """
    if isinstance(error, ArgumentErrors):
        return next(filter(None, map(first_argument_error, error.errors)), None)
    return error if isinstance(error, ArgumentError) else None


def check(ok: bool, name: str, value: Any, allowed: str, *, aspect: str = "", remedy: str = "") -> None:
    """Raises ArgumentError with the given arguments if `ok` is False."""
    if not ok:
        raise ArgumentError(name, value, allowed, aspect=aspect, remedy=remedy)


def check_choice(
    name: str, value: Any, choices: tuple[Any, ...], *, condition: str = "", aspect: str = ""
) -> Any:
    """Checks that a value is one of the choices, and returns it as a plain Python value.

    Args:
        name: Path of the argument.
        value: The value.
        choices: The allowed values. The type must match too: True does not match 1.
        condition: Text for the message that says when or why only these values are allowed.
        aspect: The property of the argument that is checked; "" if it is the value itself.

    Raises:
        ArgumentError: If the value is not one of `choices`.
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
    """Checks the range of an integer, and returns it as a Python int.

    Args:
        name: Path of the argument.
        value: The value: a Python int, or an integer of NumPy or JAX. A bool is not accepted.
        low: The lowest allowed value.
        high: The highest allowed value; None if there is no limit.
        condition: Text for the message that says when or why only these values are allowed.
        aspect: The property of the argument that is checked; "" if it is the value itself.

    Raises:
        ArgumentError: If the value is not an integer in [low, high].
    """
    given, value = value, plain(value)
    ok = type(value) is int and value >= low and (high is None or value <= high)
    if not ok:
        allowed = f"an integer of at least {low}" if high is None else f"an integer in [{low}, {high}]"
        raise ArgumentError(name, given, _joined(allowed, condition), aspect=aspect)
    return value


def check_number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> float:
    """Checks the range of a real number, and returns it as a Python int or float.

    Args:
        name: Path of the argument.
        value: The value: a Python number, or one of NumPy or JAX. A bool is not accepted.
        low: The lower limit.
        high: The highest allowed value; infinity for no limit.
        low_open: Whether `low` itself is excluded.

    Raises:
        ArgumentError: If the value is not a finite number in [low, high], or in (low, high] with `low_open`.
    """
    given, value = value, plain(value)
    ok = type(value) in (int, float)
    # NaN fails every comparison. math.isfinite is not used because it overflows for huge ints.
    ok = ok and (value > low if low_open else value >= low) and value <= high and value != math.inf
    if not ok:
        raise ArgumentError(name, given, f"a finite number in {'(' if low_open else '['}{low}, {high}]")
    return value


class Problems:
    """Collector for the errors of several checks, so that one exception reports all of them."""

    def __init__(self) -> None:
        self._found: list[ValueError] = []

    def note[T](self, check: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
        """Calls a check and returns its result, or stores its ValueError and returns None.

        Args:
            check: The function to call.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.
        """
        try:
            return check(*args, **kwargs)
        except ValueError as error:
            self._found.append(error)
            return None

    def raise_if_any(self) -> None:
        """Raises the stored errors, if there are any.

        Raises:
            ValueError: The stored error if there is exactly one; ArgumentErrors if there are several.
        """
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ArgumentErrors(tuple(self._found))


def _joined(*words: str) -> str:
    return " ".join(filter(None, words))

"""Errors about arguments: their message, their attributes, and their copies."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jax_paged.errors import (
    ArgumentError,
    ArgumentErrors,
    Problems,
    TooLongError,
    check,
    check_choice,
    check_int,
    check_number,
    first_argument_error,
)

NAMES = ("n", "messages[1].content", "chat_template_kwargs['a b']", "tools[0].function.name")
ASPECTS = ("", "the length of", "each token id in")
REMEDIES = ("", ". Call schedule() for a new one", "; did you mean 'x'?")
VALUES = (0, -1.5, None, "text", ["a"], {"k": (1, 2)}, b"x", "a" * 10_000, list(range(10_000)), float("nan"))


def rebuilt(error: Exception) -> list[Exception]:
    return [pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


def test_message_attributes_and_copies() -> None:
    rng = random.Random(0)
    for _ in range(300):
        name, aspect, remedy, value = map(rng.choice, (NAMES, ASPECTS, REMEDIES, VALUES))
        allowed = f"an integer in [0, {rng.randrange(99)}]"
        error = ArgumentError(name, value, allowed, aspect=aspect, remedy=remedy)
        message = str(error)
        assert message.startswith(f"{aspect} `{name}` must be {allowed}, got ".lstrip())
        assert message.endswith(remedy)
        assert len(message) < 420
        if len(repr(value)) <= 200:
            assert f", got {value!r}{remedy}" in message
        for other in (error, *rebuilt(error)):
            assert isinstance(other, ArgumentError)
            assert str(other) == message
            assert (other.name, repr(other.value), other.allowed) == (name, repr(value), allowed)
            assert (other.aspect, other.remedy) == (aspect, remedy)


def test_values_that_are_not_pickled_or_printed() -> None:
    error = ArgumentError("logits_processors", [lambda logits: logits], "None")
    for other in rebuilt(error):
        assert str(other) == str(error)
    assert "got a value of type int" in str(ArgumentError("n", 10**5000, "smaller"))
    nested: list[Any] = []
    for _ in range(10**5):
        nested = [nested]
    error = ArgumentError("json", nested, "flat")
    assert "got a value of type list" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_prompts_that_are_too_long() -> None:
    error = TooLongError(65, 64, 1)
    assert str(error) == "the number of tokens of `prompt` must be at most 63 (max_model_len - 1), got 65"
    for other in (error, *rebuilt(error)):
        assert isinstance(other, TooLongError)
        assert (str(other), other.max_model_len, other.name) == (str(error), 64, "prompt")


@pytest.mark.parametrize(
    ("call", "args", "message"),
    [
        (check, (False, "stop", 5, "None or a string"), "`stop` must be None or a string, got 5"),
        (check_int, ("n", True, 1), "`n` must be an integer of at least 1, got True"),
        (check_int, ("n", 0.5, 1, 9), "`n` must be an integer in [1, 9], got 0.5"),
        (check_number, ("t", float("nan"), 0, 2), "`t` must be a finite number in [0, 2], got nan"),
        (check_choice, ("x", 1, (True, False)), "`x` must be True or False, got 1"),
        (check_choice, ("x", "b", ("a",)), "`x` must be 'a', got 'b'"),
        (
            check_choice,
            ("dtype", "flaot32", ("auto", "float32", "bfloat16")),
            "`dtype` must be one of 'auto', 'float32', 'bfloat16', got 'flaot32'; did you mean 'float32'?",
        ),
    ],
)
def test_checks(call: Callable[..., Any], args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(*args)
    assert str(caught.value) == message


def test_conditions_and_aspects() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_int("best_of", 2, 3, condition="(n)", aspect="the value of")
    assert str(caught.value) == "the value of `best_of` must be an integer of at least 3 (n), got 2"
    with pytest.raises(ArgumentError) as caught:
        check_choice("skip", False, (None, True), condition="with prompt_logprobs")
    assert str(caught.value) == "`skip` must be None or True with prompt_logprobs, got False"


def test_checks_return_plain_values() -> None:
    values = (
        check_int("n", np.int64(3), 1),
        check_number("t", np.float32(0.5), 0, 1),
        check_choice("x", 1, (1,)),
    )
    assert values == (3, 0.5, 1)
    assert [type(value) for value in values] == [int, float, int]


def test_problems() -> None:
    problems = Problems()
    problems.raise_if_any()
    assert problems.note(check_int, "n", 1, 1) == 1
    problems.note(check_int, "n", 0, 1)
    with pytest.raises(ArgumentError, match="`n`"):
        problems.raise_if_any()
    problems.note(check_int, "m", 0, 1)
    with pytest.raises(ArgumentErrors) as caught:
        problems.raise_if_any()
    for error in (caught.value, *rebuilt(caught.value)):
        assert isinstance(error, ArgumentErrors)
        assert str(error).splitlines() == [
            "`n` must be an integer of at least 1, got 0",
            "`m` must be an integer of at least 1, got 0",
        ]
        first = first_argument_error(error)
        assert first is not None
        assert first.name == "n"


def test_first_argument_error() -> None:
    own = ArgumentError("n", 0, "1")
    assert first_argument_error(own) is own
    assert first_argument_error(ValueError("other")) is None
    assert first_argument_error(ArgumentErrors((ValueError("other"), ArgumentErrors((own,))))) is own

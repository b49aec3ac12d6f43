"""The automaton for stop strings: exactly what looking for each string on its own finds, in one pass."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_paged import SamplingParams
from jax_paged.engine.text.stop_strings import StopStrings
from jax_paged.sampling_params import MAX_STOP_CHARACTERS, MAX_STOP_STRING_LENGTH, MAX_STOP_STRINGS


class Naive:
    """Looks for each stop string on its own, in the whole text."""

    def __init__(self, stops):
        self.stops, self.text = stops, ""

    def feed(self, new):
        """Returns where the stop string starts that starts first in the new text, and the string."""
        self.text += new
        first, found = len(self.text), None
        for stop in self.stops:
            position = self.text.find(stop, max(0, len(self.text) - len(new) - len(stop) + 1))
            if position >= 0 and (position < first or found is None):
                first, found = position, stop
        return None if found is None else (first - len(self.text) + len(new), found)

    def num_held_back(self):
        """Returns the length of the longest end of the text with which a stop string begins, but not ends."""
        lengths = [n for s in self.stops for n in range(1, len(s)) if self.text.endswith(s[:n])]
        return max(lengths, default=0)


def texts(**sizes):
    return st.one_of(st.text("ab", **sizes), st.text("aé🙂", **sizes))


@pytest.mark.thorough
@settings(max_examples=1000, deadline=None)
@given(
    stops=st.lists(texts(min_size=1, max_size=6), min_size=1, max_size=8),
    parts=st.lists(texts(max_size=6), max_size=12),
)
def test_equals_looking_for_each_on_its_own(stops, parts):
    automaton, naive = StopStrings(stops), Naive(stops)
    state = automaton.start
    for part in parts:
        state, match = automaton.feed(state, part)
        assert match == naive.feed(part)
        assert automaton.num_held_back(state) == naive.num_held_back()


def test_cost_of_a_character_does_not_depend_on_how_many_there_are():
    """Transitions that are followed, per character: at most one that fits and one that falls back."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    few = [letters]
    many = [letters[i % 26 :] + letters[: i % 26] + letters[i // 26] for i in range(MAX_STOP_STRINGS)]
    text = (letters + letters[::-1]) * 50

    class Counted(dict):
        count = 0

        def get(self, key, default=None):
            self.count += 1
            return super().get(key, default)

    def num_looked_up(stops):
        automaton = StopStrings(stops)
        automaton._next = table = Counted(automaton._next)
        automaton.feed(automaton.start, text)
        return table.count

    assert num_looked_up(few) <= 2 * len(text)
    assert num_looked_up(many) <= 2 * len(text)


def test_limits_name_what_is_allowed():
    longest = ["x" * MAX_STOP_STRING_LENGTH] * (MAX_STOP_CHARACTERS // MAX_STOP_STRING_LENGTH)
    for most in (longest, ["x" * (MAX_STOP_CHARACTERS // MAX_STOP_STRINGS)] * MAX_STOP_STRINGS):
        assert SamplingParams(stop=most).stop_strings
        with pytest.raises(
            ValueError,
            match=r"the total length of the strings in `stop` must be an integer in \[0, 4096\], got 4097",
        ):
            SamplingParams(stop=[*most[:-1], most[-1] + "x"])
    with pytest.raises(ValueError, match=r"the number of strings in `stop` must be .*\[0, 64\], got 65"):
        SamplingParams(stop=["x"] * (MAX_STOP_STRINGS + 1))
    with pytest.raises(
        ValueError, match=r"the length of each string in `stop` must be .*\[0, 256\], got 257"
    ):
        SamplingParams(stop=["a", "x" * (MAX_STOP_STRING_LENGTH + 1)])

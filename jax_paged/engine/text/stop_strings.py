"""Finds any of many stop strings in a text that grows, in one pass whose cost does not depend on how many."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_ROOT = 0


class StopMatch(NamedTuple):
    """A stop string in the text that was just fed.

    Args:
        start: Where it starts, in characters from the start of the fed text; negative if it started before.
        stop: The stop string.
    """

    start: int
    stop: str


class StopStrings:
    """The stop strings of a request as an automaton; immutable, so that all its samples share it.

    A state stands for the longest end of the text so far that some stop string starts with. Building it
    takes time and memory in proportion to the characters of all stop strings.

    Args:
        stops: The strings, none of them empty.

    Source: Aho and Corasick, Efficient String Matching, CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        # Next state by state and character; a pair that is missing falls back to a shorter end of the text.
        self._next: dict[tuple[int, str], int] = {}
        self._fallback = [_ROOT]
        # Per state: the longest stop string that the text ends with (an index, None for none) ...
        self._found: list[int | None] = [None]
        # ... and how many of the last characters may still become a stop string.
        self._num_open = [0]
        self._build()

    @property
    def start(self) -> int:
        """The state before any text."""
        return _ROOT

    def feed(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Returns the state after more text, and the stop string in it that starts first.

        Of several that start at the same character, it is the one listed first.

        Args:
            state: The state after the text so far.
            text: The characters that follow.
        """
        best: tuple[int, int] | None = None
        for end, character in enumerate(text, 1):
            state = self._follow(state, character)
            found = self._found[state]
            if found is not None:  # of those that end here, the longest starts first
                match = end - len(self._stops[found]), found
                best = match if best is None else min(best, match)
        return state, None if best is None else StopMatch(best[0], self._stops[best[1]])

    def num_open(self, state: int) -> int:
        """Returns how many characters at the end of the text a stop string could start with."""
        return self._num_open[state]

    def _follow(self, state: int, character: str) -> int:
        while (after := self._next.get((state, character))) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return after

    def _build(self) -> None:
        children: list[list[tuple[str, int]]] = [[]]
        for index, stop in enumerate(self._stops):
            assert stop, "an empty stop string"
            state = _ROOT
            for character in stop:
                after = self._next.get((state, character))
                if after is None:
                    after = self._next[state, character] = len(children)
                    children[state].append((character, after))
                    children.append([])
                    self._found.append(None)
                state = after
            if self._found[state] is None:  # of equal strings, the first
                self._found[state] = index
        self._fallback = [_ROOT] * len(children)
        self._num_open = [0] * len(children)
        # Breadth first: fallbacks are shorter, so they are complete before they are read.
        depths, queue = [0] * len(children), deque([_ROOT])
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            if self._found[state] is None:
                self._found[state] = self._found[fallback]
            self._num_open[state] = depths[state] if children[state] else self._num_open[fallback]
            for character, child in children[state]:
                depths[child] = depths[state] + 1
                if state != _ROOT:
                    self._fallback[child] = self._follow(fallback, character)
                queue.append(child)

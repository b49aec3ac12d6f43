"""StopStrings: finds stop strings in a growing text, in one pass.

The cost of a character does not depend on the number of stop strings.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_ROOT = 0


class StopMatch(NamedTuple):
    """A stop string that was found in new text.

    Args:
        start: Index of its first character, relative to the start of the new text. It is negative if the stop
            string started in earlier text.
        stop: The stop string.
    """

    start: int
    stop: str


class StopStrings:
    """Aho-Corasick automaton of a request's stop strings. It is immutable, so all samples share it.

    Each state stands for the longest suffix of the text so far that is a prefix of some stop string. Building
    the automaton takes time and memory in proportion to the total number of characters in the stop strings.

    Args:
        stops: The stop strings, none of them empty.

    Source: Aho and Corasick, Efficient String Matching, CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        # The next state by state and character. For a missing pair, the search continues in the fallback
        # state, which stands for a shorter suffix of the text.
        self._next: dict[tuple[int, str], int] = {}
        self._fallback = [_ROOT]
        # By state: the longest stop string that the text ends with, as an index; None if there is none.
        self._found: list[int | None] = [None]
        # By state: the number of characters at the end of the text that may begin a stop string.
        self._num_held_back = [0]
        self._build()

    @property
    def start(self) -> int:
        """The state before any text."""
        return _ROOT

    def feed(self, state: int, text: str) -> tuple[int, StopMatch | None]:
        """Returns the state after more text, and the stop string in it that starts first.

        If several stop strings start at the same character, the one listed first is returned.

        Args:
            state: The state after the text so far.
            text: The new text.

        Returns:
            The state and the stop string; None in place of the stop string if there is none.
        """
        best: tuple[int, int] | None = None
        for end, character in enumerate(text, 1):
            state = self._follow(state, character)
            found = self._found[state]
            if found is not None:  # the longest one that ends here starts first
                match = end - len(self._stops[found]), found
                best = match if best is None else min(best, match)
        return state, None if best is None else StopMatch(best[0], self._stops[best[1]])

    def num_held_back(self, state: int) -> int:
        """Returns the number of characters at the end of the text that may begin a stop string."""
        return self._num_held_back[state]

    def _follow(self, state: int, character: str) -> int:
        while (after := self._next.get((state, character))) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return after

    def _build(self) -> None:
        children: list[list[tuple[str, int]]] = [[]]
        for index, stop in enumerate(self._stops):
            assert stop, "a stop string is empty"
            state = _ROOT
            for character in stop:
                after = self._next.get((state, character))
                if after is None:
                    after = self._next[state, character] = len(children)
                    children[state].append((character, after))
                    children.append([])
                    self._found.append(None)
                state = after
            if self._found[state] is None:  # if stop strings are equal, the first one counts
                self._found[state] = index
        self._fallback = [_ROOT] * len(children)
        self._num_held_back = [0] * len(children)
        # Breadth first: fallback states are shorter, so they are complete when they are used.
        depths, queue = [0] * len(children), deque([_ROOT])
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            if self._found[state] is None:
                self._found[state] = self._found[fallback]
            self._num_held_back[state] = depths[state] if children[state] else self._num_held_back[fallback]
            for character, child in children[state]:
                depths[child] = depths[state] + 1
                if state != _ROOT:
                    self._fallback[child] = self._follow(fallback, character)
                queue.append(child)

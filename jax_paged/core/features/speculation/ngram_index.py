"""Finds where the last tokens of a text stood before in it: what followed there is a draft."""

# Earlier places that are compared; the latest ones, as texts repeat what they have just said.
_NUM_PLACES = 8


class NgramIndex:
    """The tokens of one sequence, and where each run of a few tokens ends in them.

    Args:
        min_match: Tokens that have to be equal.
        max_match: Tokens that are compared: the place with most equal tokens wins, the latest of several.

    Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._tokens: list[int] = []
        # By a run of min_match tokens: the positions behind it, but for the run that stands last.
        self._places: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Adds tokens behind the others."""
        tokens, n, places = self._tokens, self._min_match, self._places
        first = max(0, len(tokens) - n)
        tokens.extend(token_ids)
        # The run that stands last has nothing behind it yet.
        runs = zip(*[tokens[first + i : -n + i] for i in range(n)], strict=True)
        for place, run in enumerate(runs, first + n):
            if run in places:
                places[run].append(place)
            else:
                places[run] = [place]

    def propose(self, num_tokens: int) -> list[int]:
        """Returns what followed the last tokens where they stood before: at most num_tokens tokens.

        What follows may reach into its own continuation: a text that repeats every 3 tokens goes on so.
        """
        tokens = self._tokens
        places = self._places.get(tuple(tokens[-self._min_match :]), ())
        best, longest = 0, 0
        for place in places[: -_NUM_PLACES - 1 : -1]:
            length = self._match(place)
            if length > longest:
                best, longest = place, length
                if length == self._max_match:
                    break
        if not longest:
            return []
        draft = tokens[best : best + num_tokens]
        while len(draft) < num_tokens:
            draft.append(draft[len(draft) - (len(tokens) - best)])
        return draft

    def _match(self, place: int) -> int:
        """Returns how many tokens before a place are equal to the last ones."""
        tokens, n = self._tokens, 0
        end = len(tokens)
        while n < self._max_match and n < place and tokens[place - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n

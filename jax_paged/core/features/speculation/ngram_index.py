"""NgramIndex: proposes draft tokens by looking up earlier occurrences of the last tokens in the same text."""

# Maximum number of earlier occurrences to compare, latest first, because text mostly repeats recent text.
_MAX_OCCURRENCES = 8


class NgramIndex:
    """Index of the n-grams of one sequence.

    If the last tokens of the sequence have occurred before, the tokens that followed them are proposed as
    draft tokens. For example, if each letter is a token and the sequence is `abcdab`, the last two tokens
    have occurred before, and `cd` is proposed. The index maps each n-gram of min_match tokens to the
    positions after its occurrences. Among these, the one with the longest match (up to max_match tokens) is
    used; the latest one if several match equally.

    Args:
        min_match: Minimum number of equal tokens, which is the length of the indexed n-grams.
        max_match: Maximum number of tokens to compare.

    Source: prompt lookup decoding, github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match, self._max_match = min_match, max_match
        self._tokens: list[int] = []
        # For each n-gram of min_match tokens, the positions after its occurrences, except at the end.
        self._positions: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: list[int]) -> None:
        """Appends tokens to the sequence."""
        tokens, n, positions = self._tokens, self._min_match, self._positions
        first = max(0, len(tokens) - n)
        tokens.extend(token_ids)
        # The last n-gram is not added yet, because no token follows it.
        runs = zip(*[tokens[first + i : -n + i] for i in range(n)], strict=True)
        for position, run in enumerate(runs, first + n):
            if run in positions:
                positions[run].append(position)
            else:
                positions[run] = [position]

    def propose(self, num_tokens: int) -> list[int]:
        """Returns up to `num_tokens` tokens that followed an earlier occurrence of the last tokens.

        If the occurrence is so recent that fewer tokens follow it, the proposal repeats: after `abcabc`, the
        proposal for 5 tokens is `abcab`.
        """
        tokens = self._tokens
        positions = self._positions.get(tuple(tokens[-self._min_match :]), ())
        best, longest = 0, 0
        for position in positions[: -_MAX_OCCURRENCES - 1 : -1]:
            length = self._match(position)
            if length > longest:
                best, longest = position, length
                if length == self._max_match:
                    break
        if not longest:
            return []
        draft = tokens[best : best + num_tokens]
        while len(draft) < num_tokens:
            draft.append(draft[len(draft) - (len(tokens) - best)])
        return draft

    def _match(self, position: int) -> int:
        """Returns how many tokens before a position are equal to the last tokens of the sequence."""
        tokens, n = self._tokens, 0
        end = len(tokens)
        while n < self._max_match and n < position and tokens[position - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n

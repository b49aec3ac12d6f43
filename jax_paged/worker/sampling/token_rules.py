"""Which tokens of one sequence get a bias, and which are forbidden where, as its parameters say."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from jax_paged.core.scheduler_output import NewSequence


class KnownTokens:
    """The tokens of one sequence as far as rows have told them.

    Args:
        new: The sequence, as it takes its batch slot.
    """

    def __init__(self, new: NewSequence) -> None:
        self._prompt, self._output = new.request.prompt_token_ids, list(new.output_token_ids)

    def record(self, start: int, token_ids: list[int]) -> None:
        """Takes in the tokens of a row, in place of what it knew from position `start` on."""
        first = start - len(self._prompt)
        if first < 0:
            token_ids, first = token_ids[-first:], 0
        if token_ids:
            self._output[first:] = token_ids

    def before(self, position: int) -> tuple[list[int], list[int]]:
        """Returns the prompt, and the output before a position."""
        return list(self._prompt), self._output[: position - len(self._prompt)]

    def between(self, start: int, stop: int) -> list[int]:
        """Returns the tokens at positions [start, stop)."""
        n = len(self._prompt)
        return self._prompt[start:stop] + self._output[max(start - n, 0) : max(stop - n, 0)]


class TokenRules:
    """The tokens of one sequence that get a bias at any position, and those that are forbidden at some.

    Args:
        new: The sequence, as it takes its batch slot.
        tokens: Those before any position that is asked for.
        vocab_size: Of the model.

    Attributes:
        bias: What is added to logits, by token id.
    """

    def __init__(self, new: NewSequence, tokens: KnownTokens, vocab_size: int) -> None:
        params = new.request.sampling_params
        self.bias, banned = params.split_bias()
        self._num_prompt = len(new.request.prompt_token_ids)
        self._min_position = self._num_prompt + params.min_tokens
        self._mask: np.ndarray | None = None
        if params.allowed_token_ids is not None or banned:
            allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
            self._mask = pack_token_mask(allowed, vocab_size) & ~pack_token_mask(banned, vocab_size)
        self._all = np.full(-(-vocab_size // 32), -1, np.int32)
        self._ends = pack_token_mask(new.end_token_ids, vocab_size) if params.min_tokens else None
        # By length and content of what stands before the last token of a bad word: the last tokens.
        self._bad_words: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
        for *before, last in params.bad_words_token_ids or ():
            self._bad_words[len(before)].setdefault(tuple(before), []).append(last)
        self._tokens = tokens  # only bad words look at them

    def mask_at(self, position: int) -> np.ndarray | None:
        """Returns what may be chosen at a position, int32 [ceil(V / 32)]; None if everything may.

        The tokens before the position are known.
        """
        mask = self._mask
        if self._ends is not None and position < self._min_position:
            mask = (self._all if mask is None else mask) & ~self._ends
        last = self._last_of_bad_words(position)
        if last:
            mask = (self._all if mask is None else mask).copy()
            words = mask.view(np.uint32)
            for token_id in last:
                words[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        return mask

    def _last_of_bad_words(self, position: int) -> list[int]:
        """Returns the tokens that would complete a bad word."""
        last: list[int] = []
        for length, words in self._bad_words.items():
            if length <= position:
                last += words.get(tuple(self._tokens.between(position - length, position)), ())
        return last


def pack_token_mask(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns a mask that allows only these tokens, int32 [ceil(V / 32)]; the lowest bit is token 0."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)

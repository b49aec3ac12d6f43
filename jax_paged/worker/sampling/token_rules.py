"""Biases and token masks of one sequence, as its sampling parameters require."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from jax_paged.core.scheduler_output import NewSequence


class KnownTokens:
    """The tokens of one sequence that the host knows.

    Args:
        new: The sequence, when it takes its batch slot.
    """

    def __init__(self, new: NewSequence) -> None:
        self._prompt, self._output = new.request.prompt_token_ids, list(new.output_token_ids)

    def record(self, start: int, token_ids: list[int]) -> None:
        """Replaces the known tokens from position `start` on by the tokens of a scheduled sequence."""
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
    """Biases and forbidden tokens of one sequence.

    Biases apply at all positions. Forbidden tokens depend on the position and, for bad words, on the tokens
    before it.

    Args:
        new: The sequence, when it takes its batch slot.
        tokens: The known tokens of the sequence.
        vocab_size: Size of the vocabulary.

    Attributes:
        bias: Values to add to logits, by token id.
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
        # The last tokens of bad words, by the length and the content of the tokens that precede them in the
        # word.
        self._bad_words: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
        for *before, last in params.bad_words_token_ids or ():
            self._bad_words[len(before)].setdefault(tuple(before), []).append(last)
        self._tokens = tokens  # only read for bad words

    def mask_at(self, position: int) -> np.ndarray | None:
        """Returns the mask of allowed tokens at a position, int32 [ceil(V / 32)]; None if all are allowed.

        The tokens before the position must be known.
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
        """Returns the tokens that would complete a bad word at a position."""
        last: list[int] = []
        for length, words in self._bad_words.items():
            if length <= position:
                last += words.get(tuple(self._tokens.between(position - length, position)), ())
        return last


def pack_token_mask(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns a mask that allows only the given tokens, int32 [ceil(V / 32)]; the lowest bit is token 0."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    allowed[list(token_ids)] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)

"""What is added to the logits of one sequence, by token id: logit_bias, min_tokens and bad words."""

import math
from collections import defaultdict

from jax_paged.core.scheduler_output import NewSequence


class TokenBias:
    """The tokens of one sequence that get a bias, at any position.

    Args:
        new: The sequence, as it takes its seat.
    """

    def __init__(self, new: NewSequence) -> None:
        params = new.sampling_params
        self._bias = params.logit_bias or {}
        self._end_token_ids = new.end_token_ids
        self._num_prompt = len(new.prompt_token_ids)
        self._min_position = self._num_prompt + params.min_tokens
        # By length and content of what stands before the last token of a bad word: the last tokens.
        self._bad_words: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
        for *before, last in params.bad_words_token_ids or ():
            self._bad_words[len(before)].setdefault(tuple(before), []).append(last)
        # Only bad words look at the tokens before a position.
        self._prompt = new.prompt_token_ids
        self._output = list(new.output_token_ids) if self._bad_words else []

    @staticmethod
    def is_needed(new: NewSequence) -> bool:
        """Returns whether a sequence can get a bias at any position."""
        params = new.sampling_params
        return bool(params.logit_bias or params.min_tokens or params.bad_words_token_ids)

    @property
    def reads_tokens(self) -> bool:
        """Whether `record` has to be told of each row."""
        return bool(self._bad_words)

    def record(self, start: int, token_ids: list[int]) -> None:
        """Takes in the tokens of a row, in place of what it knew from position `start` on."""
        first = start - self._num_prompt
        if first < 0:
            token_ids, first = token_ids[-first:], 0
        if token_ids:
            self._output[first:] = token_ids

    def at(self, position: int) -> dict[int, float]:
        """Returns the biases of the token to choose at a position; the tokens before it are known."""
        bias = dict(self._bias)
        if position < self._min_position:
            bias.update(dict.fromkeys(self._end_token_ids, -math.inf))
        for length, words in self._bad_words.items():
            if length <= position:
                last = words.get(tuple(self._tokens(position - length, position)), ())
                bias.update(dict.fromkeys(last, -math.inf))
        return bias

    def _tokens(self, start: int, stop: int) -> list[int]:
        n = self._num_prompt
        return self._prompt[start:stop] + self._output[max(start - n, 0) : max(stop - n, 0)]

"""Computes how many draft tokens to verify from acceptance rates and step durations."""

import dataclasses
from collections.abc import Callable

from jax_paged.speculation import sizes_up_to

# Minimum ratio of tokens per second with and without draft tokens.
MIN_GAIN = 1.1
# Draft tokens with a lower probability of acceptance are ignored.
_MIN_LIKELY = 0.05
# Decay of the acceptance statistics per draft token, and their initial values (an acceptance rate of 0.5).
_KEPT, _FIRST_ACCEPTED, _FIRST_TRIED = 0.9, 1.0, 2.0


@dataclasses.dataclass(slots=True)
class Acceptance:
    """Estimate of the acceptance rate of a sequence's draft tokens. Recent ones have more weight.

    Args:
        accepted: Decaying count of accepted draft tokens.
        tried: Decaying count of draft tokens.
    """

    accepted: float = _FIRST_ACCEPTED
    tried: float = _FIRST_TRIED

    @property
    def rate(self) -> float:
        """The estimated probability that a draft token is accepted if all draft tokens before it are."""
        return self.accepted / self.tried

    def record(self, num_accepted: int, num_drafts: int) -> None:
        """Records a verification of draft tokens. Draft tokens after the first rejected one do not count."""
        for i in range(min(num_accepted + 1, num_drafts)):
            self.accepted = _KEPT * self.accepted + (i < num_accepted)
            self.tried = _KEPT * self.tried + 1


def choose_drafts(
    rates: list[float],
    max_drafts: list[int],
    max_rows: int,
    cost: Callable[[int, int], float],
    plain_s: float,
) -> list[int]:
    """Returns how many draft tokens to verify for each sequence, to maximize the tokens per second.

    All numbers are 0 if verifying draft tokens is not faster by at least the factor MIN_GAIN.

    The j-th draft token of a sequence yields a token with probability rate ** j. For each possible size of
    the step, the draft tokens with the highest probabilities are taken. This is optimal because their gains
    do not depend on the other sequences.

    Args:
        rates: Acceptance rate of each decoding sequence.
        max_drafts: Number of available draft tokens of each sequence.
        max_rows: Maximum number of token rows in the step.
        cost: Returns the duration (seconds) of a step, given its number of token rows including padding and
            its number of draft model passes, which is 0 here.
        plain_s: Duration (seconds) of a step without draft tokens.
    """
    num_seqs = len(rates)
    likely: list[tuple[float, int]] = []
    for i, (rate, n) in enumerate(zip(rates, max_drafts, strict=True)):
        p = rate
        for _ in range(n):
            if p < _MIN_LIKELY:
                break
            likely.append((p, i))
            p *= rate
    likely.sort(reverse=True)
    best, best_gain = 0, MIN_GAIN
    tokens, taken = float(num_seqs), 0
    for size in sizes_up_to(max_rows):
        while taken < min(size - num_seqs, len(likely)):
            tokens += likely[taken][0]
            taken += 1
        if taken == 0 or size < num_seqs + taken:
            continue
        gain = tokens * plain_s / (num_seqs * cost(size, 0))
        if gain > best_gain:
            best, best_gain = taken, gain
        if taken == len(likely):
            break
    chosen = [0] * num_seqs
    for _, i in likely[:best]:
        chosen[i] += 1
    return chosen


def choose_length(
    rates: list[float],
    max_drafts: list[int],
    max_rows: int,
    cost: Callable[[int, int], float],
    plain_s: float,
) -> int:
    """Returns how many draft tokens of a draft model to verify per sequence; 0 if none is faster.

    The number is the same for all sequences and maximizes the tokens per second. The arguments are the same
    as in `choose_drafts`. A step with k draft tokens needs k + 1 passes of the draft model, because the draft
    model must also process the last draft token.
    """
    best, best_gain = 0, MIN_GAIN
    likely, tokens, num_rows = list(rates), float(len(rates)), len(rates)
    for k in range(1, max(max_drafts, default=0) + 1):
        tokens += sum([p for p, n in zip(likely, max_drafts, strict=True) if n >= k])
        num_rows += sum([n >= k for n in max_drafts])
        if num_rows > max_rows:
            break
        gain = tokens * plain_s / (len(rates) * cost(padded(num_rows, max_rows), k + 1))
        if gain > best_gain:
            best, best_gain = k, gain
        likely = [p * rate for p, rate in zip(likely, rates, strict=True)]
    return best


def padded(num_tokens: int, max_tokens: int) -> int:
    """Returns the number of token rows to which a step is padded."""
    return next(size for size in sizes_up_to(max_tokens) if size >= num_tokens)

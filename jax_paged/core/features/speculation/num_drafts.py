"""How many drafts are worth being verified: a rule on numbers."""

import dataclasses
from collections.abc import Callable

from jax_paged.speculation import sizes_up_to

# What a step with drafts has to bring, in tokens per time, beside one without.
MIN_GAIN = 1.1
# Drafts that are less likely to be accepted are not looked at.
_MIN_LIKELY = 0.05
# How fast old drafts are forgotten in the estimate of how many are accepted, and what it begins with.
_KEPT, _FIRST_ACCEPTED, _FIRST_TRIED = 0.9, 1.0, 2.0


@dataclasses.dataclass(slots=True)
class Acceptance:
    """How many of a sequence's drafts are accepted, the later ones counting more."""

    accepted: float = _FIRST_ACCEPTED
    tried: float = _FIRST_TRIED

    @property
    def rate(self) -> float:
        """The share of drafts that are drawn, of those that stand behind drafts that were."""
        return self.accepted / self.tried

    def note(self, num_accepted: int, num_drafts: int) -> None:
        """Takes in one row of drafts: those behind the first that was not drawn tell nothing."""
        for i in range(min(num_accepted + 1, num_drafts)):
            self.accepted = _KEPT * self.accepted + (i < num_accepted)
            self.tried = _KEPT * self.tried + 1


def chosen_drafts(
    rates: list[float], most: list[int], max_tokens: int, cost: Callable[[int, int], float], before: float
) -> list[int]:
    """Returns how many drafts of each sequence bring the most tokens per time; none where none pay enough.

    The j-th draft of a sequence brings a token with the probability rate ** j. Of every size of a step, the
    likeliest drafts fill it: that is the best choice, as what a draft brings does not depend on others.

    Args:
        rates: Of each sequence that decodes, how likely a draft is drawn.
        most: How many drafts there are of each.
        max_tokens: Of the step.
        cost: Returns the seconds of a step of so many token rows, padding included, and 0 passes.
        before: Seconds of a step without drafts.
    """
    num_seqs = len(rates)
    likely: list[tuple[float, int]] = []
    for i, (rate, n) in enumerate(zip(rates, most, strict=True)):
        p = rate
        for _ in range(n):
            if p < _MIN_LIKELY:
                break
            likely.append((p, i))
            p *= rate
    likely.sort(reverse=True)
    best, best_gain = 0, MIN_GAIN
    tokens, taken = float(num_seqs), 0
    for size in sizes_up_to(max_tokens):
        while taken < min(size - num_seqs, len(likely)):
            tokens += likely[taken][0]
            taken += 1
        if taken == 0 or size < num_seqs + taken:
            continue
        gain = tokens * before / (num_seqs * cost(size, 0))
        if gain > best_gain:
            best, best_gain = taken, gain
        if taken == len(likely):
            break
    chosen = [0] * num_seqs
    for _, i in likely[:best]:
        chosen[i] += 1
    return chosen


def chosen_length(
    rates: list[float], most: list[int], max_tokens: int, cost: Callable[[int, int], float], before: float
) -> int:
    """Returns how many drafts of every sequence bring the most tokens per time, if a model makes them; or 0.

    The arguments are those of `chosen_drafts`; with k drafts, `cost` is asked for a step with k + 1 passes of
    the draft model, which has to see the last draft too.
    """
    best, best_gain = 0, MIN_GAIN
    likely, tokens, num_rows = list(rates), float(len(rates)), len(rates)
    for k in range(1, max(most, default=0) + 1):
        tokens += sum([p for p, n in zip(likely, most, strict=True) if n >= k])
        num_rows += sum([n >= k for n in most])
        if num_rows > max_tokens:
            break
        gain = tokens * before / (len(rates) * cost(padded(num_rows, max_tokens), k + 1))
        if gain > best_gain:
            best, best_gain = k, gain
        likely = [p * rate for p, rate in zip(likely, rates, strict=True)]
    return best


def padded(num_tokens: int, max_tokens: int) -> int:
    """Returns the token rows that a step is padded to."""
    return next(size for size in sizes_up_to(max_tokens) if size >= num_tokens)

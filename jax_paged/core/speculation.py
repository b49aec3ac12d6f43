"""How many drafts are worth being verified: a rule on numbers, without clocks."""

import dataclasses
import heapq
from typing import Literal

from jax_paged.checks import check_choice, check_int, check_number

# What a step with drafts has to bring, in tokens per time, beside one without: such a step waits for the
# results of the one before it.
MIN_GAIN = 1.2
# How fast old drafts are forgotten in the estimate of how many are accepted, and what it begins with.
_KEPT, _FIRST_ACCEPTED, _FIRST_TRIED = 0.9, 1.0, 2.0


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How drafts are made, and what they cost.

    Args:
        method: "ngram": what followed the last tokens where they stood before. "draft_model": what another
            model draws, on the device.
        num_tokens: Most drafts of a sequence in one step.
        min_match: Of "ngram", how many tokens have to be equal.
        max_match: Of "ngram", how many are compared.
        num_free_rows: Token rows whose products take as long as reading the weights: a step of n token rows
            costs num_free_rows + n.
        model_cost: What a pass of the draft model costs, as a share of one of the model.
        is_adaptive: Whether sequences whose drafts do not pay get none; False verifies all that there are.

    Raises:
        ValueError: If a value is out of range.
    """

    method: Literal["ngram", "draft_model"]
    num_tokens: int
    min_match: int = 2
    max_match: int = 4
    num_free_rows: int = 16
    model_cost: float = 0.0
    is_adaptive: bool = True

    def __post_init__(self) -> None:
        check_choice("method", self.method, ("ngram", "draft_model"))
        check_int("num_tokens", self.num_tokens, 1)
        check_int("min_match", self.min_match, 1)
        check_int("max_match", self.max_match, self.min_match)
        check_int("num_free_rows", self.num_free_rows, 0)
        check_number("model_cost", self.model_cost, 0, 1)
        check_choice("is_adaptive", self.is_adaptive, (False, True))

    def max_rows(self, max_num_batched_tokens: int) -> int:
        """Returns the token rows of the largest step with drafts: larger ones would never pay."""
        most = 16 * max(1, self.num_free_rows) if self.is_adaptive else max_num_batched_tokens
        return min(max_num_batched_tokens, most)


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


def chosen_drafts(rates: list[float], most: list[int], num_free_rows: int, max_tokens: int) -> list[int]:
    """Returns how many drafts of each sequence bring the most tokens per time; none where none pay enough.

    A step of n token rows costs num_free_rows + n. The j-th draft of a sequence brings a token with the
    probability rate ** j. Taken in the order of these, drafts are worth it as long as one brings more per
    row than the step does so far: that is the best choice, as what a draft brings does not depend on others.

    Args:
        rates: Of each sequence that decodes, how likely a draft is drawn.
        most: How many drafts there are of each.
        num_free_rows: As Speculation has it.
        max_tokens: Of the step.
    """
    num_seqs = len(rates)
    chosen = [0] * num_seqs
    tokens, cost = float(num_seqs), float(num_free_rows + num_seqs)
    before = tokens / cost
    heap = [(-rate, i) for i, rate in enumerate(rates) if most[i]]
    heapq.heapify(heap)
    while heap and num_seqs < max_tokens:
        likely, i = heapq.heappop(heap)
        if -likely * cost <= tokens:
            break
        chosen[i] += 1
        tokens, cost, num_seqs = tokens - likely, cost + 1, num_seqs + 1
        if chosen[i] < most[i]:
            heapq.heappush(heap, (likely * rates[i], i))
    return chosen if tokens / cost >= MIN_GAIN * before else [0] * len(rates)


def chosen_length(rates: list[float], most: list[int], speculation: Speculation, max_tokens: int) -> int:
    """Returns how many drafts of every sequence bring the most tokens per time, if a model makes them; or 0.

    Args:
        rates: Of each sequence that decodes, how likely a draft is drawn.
        most: How many drafts each can take.
        speculation: What they cost: a pass of the draft model more than there are drafts, as it has to see
            the last one too.
        max_tokens: Of the step.
    """
    num_seqs, free, share = len(rates), speculation.num_free_rows, speculation.model_cost
    best, best_gain = 0, MIN_GAIN
    likely, tokens, rows = list(rates), float(num_seqs), num_seqs
    # Without drafts the draft model has a pass too: it must know the tokens.
    before = tokens / ((free + num_seqs) * (1 + share))
    for k in range(1, max(most, default=0) + 1):
        tokens += sum([p for p, n in zip(likely, most, strict=True) if n >= k])
        rows += sum([n >= k for n in most])
        if rows > max_tokens:
            break
        cost = free + rows + share * (k + 1) * (free + num_seqs)
        gain = tokens / cost / before
        if gain > best_gain:
            best, best_gain = k, gain
        likely = [p * rate for p, rate in zip(likely, rates, strict=True)]
    return best

"""What an engine has computed since it was made, in counters that any thread may read."""

import bisect
import dataclasses
from collections.abc import Sequence

from jax_paged.core.request import SequenceGroup

# Upper bounds of the intervals between two tokens, in seconds; the last interval has none.
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)


class Distribution:
    """How often values fell between certain bounds.

    Args:
        bounds: Upper bounds, ascending; each belongs to the interval below it.

    Attributes:
        counts: Values per interval; the last one has no upper bound.
        total: Sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int) -> None:
        """Adds a value so many times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclasses.dataclass(slots=True)
class _Progress:
    """How far a request had come when it last got a token."""

    time: float
    num_tokens: int
    longest: int


class EngineStatistics:
    """Counts the tokens of an engine's steps. One thread counts; the counters never fall.

    Attributes:
        num_steps: Steps whose results have come.
        num_prompt_tokens: Of the requests that have got their first token.
        num_cached_tokens: Those of them that were found in the prefix cache.
        num_generated_tokens: Of all sequences.
        inter_token: Seconds between two tokens of one sequence, each token counted.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.inter_token = Distribution(INTER_TOKEN_BOUNDS)
        self._progress: dict[str, _Progress] = {}

    def note(self, group: SequenceGroup, now: float) -> None:
        """Counts what a request has got since this was last called for it.

        Args:
            group: The request; `forget` follows when it has ended.
            now: Time of the step, in seconds.
        """
        # Called for every request in every step: nothing here is dearer than it has to be.
        sequences = group.sequences
        if len(sequences) == 1:
            num_tokens = longest = len(sequences[0].output_token_ids)
        else:
            lengths = [len(seq.output_token_ids) for seq in sequences]
            num_tokens, longest = sum(lengths), max(lengths, default=0)
        last = self._progress.get(group.request_id)
        if last is None:
            if num_tokens:
                self._progress[group.request_id] = _Progress(now, num_tokens, longest)
                self.num_prompt_tokens += len(group.encoder_token_ids or sequences[0].prompt_token_ids)
                self.num_cached_tokens += group.metrics.num_cached_tokens
                self.num_generated_tokens += num_tokens
            return
        num_new = num_tokens - last.num_tokens
        if num_new > 0:  # beams that are dropped take their tokens along
            # The sequences of a request advance side by side, by one token or by a burst of several.
            seconds = now - last.time
            num_steps = longest - last.longest
            self.inter_token.add(seconds / num_steps if num_steps > 1 else seconds, num_new)
            self.num_generated_tokens += num_new
            last.time, last.num_tokens, last.longest = now, num_tokens, longest

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._progress.pop(request_id, None)

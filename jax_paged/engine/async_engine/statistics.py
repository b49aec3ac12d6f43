"""EngineStatistics: counters of steps and tokens of an engine. Any thread may read them."""

import bisect
import dataclasses
from collections.abc import Sequence

from jax_paged.core.request import SequenceGroup

# Upper bounds (seconds) of the intervals for the time between two tokens. The last interval has no bound.
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10)


class Distribution:
    """A histogram of values.

    Args:
        bounds: Upper bounds of the intervals, ascending. Each interval includes its upper bound.

    Attributes:
        counts: Number of values per interval. The last interval has no upper bound.
        total: Sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int) -> None:
        """Adds a value `times` times."""
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclasses.dataclass(slots=True)
class _Progress:
    """State of a request when it last got tokens.

    Args:
        time: The time of the step (seconds).
        num_tokens: Number of output tokens of all sequences.
        longest: Number of output tokens of the longest sequence.
    """

    time: float
    num_tokens: int
    longest: int


class EngineStatistics:
    """Counters of the steps and tokens of an engine. Only one thread may count. No counter decreases.

    Attributes:
        num_steps: Number of steps whose results have been processed.
        num_prompt_tokens: Number of prompt tokens of the requests that have got their first token. For an
            encoder-decoder model, number of their encoder tokens.
        num_cached_tokens: Number of tokens of the same requests that were found in the prefix cache. For an
            encoder-decoder model, these are prompt tokens of the decoder.
        num_generated_tokens: Number of output tokens of all sequences.
        inter_token: Time between two tokens of a sequence (seconds), with one value per token.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.inter_token = Distribution(INTER_TOKEN_BOUNDS)
        self._progress: dict[str, _Progress] = {}

    def note(self, group: SequenceGroup, now: float) -> None:
        """Counts the tokens that a request has got since the last call for this request.

        Args:
            group: The request. The caller has to call `forget` when it has ended.
            now: Time of the step (seconds).
        """
        # This runs for every request in every step, so it has to be fast.
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
                self.num_prompt_tokens += len(
                    group.request.encoder_token_ids or sequences[0].prompt_token_ids
                )
                self.num_cached_tokens += group.metrics.num_cached_tokens
                self.num_generated_tokens += num_tokens
            return
        num_new = num_tokens - last.num_tokens
        if num_new > 0:  # a beam search may drop sequences with their tokens
            # The sequences of a request advance together, by one token or by several tokens in a multi-step.
            seconds = now - last.time
            num_steps = longest - last.longest
            self.inter_token.add(seconds / num_steps if num_steps > 1 else seconds, num_new)
            self.num_generated_tokens += num_new
            last.time, last.num_tokens, last.longest = now, num_tokens, longest

    def forget(self, request_id: str) -> None:
        """Removes a request that has ended."""
        self._progress.pop(request_id, None)

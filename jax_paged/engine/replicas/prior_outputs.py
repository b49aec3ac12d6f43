"""PriorOutput: an output of a request that another engine has begun and can't continue."""

import dataclasses
from collections.abc import Iterable, Sequence

from jax_paged.outputs import TokenLogprobDict


@dataclasses.dataclass(frozen=True)
class PriorOutput:
    """One output so far, or the delta that a chunk of a streamed response adds to it.

    Args:
        token_ids: The tokens that were drawn.
        logprobs: One entry per token; None if log-probabilities were not requested.
        finish_reason: "stop" or "length" if the output has ended; None if it continues.
        stop_reason: What ended the output; see CompletionOutput.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def joined(parts: Iterable[PriorOutput]) -> PriorOutput:
    """Returns the output that consists of the given deltas, in order."""
    parts = list(parts)
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return PriorOutput(
        [token_id for part in parts for token_id in part.token_ids],
        None if all(part.logprobs is None for part in parts) else logprobs,
        parts[-1].finish_reason if parts else None,
        parts[-1].stop_reason if parts else None,
    )

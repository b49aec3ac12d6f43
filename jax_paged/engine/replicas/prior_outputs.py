"""Outputs that a request goes on with: another engine, which has gone, has drawn their first tokens."""

import dataclasses
from collections.abc import Iterable, Sequence

from jax_paged.outputs import TokenLogprobDict


@dataclasses.dataclass(frozen=True)
class PriorOutput:
    """What there is of one output, or what a part of an answer adds to it.

    Args:
        token_ids: What was drawn.
        logprobs: One per token; None if they were not asked for.
        finish_reason: "stop" or "length" if the output has ended; None if it goes on.
        stop_reason: What ended it, as CompletionOutput has it.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


def joined(parts: Iterable[PriorOutput]) -> PriorOutput:
    """Returns the output that some parts make together."""
    parts = list(parts)
    logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return PriorOutput(
        [token_id for part in parts for token_id in part.token_ids],
        None if all(part.logprobs is None for part in parts) else logprobs,
        parts[-1].finish_reason if parts else None,
        parts[-1].stop_reason if parts else None,
    )

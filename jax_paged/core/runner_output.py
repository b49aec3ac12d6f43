"""What the runner hands back of a step."""

import dataclasses

import numpy as np
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability and rank of a token, and the most likely tokens in its place."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(frozen=True)
class StepOutput:
    """What a step computed.

    Args:
        token_ids: One a sampling sequence, in the order of SchedulerOutput.scheduled.
        logprobs: Of these; the top lists are empty, and rank 0, unless the request wants them.
        is_finite: One a row; False where the logits held NaN or infinity: the request has to end.
        prompt_logprobs: One list a row: of the prompt tokens at positions start + 1 and on, if wanted.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    is_finite: list[bool]
    prompt_logprobs: list[list[TokenLogprobs]]


Details = tuple[list[int], list[list[int]], list[list[float]]]


def read_details(details: Array | np.ndarray) -> Details:
    """Returns rank, most likely ids and their log-probabilities, a list entry a row.

    Args:
        details: int32 [B, 1 + 2N]: rank, ids, bits of the log-probabilities.
    """
    array = np.ascontiguousarray(details)
    n = (array.shape[1] - 1) // 2
    top_logprobs = np.ascontiguousarray(array[:, 1 + n :]).view(np.float32)
    return array[:, 0].tolist(), array[:, 1 : 1 + n].tolist(), top_logprobs.tolist()

"""What the device hands back of a step, as values: it can be pickled, and holds no array of the device."""

import dataclasses
from typing import Any

# Stands in ModelRunnerOutput.token_ids where the request's parameters leave no token to choose.
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability and rank of a token, and the most likely tokens in its place.

    Args:
        logprob: Natural logarithm of the token's probability.
        rank: 1 for the most likely token; 0 if the request does not want log-probabilities.
        top_token_ids: The most likely tokens, best first; empty unless wanted.
        top_logprobs: Their log-probabilities.
    """

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one SchedulerOutput.

    Args:
        step_id: That of the SchedulerOutput.
        token_ids: One list per entry of SchedulerOutput.samples: one token per row of logits, in order of
            position; NO_TOKEN where the request's parameters forbid every token: a request that gets there
            has to end. Of a burst, the tokens up to the one that ends the sequence, up to NO_TOKEN, or up to
            logits that are not finite.
        logprobs: Of these tokens, in the same nesting; those of NO_TOKEN mean nothing.
        is_finite: One per entry of SchedulerOutput.scheduled; False where the logits that were looked at
            held NaN or infinity: the request has to end.
        prompt_logprobs: One list per entry of SchedulerOutput.scheduled: those of the prompt tokens at
            positions start + 1 and on; empty unless the request wants them. Of a row with drafts, those of
            its tokens from the second on.
        captured: What hooks captured of the tokens that rows have computed, by the row's index and the hook's
            name: NumPy arrays.
        num_shared_tokens: Tokens that were read once for several sequences, each of these after the first
            counted.
        drafts: If a model on the device has drafted: one list per entry of SchedulerOutput.samples, in place
            of the NO_TOKEN that the step has there.
        errors: Why requests have to end, by the index of a row in SchedulerOutput.scheduled: its inputs could
            not be prepared, as with an image that could not be encoded. The row's other results mean nothing.
    """

    step_id: int
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    is_finite: list[bool]
    prompt_logprobs: list[list[TokenLogprobs]]
    captured: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    num_shared_tokens: int = 0
    drafts: list[list[int]] = dataclasses.field(default_factory=list)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)

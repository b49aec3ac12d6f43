"""ModelRunnerOutput: the result of one step. It can be pickled and contains no device arrays."""

import dataclasses
from typing import Any

# In ModelRunnerOutput.token_ids: the request's parameters allow no token. In SchedulerOutput: a token that
# the host does not know yet.
NO_TOKEN = -1


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability and rank of a token, and the most likely tokens at its position.

    Args:
        logprob: Natural logarithm of the token's probability.
        rank: 1 for the most likely token; 0 if the request does not ask for log-probabilities.
        top_token_ids: The most likely tokens, best first; empty unless requested.
        top_logprobs: Log-probabilities of these tokens.
    """

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one SchedulerOutput.

    Args:
        step_id: The step_id of the SchedulerOutput.
        token_ids: For each entry of SchedulerOutput.samples, one token per logits row, in order of position.
            A token is NO_TOKEN if the request's parameters forbid every token; the request then has to end.
            The list is shorter if the logits after a draft token are not finite. In multi-step decoding, the
            list ends with the token that ends the sequence, with NO_TOKEN, or before logits that are not
            finite.
        logprobs: Log-probabilities of these tokens, in the same nesting. Entries for NO_TOKEN are
            meaningless.
        is_finite: One per entry of SchedulerOutput.scheduled. False if its logits contained NaN or infinity;
            the request then has to end.
        prompt_logprobs: One list per entry of SchedulerOutput.scheduled: log-probabilities of the prompt
            tokens at positions start + 1, start + 2, ...; empty unless requested. If the step scores drafts,
            log-probabilities of the draft tokens.
        captured: NumPy arrays that hooks have captured or pooling has computed, by index into
            SchedulerOutput.scheduled and name.
        num_saved_reads: Number of token reads that cascade attention has saved. A prefix of t tokens that
            n sequences share saves (n - 1) * t reads.
        drafts: For each entry of SchedulerOutput.samples, the draft tokens that a draft model on the device
            has proposed in place of NO_TOKEN; empty without a draft model.
        errors: Errors of single sequences, by index into SchedulerOutput.scheduled, such as an image that
            could not be encoded. Their requests have to end, and their other results are meaningless.
    """

    step_id: int
    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprobs]]
    is_finite: list[bool]
    prompt_logprobs: list[list[TokenLogprobs]]
    captured: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    num_saved_reads: int = 0
    drafts: list[list[int]] = dataclasses.field(default_factory=list)
    errors: dict[int, str] = dataclasses.field(default_factory=dict)

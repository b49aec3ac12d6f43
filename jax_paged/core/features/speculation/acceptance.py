"""Acceptance statistics: the draft tokens of each sequence, and how many of them were accepted."""

from jax_paged.core.features.speculation.ngram_index import NgramIndex
from jax_paged.core.features.speculation.num_drafts import Acceptance
from jax_paged.core.features.speculation.probing import begins_span
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.request import Sequence
from jax_paged.core.result_updater import StepTokens
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.speculation import Speculation

# Below this acceptance rate, verifying draft tokens is never faster.
MIN_RATE = 0.25
# Prior for the acceptance rate of grammar-forced tokens: 4 accepted out of 5 proposed.
_FORCED_PRIOR = 4.0, 5.0


class DraftState:
    """Draft-token state of one sequence: n-gram index, forced tokens, expected tokens and acceptance rates.

    Args:
        speculation: Settings of speculative decoding.

    Attributes:
        acceptance: Estimate of the acceptance rate of its draft tokens.
        index: N-grams of its tokens, for the method "ngram".
    """

    def __init__(self, speculation: Speculation) -> None:
        self.acceptance = Acceptance()
        self.index = NgramIndex(speculation.min_match, speculation.max_match)
        self._speculation = speculation
        self._expected: list[int] = []  # see compare
        self._num_matched = 0  # number of tokens of `_expected` that have been sampled so far
        self._expected_position = 0  # length of the sequence when it was last compared
        # Tokens that a grammar forces after the first `_forced_position` tokens. They have their own
        # acceptance rate, because the model may write the same text with other tokens.
        self._forced: list[int] = []
        self._forced_position = 0
        self._forced_acceptance = Acceptance(*_FORCED_PRIOR)

    def force(self, seq: Sequence, token_ids: list[int]) -> None:
        """Records the tokens that a grammar forces after the current tokens of the sequence."""
        self._forced, self._forced_position = token_ids, len(seq)

    def forced(self, seq: Sequence) -> list[int] | None:
        """Returns the tokens that a grammar forces next, or None if no forced tokens are known."""
        return self._forced if self._forced_position == len(seq) else None

    def rate_at(self, position: int) -> float:
        """Returns the estimated acceptance rate of draft tokens after the first `position` tokens."""
        return (self._forced_acceptance if self._forced_position == position else self.acceptance).rate

    def extend_index(self, seq: Sequence) -> None:
        """Adds the newest tokens of the sequence to the n-gram index."""
        self.index.extend(seq.tokens(len(self.index), len(seq)))

    def record_verified(self, seq: Sequence, drafts: list[int], token_ids: list[int]) -> None:
        """Updates the acceptance rate after a step that verified draft tokens.

        Args:
            seq: The sequence, including its new tokens.
            drafts: The draft tokens that were verified.
            token_ids: The tokens that the sequence has accepted.
        """
        num_accepted = num_equal(drafts, token_ids)
        # If the sequence ended at a draft token, it is unknown whether later ones would have been accepted.
        num_known = len(token_ids) if num_accepted == len(token_ids) else len(drafts)
        is_forced = self._forced_position == len(seq) - len(token_ids)
        acceptance = self._forced_acceptance if is_forced else self.acceptance
        acceptance.record(num_accepted, min(len(drafts), num_known))
        self._expected, self._num_matched = [], 0

    def compare(self, seq: Sequence, token_ids: list[int], *, is_eager: bool) -> None:
        """Compares new tokens with expected tokens; proposes further expected tokens once none is left.

        Expected tokens are draft tokens that were not verified. Comparing them with sampled tokens shows at
        no cost whether drafts would be accepted, for example because the text begins to repeat.

        Args:
            seq: The sequence. No draft tokens were verified for it in this step.
            token_ids: Its new tokens.
            is_eager: Whether to propose expected tokens at once if the acceptance rate is high enough, and
                not only once in every _SPAN tokens (see probing.py).
        """
        if self._expected_position != len(seq) - len(token_ids):
            self._expected, self._num_matched = [], 0  # some tokens were not compared
        for token_id in token_ids if self._expected else ():
            is_match = token_id == self._expected[self._num_matched]
            self._num_matched += is_match
            if not is_match or self._num_matched == len(self._expected):
                self.acceptance.record(self._num_matched, len(self._expected))
                self._expected, self._num_matched = [], 0
                break
        is_due = (is_eager and self.acceptance.rate >= MIN_RATE) or begins_span(seq, len(token_ids))
        if not self._expected and is_due:
            self.extend_index(seq)
            self._expected = self.index.propose(self._speculation.num_tokens)
        self._expected_position = len(seq)


def verified_drafts(output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, list[int]]:
    """Returns the draft tokens that a step has verified, by sequence id."""
    verified: dict[int, list[int]] = {}
    if output.scores_drafts or output.num_batched_tokens == len(output.scheduled):
        return verified
    for i, sample in enumerate(output.samples):
        if sample.num_logits > 1:
            row = output.scheduled[sample.scheduled_index].token_ids
            verified[sample.seq_id] = result.drafts[i] if result.drafts else row[1 - sample.num_logits :]
    return verified


def num_equal(drafts: list[int], token_ids: list[int]) -> int:
    """Returns the length of the common prefix of draft tokens and sampled tokens."""
    pairs = zip(drafts, token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafts), len(token_ids)))


def sampled_tokens(output: SchedulerOutput, result: ModelRunnerOutput) -> StepTokens:
    """Returns the sampled tokens of a step with drafts, for each sample up to the first mismatch.

    A token that was sampled after a draft token is valid only if that draft token was itself sampled at its
    position. The output is therefore the same as without drafts.
    """
    # Draft tokens are the last tokens of a scheduled sequence. They are not counted as computed.
    token_ids, logprobs, num_computed = [], [], []
    for i, (row, _, num_logits) in enumerate(output.samples):
        computed = output.scheduled[row].token_ids
        num_computed.append(len(computed) + 1 - num_logits)
        drafts = result.drafts[i] if result.drafts else computed[num_computed[-1] :]
        n = num_valid_tokens(result.token_ids[i], drafts)
        token_ids.append(result.token_ids[i][:n])
        logprobs.append(result.logprobs[i][:n])
    return StepTokens(token_ids, logprobs, num_computed, [1] * len(num_computed), {})


def num_valid_tokens(token_ids: list[int], drafts: list[int]) -> int:
    """Returns the number of valid tokens: all up to and including the first one unlike its draft token."""
    pairs = zip(token_ids, drafts, strict=False)
    return next((i + 1 for i, (token_id, draft) in enumerate(pairs) if token_id != draft), len(token_ids))

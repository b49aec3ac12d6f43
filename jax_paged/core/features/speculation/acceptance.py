"""Acceptance statistics: the drafts of each sequence, and how many of them were drawn."""

from jax_paged.core.features.speculation.ngram_index import NgramIndex
from jax_paged.core.features.speculation.num_drafts import Acceptance
from jax_paged.core.features.speculation.probing import begins_span
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.request import Sequence
from jax_paged.core.result_updater import DrawnTokens
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.speculation import Speculation

# A step with drafts that are accepted less often than this never pays.
MIN_RATE = 0.25
# Prior for the acceptance rate of grammar-forced tokens: 4 accepted out of 5 proposed.
_FORCED_PRIOR = 4.0, 5.0


class DraftState:
    """Draft-token state of one sequence.

    Args:
        speculation: How drafts are made.

    Attributes:
        acceptance: Acceptance rate of its drafts.
        index: N-grams of its tokens, for the method "ngram".
    """

    def __init__(self, speculation: Speculation) -> None:
        self.acceptance = Acceptance()
        self.index = NgramIndex(speculation.min_match, speculation.max_match)
        self._speculation = speculation
        # Drafts that were not verified: the next tokens tell whether they would have been accepted. So text
        # that begins to repeat is noticed at no cost.
        self._expected: list[int] = []
        self._num_matched = 0  # tokens of `_expected` that were drawn so far
        self._expected_position = 0  # of its next token
        # Tokens that a grammar forces after `_forced_position` tokens. They have a rate of their own, because
        # the model may write the same text with other tokens.
        self._forced: list[int] = []
        self._forced_position = 0
        self._forced_acceptance = Acceptance(*_FORCED_PRIOR)

    def force(self, seq: Sequence, token_ids: list[int]) -> None:
        """Takes in the tokens that a grammar forces after the tokens of the sequence."""
        self._forced, self._forced_position = token_ids, len(seq)

    def forced(self, seq: Sequence) -> list[int] | None:
        """Returns the tokens that a grammar forces next, None if it is not known to force any."""
        return self._forced if self._forced_position == len(seq) else None

    def rate_at(self, position: int) -> float:
        """Returns the acceptance rate of drafts after the first `position` tokens."""
        return (self._forced_acceptance if self._forced_position == position else self.acceptance).rate

    def extend_index(self, seq: Sequence) -> None:
        """Adds the newest tokens of the sequence to the index."""
        self.index.extend(seq.tokens(len(self.index), len(seq)))

    def note_verified(self, seq: Sequence, drafts: list[int], token_ids: list[int]) -> None:
        """Takes in the drafts that a step has verified and the tokens that the sequence has accepted."""
        num_accepted = num_equal(drafts, token_ids)
        # If the sequence ended at a draft, the drafts after it tell nothing.
        num_known = len(token_ids) if num_accepted == len(token_ids) else len(drafts)
        is_forced = self._forced_position == len(seq) - len(token_ids)
        acceptance = self._forced_acceptance if is_forced else self.acceptance
        acceptance.note(num_accepted, min(len(drafts), num_known))
        self._expected, self._num_matched = [], 0

    def compare(self, seq: Sequence, token_ids: list[int], *, is_eager: bool) -> None:
        """Compares new tokens with the drafts that were expected, and expects new ones where these end.

        Args:
            seq: The sequence; no drafts were verified for it.
            token_ids: Its new tokens.
            is_eager: Whether to look for new drafts at once, or only at the beginning of a span.
        """
        if self._expected_position != len(seq) - len(token_ids):
            self._expected, self._num_matched = [], 0  # it was not examined meanwhile
        for token_id in token_ids if self._expected else ():
            is_match = token_id == self._expected[self._num_matched]
            self._num_matched += is_match
            if not is_match or self._num_matched == len(self._expected):
                self.acceptance.note(self._num_matched, len(self._expected))
                self._expected, self._num_matched = [], 0
                break
        is_due = (is_eager and self.acceptance.rate >= MIN_RATE) or begins_span(seq, len(token_ids))
        if not self._expected and is_due:
            self.extend_index(seq)
            self._expected = self.index.propose(self._speculation.num_tokens)
        self._expected_position = len(seq)


def verified_drafts(output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, list[int]]:
    """Returns the drafts that a step has verified, by sequence id."""
    verified: dict[int, list[int]] = {}
    if output.scores_drafts or output.num_batched_tokens == len(output.scheduled):
        return verified
    for i, sample in enumerate(output.samples):
        if sample.num_logits > 1:
            row = output.scheduled[sample.row].token_ids
            verified[sample.seq_id] = result.drafts[i] if result.drafts else row[1 - sample.num_logits :]
    return verified


def num_equal(drafts: list[int], token_ids: list[int]) -> int:
    """Returns how many tokens equal their drafts, up to the first that differs."""
    pairs = zip(drafts, token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafts), len(token_ids)))


def drawn(output: SchedulerOutput, result: ModelRunnerOutput) -> DrawnTokens:
    """Returns what a step with drafts has drawn, for each sample up to the first token unlike its draft.

    A token that was drawn after a draft counts only if that draft was drawn in its place. So the output is
    what it would be without drafts.
    """
    # Drafts are the last tokens of a row; they are not tokens of the sequence yet.
    token_ids, logprobs, num_computed = [], [], []
    for i, (row, _, num_logits) in enumerate(output.samples):
        computed = output.scheduled[row].token_ids
        num_computed.append(len(computed) + 1 - num_logits)
        drafts = result.drafts[i] if result.drafts else computed[num_computed[-1] :]
        n = num_accepted(result.token_ids[i], drafts)
        token_ids.append(result.token_ids[i][:n])
        logprobs.append(result.logprobs[i][:n])
    return DrawnTokens(token_ids, logprobs, num_computed, [1] * len(num_computed), {})


def num_accepted(token_ids: list[int], drafts: list[int]) -> int:
    """Returns how many tokens count: those up to the first that differs from its draft."""
    pairs = zip(token_ids, drafts, strict=False)
    return next((i + 1 for i, (token_id, draft) in enumerate(pairs) if token_id != draft), len(token_ids))

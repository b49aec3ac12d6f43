"""ProbingPolicy: decides when to reconsider whether draft tokens are verified, and when to probe.

A probe is a step that does the opposite of the current decision, so that the durations of both types of steps
stay known.
"""

from jax_paged.core.request import Sequence

# Examining sequences costs time. While steps verify no draft tokens, only some sequences are examined.
# Number of first output tokens of each sequence during which it is always examined.
_FIRST_TOKENS = 32
# Later, sequences are divided into parts that take turns. One turn lasts this number of tokens.
_SPAN = 16
_MIN_PARTS = 4
# Maximum number of sequences in a part. If no more sequences than this decode, all of them may be examined.
_PART_SIZE = 4
# Number of results between two decisions, with few sequences and with many.
_DECISION_INTERVAL, _DECISION_INTERVAL_MANY = 2, 8
# A probe is a step with draft tokens if other steps have none, or without them if other steps have some.
# Number of results between two probes with draft tokens, while the other steps have none.
_DRAFT_PROBE_INTERVAL = 8
# Each probe with draft tokens that does not change the decision doubles this interval, at most 5 times.
_MAX_DOUBLINGS = 5
# Number of results between two probes without draft tokens, while the other steps have some.
_PLAIN_PROBE_INTERVAL = 64


class ProbingPolicy:
    """Policy for examining sequences, reconsidering the decision, and probing.

    Examining a sequence means comparing its tokens with expected draft tokens (see DraftState.compare).

    Args:
        is_adaptive: False if every step verifies all available draft tokens.

    Attributes:
        verifies_next: True if the next step shall verify draft tokens. The planner confirms this when it
            plans the step.
        is_probe: True if the next step is a probe.
    """

    def __init__(self, is_adaptive: bool) -> None:
        self.verifies_next = False
        self.is_probe = False
        self._is_adaptive = is_adaptive
        self._num_results = 0
        self._num_doublings = 0

    def num_parts(self, num_seqs: int) -> int:
        """Returns the number of parts of the decoding sequences. One part is examined at a time."""
        if self.verifies_next or self.is_probe or not self._is_adaptive:
            return 1
        return max(_MIN_PARTS, -(-num_seqs // _PART_SIZE))

    def record_planned(self, has_drafts: bool) -> None:
        """Records whether the step that was planned verifies draft tokens."""
        if self.verifies_next:
            self.is_probe = False
        self.verifies_next = has_drafts

    def stop(self) -> None:
        """Stops verifying draft tokens until they are likely to be accepted for some sequence."""
        self.verifies_next = self.is_probe = False

    def begin_decision(self, num_seqs: int) -> bool:
        """Counts a result and decides whether the next step is a probe.

        Returns:
            True if the planner has to decide now whether to verify draft tokens.
        """
        self._num_results += 1
        interval = _DECISION_INTERVAL if can_examine_all(num_seqs) else _DECISION_INTERVAL_MANY
        is_due = not self._is_adaptive or self.verifies_next or self.is_probe
        is_due = is_due or self._num_results % interval == 0
        if not is_due or (self.is_probe and self.verifies_next):
            return False  # a probe with draft tokens has not been scheduled yet
        interval = _DRAFT_PROBE_INTERVAL << self._num_doublings
        if self.verifies_next:
            interval = _PLAIN_PROBE_INTERVAL
        self.is_probe = self._is_adaptive and not self.is_probe and self._num_results % interval == 0
        return True

    def end_decision(self, has_drafts: bool) -> None:
        """Records the planner's decision for the next step."""
        self.verifies_next = has_drafts
        if has_drafts:
            self._num_doublings = min(self._num_doublings + 1, _MAX_DOUBLINGS) if self.is_probe else 0


def can_examine_all(num_seqs: int) -> bool:
    """Returns whether the number of decoding sequences is small enough to examine all of them at once."""
    return num_seqs <= _PART_SIZE


def has_turn(seq: Sequence, num_parts: int) -> bool:
    """Returns whether a sequence is examined now, if sequences are divided into `num_parts` parts."""
    is_new = len(seq.output_token_ids) <= _FIRST_TOKENS
    return is_new or (len(seq) // _SPAN + seq.seq_id) % num_parts == 0


def begins_span(seq: Sequence, num_new_tokens: int) -> bool:
    """Returns whether the newest tokens of a sequence begin a span in which it is examined."""
    return len(seq) % _SPAN < num_new_tokens

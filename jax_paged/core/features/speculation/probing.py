"""When the draft planner decides anew whether drafts pay, and when a step tries the other way."""

from jax_paged.core.request import Sequence

# Looking for drafts costs time. While drafts do not pay, a sequence is examined during its first tokens, and
# then for _SPAN tokens in turns: one of _TURNS if few sequences decode, otherwise about _FEW of all.
_FIRST_TOKENS, _SPAN, _TURNS, _FEW = 32, 16, 4, 4
# Results between two decisions, with few sequences and with many.
_DECISION_INTERVAL, _DECISION_INTERVAL_MANY = 2, 8
# Results between two probes, so that the times of both kinds of steps stay known: a step with drafts while
# they do not pay, and a step without them while they do. Each probe that changes nothing doubles the distance
# to the next probe with drafts, up to 2 ** _MAX_DOUBLINGS.
_DRAFT_PROBE_INTERVAL, _PLAIN_PROBE_INTERVAL, _MAX_DOUBLINGS = 8, 64, 5


class ProbingPolicy:
    """Decides how often the planner examines sequences, decides anew, and probes.

    Args:
        is_adaptive: False if every step verifies all drafts that there are.

    Attributes:
        verifies_next: True if the next step is to verify drafts; the planner confirms it with the step.
        is_probe: True if the next step does the opposite of what is known to be faster.
    """

    def __init__(self, is_adaptive: bool) -> None:
        self.verifies_next = False
        self.is_probe = False
        self._is_adaptive = is_adaptive
        self._num_results = 0
        self._num_doublings = 0

    def num_turns(self, num_seqs: int) -> int:
        """Returns into how many groups the sequences that decode are divided; one is examined at a time."""
        if self.verifies_next or self.is_probe or not self._is_adaptive:
            return 1
        return max(_TURNS, -(-num_seqs // _FEW))

    def note_planned(self, has_drafts: bool) -> None:
        """Takes in whether the step that was planned verifies drafts."""
        if self.verifies_next:
            self.is_probe = False
        self.verifies_next = has_drafts

    def stop(self) -> None:
        """Gives drafts up until a sequence's drafts are likely again."""
        self.verifies_next = self.is_probe = False

    def begin_decision(self, num_seqs: int) -> bool:
        """Counts a result, and returns whether to decide now; `is_probe` then tells which way."""
        self._num_results += 1
        interval = _DECISION_INTERVAL if is_few(num_seqs) else _DECISION_INTERVAL_MANY
        is_due = not self._is_adaptive or self.verifies_next or self.is_probe
        is_due = is_due or self._num_results % interval == 0
        if not is_due or (self.is_probe and self.verifies_next):
            return False  # a probe with drafts is yet to be scheduled
        interval = _DRAFT_PROBE_INTERVAL << self._num_doublings
        if self.verifies_next:
            interval = _PLAIN_PROBE_INTERVAL
        self.is_probe = self._is_adaptive and not self.is_probe and self._num_results % interval == 0
        return True

    def end_decision(self, has_drafts: bool) -> None:
        """Takes in the decision for the next step."""
        self.verifies_next = has_drafts
        if has_drafts:
            self._num_doublings = min(self._num_doublings + 1, _MAX_DOUBLINGS) if self.is_probe else 0


def is_few(num_seqs: int) -> bool:
    """Returns whether so few sequences decode that all of them can be examined at once."""
    return num_seqs <= _FEW


def has_turn(seq: Sequence, num_turns: int) -> bool:
    """Returns whether a sequence is examined now, if sequences are divided into `num_turns` groups."""
    is_new = len(seq.output_token_ids) <= _FIRST_TOKENS
    return is_new or (len(seq) // _SPAN + seq.seq_id) % num_turns == 0


def begins_span(seq: Sequence, num_new_tokens: int) -> bool:
    """Returns whether the newest tokens of a sequence begin a span in which it is examined."""
    return len(seq) % _SPAN < num_new_tokens

"""Speculation: whether the next step also computes drafts of the tokens that may follow, and which."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features.speculation.ngram_index import NgramIndex
from jax_paged.core.features.speculation.num_drafts import (
    Acceptance,
    Speculation,
    chosen_drafts,
    chosen_length,
    padded,
)
from jax_paged.core.features.speculation.step_times import StepTimes
from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import NewTokens
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import Sequence, SequenceGroup
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import StopConditions

# Below this share of accepted drafts a step with drafts never pays.
_MIN_RATE = 0.25
# What a form leaves no choice about is likely drawn: the estimate of its acceptance begins with so many of so
# many.
_FORCED_FIRST = 4.0, 5.0
# Looking costs time too. So while drafts don't pay, a sequence is looked at after its first tokens, and then
# for _SPAN tokens in turns: of a few sequences one of _TURNS, of more so many that a few are looked at.
_FIRST_TOKENS, _SPAN, _TURNS, _FEW = 32, 16, 4, 4
# After so many such results, of a few sequences and of more, whether drafts pay is decided anew.
_DECIDES, _DECIDES_MANY = 2, 8
# After so many a step goes the other way, so that both ways' times stay known: with drafts where they would
# pay if a step cost what its rows do (each time in vain doubles the distance to the next), and without.
_TRIES_DRAFTS, _TRIES_PLAIN, _MOST_DOUBLED = 8, 64, 5


class _Drafted:
    """What is known of a sequence's drafts.

    Attributes:
        index: Of "ngram", its tokens.
        guess: Of "ngram", tokens that were expected and not verified: the next ones tell whether they would
            have been accepted, so that a sequence whose text begins to repeat is noticed at no cost.
        num_right: How many of the guess have come so far.
        place: Where the next token of the guess would stand.
        forced: What its form lets follow, and forced_place the length for which that holds.
        forced_acceptance: How often that was drawn: other tokens may write the same text.
    """

    __slots__ = (
        "acceptance",
        "forced",
        "forced_acceptance",
        "forced_place",
        "guess",
        "index",
        "num_right",
        "place",
    )

    def __init__(self, speculation: Speculation) -> None:
        self.acceptance = Acceptance()
        self.index = NgramIndex(speculation.min_match, speculation.max_match)
        self.guess: list[int] = []
        self.num_right = self.place = self.forced_place = 0
        self.forced: list[int] = []
        self.forced_acceptance = Acceptance(*_FORCED_FIRST)

    def rate_at(self, place: int) -> float:
        """Returns how likely a draft is drawn behind so many tokens."""
        return (self.forced_acceptance if self.forced_place == place else self.acceptance).rate


class _Decoding(NamedTuple):
    """A sequence that decodes: its drafts, and how likely each is accepted."""

    group: SequenceGroup
    seq: Sequence
    drafts: list[int]
    rate: float


class DraftPlanner:
    """Decides whether the next step verifies drafts, and gives their tokens blocks.

    A draft is computed with the tokens before it, in one step, and every token is drawn with its own seed and
    position: the updater accepts tokens up to the first that is not its draft. So outputs are what they
    would be without drafts, and drafts only decide how many tokens a step brings.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        stop_conditions: Say which sequences can have drafts, and how many.
        speculation: How drafts are made; None for none.
        max_num_batched_tokens: Token budget of a step.

    Attributes:
        num_rows: Rows with drafts that were verified.
        num_drafts: Drafts that were verified.
        num_accepted: Drafts that were drawn, by their place behind the last token.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        stop_conditions: StopConditions,
        speculation: Speculation | None,
        max_num_batched_tokens: int,
    ) -> None:
        self.speculation = speculation
        self.num_rows = self.num_drafts = 0
        self.num_accepted = [0] * (speculation.num_tokens if speculation else 0)
        self._manager = block_manager
        self._queues = queues
        self._stop_conditions = stop_conditions
        self._max_tokens = speculation.max_rows(max_num_batched_tokens) if speculation else 0
        self._by_sequence: weakref.WeakKeyDictionary[Sequence, _Drafted] = weakref.WeakKeyDictionary()
        self._pays = False
        self._num_looks = self._num_in_vain = 0
        self._is_try = False  # the next step goes the other way than what pays
        self._times = StepTimes(speculation) if speculation else None
        self._is_busy = False  # requests have run since then
        self._began = 0.0  # the time from which the next result counts

    @property
    def waits(self) -> bool:
        """Whether the next step has drafts, which are known when the results of those before are there."""
        return self._pays and not self._queues.waiting and not self._queues.swapped

    def plan(self, step: StepBuilder) -> bool:
        """Makes an empty step one with drafts of the running sequences, if nobody waits and drafts pay.

        Returns:
            Whether it is one; if not, nothing but windows has changed.
        """
        if self.speculation is None or step.is_ahead or self._queues.waiting or self._queues.swapped:
            return False
        decoding = self._decoding(is_ahead=False) if self._pays else None
        chosen = [] if decoding is None else self._chosen(decoding)
        self._is_try &= not self._pays
        self._pays = any(chosen)
        if decoding is None or not self._pays:
            return False
        rows = [(seq, 1 + n) for (_, seq, _, _), n in zip(decoding, chosen, strict=True)]
        copies = self._manager.append_slots(rows)
        if copies is None:
            return False
        step.copies += copies
        step.is_short = True  # of which drafts are accepted
        for (group, seq, drafts, _), n in zip(decoding, chosen, strict=True):
            if n:
                step.drafts[seq] = drafts[:n]
            (step.longer_rows if n else step.rows_of_one).append((group, seq, 1, (seq,)))
            step.budget -= 1 + n
        return True

    @property
    def takes_expected(self) -> bool:
        """Whether `expect` is of use: drafts of a model are known to the device alone."""
        return self.speculation is not None and self.speculation.method == "ngram"

    def expect(self, group: SequenceGroup | None, index: int, token_ids: list[int]) -> None:
        """Takes in what the form of a running request lets follow a sequence."""
        if group is not None and self._can_draft(group):
            kept = self._kept(group.sequences[index])
            kept.forced, kept.forced_place = token_ids, len(group.sequences[index])
            self._pays = True  # if it does is decided with the step

    def note_schedule(self, now: float, *, is_first: bool) -> None:
        """Notes when a step was scheduled; the first of those in flight may come after a pause."""
        if is_first and not self._is_busy:
            self._began = now

    def observe(
        self,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        new_tokens: list[NewTokens],
        now: float,
    ) -> None:
        """Takes in what a step has brought, of which the sequences have accepted `new_tokens`."""
        if self.speculation is None:
            return
        seconds, self._began = now - self._began, now
        self._is_busy = len(self._queues) > 0
        if not new_tokens:
            return  # of a prompt, or a step ahead in which nobody had a turn
        drafted = _drafted(output, result)
        is_few, is_adaptive = len(new_tokens) <= _FEW, self.speculation.is_adaptive
        num_turns = max(_TURNS, -(-len(new_tokens) // _FEW))
        if self._pays or self._is_try or not is_adaptive:
            num_turns = 1
        is_ngram, best_rate = self.speculation.method == "ngram", -1.0
        for group, seq, token_ids, _ in new_tokens:
            if drafts := drafted.get(seq.seq_id):
                self._count(seq, drafts, token_ids)
            elif not is_ngram or not _has_turn(seq, num_turns):
                continue
            elif self._can_draft(group) and not seq.status.is_finished:
                self._compare(seq, token_ids, is_quick=self._pays or is_few)
            kept = self._by_sequence.get(seq)
            best_rate = max(best_rate, kept.acceptance.rate if kept else 0.0)
        if best_rate >= 0 or not is_ngram:
            self._note_time(output, result, seconds)
        if is_ngram and is_adaptive and best_rate < _MIN_RATE:
            self._pays = self._is_try = False
            return
        self._num_looks += 1
        is_due = not is_adaptive or self._pays or self._is_try
        is_due |= self._num_looks % (_DECIDES if is_few else _DECIDES_MANY) == 0
        if not is_due or (self._is_try and self._pays):
            return  # a step that tries drafts is yet to be scheduled
        tries = _TRIES_PLAIN if self._pays else _TRIES_DRAFTS << self._num_in_vain
        self._is_try = is_adaptive and not self._is_try and self._num_looks % tries == 0
        decoding = None if self._queues.waiting or self._queues.swapped else self._decoding(is_ahead=True)
        self._pays = decoding is not None and any(self._chosen(decoding))
        if self._is_try and self._pays:
            self._num_in_vain = min(self._num_in_vain + 1, _MOST_DOUBLED)
        elif self._pays:
            self._num_in_vain = 0

    def forget(self, request_id: str) -> None:
        """Forgets a request whose tokens change otherwise than by new ones."""
        group = self._queues.find(request_id)
        for seq in () if group is None else group.sequences:
            self._by_sequence.pop(seq, None)

    def _decoding(self, *, is_ahead: bool) -> list[_Decoding] | None:
        """Returns the running sequences, if all decode, and their drafts; None if there is none.

        Args:
            is_ahead: Whether tokens may be pending: then drafts are those of the tokens that are known.
        """
        assert self.speculation is not None
        found, has_drafts = [], False
        for group in self._queues.running.values():
            can_draft = self._can_draft(group)
            for seq in group.unfinished:
                num_left = self._stop_conditions.num_left(group, seq)
                if num_left <= 0:
                    continue
                if not seq.has_output or seq.num_new_tokens != 1 or seq not in self._manager.block_tables:
                    return None
                if group.beam_params is not None:
                    return None  # they are forked and freed together
                drafts: list[int] = []
                most = min(self.speculation.num_tokens, num_left - 1)
                if can_draft and most > 0:
                    assert is_ahead or not seq.num_pending, "drafts follow the last token"
                    drafts = self._drafts(seq, most)
                has_drafts |= bool(drafts)
                kept = self._by_sequence.get(seq)
                found.append(_Decoding(group, seq, drafts, kept.rate_at(len(seq)) if kept else 0.0))
        return found if has_drafts and len(found) < self._max_tokens else None

    def _can_draft(self, group: SequenceGroup) -> bool:
        assert self.speculation is not None
        # The masks of a form follow the drafts, which a model's only the device knows.
        knows = self.speculation.method != "ngram" and group.sampling_params.structured_outputs
        return not knows and self._stop_conditions.can_draft(group)

    def _drafts(self, seq: Sequence, most: int) -> list[int]:
        assert self.speculation is not None
        kept = self._by_sequence.get(seq) or self._kept(seq)
        if self.speculation.method != "ngram":
            return [NO_TOKEN] * most
        if kept.forced_place == len(seq):
            return kept.forced[:most]
        if self.speculation.is_adaptive and kept.acceptance.rate < _MIN_RATE:
            return []
        return self._kept(seq).index.propose(most)

    def _kept(self, seq: Sequence) -> _Drafted:
        """Returns what is known of a sequence, with all of its tokens."""
        assert self.speculation is not None
        kept = self._by_sequence.get(seq)
        if kept is None:
            kept = self._by_sequence[seq] = _Drafted(self.speculation)
        if self.speculation.method == "ngram":
            kept.index.extend(seq.tokens(len(kept.index), len(seq)))
        return kept

    def _chosen(self, decoding: list[_Decoding]) -> list[int]:
        """Returns how many drafts of each sequence to verify."""
        assert self.speculation is not None
        most = [len(d.drafts) for d in decoding]
        if not self.speculation.is_adaptive:
            room = self._max_tokens - len(decoding)
            return [min(n, max(0, room - sum(most[:i]))) for i, n in enumerate(most)]
        assert self._times is not None
        num_seqs, times, is_ngram = len(decoding), self._times, self.speculation.method == "ngram"
        before = times.plain(num_seqs)
        if before is None:
            return [0] * num_seqs

        def choose(seconds: Callable[[int, int, int], float]) -> list[int]:
            def cost(num_rows: int, num_passes: int) -> float:
                return seconds(num_rows, num_passes, num_seqs)

            rates = [d.rate for d in decoding]
            if is_ngram:
                return chosen_drafts(rates, most, self._max_tokens, cost, before)
            k = chosen_length(rates, most, self._max_tokens, cost, before)
            return [min(k, n) for n in most]

        chosen = choose(times.verifying)
        if not self._is_try:
            return chosen
        # Times that were seen may be those of a bad moment.
        return [0] * num_seqs if any(chosen) else choose(times.expected)

    def _note_time(self, output: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """Takes in how long a step took in which every row decodes."""
        assert self._times is not None
        if len(output.samples) != len(output.scheduled) or output.new_sequences:
            return
        num_rows = output.num_batched_tokens
        num_drafts = max([sample.num_logits - 1 for sample in output.samples], default=0)
        if num_drafts and not output.scores_drafts:
            num_passes = num_drafts + 1 if result.drafts else 0
            self._times.note_verifying(padded(num_rows, self._max_tokens), num_passes, seconds)
        elif num_rows == len(output.scheduled) > 0:
            num_steps = max(map(len, result.token_ids)) if output.burst else 1
            self._times.note_plain(num_rows, seconds / max(1, num_steps))

    def _count(self, seq: Sequence, drafts: list[int], token_ids: list[int]) -> None:
        """Takes in how many drafts a sequence has accepted."""
        num_accepted = _num_equal(drafts, token_ids)
        self.num_rows += 1
        self.num_drafts += len(drafts)
        for i in range(num_accepted):
            self.num_accepted[i] += 1
        if kept := self._by_sequence.get(seq):
            # Of a sequence that ended at a draft, those behind it tell nothing.
            num_known = len(token_ids) if num_accepted == len(token_ids) else len(drafts)
            is_forced = kept.forced_place == len(seq) - len(token_ids)
            acceptance = kept.forced_acceptance if is_forced else kept.acceptance
            acceptance.note(num_accepted, min(len(drafts), num_known))
            kept.guess, kept.num_right = [], 0

    def _compare(self, seq: Sequence, token_ids: list[int], *, is_quick: bool) -> None:
        """Looks how far a guess is right, as if it had been verified, and guesses anew where it has ended.

        Args:
            seq: The sequence, which had no drafts.
            token_ids: What it has got.
            is_quick: Whether to guess at once, or now and then.
        """
        assert self.speculation is not None
        kept = self._by_sequence.get(seq) or self._kept(seq)
        if kept.place != len(seq) - len(token_ids):
            kept.guess, kept.num_right = [], 0  # others had their turn meanwhile
        for token_id in token_ids if kept.guess else ():
            is_right = token_id == kept.guess[kept.num_right]
            kept.num_right += is_right
            if not is_right or kept.num_right == len(kept.guess):
                kept.acceptance.note(kept.num_right, len(kept.guess))
                kept.guess, kept.num_right = [], 0
                break
        is_due = is_quick and kept.acceptance.rate >= _MIN_RATE
        is_due |= len(seq) % _SPAN < len(token_ids)
        if not kept.guess and is_due:
            kept.guess = self._kept(seq).index.propose(self.speculation.num_tokens)
        kept.place = len(seq)


def _has_turn(seq: Sequence, num_turns: int) -> bool:
    """Returns whether a sequence is looked at, if so many take turns."""
    is_new = len(seq.output_token_ids) <= _FIRST_TOKENS
    return is_new or (len(seq) // _SPAN + seq.seq_id) % num_turns == 0


def _drafted(output: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, list[int]]:
    """Returns the drafts that a step has verified, by the sequence's id."""
    drafted: dict[int, list[int]] = {}
    if output.scores_drafts or output.num_batched_tokens == len(output.scheduled):
        return drafted
    for i, sample in enumerate(output.samples):
        if sample.num_logits > 1:
            row = output.scheduled[sample.row].token_ids
            drafted[sample.seq_id] = result.drafts[i] if result.drafts else row[1 - sample.num_logits :]
    return drafted


def _num_equal(drafts: list[int], token_ids: list[int]) -> int:
    """Returns how many tokens are those that were drafted, up to the first that is not."""
    pairs = zip(drafts, token_ids, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drafts), len(token_ids)))

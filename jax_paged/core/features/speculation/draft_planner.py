"""Speculation: whether the next step verifies draft tokens, and which."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from jax_paged.core.batch_slots import PlannedRows
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features.speculation.acceptance import MIN_RATE, DraftState, num_equal, verified_drafts
from jax_paged.core.features.speculation.num_drafts import chosen_drafts, chosen_length
from jax_paged.core.features.speculation.probing import ProbingPolicy, has_turn, is_few
from jax_paged.core.features.speculation.step_times import StepTimes
from jax_paged.core.model_runner_output import NO_TOKEN, ModelRunnerOutput
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import NewTokens
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import StopConditions
from jax_paged.speculation import Speculation


class _Decoding(NamedTuple):
    """A sequence that decodes: its drafts, and how likely each is accepted."""

    group: SequenceGroup
    seq: Sequence
    drafts: list[int]
    rate: float


class DraftPlanner:
    """Decides whether the next step verifies drafts, and allocates the blocks of their tokens.

    A draft is computed with the tokens before it, in one step, and every token is drawn with its own seed and
    position: the updater accepts tokens up to the first that differs from its draft. So outputs are the same
    as without drafts, and drafts only decide how many tokens a step yields.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        stop_conditions: Tells how many tokens a sequence may still get.
        speculation: How drafts are made.
        max_num_batched_tokens: Token budget of a step.

    Attributes:
        num_rows: Rows with drafts that were verified.
        num_drafts: Drafts that were verified.
        num_accepted: Drafts that were drawn, by their position after the last token.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        stop_conditions: StopConditions,
        speculation: Speculation,
        max_num_batched_tokens: int,
    ) -> None:
        self.speculation = speculation
        self.num_rows = self.num_drafts = 0
        self.num_accepted = [0] * speculation.num_tokens
        self._manager = block_manager
        self._queues = queues
        self._stop_conditions = stop_conditions
        self._max_tokens = speculation.max_rows(max_num_batched_tokens)
        self._is_ngram = speculation.method == "ngram"
        self._states: weakref.WeakKeyDictionary[Sequence, DraftState] = weakref.WeakKeyDictionary()
        self._probing = ProbingPolicy(speculation.is_adaptive)
        self._times = StepTimes(speculation)
        self._was_idle = True  # True if no request was left after the last result
        self._step_began = 0.0  # the time from which the next result counts

    @property
    def waits(self) -> bool:
        """True if the next step verifies drafts; it is scheduled after the previous results have arrived."""
        return self._probing.verifies_next and not self._has_queue

    @property
    def takes_expected(self) -> bool:
        """True if `expect` has an effect: drafts of a model are only known on the device."""
        return self._is_ngram

    @property
    def _has_queue(self) -> bool:
        return bool(self._queues.waiting or self._queues.swapped)

    def plan(self, step: StepBuilder) -> bool:
        """Adds the running sequences with their drafts to an empty step, if no request waits and drafts pay.

        Returns:
            True if the step verifies drafts. If not, nothing but the probing policy has changed, and blocks
            that fell out of a window are freed.
        """
        if step.is_ahead or self._has_queue:
            return False
        decoding = self._decoding(is_ahead=False) if self._probing.verifies_next else None
        chosen = [] if decoding is None else self._choose(decoding)
        self._probing.note_planned(any(chosen))
        if decoding is None or not any(chosen):
            return False
        rows = [(seq, 1 + n) for (_, seq, _, _), n in zip(decoding, chosen, strict=True)]
        copies = self._manager.append_slots(rows)
        if copies is None:
            return False
        step.copies += copies
        step.awaits_results = True  # the next step needs to know which drafts are accepted
        pairs = list(zip(decoding, chosen, strict=True))
        step.planned = PlannedRows(drafts={seq: drafts[:n] for (_, seq, drafts, _), n in pairs if n})
        for (group, seq, _, _), n in pairs:
            (step.longer_rows if n else step.rows_of_one).append((group, seq, 1, (seq,)))
            step.budget -= 1 + n
        return True

    def set_flag(self, group: SequenceGroup) -> None:
        """Notes whether drafts may be verified for a request.

        Beams are forked at each token; bad words, logits processors and hooks follow the tokens one by one; a
        grammar's masks depend on the drafts, which only the device knows if a model makes them.
        """
        params = group.sampling_params
        needs_single_tokens = params.bad_words_token_ids or params.logits_processors or params.extra_args
        is_excluded = group.beam_params or needs_single_tokens or params.hook_args or params.pooling
        group.allows_drafts = not is_excluded and (self._is_ngram or not params.structured_outputs)

    def expect(self, group: SequenceGroup, index: int, token_ids: list[int]) -> None:
        """Takes in the tokens that the grammar of a running request forces next for a sequence."""
        if group.allows_drafts:
            seq = group.sequences[index]
            self._state_of(seq).force(seq, token_ids)
            self._probing.verifies_next = True

    def note_schedule(self, now: float, *, is_first: bool) -> None:
        """Notes when a step is scheduled; the first of the steps in flight may follow a pause."""
        if is_first and self._was_idle:
            self._step_began = now

    def observe(
        self, output: SchedulerOutput, result: ModelRunnerOutput, new_tokens: list[NewTokens], now: float
    ) -> None:
        """Takes in the result of a step, and decides whether the next step verifies drafts.

        1. Count accepted drafts, and compare other sequences with the drafts that they would have had.
        2. Record the time of the step.
        3. Give drafts up if no sequence has likely ones.
        4. Otherwise decide for the next step, if a decision is due.
        """
        seconds, self._step_began = now - self._step_began, now
        self._was_idle = len(self._queues) == 0
        if not new_tokens:
            return  # a step of prompts, or one ahead of the results for which nothing was decided
        best_rate = self._note_acceptance(verified_drafts(output, result), new_tokens)
        if best_rate >= 0 or not self._is_ngram:
            self._times.note(output, result, seconds, self._max_tokens)
        if self._is_ngram and self.speculation.is_adaptive and best_rate < MIN_RATE:
            self._probing.stop()
        elif self._probing.begin_decision(len(new_tokens)):
            decoding = None if self._has_queue else self._decoding(is_ahead=True)
            self._probing.end_decision(decoding is not None and any(self._choose(decoding)))

    def forget(self, request_id: str) -> None:
        """Forgets a request whose tokens were edited."""
        group = self._queues.find(request_id)
        for seq in () if group is None else group.sequences:
            self._states.pop(seq, None)

    def _note_acceptance(self, verified: dict[int, list[int]], new_tokens: list[NewTokens]) -> float:
        """Updates the statistics of sequences; returns the best acceptance rate of those examined, or -1."""
        best_rate, num_turns = -1.0, self._probing.num_turns(len(new_tokens))
        is_eager = self._probing.verifies_next or is_few(len(new_tokens))
        for group, seq, token_ids, _ in new_tokens:
            if drafts := verified.get(seq.seq_id):
                self._count(seq, drafts, token_ids)
            elif not self._is_ngram or not has_turn(seq, num_turns):
                continue
            elif group.allows_drafts and not seq.status.is_finished:
                state = self._states.get(seq) or self._state_of(seq)
                state.compare(seq, token_ids, is_eager=is_eager)
            state = self._states.get(seq)
            best_rate = max(best_rate, state.acceptance.rate if state else 0.0)
        return best_rate

    def _count(self, seq: Sequence, drafts: list[int], token_ids: list[int]) -> None:
        self.num_rows += 1
        self.num_drafts += len(drafts)
        for i in range(num_equal(drafts, token_ids)):
            self.num_accepted[i] += 1
        if state := self._states.get(seq):
            state.note_verified(seq, drafts, token_ids)

    def _decoding(self, *, is_ahead: bool) -> list[_Decoding] | None:
        """Returns the running sequences with their drafts.

        Args:
            is_ahead: Whether tokens may be pending; drafts then follow the tokens that are known.

        Returns:
            None if there are no drafts, a sequence does not decode, or the step would be too large.
        """
        found, has_drafts = [], False
        for group in self._queues.running.values():
            for seq in group.unfinished:
                num_left = self._stop_conditions.num_left(group, seq)
                if num_left <= 0:
                    continue
                if not seq.has_output or seq.num_new_tokens != 1 or seq not in self._manager.block_tables:
                    return None
                if group.beam_params is not None:
                    return None  # beams are forked and freed together
                drafts: list[int] = []
                max_drafts = min(self.speculation.num_tokens, num_left - 1)
                if group.allows_drafts and max_drafts > 0:
                    assert is_ahead or not seq.num_pending, "drafts follow the last token"
                    drafts = self._drafts(seq, max_drafts)
                has_drafts |= bool(drafts)
                state = self._states.get(seq)
                found.append(_Decoding(group, seq, drafts, state.rate_at(len(seq)) if state else 0.0))
        return found if has_drafts and len(found) < self._max_tokens else None

    def _drafts(self, seq: Sequence, max_drafts: int) -> list[int]:
        state = self._states.get(seq) or self._state_of(seq)
        if not self._is_ngram:
            return [NO_TOKEN] * max_drafts
        if (forced := state.forced(seq)) is not None:
            return forced[:max_drafts]
        if self.speculation.is_adaptive and state.acceptance.rate < MIN_RATE:
            return []
        state.extend_index(seq)
        return state.index.propose(max_drafts)

    def _state_of(self, seq: Sequence) -> DraftState:
        """Returns the state of a sequence, with all of its tokens."""
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = DraftState(self.speculation)
        if self._is_ngram:
            state.extend_index(seq)
        return state

    def _choose(self, decoding: list[_Decoding]) -> list[int]:
        """Returns how many drafts of each sequence to verify; in a probe, the opposite of what is faster."""
        num_drafts = [len(d.drafts) for d in decoding]
        num_seqs = len(decoding)
        if not self.speculation.is_adaptive:
            room = self._max_tokens - num_seqs
            return [min(n, max(0, room - sum(num_drafts[:i]))) for i, n in enumerate(num_drafts)]
        plain_s = self._times.plain(num_seqs)
        if plain_s is None:
            return [0] * num_seqs
        rates = [d.rate for d in decoding]

        def best(step_seconds: Callable[[int, int, int], float]) -> list[int]:
            def cost(num_rows: int, num_passes: int) -> float:
                return step_seconds(num_rows, num_passes, num_seqs)

            if self._is_ngram:
                return chosen_drafts(rates, num_drafts, self._max_tokens, cost, plain_s)
            k = chosen_length(rates, num_drafts, self._max_tokens, cost, plain_s)
            return [min(k, n) for n in num_drafts]

        chosen = best(self._times.verifying)
        if not self._probing.is_probe:
            return chosen
        # A probe with drafts assumes the expected cost: the measured times may be those of a bad moment.
        return [0] * num_seqs if any(chosen) else best(self._times.expected)

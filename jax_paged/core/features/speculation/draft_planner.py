"""DraftPlanner: decides whether the next step verifies draft tokens, and which ones."""

import weakref
from collections.abc import Callable
from typing import NamedTuple

from jax_paged.core.batch_slots import PlannedStep
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features.speculation.acceptance import MIN_RATE, DraftState, num_equal, verified_drafts
from jax_paged.core.features.speculation.num_drafts import choose_drafts, choose_length
from jax_paged.core.features.speculation.probing import ProbingPolicy, can_examine_all, has_turn
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
    """A decoding sequence, its draft tokens, and their estimated acceptance rate."""

    group: SequenceGroup
    seq: Sequence
    drafts: list[int]
    rate: float


class DraftPlanner:
    """Planner of steps that verify draft tokens.

    Draft tokens are computed together with the last token of their sequence, in one step. A token is sampled
    after each of them, with the random number for the seed of the sequence and the position of the token.
    Sampled tokens are accepted up to and including the first one that differs from its draft token. Outputs
    are therefore the same as without drafts. Only the number of tokens per step changes.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        stop_conditions: Provides the number of tokens that a sequence may still receive.
        speculation: Settings of speculative decoding.
        max_num_batched_tokens: Token budget of a step.

    Attributes:
        num_verified: Number of times that draft tokens of a sequence were verified.
        num_drafts: Number of draft tokens that were verified.
        num_accepted: Number of draft tokens that were accepted, by their index among the draft tokens.
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
        self.num_verified = self.num_drafts = 0
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
        self._step_began = 0.0  # start time of the step whose result is next (seconds)

    @property
    def verifies_next_step(self) -> bool:
        """True if the next step verifies draft tokens, so it must be scheduled after the previous results."""
        return self._probing.verifies_next and not self._has_queue

    @property
    def accepts_forced_tokens(self) -> bool:
        """True if `propose_forced` has an effect, which is the case if the host proposes the draft tokens."""
        return self._is_ngram

    @property
    def _has_queue(self) -> bool:
        return bool(self._queues.waiting or self._queues.swapped)

    def plan(self, step: StepBuilder) -> bool:
        """Fills an empty step with draft tokens to verify, if this is expected to be faster.

        The step contains all running sequences. Nothing is planned while requests wait.

        Returns:
            True if the step verifies draft tokens. If not, nothing has changed except the probing policy, and
            blocks outside of windows may have been freed.
        """
        if step.is_ahead or self._has_queue:
            return False
        decoding = self._decoding(is_ahead=False) if self._probing.verifies_next else None
        chosen = [] if decoding is None else self._choose(decoding)
        self._probing.record_planned(any(chosen))
        if decoding is None or not any(chosen):
            return False
        rows = [(seq, 1 + n) for (_, seq, _, _), n in zip(decoding, chosen, strict=True)]
        copies = self._manager.append_slots(rows)
        if copies is None:
            return False
        step.copies += copies
        step.awaits_results = True  # the next step depends on which draft tokens are accepted
        pairs = list(zip(decoding, chosen, strict=True))
        step.planned = PlannedStep(drafts={seq: drafts[:n] for (_, seq, drafts, _), n in pairs if n})
        for (group, seq, _, _), n in pairs:
            (step.multi_token_sequences if n else step.single_token_sequences).append((group, seq, 1, (seq,)))
            step.budget -= 1 + n
        return True

    def set_flag(self, group: SequenceGroup) -> None:
        """Sets allows_drafts for a new request.

        Draft tokens are excluded for beam searches, because beams are forked after every token. They are also
        excluded for bad words, logits processors and hooks, which need the tokens one by one. With a draft
        model, they are excluded for structured output: token masks depend on draft tokens that only the
        device knows.
        """
        params = group.sampling_params
        needs_single_tokens = params.bad_words_token_ids or params.logits_processors or params.extra_args
        is_excluded = group.beam_params or needs_single_tokens or params.hook_args or params.pooling
        group.allows_drafts = not is_excluded and (self._is_ngram or not params.structured_outputs)

    def propose_forced(self, group: SequenceGroup, index: int, token_ids: list[int]) -> None:
        """Records the tokens that the grammar of a running request forces next for one of its sequences."""
        if group.allows_drafts:
            seq = group.sequences[index]
            self._state_of(seq).force(seq, token_ids)
            self._probing.verifies_next = True

    def record_schedule(self, now: float, *, is_first: bool) -> None:
        """Records the time at which a step is scheduled.

        Args:
            now: Time in the engine's clock (seconds).
            is_first: Whether no other step is in flight. Such a step may follow an idle period, which must
                not count as step time.
        """
        if is_first and self._was_idle:
            self._step_began = now

    def observe(
        self, output: SchedulerOutput, result: ModelRunnerOutput, new_tokens: list[NewTokens], now: float
    ) -> None:
        """Processes the result of a step, and decides whether the next step verifies draft tokens.

        1. Count accepted draft tokens. Compare the tokens of other sequences with their expected tokens.
        2. Record the duration of the step.
        3. Stop verifying draft tokens if no sequence is likely to accept its draft tokens.
        4. Otherwise decide for the next step, if a decision is due.
        """
        seconds, self._step_began = now - self._step_began, now
        self._was_idle = len(self._queues) == 0
        if not new_tokens:
            return  # no sequence received a token, as in a step of prompt chunks
        best_rate = self._record_acceptance(verified_drafts(output, result), new_tokens)
        if best_rate >= 0 or not self._is_ngram:
            self._times.record(output, result, seconds, self._max_tokens)
        if self._is_ngram and self.speculation.is_adaptive and best_rate < MIN_RATE:
            self._probing.stop()
        elif self._probing.begin_decision(len(new_tokens)):
            decoding = None if self._has_queue else self._decoding(is_ahead=True)
            self._probing.end_decision(decoding is not None and any(self._choose(decoding)))

    def forget(self, request_id: str) -> None:
        """Discards the draft-token state of a request whose tokens were edited."""
        group = self._queues.find(request_id)
        for seq in () if group is None else group.sequences:
            self._states.pop(seq, None)

    def _record_acceptance(self, verified: dict[int, list[int]], new_tokens: list[NewTokens]) -> float:
        """Updates the statistics of sequences.

        Returns:
            The best acceptance rate among the sequences that were examined; -1 if none was.
        """
        best_rate, num_parts = -1.0, self._probing.num_parts(len(new_tokens))
        is_eager = self._probing.verifies_next or can_examine_all(len(new_tokens))
        for group, seq, token_ids, _ in new_tokens:
            if drafts := verified.get(seq.seq_id):
                self._count(seq, drafts, token_ids)
            elif not self._is_ngram or not has_turn(seq, num_parts):
                continue
            elif group.allows_drafts and not seq.status.is_finished:
                state = self._states.get(seq) or self._state_of(seq)
                state.compare(seq, token_ids, is_eager=is_eager)
            state = self._states.get(seq)
            best_rate = max(best_rate, state.acceptance.rate if state else 0.0)
        return best_rate

    def _count(self, seq: Sequence, drafts: list[int], token_ids: list[int]) -> None:
        self.num_verified += 1
        self.num_drafts += len(drafts)
        for i in range(num_equal(drafts, token_ids)):
            self.num_accepted[i] += 1
        if state := self._states.get(seq):
            state.record_verified(seq, drafts, token_ids)

    def _decoding(self, *, is_ahead: bool) -> list[_Decoding] | None:
        """Returns the running sequences with their draft tokens.

        Args:
            is_ahead: Whether steps are in flight, so that tokens may be pending. Draft tokens then follow the
                known tokens.

        Returns:
            None if there are no draft tokens, if a sequence does not decode, or if the step would be too
            large.
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
                    assert is_ahead or not seq.num_pending_tokens, "the last token is pending"
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
        """Returns the draft-token state of a sequence, with all of its tokens in the index."""
        state = self._states.get(seq)
        if state is None:
            state = self._states[seq] = DraftState(self.speculation)
        if self._is_ngram:
            state.extend_index(seq)
        return state

    def _choose(self, decoding: list[_Decoding]) -> list[int]:
        """Returns how many draft tokens of each sequence to verify.

        In a probe, this is the opposite of the choice that is expected to be faster.
        """
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
                return choose_drafts(rates, num_drafts, self._max_tokens, cost, plain_s)
            k = choose_length(rates, num_drafts, self._max_tokens, cost, plain_s)
            return [min(k, n) for n in num_drafts]

        chosen = best(self._times.verifying)
        if not self._probing.is_probe:
            return chosen
        # A probe with drafts uses the modeled durations, because the measured ones may have been outliers.
        return [0] * num_seqs if any(chosen) else best(self._times.modeled)

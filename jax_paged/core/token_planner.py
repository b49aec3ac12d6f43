"""How many tokens each sequence of a running request computes in a step."""

import functools
from collections.abc import Iterable

from jax_paged.core.admission import Admission
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.preemption import Preemption
from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import StopConditions


class TokenPlanner:
    """Divides a step's tokens among the sequences of requests, one request at a time.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        admission: Allocates blocks for sequences that have lost theirs.
        preemption: Makes room for them.
        stop_conditions: Tells which sequences can go on before their last token is known.
        enable_chunked_prefill: Whether a prompt may be computed in parts.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        admission: Admission,
        preemption: Preemption,
        stop_conditions: StopConditions,
        enable_chunked_prefill: bool,
    ) -> None:
        self.block_manager = block_manager
        self.queues = queues
        self.enable_chunked_prefill = enable_chunked_prefill
        self._admission = admission
        self._preemption = preemption
        self._stop_conditions = stop_conditions

    def plan(
        self, group: SequenceGroup, behind: Iterable[SequenceGroup], step: StepBuilder, now: float
    ) -> list[tuple[Sequence, int]]:
        """Returns the sequences of a running request that compute tokens, each with its number of tokens.

        May preempt other requests, to get blocks for sequences of this one that have lost theirs.

        Args:
            group: The request.
            behind: Running requests that are planned after it. Each of their sequences that decodes keeps a
                token of the budget: a long prompt that goes first must not stop their output.
            step: What is scheduled so far.
            now: Time, in the engine's clock (seconds).
        """
        if len(group.sequences) == 1:
            return self._plan_sequence(group, group.sequences[0], behind, step)
        return self._plan_sequences(group, behind, step, now)

    def _plan_sequence(
        self, group: SequenceGroup, seq: Sequence, behind: Iterable[SequenceGroup], step: StepBuilder
    ) -> list[tuple[Sequence, int]]:
        if seq.num_pending and not self._stop_conditions.can_run_ahead(group, seq):
            return []
        num_tokens = seq.num_new_tokens
        if num_tokens == 1 and (seq.output_token_ids or seq.num_pending):
            return [(seq, 1)] if step.budget else []
        num_tokens = self.within(num_tokens, self.available(behind, step))
        if self.enable_chunked_prefill:
            if num_tokens > 1:
                num_tokens = self.block_manager.within_windows(seq, num_tokens)
            if num_tokens < seq.num_new_tokens:
                step.is_closed = True  # new requests must not use the tokens that this one leaves
        return [(seq, num_tokens)] if num_tokens else []

    def _plan_sequences(
        self, group: SequenceGroup, behind: Iterable[SequenceGroup], step: StepBuilder, now: float
    ) -> list[tuple[Sequence, int]]:
        """Plans samples or beams: those without blocks get them again, as far as others are computed.

        Beams sample together, and none may end before the others share its blocks: until all beams are
        computed up to their last token, that token waits. The same holds for samples without blocks.
        """
        tables, can_run_ahead = self.block_manager.block_tables, self._stop_conditions.can_run_ahead
        seqs = [s for s in group.unfinished if not s.num_pending or can_run_ahead(group, s)]
        if step.is_ahead and any(seq not in tables for seq in seqs):
            step.awaits_results = True  # what they share may grow
            return []
        for seq in seqs:
            if seq not in tables:
                self._give_blocks_back(group, seq, step, now)
                if group.request_id not in self.queues.running:
                    return []
        needed = [(s, s.num_new_tokens) for s in seqs if s in tables]
        is_prefill = any(n > 1 for _, n in needed)
        last_token_waits = len(needed) < len(seqs) or (group.beam_params is not None and is_prefill)
        if group.beam_params and not last_token_waits and step.budget < len(seqs):
            return []
        rows: list[tuple[Sequence, int]] = []
        budget = self.available(behind, step) if is_prefill else step.budget
        for seq, n in needed:
            num_tokens = self.within(n - last_token_waits, budget)
            budget -= num_tokens
            if num_tokens:
                rows.append((seq, num_tokens))
        return rows

    def fork_samples(self, group: SequenceGroup, seq: Sequence) -> tuple[Sequence, ...]:
        """Makes the other samples of a request whose prompt is computed in this step; returns all of them.

        Beams are not forked before tokens are known.
        """
        if group.beam_params is not None:
            return (seq,)
        for index in range(1, group.max_num_seqs):
            sample = seq.fork(index, group.sampling_params.seed_of(index))
            self.block_manager.fork(seq, sample, len(seq))
            group.sequences.append(sample)
        return tuple(group.sequences)

    def available(self, behind: Iterable[SequenceGroup], step: StepBuilder) -> int:
        """Returns the tokens that a step has for prompts: those that decode behind them get theirs."""
        return step.budget - self._num_decode_tokens(behind)

    def has_tokens(self, seq: Sequence, behind: Iterable[SequenceGroup], step: StepBuilder) -> bool:
        """Returns whether a step has tokens left for a sequence that is to be admitted."""
        return self.within(seq.num_new_tokens, self.available(behind, step)) > 0

    def within(self, num_tokens: int, budget: int) -> int:
        """Returns how many of some tokens a step computes; without chunks all or none."""
        if num_tokens <= budget:
            return num_tokens
        return max(0, budget) if self.enable_chunked_prefill else 0

    def _num_decode_tokens(self, groups: Iterable[SequenceGroup]) -> int:
        """Returns how many sequences of running requests decode: they have one token of output to compute."""
        if not self.enable_chunked_prefill:
            return 0  # prompts have steps of their own
        tables = self.block_manager.block_tables
        return sum(
            seq.num_new_tokens == 1 and seq.has_output and seq in tables
            for group in groups
            if group.request_id in self.queues.running
            for seq in group.unfinished
        )

    def _give_blocks_back(self, group: SequenceGroup, seq: Sequence, step: StepBuilder, now: float) -> None:
        """Gives a sequence of a recomputed request its blocks back, as far as another's are computed."""
        manager = self.block_manager
        others = [s for s in group.unfinished if s in manager.block_tables]
        # The last token of each is left to compute: its logits are needed.
        common = [(min(seq.num_common_tokens(s), len(s) - 1, len(seq) - 1), s) for s in others]
        shared, parent = max(common, key=lambda pair: pair[0])
        if parent.num_computed_tokens < shared:
            return
        if manager.fork(parent, seq, shared):
            seq.num_computed_tokens = shared
        else:
            # If it is the last one itself, it keeps what it has and tries again in the next step.
            attempt = functools.partial(self._admission.allocate, group, seq, 0)
            self._preemption.preempt_until(group, lambda: attempt() or None, step, now, gives_way=False)

"""Decides how many tokens each sequence of a running request computes in a step."""

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
    """Planner that divides the tokens of a step among sequences, one request at a time.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        admission: Allocates blocks for sequences that have lost theirs.
        preemption: Preempts other requests to free blocks for these sequences.
        stop_conditions: Decides which sequences can continue before their last token is known.
        enable_chunked_prefill: Whether prompts may be computed in chunks.
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
        self, group: SequenceGroup, later: Iterable[SequenceGroup], step: StepBuilder, now: float
    ) -> list[tuple[Sequence, int]]:
        """Returns the sequences of a running request that compute tokens, each with its number of tokens.

        May preempt other requests to allocate blocks for sequences of this request that have lost theirs.

        Args:
            group: The request.
            later: Running requests that come after it. One token of the budget is reserved for each
                of their sequences that decodes, so that a long prompt does not delay them.
            step: The step that is being scheduled.
            now: Time in the engine's clock (seconds).
        """
        if len(group.sequences) == 1:
            return self._plan_sequence(group, group.sequences[0], later, step)
        return self._plan_sequences(group, later, step, now)

    def _plan_sequence(
        self, group: SequenceGroup, seq: Sequence, later: Iterable[SequenceGroup], step: StepBuilder
    ) -> list[tuple[Sequence, int]]:
        if seq.num_pending_tokens and not self._stop_conditions.can_run_ahead(group, seq):
            return []
        num_tokens = seq.num_new_tokens
        if num_tokens == 1 and (seq.output_token_ids or seq.num_pending_tokens):
            return [(seq, 1)] if step.budget else []
        num_tokens = self.tokens_in_budget(num_tokens, self.prompt_budget(later, step))
        if self.enable_chunked_prefill:
            if num_tokens > 1:
                num_tokens = self.block_manager.limit_to_free_blocks(seq, num_tokens)
            if num_tokens < seq.num_new_tokens:
                # Part of the prompt does not fit into this step. New requests must not take the tokens and
                # blocks that this request needs in the next step.
                step.is_closed = True
        return [(seq, num_tokens)] if num_tokens else []

    def _plan_sequences(
        self, group: SequenceGroup, later: Iterable[SequenceGroup], step: StepBuilder, now: float
    ) -> list[tuple[Sequence, int]]:
        """Plans the sequences of a request with several samples or beams.

        After a preemption with recomputation, only one sequence has blocks. The other sequences get theirs
        when the tokens that they share with a computed sequence have been computed. Until all sequences have
        blocks, no sequence computes its last token, because sampling could end a sequence and free blocks
        that others are about to share. All beams must sample in the same step, so no beam
        computes its last token in a step in which any of them has more than one token to compute.
        """
        tables, can_run_ahead = self.block_manager.block_tables, self._stop_conditions.can_run_ahead
        seqs = [s for s in group.unfinished if not s.num_pending_tokens or can_run_ahead(group, s)]
        if step.is_ahead and any(seq not in tables for seq in seqs):
            step.awaits_results = True  # results in flight may extend the prefix that the sequences share
            return []
        for seq in seqs:
            if seq not in tables:
                self._reallocate(group, seq, step, now)
                if group.request_id not in self.queues.running:
                    return []
        needed = [(s, s.num_new_tokens) for s in seqs if s in tables]
        is_prefill = any(n > 1 for _, n in needed)
        last_token_waits = len(needed) < len(seqs) or (group.beam_params is not None and is_prefill)
        if group.beam_params and not last_token_waits and step.budget < len(seqs):
            return []
        rows: list[tuple[Sequence, int]] = []
        budget = self.prompt_budget(later, step) if is_prefill else step.budget
        for seq, n in needed:
            num_tokens = self.tokens_in_budget(n - last_token_waits, budget)
            budget -= num_tokens
            if num_tokens:
                rows.append((seq, num_tokens))
        return rows

    def fork_samples(self, group: SequenceGroup, seq: Sequence) -> tuple[Sequence, ...]:
        """Forks the other samples of a request whose prompt is completed in this step. Returns all samples.

        Beams are not forked here, because they are forked once their tokens are known.
        """
        if group.beam_params is not None:
            return (seq,)
        for index in range(1, group.max_num_seqs):
            sample = seq.fork(index, group.sampling_params.seed_of(index))
            self.block_manager.fork(seq, sample, len(seq))
            group.sequences.append(sample)
        return tuple(group.sequences)

    def prompt_budget(self, later: Iterable[SequenceGroup], step: StepBuilder) -> int:
        """Returns the budget that is left for prompts after one token per decode in `later`."""
        return step.budget - self._num_decode_tokens(later)

    def fits_budget(self, seq: Sequence, later: Iterable[SequenceGroup], step: StepBuilder) -> bool:
        """Returns whether a sequence that is about to be admitted could compute tokens in this step."""
        return self.tokens_in_budget(seq.num_new_tokens, self.prompt_budget(later, step)) > 0

    def tokens_in_budget(self, num_tokens: int, budget: int) -> int:
        """Returns how many of `num_tokens` tokens fit into the budget.

        Without chunked prefill, the result is either all of them or 0.
        """
        if num_tokens <= budget:
            return num_tokens
        return max(0, budget) if self.enable_chunked_prefill else 0

    def _num_decode_tokens(self, groups: Iterable[SequenceGroup]) -> int:
        """Returns how many sequences of running requests decode.

        A sequence decodes if its only token left to compute is an output token.
        """
        if not self.enable_chunked_prefill:
            return 0  # prompts and decodes are computed in different steps
        tables = self.block_manager.block_tables
        return sum(
            seq.num_new_tokens == 1 and seq.has_output and seq in tables
            for group in groups
            if group.request_id in self.queues.running
            for seq in group.unfinished
        )

    def _reallocate(self, group: SequenceGroup, seq: Sequence, step: StepBuilder, now: float) -> None:
        """Allocates the blocks of a sequence that lost them in a preemption with recomputation.

        The sequence shares the blocks of the sequence with which it has the longest common prefix, once that
        prefix has been computed. If this is not possible, it gets blocks of its own.
        """
        manager = self.block_manager
        others = [s for s in group.unfinished if s in manager.block_tables]
        # The last token of each sequence is not shared: it must be computed for its logits.
        common = [(min(seq.num_common_tokens(s), len(s) - 1, len(seq) - 1), s) for s in others]
        shared, parent = max(common, key=lambda pair: pair[0])
        if parent.num_computed_tokens < shared:
            return
        if manager.fork(parent, seq, shared):
            seq.num_computed_tokens = shared
        else:
            # If this request is the last one in the order, it keeps its blocks and tries again in the
            # next step.
            attempt = functools.partial(self._admission.allocate, group, seq, 0)
            self._preemption.preempt_until(group, lambda: attempt() or None, step, now, allow_self=False)

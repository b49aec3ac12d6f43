"""Preemption: running requests lose their blocks when blocks, batch slots or adapter slots run out.

A request is preempted as a whole, and only while no step is in flight. A step that would have to preempt sets
`awaits_results` instead. `Scheduler.can_run_ahead` is then False, and the engine processes the results of the
steps in flight before it schedules the next step. No sampled token is lost.

1. Victims: for a running request, the last running request in the order (`preempt_until`). For a waiting
   request, running requests with higher keys, starting with the last one (`Admission.preempt_for`).
2. Method: with "recompute", the blocks are freed and the tokens are computed again later (`requeue`). With
   "swap", the blocks are copied to host memory (`preempt`). A request is also recomputed if host memory is
   full, or if the step swaps in another request, because such a step reads host blocks that must not be
   overwritten.
3. Executor: SchedulerOutput.released_seq_ids tells it which batch slots to release.
4. Resumption: `Admission.allocate_or_swap_in` allocates or swaps in the blocks. The executor receives a
   NewSequence with a new id and rebuilds token counts and token rules from the output tokens. The states of
   logits processors were kept in host memory under the former id (SavedStates).
5. Reproducibility: the output is the same as without the preemption. The random number of a draw depends only
   on the sequence's seed and the token's position, and recomputed tokens are not sampled again. Recomputed
   logits are equal up to rounding, or bit for bit with batch_invariant.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.result_updater import ResultUpdater
from jax_paged.core.step_builder import StepBuilder
from jax_paged.core.stop_conditions import HOST_TOO_SMALL, POOL_TOO_SMALL, StopConditions

PreemptionMode = Literal["recompute", "swap"]
T = TypeVar("T")


class Preemption:
    """Preemption of whole requests, starting with the last one in the order.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        updater: Ends requests.
        mode: "recompute" or "swap" for all requests. None swaps requests with several sequences, because
            recomputation would lose the blocks that they share, and recomputes the others (the rule of the
            PagedAttention paper).
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        updater: ResultUpdater,
        mode: PreemptionMode | None,
    ) -> None:
        self.block_manager = block_manager
        self.queues = queues
        self.mode = mode
        self._updater = updater

    def cannot_preempt_yet(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Returns whether a request cannot be preempted in this step, although it may be possible later.

        A request with dropped blocks (LLMEngine.drop_kv) cannot be recomputed. It must be swapped out, which
        is not possible in a step that swaps in.
        """
        return bool(step.swap_in) and _has_dropped(group)

    def preempt(self, group: SequenceGroup, step: StepBuilder, now: float) -> None:
        """Frees or swaps out all blocks of a running request, for which `cannot_preempt_yet` is False.

        The request ends if it has dropped blocks and host memory is full.
        """
        manager, seqs = self.block_manager, group.unfinished
        group.metrics.num_preemptions += 1
        step.preempted.append(group.request_id)
        step.encoder_groups = [(other, tables) for other, tables in step.encoder_groups if other is not group]
        mode = self.mode or ("swap" if len(seqs) > 1 else "recompute")
        swaps = mode == "swap" or _has_dropped(group)
        copies = manager.swap_out(seqs) if swaps and not step.swap_in else None
        if copies is None and _has_dropped(group):
            self.end_unschedulable(group, step, now, HOST_TOO_SMALL)
            return
        if copies is None:  # also if host memory is full
            self.requeue(group)
            return
        step.swap_out += copies
        self.queues.move_to_swapped(group)
        for seq in seqs:
            seq.status = SequenceStatus.SWAPPED

    def requeue(self, group: SequenceGroup) -> None:
        """Frees the blocks of a request and moves it to the waiting queue. All its tokens are computed again.

        This method also reverts admissions, and it is used by request edits and weight updates. Only
        `preempt` counts as a preemption in the metrics.
        """
        for seq in group.unfinished:
            if seq in self.block_manager.block_tables or seq in self.block_manager.swapped_tables:
                self.block_manager.free(seq)
            assert not seq.num_in_flight_tokens, "a step in flight computes the sequence"
            assert not seq.num_dropped_tokens, "a sequence with dropped blocks cannot be recomputed"
            seq.status, seq.num_computed_tokens = SequenceStatus.WAITING, 0
        self.queues.move_to_waiting(group)

    def forget_prefixes(self, kept_salt: str | None) -> None:
        """Empties the prefix cache after a weight update. No prefix may be pinned.

        Args:
            kept_salt: An unused salt. Running and swapped requests keep their computed tokens under this
                salt, so that no other request shares them. None recomputes these requests instead.
        """
        self.block_manager.forget_prefixes()
        for group in [*self.queues.running.values(), *self.queues.swapped.values()]:
            if kept_salt is None:
                self.requeue(group)
                continue
            # Keep the request's own salt in the new one: it separates requests with other adapters and hooks.
            salt = f"{kept_salt}\0{group.cache_salt}"
            group.request = dataclasses.replace(group.request, cache_salt=salt)
            for seq in group.unfinished:
                seq.block_hashes.clear()

    def end_unschedulable(
        self, group: SequenceGroup, step: StepBuilder, now: float, reason: str = POOL_TOO_SMALL
    ) -> None:
        """Ends a request that could not run, or continue, even in an empty KV cache."""
        self._updater.end_group(group, StopConditions.unschedulable_status(group), now, reason)
        step.ended.append(group.request_id)

    def preempt_until(
        self,
        group: SequenceGroup,
        attempt: Callable[[], T | None],
        step: StepBuilder,
        now: float,
        *,
        allow_self: bool = True,
    ) -> T | None:
        """Calls `attempt` for a running request, preempting other requests until it succeeds.

        The last running request in the order is preempted first. While steps are in flight, nothing is
        preempted and the step is marked `awaits_results`.

        Args:
            group: The request that needs blocks.
            attempt: Tries to allocate them. Returns None if this fails.
            step: The step that is being scheduled.
            now: Time in the engine's clock (seconds).
            allow_self: Whether the request itself is preempted if it is the last one in the order.

        Returns:
            The result of `attempt`. None if the request has to wait for the next step, was preempted itself,
            or was the only running request and has ended.
        """
        while (result := attempt()) is None:
            if step.is_ahead:
                step.awaits_results = True
                return None
            last = self.queues.last_running()
            assert last is not None, "no request is running"
            if len(self.queues.running) == 1:
                self.end_unschedulable(group, step, now)
                return None
            if self.cannot_preempt_yet(last, step):
                return None
            if last is not group or allow_self:
                self.preempt(last, step, now)
            if last is group:
                return None
        return result


def _has_dropped(group: SequenceGroup) -> bool:
    return any(seq.num_dropped_tokens for seq in group.unfinished)

"""Preemption: running requests lose their blocks when blocks, batch slots or adapter slots run out.

A request is preempted as a whole, and only when no step is in flight: a step that would have to preempt sets
`awaits_results`, then `Scheduler.can_run_ahead` is False, and the engine takes in the results of the steps
in flight before it schedules the next one. So no token that was drawn is lost.

1. Which: the last running request in the order (`preempt_until`, for a running request), or requests of a
   higher priority value or key than a waiting one, from the last (`Admission.preempt_for`).
2. How: its blocks are freed and its tokens are computed again later (`requeue`), or its blocks are copied to
   host memory (`preempt`, mode "swap"). It is also recomputed if host memory is full, and in a step that
   swaps in: the host blocks that such a step reads must not be written.
3. The executor is told by SchedulerOutput.released_seq_ids, and releases the batch slots.
4. Resumption: `Admission.give_blocks` allocates or swaps in blocks, and the executor gets a NewSequence,
   under a new id. From its output tokens it makes penalties and token rules again; states of logits
   processors were kept in host memory under the former id (KeptStates).
5. The same tokens follow: the random number of a draw depends on the sequence's seed and the position alone,
   and tokens that are computed again are not drawn again. Recomputed logits are equal to rounding, and with
   batch_invariant to the bit.
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
    """Takes blocks away from whole requests, the last in the order first.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        updater: Ends requests.
        mode: "recompute" or "swap" for all requests; None swaps those with several sequences, because
            recomputing would lose what they share, and recomputes the others (the paper's rule).
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

    def must_wait(self, group: SequenceGroup, step: StepBuilder) -> bool:
        """Returns whether a request must not be preempted in this step, but may be in a later one.

        A request with dropped blocks (LLMEngine.drop_kv) can't be computed again, so it has to be swapped
        out, which a step that swaps in does not do.
        """
        return bool(step.swap_in) and _has_dropped(group)

    def preempt(self, group: SequenceGroup, step: StepBuilder, now: float) -> None:
        """Takes all blocks of a running request: it waits, or is swapped out. Not if it `must_wait`."""
        manager, seqs = self.block_manager, group.unfinished
        group.metrics.num_preemptions += 1
        step.preempted.append(group.request_id)
        step.to_encode = [(other, tables) for other, tables in step.to_encode if other is not group]
        mode = self.mode or ("swap" if len(seqs) > 1 else "recompute")
        swaps = mode == "swap" or _has_dropped(group)
        copies = manager.swap_out(seqs) if swaps and not step.swap_in else None
        if copies is None and _has_dropped(group):
            self.end_for_good(group, step, now, HOST_TOO_SMALL)
            return
        if copies is None:  # also if host memory has no room for it
            self.requeue(group)
            return
        step.swap_out += copies
        self.queues.swap(group)
        for seq in seqs:
            seq.status = SequenceStatus.SWAPPED

    def requeue(self, group: SequenceGroup) -> None:
        """Frees the blocks of a request, which waits then and computes its tokens, output too, again.

        Also takes back an admission, and serves edits of requests and exchanges of weights; only `preempt`
        counts as a preemption.
        """
        for seq in group.unfinished:
            if seq in self.block_manager.block_tables or seq in self.block_manager.swapped_tables:
                self.block_manager.free(seq)
            assert not seq.num_in_flight, "a step in flight computes it"
            assert not seq.num_dropped_tokens, "what was dropped would come back"
            seq.status, seq.num_computed_tokens = SequenceStatus.WAITING, 0
        self.queues.wait(group)

    def forget_prefixes(self, kept_salt: str | None) -> None:
        """Empties the prefix cache, for other weights; no prefix is pinned.

        Args:
            kept_salt: A salt that nobody has used, under which requests that run keep what they have
                computed. None takes it from them: they compute their tokens again.
        """
        self.block_manager.forget_prefixes()
        for group in [*self.queues.running.values(), *self.queues.swapped.values()]:
            if kept_salt is None:
                self.requeue(group)
                continue
            # Beside its own: what its adapter and its hooks have computed is still no other's.
            salt = f"{kept_salt}\0{group.cache_salt}"
            group.request = dataclasses.replace(group.request, cache_salt=salt)
            for seq in group.unfinished:
                seq.block_hashes.clear()

    def end_for_good(
        self, group: SequenceGroup, step: StepBuilder, now: float, reason: str = POOL_TOO_SMALL
    ) -> None:
        """Ends a request that could not run (on), even in an empty pool."""
        self._updater.end_group(group, StopConditions.without_room(group), now, reason)
        step.ended.append(group.request_id)

    def preempt_until(
        self,
        group: SequenceGroup,
        attempt: Callable[[], T | None],
        step: StepBuilder,
        now: float,
        *,
        gives_way: bool = True,
    ) -> T | None:
        """Tries something for a running request, preempting the last ones until it works.

        While a step is in flight no request is preempted: the step `awaits_results`.

        Returns:
            What worked; None if the request has to wait for a step in flight or for the next one, or is
            alone and has ended, or is the last one: then it is itself preempted if it `gives_way`.
        """
        while (result := attempt()) is None:
            if step.is_ahead:
                step.awaits_results = True
                return None
            last = self.queues.last_running()
            assert last is not None, "the request itself runs"
            if len(self.queues.running) == 1:
                self.end_for_good(group, step, now)
                return None
            if self.must_wait(last, step):
                return None
            if last is not group or gives_way:
                self.preempt(last, step, now)
            if last is group:
                return None
        return result


def _has_dropped(group: SequenceGroup) -> bool:
    return any(seq.num_dropped_tokens for seq in group.unfinished)

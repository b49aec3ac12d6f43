"""Admission: decides which waiting or swapped request runs next, and allocates its blocks."""

import enum
import math
from typing import TYPE_CHECKING, TypedDict

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.preemption import Preemption
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.step_builder import StepBuilder

if TYPE_CHECKING:
    from jax_paged.core.features.lora import AdapterSlots


class AdmissionResult(enum.Enum):
    """Outcome of an attempt to admit a waiting or swapped request.

    - ADMITTED: The request runs. The step computes its tokens, unless they depend on results of steps in
      flight.
    - STALLED: The request was swapped in, but there are no free blocks for its next tokens. It computes none
      in this step.
    - NO_ROOM: There are not enough free blocks or batch slots.
    - NO_TOKENS: There is room, but the token budget of the step is used up.
    - NO_ADAPTER_SLOT: There is no free device slot for its LoRA adapter.
    """

    ADMITTED = enum.auto()
    STALLED = enum.auto()
    NO_ROOM = enum.auto()
    NO_TOKENS = enum.auto()
    NO_ADAPTER_SLOT = enum.auto()


class Admission:
    """Admission control for waiting and swapped requests.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        preemption: Preempts running requests for a waiting request with a lower scheduling key.
        adapters: Owner of the device slots of LoRA adapters; None without LoRA.
        max_num_seqs: Maximum number of running sequences.
        watermark: Fraction of the usable blocks that stays free when a request is admitted while others run.
        enable_chunked_prefill: See Scheduler. Without chunked prefill, prompts are admitted before running
            requests have received the blocks for their next tokens, so blocks are kept free for them.
        scheduler_delay_factor: See Scheduler.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        queues: RequestQueues,
        preemption: Preemption,
        adapters: "AdapterSlots | None",
        *,
        max_num_seqs: int,
        watermark: float,
        enable_chunked_prefill: bool,
        scheduler_delay_factor: float,
    ) -> None:
        self.block_manager = block_manager
        self.queues = queues
        self.adapters = adapters
        self.max_num_seqs = max_num_seqs
        self.enable_chunked_prefill = enable_chunked_prefill
        self.scheduler_delay_factor = scheduler_delay_factor
        self._preemption = preemption
        self._num_watermark_blocks = math.ceil(watermark * block_manager.num_usable_blocks)
        self._last_prompt_start: float | None = None
        self._last_prompt_s = 0.0
        self._holds_back_new = False

    def begin_step(self, now: float) -> None:
        """Begins a step. Decides whether new requests are held back, to schedule more of them together.

        Also makes requests that were set aside for an adapter slot available again if they may find one now.
        """
        if self._last_prompt_start is not None:
            self._last_prompt_s, self._last_prompt_start = now - self._last_prompt_start, None
        if self.adapters is not None:
            self.adapters.begin_step()
        first = self.queues.first_waiting()
        waited = now - first.metrics.arrival_time if first else 0.0
        self._holds_back_new = (
            bool(self.queues.running) and waited < self.scheduler_delay_factor * self._last_prompt_s
        )

    def record_prompt(self, now: float) -> None:
        """Records that the step that starts now computes a prompt."""
        self._last_prompt_start = now

    def first_waiting(self) -> SequenceGroup | None:
        """Returns the next waiting request if it may be admitted now, else None.

        A request that has not run before is held back while new requests are collected (see begin_step), and
        while a request that comes before it is swapped out.
        """
        group, swapped = self.queues.first_waiting(), self.queues.first_swapped()
        if group is None or group.metrics.first_scheduled_time is not None:
            return group
        is_after_swapped = swapped is not None and swapped.order < group.order
        return None if self._holds_back_new or is_after_swapped else group

    def first(self) -> SequenceGroup | None:
        """Returns the next waiting or swapped request."""
        both = (self.first_waiting(), self.queues.first_swapped())
        return min((g for g in both if g is not None), key=lambda g: g.order, default=None)

    def first_if_swapped(self) -> SequenceGroup | None:
        """Returns the next waiting or swapped request if it is swapped out, else None."""
        group = self.first()
        return group if group is self.queues.first_swapped() else None

    def allocate_or_swap_in(self, group: SequenceGroup, step: StepBuilder) -> AdmissionResult | None:
        """Allocates the blocks of a waiting request, or swaps in the blocks of a swapped request.

        Returns:
            None on success, otherwise the resource that is missing.
        """
        if self.adapters is not None and not self.adapters.has_room(group):
            return AdmissionResult.NO_ADAPTER_SLOT
        if self.queues.num_reserved_slots + group.num_reserved_slots > self.max_num_seqs:
            return AdmissionResult.NO_ROOM
        is_alone = not self.queues.running
        num_kept_free = self._num_kept_free(group, self.queues.num_reserved_slots, is_alone)
        if group.request_id in self.queues.swapped:
            copies = self.block_manager.swap_in(group.unfinished, num_reserved=num_kept_free)
            step.swap_in += copies or []
            return AdmissionResult.NO_ROOM if copies is None else None
        return None if self.allocate(group, group.unfinished[0], num_kept_free) else AdmissionResult.NO_ROOM

    def mark_running(self, group: SequenceGroup) -> None:
        """Moves a request that has its blocks to the running requests."""
        self.queues.move_to_running(group)
        for seq in group.unfinished:
            seq.status = SequenceStatus.RUNNING

    def revert_allocation(self, seq: Sequence) -> None:
        """Reverts `allocate_or_swap_in` for a waiting request."""
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0

    def make_room(
        self, group: SequenceGroup, missing: AdmissionResult, step: StepBuilder, now: float
    ) -> bool:
        """Preempts requests with higher keys, or sets the request aside if it only lacks an adapter slot.

        Returns:
            True if a request may still be admitted in this step: this one, or one after it in the order.
        """
        if self.preempt_for(group, step, now):
            return True
        can_be_passed = (
            missing is AdmissionResult.NO_ADAPTER_SLOT and group.request_id not in self.queues.swapped
        )
        if self.adapters is None or not can_be_passed or step.awaits_results:
            return False
        self.adapters.set_aside(group)
        return True

    def preempt_for(self, group: SequenceGroup, step: StepBuilder, now: float) -> bool:
        """Preempts running requests with a higher key than `group` until `group` can be admitted.

        The last running request in the order is preempted first. If preempting all of them would not be
        enough, none is preempted. While steps are in flight, nothing is preempted and the step is marked
        `awaits_results`.

        Returns:
            True if requests were preempted and the request can be admitted now.
        """
        manager, running, last = self.block_manager, self.queues.running, self.queues.last_running()
        if last is None or last.key <= group.key:
            return False
        if step.is_ahead:
            step.awaits_results = True
            return False  # steps in flight may still write to the blocks, so they would not become free now
        shared: list[int] = []
        if group.request_id in self.queues.swapped:
            num_needed = manager.num_swapped_blocks(group.unfinished)
        else:
            seq = group.unfinished[0]
            num_needed, prefix = manager.preview_allocation(seq, group.cache_salt, **_allocation_args(group))
            shared = prefix.blocks
            num_uncached = len(seq) - prefix.num_blocks * manager.block_size
            if not self.enable_chunked_prefill and num_uncached > step.budget:
                return False  # even with enough blocks, the prompt would exceed the token budget
        victims: list[SequenceGroup] = []
        num_slots, num_blocks = self.queues.num_reserved_slots, manager.num_free_blocks
        for victim in reversed(running.values()):
            if victim.key <= group.key or self._preemption.cannot_preempt_yet(victim, step):
                return False
            victims.append(victim)
            num_slots -= victim.num_reserved_slots
            tables = (manager.block_tables[s] for s in victim.unfinished if s in manager.block_tables)
            num_blocks += sum(len(table) for held in tables for table in held)
            num_missing = num_needed + self._num_kept_free(group, num_slots, len(victims) == len(running))
            lacks_room = num_slots + group.num_reserved_slots > self.max_num_seqs or num_blocks < num_missing
            if lacks_room or (self.adapters and not self.adapters.has_room(group, without=victims)):
                # num_blocks counts shared blocks several times, so it is an upper bound.
                continue
            released = manager.released_by(s for victim in victims for s in victim.unfinished)
            if manager.num_free_blocks + len(released.difference(shared)) >= num_missing:
                for victim in victims:
                    self._preemption.preempt(victim, step, now)
                return True
        return False

    def allocate(self, group: SequenceGroup, seq: Sequence, num_kept_free: int) -> bool:
        """Allocates the blocks of a sequence of a request; see BlockManager.allocate."""
        return self.block_manager.allocate(
            seq, group.cache_salt, num_reserved=num_kept_free, **_allocation_args(group)
        )

    def _num_kept_free(self, group: SequenceGroup, num_reserved_slots: int, is_alone: bool) -> int:
        """Returns the number of blocks that must stay free when a request is admitted."""
        num_groups = len(self.block_manager.groups)
        num_kept_free = 0 if is_alone else self._num_watermark_blocks
        if not self.enable_chunked_prefill:  # running requests have not received their next blocks yet
            num_kept_free += num_reserved_slots * num_groups
        if is_alone:
            return num_kept_free
        if group.request_id in self.queues.swapped:  # one more block for the next tokens of each sequence
            return num_kept_free + len(group.unfinished) * num_groups
        # A waiting request has several sequences if it is computed again or continues prior outputs. The
        # other sequences are forked from the first one. They need blocks for the tokens that they do not
        # share with it.
        manager, (seq, *others) = self.block_manager, group.unfinished
        common = [min(seq.num_common_tokens(s), len(s) - 1) // manager.block_size for s in others]
        num_own = [manager.num_blocks_of(len(s) + 1) - n for s, n in zip(others, common, strict=True)]
        return num_kept_free + sum(num_own) * num_groups


class _AllocationArgs(TypedDict):
    use_cache: bool
    num_encoder_tokens: int


def _allocation_args(group: SequenceGroup) -> _AllocationArgs:
    features = group.request.features
    return {
        # Tokens in cached blocks are not computed, so they have no log-probabilities.
        "use_cache": group.sampling_params.reads_prefix_cache,
        "num_encoder_tokens": 0 if features is None else len(features.encoder_token_ids),
    }

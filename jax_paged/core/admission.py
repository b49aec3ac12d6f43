"""Admission: which waiting or swapped request runs next, and the blocks that it gets."""

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
    """Whether a waiting or swapped request runs now, or what it lacks.

    ADMITTED: It runs. The step computes tokens of it, unless they have to wait for steps in flight.
    STALLED: It was swapped in, but there are no blocks for its next tokens: the step computes none.
    NO_ROOM: It lacks blocks or batch slots.
    NO_TOKENS: It has room, but the token budget of the step is used up.
    NO_ADAPTER_SLOT: It lacks a device slot for its adapter.
    """

    ADMITTED = enum.auto()
    STALLED = enum.auto()
    NO_ROOM = enum.auto()
    NO_TOKENS = enum.auto()
    NO_ADAPTER_SLOT = enum.auto()


class Admission:
    """Lets waiting and swapped requests run.

    Args:
        block_manager: Owner of the blocks.
        queues: Owner of the requests.
        preemption: Takes blocks from requests of a lower priority.
        adapters: Owner of the device slots of LoRA adapters; None without LoRA.
        max_num_seqs: Maximum sequences running at a time.
        watermark: Share of the usable blocks that stays free when a request is admitted beside running ones.
        enable_chunked_prefill: Whether running requests have got their next blocks before others are
            admitted.
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
        """Decides whether new requests are held back in this step, so that more come together."""
        if self._last_prompt_start is not None:
            self._last_prompt_s, self._last_prompt_start = now - self._last_prompt_start, None
        if self.adapters is not None:
            self.adapters.begin_step()
        first = self.queues.first_waiting()
        waited = now - first.metrics.arrival_time if first else 0.0
        self._holds_back_new = (
            bool(self.queues.running) and waited < self.scheduler_delay_factor * self._last_prompt_s
        )

    def note_prompt(self, now: float) -> None:
        """Notes that the step that begins now computes a prompt."""
        self._last_prompt_start = now

    def first_waiting(self) -> SequenceGroup | None:
        """Returns the next waiting request, but no new one behind one that is swapped out, or too early."""
        group, swapped = self.queues.first_waiting(), self.queues.first_swapped()
        if group is None or group.metrics.first_scheduled_time is not None:
            return group
        is_behind = swapped is not None and swapped.order < group.order
        return None if self._holds_back_new or is_behind else group

    def first(self) -> SequenceGroup | None:
        """Returns the next request that does not run."""
        both = (self.first_waiting(), self.queues.first_swapped())
        return min((g for g in both if g is not None), key=lambda g: g.order, default=None)

    def first_if_swapped(self) -> SequenceGroup | None:
        """Returns the next request that does not run, if it is swapped out."""
        group = self.first()
        return group if group is self.queues.first_swapped() else None

    def give_blocks(self, group: SequenceGroup, step: StepBuilder) -> AdmissionResult | None:
        """Gives a waiting or swapped request the blocks of its tokens; else returns what it lacks."""
        if self.adapters is not None and not self.adapters.has_room(group):
            return AdmissionResult.NO_ADAPTER_SLOT
        if self.queues.num_reserved_slots + group.num_reserved_slots > self.max_num_seqs:
            return AdmissionResult.NO_ROOM
        is_alone = not self.queues.running
        num_reserved = self._num_reserved(group, self.queues.num_reserved_slots, is_alone)
        if group.request_id in self.queues.swapped:
            copies = self.block_manager.swap_in(group.unfinished, num_reserved=num_reserved)
            step.swap_in += copies or []
            return AdmissionResult.NO_ROOM if copies is None else None
        return None if self.allocate(group, group.unfinished[0], num_reserved) else AdmissionResult.NO_ROOM

    def run(self, group: SequenceGroup) -> None:
        """Moves a request that has its blocks to the running ones."""
        self.queues.run(group)
        for seq in group.unfinished:
            seq.status = SequenceStatus.RUNNING

    def take_back(self, seq: Sequence) -> None:
        """Undoes `give_blocks` for a waiting request."""
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0

    def make_way(self, group: SequenceGroup, missing: AdmissionResult, step: StepBuilder, now: float) -> bool:
        """Preempts requests of lower priority, or sets the request aside if it only lacks an adapter slot.

        Returns:
            True if another request may be admitted in this step: this one, or one after it.
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
        """Preempts as many running requests of a higher key as a request needs to run, from the last.

        While a step is in flight no request is preempted: the step `awaits_results`.

        Returns:
            True if the request has room now. If preempting all of them is not enough, none is preempted.
        """
        manager, running, last = self.block_manager, self.queues.running, self.queues.last_running()
        if last is None or last.key <= group.key:
            return False
        if step.is_ahead:
            step.awaits_results = True
            return False  # blocks taken away now would not be free in this step
        shared: list[int] = []
        if group.request_id in self.queues.swapped:
            num_needed = manager.num_swapped_blocks(group.unfinished)
        else:
            seq = group.unfinished[0]
            num_needed, prefix = manager.needed_by(seq, group.cache_salt, **_needs(group))
            shared = prefix.blocks
            num_uncached = len(seq) - prefix.num_blocks * manager.block_size
            if not self.enable_chunked_prefill and num_uncached > step.budget:
                return False  # it would not run in this step even so
        victims: list[SequenceGroup] = []
        num_slots, num_blocks = self.queues.num_reserved_slots, manager.num_free_blocks
        for victim in reversed(running.values()):
            if victim.key <= group.key or self._preemption.must_wait(victim, step):
                return False
            victims.append(victim)
            num_slots -= victim.num_reserved_slots
            tables = (manager.block_tables[s] for s in victim.unfinished if s in manager.block_tables)
            num_blocks += sum(len(table) for held in tables for table in held)
            num_missing = num_needed + self._num_reserved(group, num_slots, len(victims) == len(running))
            lacks_room = num_slots + group.num_reserved_slots > self.max_num_seqs or num_blocks < num_missing
            if lacks_room or (self.adapters and not self.adapters.has_room(group, without=victims)):
                continue  # not enough, even if they shared nothing
            released = manager.released_by(s for victim in victims for s in victim.unfinished)
            if manager.num_free_blocks + len(released.difference(shared)) >= num_missing:
                for victim in victims:
                    self._preemption.preempt(victim, step, now)
                return True
        return False

    def allocate(self, group: SequenceGroup, seq: Sequence, num_reserved: int) -> bool:
        """Gives a sequence of a request the blocks of its tokens; see BlockManager.allocate."""
        return self.block_manager.allocate(seq, group.cache_salt, num_reserved=num_reserved, **_needs(group))

    def _num_reserved(self, group: SequenceGroup, num_reserved_slots: int, is_alone: bool) -> int:
        """Returns the blocks that must stay free when a request is admitted beside running ones."""
        num_groups = len(self.block_manager.groups)
        num_reserved = 0 if is_alone else self._num_watermark_blocks
        if not self.enable_chunked_prefill:  # the running ones have not got their next blocks yet
            num_reserved += num_reserved_slots * num_groups
        if is_alone:
            return num_reserved
        if group.request_id in self.queues.swapped:  # so that its next tokens find room
            return num_reserved + len(group.unfinished) * num_groups
        # So that the others, forked from the first again, find room.
        manager, (seq, *others) = self.block_manager, group.unfinished
        common = [min(seq.num_common_tokens(s), len(s) - 1) // manager.block_size for s in others]
        num_own = [manager.num_blocks_of(len(s) + 1) - n for s, n in zip(others, common, strict=True)]
        return num_reserved + sum(num_own) * num_groups


class _Needs(TypedDict):
    use_cache: bool
    num_encoder_tokens: int


def _needs(group: SequenceGroup) -> _Needs:
    features = group.request.features
    return {
        # Shared tokens are not computed, so there would be no log-probabilities of them.
        "use_cache": group.sampling_params.reads_prefix_cache,
        "num_encoder_tokens": 0 if features is None else len(features.encoder_token_ids),
    }

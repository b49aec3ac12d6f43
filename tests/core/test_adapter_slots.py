"""Slots of adapters: who has one, who waits for one, and who may overtake meanwhile."""

import random
from collections import deque
from typing import Any

import pytest
from helpers.scheduling import EOS, make_group, make_scheduler, result_of, rows, step

from jax_paged.core.request import SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput


def adapted(index: int, adapter: str, prompt_len: int = 4, **values: Any) -> SequenceGroup:
    return make_group(index, [index] * prompt_len, salt=adapter, adapter=adapter, **values)


def running(sched: Scheduler) -> list[str]:
    return sorted(sched.queues.running)


class SlotMirror:
    """What the device has in its slots and seats, by the values of the steps alone."""

    def __init__(self, num_slots: int) -> None:
        self.slots: dict[int, str] = {}
        self.num_slots = num_slots
        self.seats: dict[int, tuple[str, int]] = {}

    def update(self, output: SchedulerOutput, adapters: dict[str, str]) -> None:
        for seq_id in output.released_seq_ids:
            del self.seats[seq_id]
        for slot, adapter, _ in output.adapter_loads:
            assert 1 <= slot <= self.num_slots
            assert adapter not in self.slots.values(), "it is there already"
            assert all(taken != slot for _, taken in self.seats.values()), "somebody uses the slot"
            self.slots[slot] = adapter
        for new in output.new_sequences:
            self.seats[new.seq_id] = adapters[new.request.request_id], new.adapter_slot
        for row in output.scheduled:
            adapter, slot = self.seats[row.seq_id]
            assert self.slots.get(slot, "") == adapter if slot else not adapter


@pytest.mark.parametrize("seed", range(12))
def test_every_row_finds_its_adapter_and_every_request_ends(seed: int) -> None:
    """Random traffic: tight pools, both ways of preemption, several samples, priorities, steps in flight."""
    rng = random.Random(seed)
    num_slots, scheduling_policy = rng.choice([1, 2, 3]), rng.choice(["fcfs", "priority"])
    sched = make_scheduler(
        num_blocks=rng.choice([14, 20, 60]),
        num_swap_blocks=rng.choice([0, 40]),
        budget=rng.choice([9, 32]),
        max_num_seqs=6,
        scheduling_policy=scheduling_policy,
        preemption_mode=rng.choice([None, "swap", "recompute"]),
        enable_chunked_prefill=True,
        num_scheduler_steps=rng.choice([1, 3]),
        max_loras=num_slots,
    )
    mirror, adapters, in_flight = SlotMirror(num_slots), {}, deque()
    num_requests, most_in_flight, added, num_steps = 60, rng.choice([1, 2]), 0, 0
    while added < num_requests or sched.has_unfinished or in_flight:
        while added < num_requests and rng.random() < 0.5:
            adapter = rng.choice(["", *"abcde"])
            values = {"n": rng.choice([1, 1, 3]), "max_tokens": rng.randint(1, 9), "ignore_eos": True}
            priority = rng.randint(0, 2) if scheduling_policy == "priority" else 0
            group = adapted(added, adapter, rng.randint(1, 14), priority=priority, **values)
            adapters[group.request_id] = adapter
            sched.add(group)
            added += 1
        if sched.has_unfinished and rng.random() < 0.02:
            queues = sched.queues
            sched.abort(rng.choice([*queues.running, *queues.waiting, *queues.swapped]))
        num_steps += 1
        assert num_steps < 3000, "somebody waits for ever"
        if not in_flight or (len(in_flight) < most_in_flight and sched.can_run_ahead):
            if sched.has_unfinished:
                output = sched.schedule(0.0)
                mirror.update(output, adapters)
                assert len(sched.queues.running_adapters) <= num_slots
                in_flight.append(output)
            if len(in_flight) < most_in_flight and rng.random() < 0.5:
                continue
        if in_flight:
            output = in_flight.popleft()
            counts = output.num_multi_step_tokens or [1] * len(output.samples)
            sched.update(output, result_of(output, [[5] * n for n in counts]), 0.0)
    sched.block_manager.check_integrity()
    assert not sched.queues.running_adapters


def test_without_a_slot_a_request_waits_and_others_overtake_it() -> None:
    sched = make_scheduler(max_loras=1)
    for index, adapter in enumerate(["a", "b", "", "b", ""]):
        sched.add(adapted(index, adapter))
    step(sched)
    assert running(sched) == ["r0", "r2", "r4"]
    assert sched.adapters.slots == {"a": 1}


def test_an_adapter_that_runs_is_closed_behind_a_request_that_waits_for_its_slot() -> None:
    """Else those of a and b would overtake c as long as they come."""
    sched = make_scheduler(max_loras=2, max_num_seqs=8)
    for index, adapter in enumerate(["a", "a", "b", "c", "a", "b"]):
        sched.add(adapted(index, adapter, max_tokens=20))
    step(sched)
    assert running(sched) == ["r0", "r1", "r2", "r4", "r5"]  # nobody was known to wait
    for index, adapter in enumerate(["a", "b", ""], start=6):
        sched.add(adapted(index, adapter, max_tokens=20))
    step(sched)
    assert running(sched) == ["r0", "r1", "r2", "r4", "r5", "r6", "r8"]  # b has the fewest
    sched.abort("r2")
    step(sched)
    assert "r3" not in sched.queues.running
    sched.abort("r5")
    output = step(sched)
    assert "r3" in sched.queues.running
    assert [(load.slot, load.adapter) for load in output.adapter_loads] == [(2, "c")]
    assert "r7" in sched.queues.waiting  # b again has no slot


def test_an_adapter_that_nobody_uses_keeps_its_slot_until_another_needs_it() -> None:
    sched = make_scheduler(max_loras=2)
    for index, adapter in enumerate("ab"):
        sched.add(adapted(index, adapter, max_tokens=1))
    assert len(step(sched).adapter_loads) == 2
    sched.add(adapted(2, "a", max_tokens=1))
    assert step(sched).adapter_loads == ()
    sched.add(adapted(3, "c", max_tokens=1))
    assert [(load.slot, load.adapter) for load in step(sched).adapter_loads] == [(2, "c")]  # b's
    assert sched.adapters.slots == {"a": 1, "c": 2}


def test_a_request_of_a_higher_priority_takes_a_slot_but_preempts_nobody_in_vain() -> None:
    sched = make_scheduler(max_loras=1, scheduling_policy="priority", num_blocks=400)
    sched.add(adapted(0, "a", priority=1, max_tokens=40))
    sched.add(adapted(1, "", priority=2, max_tokens=40))
    step(sched)
    sched.add(adapted(2, "b", priority=1, max_tokens=40))
    assert step(sched).preempted == ()  # a's is no lower
    sched.add(adapted(3, "c", priority=0, max_tokens=40))
    output = step(sched)
    assert output.preempted == ("r1", "r0")
    assert "r3" in {request_id for request_id, _, _ in rows(sched, output)}


def test_nobody_is_preempted_for_a_slot_that_others_still_use() -> None:
    sched = make_scheduler(max_loras=1, scheduling_policy="priority", num_blocks=400)
    sched.add(adapted(0, "a", priority=0, max_tokens=9))
    sched.add(adapted(1, "a", priority=2, max_tokens=40))
    step(sched)
    sched.add(adapted(2, "b", priority=1, max_tokens=9))
    while "r0" in sched.queues.running:
        assert step(sched).preempted == ()
    assert step(sched).preempted == ("r1",)
    assert "r2" in sched.queues.running


def test_requests_that_keep_what_older_weights_have_computed_still_share_nothing() -> None:
    sched = make_scheduler(max_loras=2)
    for index, adapter in enumerate(["a", "b", "b"]):
        group = adapted(index, adapter)
        group.sequences[0].prompt_token_ids[:] = [7] * 4
        sched.add(group)
    step(sched)
    sched.forget_prefixes("kept")
    salts = [group.cache_salt for group in sched.queues.running.values()]
    assert salts[0] != salts[1] == salts[2]
    assert not {"a", "b", "kept"} & set(salts)


def test_aborted_requests_are_not_brought_back() -> None:
    sched = make_scheduler(max_loras=1)
    for index, adapter in enumerate("abb"):
        sched.add(adapted(index, adapter))
    step(sched)
    assert len(list(sched.queues.requests_set_aside)) == 2
    sched.abort("r1")
    sched.abort("r0")
    step(sched)
    assert running(sched) == ["r2"]
    assert not sched.queues.requests_set_aside
    while sched.has_unfinished:
        step(sched, EOS)


@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
@pytest.mark.parametrize("calls", [("ab", "ab"), ("abc",), ("aabbcc", "ba", "cc")])
def test_requests_of_one_token_take_turns_in_the_only_slot(
    scheduling_policy: str, calls: tuple[str, ...]
) -> None:
    """Each finds the slot as it was when a former one was refused: nothing runs."""
    sched, num_requests = make_scheduler(max_loras=1, scheduling_policy=scheduling_policy), 0
    for adapters in calls:
        for adapter in adapters:
            sched.add(adapted(num_requests, adapter, max_tokens=1))
            num_requests += 1
        for _ in range(len(adapters)):  # each step ends a request at least
            step(sched)
        assert not sched.has_unfinished


def test_a_request_waits_for_blocks_beside_a_slot_and_preempts_once_there_are_enough() -> None:
    """The slot is taken by a request of lower priority, and the blocks by one of higher priority."""
    sched = make_scheduler(max_loras=1, scheduling_policy="priority", num_blocks=12)
    sched.add(adapted(0, "", prompt_len=23, priority=0, max_tokens=2))
    sched.add(adapted(1, "a", prompt_len=4, priority=2, max_tokens=40, ignore_eos=True))
    step(sched)
    sched.add(adapted(2, "b", prompt_len=24, priority=1, max_tokens=4))
    assert step(sched).preempted == ()  # not even without r1 are there 6 blocks
    assert not sched.queues.find("r0")
    assert step(sched).preempted == ("r1",)
    assert "r2" in sched.queues.running

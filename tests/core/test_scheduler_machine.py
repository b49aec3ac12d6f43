"""Random operations on a scheduler with scarce resources: who holds each resource, and who waits for it.

The resources are blocks on the device and in host memory, batch slots, the token budget, adapter slots and
state slots. Only unfinished requests hold resources, and every step makes progress.
"""

import collections
import itertools
from typing import Any, ClassVar

import pytest
from helpers.scheduling import EOS, make_group, make_scheduler, result_of
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.core.request import SequenceGroup, SequenceStatus
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.sampling_params import BeamSearchParams

MAX_MODEL_LEN = 24
STOP = 7  # a token that completes a stop string
TOKENS = st.lists(st.sampled_from([5, 5, 5, 5, EOS, STOP]), min_size=1, max_size=4)
REQUESTS = st.fixed_dictionaries(
    {
        "adapter": st.sampled_from(["", "a", "b", "c"]),
        "prompt_len": st.integers(1, 14),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "beam_width": st.sampled_from([0, 0, 0, 0, 2]),
        "max_tokens": st.sampled_from([1, 1, 4, 9]),
        "priority": st.integers(0, 2),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that come, run, are preempted, and end in every way; up to two steps are in flight."""

    counts: ClassVar[collections.Counter[str]] = collections.Counter()

    @initialize(
        num_blocks=st.sampled_from([6, 10, 20]),
        block_size=st.sampled_from([2, 4]),
        num_swap_blocks=st.sampled_from([0, 4, 60]),
        caching=st.booleans(),
        num_state_slots=st.sampled_from([0, 0, 3, 12]),
        max_loras=st.sampled_from([1, 1, 2, 3]),
        max_num_seqs=st.sampled_from([3, 5]),
        budget=st.sampled_from([5, MAX_MODEL_LEN]),
        scheduling_policy=st.sampled_from(["fcfs", "priority"]),
        mode=st.sampled_from([None, "swap", "recompute"]),
        chunked=st.sampled_from([True, True, False]),
        num_scheduler_steps=st.sampled_from([1, 1, 3]),
        max_in_flight=st.sampled_from([1, 1, 2]),
    )
    def start(
        self, scheduling_policy: Any, mode: Any, chunked: bool, budget: int, max_in_flight: int, **sizes: Any
    ) -> None:
        self.sched = make_scheduler(
            scheduling_policy=scheduling_policy,
            preemption_mode=mode,
            enable_chunked_prefill=chunked,
            budget=budget if chunked else MAX_MODEL_LEN,
            max_model_len=MAX_MODEL_LEN,
            **sizes,
        )
        self.max_in_flight = max_in_flight
        self.groups: list[SequenceGroup] = []
        self.could_run: set[SequenceGroup] = set()
        self.in_flight: collections.deque[SchedulerOutput] = collections.deque()

    @property
    def may_schedule(self) -> bool:
        if not self.sched.has_unfinished:
            return False
        return not self.in_flight or (len(self.in_flight) < self.max_in_flight and self.sched.can_run_ahead)

    @property
    def unfinished(self) -> list[SequenceGroup]:
        return [group for group in self.groups if not group.is_finished]

    @precondition(lambda self: len(self.unfinished) < 8)
    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            values = dict(request)
            adapter, priority = values.pop("adapter"), values.pop("priority")
            prompt = [i % 3 for i in range(values.pop("prompt_len"))]
            if width := values.pop("beam_width"):
                values["beams"] = BeamSearchParams(beam_width=width, max_tokens=values["max_tokens"])
                values["n"] = 1
            if self.sched.scheduling_policy == "priority":
                values["priority"] = priority
            group = make_group(len(self.groups), prompt, salt=adapter, adapter=adapter, **values)
            self.groups.append(group)
            self.sched.add(group)

    @precondition(lambda self: self.may_schedule)
    @rule()
    def schedule(self) -> None:
        """Every step that knows the results of those before it computes something, or ends a request."""
        sched, is_ahead = self.sched, bool(self.in_flight)
        output = sched.schedule(0.0)
        self.in_flight.append(output)
        assert is_ahead or output.scheduled or output.ended, "a step without progress"
        # A request may find a slot free that others gave back in this very step, but in the next one it runs.
        could_run = {
            group
            for group in sched.queues.requests_set_aside
            if sched.adapters and sched.adapters.has_room(group)
        }
        assert not could_run & self.could_run, "a request waits for a slot that it could have"
        self.could_run = could_run
        for name in ("preempted", "ended", "blocks_to_swap_out", "adapter_loads"):
            self.counts[name] += bool(getattr(output, name))
        self.counts["state copies"] += bool(output.state_moves.copies)
        self.counts["set aside"] += bool(sched.queues.requests_set_aside)
        self.counts["ahead"] += is_ahead

    @precondition(lambda self: len(self.in_flight) == 1)
    @rule(data=st.data())
    def drop_rows(self, data: st.DataObject) -> None:
        """A user drops requests from the step that was scheduled last."""
        (output,) = self.in_flight
        found = [self.sched.find(row.seq_id) for row in output.scheduled]
        owners = [pair[0].request_id for pair in found if pair is not None and not pair[1].status.is_finished]
        if owners and len(owners) == len(found):  # nothing was aborted since
            kept = data.draw(st.sets(st.sampled_from(sorted(set(owners)))))
            rows = [i for i, owner in enumerate(owners) if owner in kept]
            self.in_flight[0] = self.sched.edit(output, rows)

    @precondition(lambda self: self.in_flight)
    @rule(tokens=TOKENS)
    def take_in(self, tokens: list[int]) -> None:
        """The result of the oldest step arrives; samples draw the tokens in turns."""
        output, turns = self.in_flight.popleft(), itertools.cycle(tokens)
        token_ids: list[int | list[int]] = []
        logprobs: list[TokenLogprobs | list[TokenLogprobs]] = []
        for sample in output.samples:
            found = self.sched.find(sample.seq_id)
            beams = found[0].beam_params if found is not None else None
            num_tokens = (
                output.num_multi_step_tokens[sample.scheduled_index] if output.num_multi_step_tokens else 1
            )
            token_ids.append([next(turns) for _ in range(num_tokens)])
            top = (
                [next(turns), *range(10, 10 + 2 * beams.beam_width)][: 2 * beams.beam_width] if beams else []
            )
            logprobs.append([TokenLogprobs(0.0, 0, top, [-1.0 - i for i in range(len(top))])] * num_tokens)
        update = self.sched.update(output, result_of(output, token_ids, logprobs), 0.0)
        for group, seq, new_tokens, _ in update.new_tokens:
            if STOP in new_tokens and not seq.status.is_finished:
                self.sched.finish(group, seq, SequenceStatus.FINISHED_STOPPED, 0.0, "stop")

    @rule(num_steps=st.integers(1, 6), tokens=TOKENS)
    def run_steps(self, num_steps: int, tokens: list[int]) -> None:
        for _ in range(num_steps):
            while self.may_schedule:
                self.schedule()
            if self.in_flight:
                self.take_in(tokens=tokens)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.sched.abort(data.draw(st.sampled_from([group.request_id for group in self.unfinished])))

    @precondition(lambda self: not self.in_flight)
    @rule()
    def forget_prefixes(self) -> None:
        """Other weights: running requests lose what they have computed."""
        self.sched.forget_prefixes(None)

    @invariant()
    def everything_held_is_held_by_an_unfinished_request(self) -> None:
        if not hasattr(self, "sched"):
            return
        sched, queues = self.sched, self.sched.queues
        manager = sched.block_manager
        manager.check_integrity()  # references to blocks and state slots are those of the tables
        at = {name: list(getattr(queues, name).values()) for name in ("running", "swapped", "waiting")}
        assert sorted(g.arrival for groups in at.values() for g in groups) == [
            g.arrival for g in self.unfinished
        ]
        sequences = {name: {seq for g in groups for seq in g.unfinished} for name, groups in at.items()}
        assert manager.block_tables.keys() <= sequences["running"]
        assert manager.swapped_tables.keys() <= sequences["swapped"]
        assert (
            queues.num_reserved_slots
            == sum(g.num_reserved_slots for g in at["running"])
            <= sched.max_num_seqs
        )
        assert queues.running_adapters == collections.Counter(g.adapter for g in at["running"] if g.adapter)
        assert len(queues.running_adapters) <= sched.max_loras
        slots = sched.adapters.slots if sched.adapters else {}
        assert sorted(slots.values()) == list(range(1, len(slots) + 1))
        assert set(queues.requests_set_aside) <= set(at["waiting"])
        if not self.in_flight:
            pools = [manager.pool, manager.states.pool]
            assert not any(pool.num_held for pool in pools), "blocks wait for a step that has returned"

    def teardown(self) -> None:
        """Checks that all requests end within a bounded number of steps, and that nothing is held then."""
        if not hasattr(self, "sched"):
            return
        # Each step computes a token or more of at least one request; what preemption makes it compute again
        # is bounded by the number of requests that end before it.
        num_tokens = sum(MAX_MODEL_LEN * group.max_num_seqs for group in self.unfinished)
        for _ in range(10 + 4 * num_tokens):
            if self.in_flight:
                self.take_in(tokens=[5])
            elif self.sched.has_unfinished:
                self.schedule()
            else:
                break
        assert not self.sched.has_unfinished, "requests wait for ever"
        manager = self.sched.block_manager
        for pool in (manager.pool, manager.swap_pool, manager.states.pool, manager.states.swap_pool):
            assert pool.num_free == pool.num_usable
        assert not self.sched.queues.running_adapters
        assert not self.sched.queues.num_reserved_slots


def run_machine(number: int, num_examples: int) -> collections.Counter[str]:
    """Runs the machine, the same for the same number; returns how often what has happened."""
    machine = type("Machine", (SchedulerMachine,), {"counts": collections.Counter()})
    seed(number)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=50,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.counts


def test_every_request_ends_and_nothing_is_left_whatever_is_scarce() -> None:
    # What the machine draws depends on the modules that are loaded, also for the same seed.
    counts: collections.Counter[str] = collections.Counter()
    for number in range(3, 9):
        counts += run_machine(number, 50)
        if counts.keys() >= {"preempted", "adapter_loads", "state copies", "set aside", "ahead"}:
            return
    raise AssertionError(f"the machine has not reached every state: {counts}")


def test_a_slot_that_becomes_free_within_a_step_goes_to_the_first_request_that_waits_for_it() -> None:
    machine = SchedulerMachine()
    sizes = {"num_blocks": 6, "block_size": 4, "num_swap_blocks": 0, "caching": False, "num_state_slots": 0}
    sizes |= {"max_loras": 1, "max_num_seqs": 3, "num_scheduler_steps": 1}
    machine.start(scheduling_policy="fcfs", mode=None, chunked=True, budget=24, max_in_flight=1, **sizes)
    request = {"prompt_len": 1, "n": 3, "beam_width": 0, "max_tokens": 9, "priority": 0}
    machine.add(requests=[request | {"adapter": "b"}])  # it outgrows the pool
    machine.run_steps(num_steps=1, tokens=[5])
    machine.add(requests=[request | {"adapter": "c", "n": 1, "prompt_len": 5}])
    while not machine.groups[0].is_finished:
        machine.add(requests=[request | {"adapter": "a", "n": 1}])
        machine.run_steps(num_steps=1, tokens=[5])
    assert "a" not in machine.sched.queues.running_adapters
    machine.run_steps(num_steps=1, tokens=[5])
    assert machine.sched.queues.running_adapters == {"c": 1}
    machine.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_many_more_operations(number: int) -> None:
    run_machine(number, 500)

"""Steps that are scheduled before the results of those before them are there."""

import collections
import dataclasses
from typing import Any

import pytest
from helpers.scheduling import EOS, NO_LOGPROBS, found, make_group, make_scheduler, result_of, step
from helpers.value_device import ValueDevice
from test_scheduler_simulation import CROSS, FULL, MAX_MODEL_LEN, WINDOW, Simulation, root_of, total

from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.core.request import SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED, NON_FINITE
from jax_paged.sampling_params import BeamSearchParams

SPARE_TOKENS = 8  # tokens of a burst, each of which may have a block


class RunningAhead(Simulation):
    """Random requests; up to `depth` steps are in flight, and the device runs them as late as it may."""

    def __init__(self, seed: int, depth: int, **fixed: Any) -> None:
        super().__init__(seed, **fixed)
        self.depth = depth
        self.in_flight: collections.deque[SchedulerOutput] = collections.deque()
        manager = self.manager
        sizes = manager.pool.num_blocks, manager.swap_pool.num_blocks, manager.block_size
        self.values = ValueDevice(
            *sizes,
            manager.groups,
            lambda request_id: root_of(self.groups[int(request_id[1:])]),
            (self.setup.num_state_slots, manager.states.swap_pool.num_blocks),
        )
        self.counts |= {"ahead": 0, "empty": 0, "short": 0, "bursts": 0, "bursts ahead": 0, "cut": 0}
        self.counts |= {"edits": 0, "dropped": 0, "unforked": 0}
        self.counts |= {"verified": 0, "drafts": 0, "accepted": 0}

    @property
    def is_busy(self) -> bool:
        return self.sched.has_unfinished or bool(self.in_flight)

    def step(self) -> SchedulerOutput:
        sched, counts = self.sched, self.counts
        self.now += 1.0
        while not self.in_flight or (len(self.in_flight) < self.depth and sched.can_run_ahead):
            before = set(sched.queues.running), len(self.in_flight)
            output = sched.schedule(self.now)
            self.manager.check_integrity()
            self.check_queues()
            self.check_ahead(output, *before)
            if self.rng.random() < self.setup.edits:
                output = self.edit(output)
            self.in_flight.append(output)
            self.ended |= set(output.ended)
        self.end_early()
        output = self.in_flight.popleft()
        token_ids, logprobs = self.values.execute(output)
        had_first_token = {g for g in self.groups if g.metrics.first_token_time is not None}
        result = result_of(output, token_ids, logprobs)
        update = sched.update(output, dataclasses.replace(result, drafts=self.values.drafts), self.now)
        self.manager.check_integrity()
        self.check_first_tokens(had_first_token)
        self.check_walk()
        # A stop string, which ends a sequence a step late on the device; perhaps in the middle of a burst.
        for group, seq, new, _ in update.new_tokens:
            if (seq.status is SequenceStatus.RUNNING or len(new) > 1) and self.rng.random() < 0.02:
                kept = len(seq.output_token_ids) - self.rng.randrange(len(new))
                status = SequenceStatus.FINISHED_ABORTED
                sched.finish(group, seq, status, self.now, num_output_tokens=kept)
                counts["cut"] += len(new) > 1
        pool = self.manager.pool
        free = pool._free.keys()
        self.values.spoil(lambda block: block in free and pool.contents[block] is None, self.rng)
        counts["steps"] += 1
        counts["tokens"] += sum(map(len, token_ids))
        counts["preemptions"] += len(output.preempted)
        counts["swaps"] += bool(output.blocks_to_swap_out)
        counts["copies"] += len(output.blocks_to_copy)
        counts["short"] += sched._awaits_results
        if (drafts := sched.drafts) is not None:
            counts["verified"], counts["drafts"] = drafts.num_verified, drafts.num_drafts
            counts["accepted"] = sum(drafts.num_accepted)
        return output

    def edit(self, output: SchedulerOutput) -> SchedulerOutput:
        """Drops some requests from the step that was scheduled last, and re-orders the others."""
        groups = [found(self.sched, row.seq_id)[0] for row in output.scheduled]
        order = {group: self.rng.random() for group in dict.fromkeys(groups)}
        kept = [i for i, group in enumerate(groups) if order[group] < 0.7]
        kept.sort(key=lambda i: (output.scheduled[i].num_tokens > 1, order[groups[i]]))
        self.end_early()
        edited = self.sched.edit(output, kept)
        self.manager.check_integrity()
        for group, seq in (found(self.sched, output.scheduled[i].seq_id) for i in kept):
            assert seq in group.sequences
        counts = self.counts
        counts["edits"] += 1
        counts["dropped"] += len(groups) - len(kept)
        counts["unforked"] += len(output.new_sequences) > len(output.scheduled) and len(kept) < len(groups)
        return edited

    def check_ahead(self, output: SchedulerOutput, ran_before: set[str], num_in_flight: int) -> None:
        assert sum(row.num_tokens for row in output.scheduled) == output.num_batched_tokens
        assert output.num_batched_tokens <= self.setup.budget
        if output.num_multi_step_tokens:
            self.check_burst(output)
            self.counts["bursts"] += 1
            self.counts["bursts ahead"] += num_in_flight > 0
        assert len({row.seq_id for row in output.scheduled}) == len(output.scheduled)
        drafted = {sample.scheduled_index: sample.num_logits - 1 for sample in output.samples}
        rows = [row.token_ids[: row.num_tokens - drafted.get(i, 0)] for i, row in enumerate(output.scheduled)]
        assert all(NO_TOKEN not in token_ids or len(token_ids) == 1 for token_ids in rows)
        assert not any(drafted.values()) or num_in_flight == 0, "drafts follow the last token"
        if num_in_flight:
            assert not output.preempted, "blocks are taken away that a step in flight may make free"
            assert not output.ended
            self.counts["ahead"] += 1
            self.counts["empty"] += not output.scheduled
        else:
            assert output.scheduled or output.ended or not self.sched.has_unfinished, "no progress"
            assert all(NO_TOKEN not in token_ids for token_ids in rows)

    def check_burst(self, output: SchedulerOutput) -> None:
        queues, manager = self.sched.queues, self.manager
        assert not queues.waiting
        assert not queues.swapped
        assert 1 < max(output.num_multi_step_tokens) <= self.setup.num_scheduler_steps
        assert min(output.num_multi_step_tokens) > 0
        assert [(s.scheduled_index, s.seq_id, s.num_logits) for s in output.samples] == [
            (i, row.seq_id, 1) for i, row in enumerate(output.scheduled)
        ]
        for row, num_tokens in zip(output.scheduled, output.num_multi_step_tokens, strict=True):
            group, seq = found(self.sched, row.seq_id)
            assert group.beam_params is None
            assert seq.num_output_tokens - num_tokens >= max(1, group.sampling_params.min_tokens)
            assert seq.num_output_tokens <= (group.sampling_params.max_tokens or MAX_MODEL_LEN)
            num_blocks = manager.num_blocks_of(row.start + num_tokens)
            for cache, table in zip(manager.groups, manager.block_tables[seq], strict=True):
                spare = len(table) - num_blocks  # what a burst that was dropped has got
                leaves = self.setup.edits or self.setup.speculation  # drafts that were not accepted
                is_right = 0 <= spare <= SPARE_TOKENS if leaves else spare == 0
                assert cache.is_cross or is_right, "a block more or less than needed"


@pytest.mark.thorough
@pytest.mark.parametrize("depth", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_requests_in_a_tiny_pool(depth: int) -> None:
    runs = [RunningAhead(seed, depth).run() for seed in range(40)]
    runs += [
        RunningAhead(seed, depth, preemption_mode="swap", num_swap_blocks=300).run() for seed in range(15)
    ]
    least = {"preemptions": 60, "swaps": 10, "cached": 300, "early": 100, "copies": 300}
    if depth > 1:
        least |= {"ahead": 2000, "short": 100}
        assert sum(run.values.num_unknown for run in runs) > 2000
    assert {name: total(runs, name) for name, n in least.items() if total(runs, name) < n} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_random_requests_in_bursts(depth: int) -> None:
    runs = [RunningAhead(seed, depth, num_scheduler_steps=8).run() for seed in range(40)]
    settings = {"preemption_mode": "swap", "num_swap_blocks": 300}
    runs += [RunningAhead(seed, depth, num_scheduler_steps=8, **settings).run() for seed in range(15)]
    # Few and long requests: nobody waits most of the time.
    kinds = ("one", "samples")
    runs += [
        RunningAhead(seed, depth, num_scheduler_steps=8, kinds=kinds).run(arrival=0.1) for seed in range(40)
    ]
    assert sum(run.values.num_bursts for run in runs) == total(runs, "bursts")
    least = {"preemptions": 60, "swaps": 10, "copies": 300, "bursts": 500, "cut": 10}
    if depth > 1:
        least |= {"bursts ahead": 200}
    assert {name: total(runs, name) for name, n in least.items() if total(runs, name) < n} == {}


@pytest.mark.thorough
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_random_requests_whose_steps_are_edited(depth: int) -> None:
    """Every output is that of a request that is alone, whatever was dropped on the way; no block is lost."""
    runs = [RunningAhead(seed, depth, edits=0.4).run() for seed in range(10)]
    settings = {"preemption_mode": "swap", "num_swap_blocks": 300, "kinds": ("samples", "beams")}
    runs += [RunningAhead(seed, depth, edits=0.4, **settings).run() for seed in range(14)]
    bursts = {"edits": 0.4, "num_scheduler_steps": 8, "kinds": ("one", "samples")}
    runs += [RunningAhead(seed, depth, **bursts).run(arrival=0.1) for seed in range(4)]
    least = {"edits": 400, "dropped": 500, "unforked": 10, "copies": 100, "swaps": 5, "bursts": 30}
    assert {name: total(runs, name) for name, n in least.items() if total(runs, name) < n} == {}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "groups", [pytest.param((FULL,), marks=pytest.mark.slow), (FULL, WINDOW), (FULL, CROSS)]
)
def test_with_room_for_all_every_step_runs_ahead(groups: tuple[Any, ...]) -> None:
    kinds = ("one", "samples")
    settings = {
        "groups": groups,
        "num_blocks": 2000,
        "kinds": kinds,
        "early_ends": 0.0,
        "scheduling_policy": "fcfs",
    }
    runs = [RunningAhead(seed, 2, **settings).run(arrival=0.9) for seed in range(10)]
    assert total(runs, "preemptions") == 0
    assert total(runs, "short") == 0
    assert total(runs, "ahead") > 0.9 * total(runs, "steps")


@pytest.mark.slow
def test_many_more_random_requests() -> None:
    for seed in range(60, 600):
        RunningAhead(
            seed, 1 + seed % 3, num_scheduler_steps=[1, 8, 3][seed // 3 % 3], edits=seed % 2 * 0.4
        ).run()


def test_a_step_ahead_computes_the_token_that_is_being_drawn() -> None:
    sched = make_scheduler(block_size=4)
    sched.add(make_group(0, [5] * 6))
    first, second, third = sched.schedule(0.0), sched.schedule(0.0), sched.schedule(0.0)
    assert [(o.scheduled[0].start, o.scheduled[0].token_ids) for o in (first, second, third)] == [
        (0, [5] * 6),
        (6, [NO_TOKEN]),
        (7, [NO_TOKEN]),
    ]
    assert [len(o.scheduled[0].new_blocks[0]) for o in (first, second, third)] == [0, 0, 0]
    for output, token_id in zip((first, second, third), (11, 12, 13), strict=True):
        sched.update(output, result_of(output, [token_id]), 0.0)
    output = sched.schedule(0.0)
    assert (output.scheduled[0].start, output.scheduled[0].token_ids) == (8, [13])


def test_what_is_drawn_after_the_end_is_dropped() -> None:
    sched = make_scheduler(block_size=4)
    group = make_group(0, [5] * 6)
    sched.add(group)
    first, second = sched.schedule(0.0), sched.schedule(0.0)
    assert sched.update(first, result_of(first, [EOS]), 1.0).ended == [group]
    pool = sched.block_manager.pool
    assert pool.num_held == 2  # the second step may still write to them
    update = sched.update(second, result_of(second, [9]), 2.0)
    assert update == ([], [], [], [], [])
    assert pool.num_held == 0
    assert (group.sequences[0].output_token_ids, group.metrics.finished_time) == ([EOS], 1.0)


@pytest.mark.parametrize(
    ("prompt_len", "values"),
    [(6, {"max_tokens": 1}), (15, {"max_tokens": None}), (6, {"bad_words_token_ids": [[7, 8]]})],
    ids=["max_tokens", "max_model_len", "bad words"],
)
def test_some_wait_for_their_token(prompt_len: int, values: dict[str, Any]) -> None:
    """Those that end with it for certain, and those whose next choice depends on it on the host."""
    bad_words = values.pop("bad_words_token_ids", None)
    sched = make_scheduler(block_size=4, max_model_len=16)
    group = make_group(0, [5] * prompt_len, **values)
    group.sampling_params.bad_words_token_ids = bad_words
    sched.add(group)
    sched.add(make_group(1, [5] * 3))
    first, second = sched.schedule(0.0), sched.schedule(0.0)
    assert len(first.scheduled) == 2
    assert [row.seq_id for row in second.scheduled] == [first.scheduled[1].seq_id]
    sched.update(first, result_of(first, [9, 9]), 0.0)
    assert len(sched.schedule(0.0).scheduled) == (2 if bad_words else 1)


def test_beams_wait_for_their_tokens() -> None:
    sched = make_scheduler()
    sched.add(make_group(0, [5] * 6, beams=BeamSearchParams(2, max_tokens=4)))
    first, second = sched.schedule(0.0), sched.schedule(0.0)
    assert (len(first.scheduled), len(second.scheduled)) == (1, 0)


def test_nobody_is_preempted_ahead_of_results() -> None:
    """The blocks may come from a request that ends in the step in flight."""
    sched = make_scheduler(num_blocks=5, block_size=4, caching=False)
    ends, goes_on = make_group(0, [5] * 7, max_tokens=2), make_group(1, [6] * 8, max_tokens=9)
    sched.add(ends)
    sched.add(goes_on)
    first = sched.schedule(0.0)
    assert len(first.scheduled) == 2
    second = sched.schedule(0.0)
    assert [row.token_ids for row in second.scheduled] == [[NO_TOKEN]]
    assert not second.preempted
    assert not sched.can_run_ahead
    sched.update(first, result_of(first, [9, 9]), 0.0)
    sched.update(second, result_of(second, [9]), 0.0)
    assert ends.is_finished
    assert sched.can_run_ahead
    third = sched.schedule(0.0)
    assert [row.token_ids for row in third.scheduled] == [[9]]
    assert not third.preempted


def bursting(**settings: Any) -> tuple[Scheduler, SchedulerOutput]:
    """Returns a scheduler of bursts of 4, with a request that has a token of output, and its next step."""
    sched = make_scheduler(block_size=4, num_scheduler_steps=4)
    sched.add(make_group(0, [5] * 6, **settings))
    step(sched, token_id=9)
    return sched, sched.schedule(0.0)


@pytest.mark.parametrize(
    ("values", "burst"),
    [
        ({}, (4,)),
        ({"n": 2}, (4, 4)),
        ({"max_tokens": 3}, (2,)),
        ({"max_tokens": 2}, ()),  # a burst of one would be no gain
        ({"min_tokens": 2}, ()),
        ({"min_tokens": 1}, (4,)),
        ({"stop_token_ids": list(range(20, 27))}, (4,)),
        ({"stop_token_ids": list(range(20, 28))}, ()),  # one more than a burst looks for, with the model's
        ({"stop_token_ids": list(range(20, 28)), "ignore_eos": True}, (4,)),
        ({"logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4]}, (4,)),
    ],
)
def test_who_takes_part_in_a_burst(values: dict[str, Any], burst: tuple[int, ...]) -> None:
    assert bursting(**values)[1].num_multi_step_tokens == burst


def test_a_burst_has_blocks_for_all_its_tokens_and_gives_them_back() -> None:
    sched, output = bursting()
    pool = sched.block_manager.pool
    assert (output.scheduled[0].start, output.scheduled[0].token_ids) == (6, [9])
    assert [len(blocks) for blocks in output.scheduled[0].new_blocks] == [1]
    assert sched.update(output, result_of(output, [[7, EOS]]), 1.0).new_tokens[0].token_ids == [7, EOS]
    assert pool.num_free == pool.num_usable


def test_bursts_wait_while_somebody_does_and_while_blocks_are_short() -> None:
    sched = make_scheduler(num_blocks=6, block_size=4, num_scheduler_steps=8, caching=False)
    sched.add(make_group(0, [5] * 8, max_tokens=12))
    step(sched)
    sched.add(make_group(1, [6] * 12, max_tokens=2))
    waits = sched.schedule(0.0)
    assert (waits.num_multi_step_tokens, len(sched.queues.waiting)) == ((), 1)
    sched.update(waits, result_of(waits, [9]), 0.0)
    sched.abort("r1")
    output = sched.schedule(0.0)
    assert output.num_multi_step_tokens == (8,)
    sched.update(output, result_of(output, [[9] * 8]), 0.0)
    sched.add(make_group(2, [6] * 3, max_tokens=9))  # takes the last block
    step(sched)
    assert [sched.schedule(0.0).num_multi_step_tokens, sched.block_manager.num_free_blocks] == [(), 0]


def test_what_follows_a_burst_in_flight() -> None:
    sched, first = bursting(max_tokens=8)
    second, third = sched.schedule(0.0), sched.schedule(0.0)
    assert [o.num_multi_step_tokens for o in (first, second, third)] == [(4,), (3,), ()]
    assert (second.scheduled[0].start, second.scheduled[0].token_ids) == (10, [NO_TOKEN])
    assert third.scheduled == ()  # the sequence ends with the tokens that are being drawn
    sched.update(first, result_of(first, [[11, 12, EOS]]), 1.0)
    pool = sched.block_manager.pool
    assert not sched.has_unfinished
    assert pool.num_held == pool.num_usable - pool.num_free > 0
    assert sched.update(second, result_of(second, [[]]), 2.0) == ([], [], [], [], [])
    assert sched.update(third, result_of(third, []), 2.0) == ([], [], [], [], [])
    assert pool.num_free == pool.num_usable


def test_others_go_on_in_bursts_when_one_ends_with_the_burst_in_flight() -> None:
    sched, first = bursting(max_tokens=5)
    sched.update(first, result_of(first, [[11, 12, 13, 14]]), 0.0)
    sched.add(make_group(1, [6] * 3, max_tokens=3))
    sched.add(make_group(2, [7] * 3, max_tokens=9))
    step(sched)
    first, second = sched.schedule(0.0), sched.schedule(0.0)
    assert [o.num_multi_step_tokens for o in (first, second)] == [(2, 4), (4,)]
    assert second.scheduled[0].seq_id == first.scheduled[1].seq_id


@pytest.mark.parametrize(
    ("drawn", "is_finite", "accepted", "reason"),
    [
        ([[11, 12, 13, 14], [21], [31, 32, 33, 34]], [True, False, True], [2, 2, 2], NON_FINITE),
        ([[11, 12, 13, 14], [21, NO_TOKEN], [31, 32, 33, 34]], None, [3, 2, 2], NO_TOKEN_ALLOWED),
        ([[11, EOS], [21, 22], [31, 32, 33, 34]], [True, False, True], [3, 3, 3], NON_FINITE),
        (
            [[11, 12, 13, NO_TOKEN], [21, 22], [31, NO_TOKEN]],
            [True, False, True],
            [3, 3, 2],
            NO_TOKEN_ALLOWED,
        ),
    ],
)
def test_a_request_that_ends_as_a_whole_in_a_burst_gets_what_single_steps_bring(
    drawn: list[list[int]], is_finite: list[bool] | None, accepted: list[int], reason: str
) -> None:
    sched, output = bursting(n=3)
    other = make_group(1, [8] * 3)
    assert output.num_multi_step_tokens == (4, 4, 4)
    (group,) = sched.queues.running.values()
    update = sched.update(output, result_of(output, drawn, is_finite=is_finite), 1.0)
    assert [len(seq.output_token_ids) for seq in group.sequences] == accepted
    assert update.changed == update.ended == [group]
    assert {seq.stop_reason for seq in group.sequences if seq.output_token_ids[-1] != EOS} == {reason}
    pool = sched.block_manager.pool
    assert pool.num_free == pool.num_usable
    cached = [c.tokens for c in pool.contents if c is not None]
    assert all(NO_TOKEN not in tokens for tokens in cached)
    sched.add(other)
    step(sched)


def test_what_is_not_finite_after_the_end_of_a_sequence_ends_nobody() -> None:
    """A step that was scheduled ahead of a burst computes a position that the burst has not reached."""
    sched, first = bursting(n=2)
    sched.add(make_group(1, [8] * 3))
    second = sched.schedule(0.0)
    assert (first.num_multi_step_tokens, second.num_multi_step_tokens) == ((4, 4), ())
    sched.update(first, result_of(first, [[11, EOS], [21, 22, 23, 24]]), 0.0)
    update = sched.update(second, result_of(second, [5, 6, 7], is_finite=[False, True, True]), 0.0)
    assert update.ended == []
    assert [new.token_ids for new in update.new_tokens] == [[6], [7]]


def test_what_is_in_flight_of_an_aborted_request_reaches_nobody() -> None:
    sched = make_scheduler()
    sched.add(make_group(0, [5] * 6, prompt_logprobs=1))
    output = sched.schedule(0.0)
    sched.abort("r0")
    result = result_of(output, [9])
    result = dataclasses.replace(result, prompt_logprobs=[[NO_LOGPROBS] * 5], is_finite=[False])
    assert sched.update(output, result, 0.0) == ([], [], [], [], [])

"""The scheduler's decisions, step by step, by example."""

import re

import pytest
from helpers.scheduling import (
    EOS,
    make_group,
    make_scheduler,
    rows,
    samples_per_row,
    step,
    take_in,
)

from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.request import Request, SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.sampling_params import SamplingParams


def drain(sched: Scheduler) -> int:
    num_steps = 0
    while sched.has_unfinished:
        output = step(sched)
        assert output.scheduled or output.ended or not sched.has_unfinished
        num_steps += 1
    assert sched.block_manager.num_free_blocks == sched.block_manager.num_usable_blocks
    return num_steps


def rows_of(sched: Scheduler, **values) -> list[tuple[str, int, int]]:
    """Runs a step and returns its rows."""
    output = sched.schedule(**{"now": 0.0, **values})
    out = rows(sched, output)
    take_in(sched, output, 5)
    sched.block_manager.check_integrity()
    return out


def test_chunks_fill_the_budget_and_decodes_come_first():
    sched = make_scheduler(budget=10)
    for index, prompt_len in enumerate([3, 14, 2, 9]):
        sched.add(make_group(index, [index] * prompt_len))
    output = sched.schedule(0.0)
    assert [len(new.block_tables[0]) for new in output.new_sequences] == [1, 4]  # all of r1's blocks at once
    first = rows(sched, output)
    take_in(sched, output, 5)
    outputs = []
    seen = [first]
    for _ in range(3):
        output = sched.schedule(0.0)
        outputs.append(output)
        seen.append(rows(sched, output))
        take_in(sched, output, 5)
    assert seen == [
        [("r0", 0, 3), ("r1", 0, 7)],
        [("r0", 3, 1), ("r1", 7, 7), ("r2", 0, 2)],
        [("r0", 4, 1), ("r1", 14, 1), ("r2", 2, 1), ("r3", 0, 7)],
        [("r0", 5, 1), ("r1", 15, 1), ("r2", 3, 1), ("r3", 7, 2)],
    ]
    assert [output.num_batched_tokens for output in outputs] == [10, 10, 5]
    drain(sched)


def test_rows_of_one_token_come_first_whatever_they_are():
    sched = make_scheduler(budget=6)
    sched.add(make_group(0, [0] * 3))
    sched.add(make_group(1, [1] * 2))
    sched.add(make_group(2, [2] * 9))
    assert rows_of(sched) == [("r2", 0, 1), ("r0", 0, 3), ("r1", 0, 2)]


def test_max_num_seqs():
    sched = make_scheduler(max_num_seqs=2)
    groups = [make_group(index, [index], max_tokens=2 + index) for index in range(4)]
    for group in groups:
        sched.add(group)
    assert [[r[0] for r in rows_of(sched)] for _ in range(5)] == [
        ["r0", "r1"],
        ["r0", "r1"],
        ["r1", "r2"],
        ["r2", "r3"],
        ["r2", "r3"],
    ]


def test_preemption_takes_the_latest_and_resumes_in_order():
    sched = make_scheduler(num_blocks=7, block_size=2, caching=False)
    groups = [make_group(index, [index] * 3, max_tokens=4) for index in range(3)]
    for group in groups:
        sched.add(group)
    assert rows_of(sched) == [("r0", 0, 3), ("r1", 0, 3), ("r2", 0, 3)]
    assert rows_of(sched) == [("r0", 3, 1), ("r1", 3, 1), ("r2", 3, 1)]
    output = step(sched)  # r0 and r1 need a third block each: r2 gives its two
    assert output.preempted == ("r2",)
    assert rows(sched, output) == [("r0", 4, 1), ("r1", 4, 1)]
    seq = groups[2].sequences[0]
    assert (seq.status, seq.num_computed_tokens, seq.output_token_ids) == (SequenceStatus.WAITING, 0, [5, 5])
    sched.add(make_group(3, [3]))
    assert set(sched.queues.waiting) == {"r2", "r3"}
    assert sched.queues.first_waiting() is groups[2]
    assert rows_of(sched) == [("r0", 5, 1), ("r1", 5, 1)]
    assert rows_of(sched) == [("r3", 0, 1), ("r2", 0, 5)]  # prompt and output again
    drain(sched)
    assert [group.sequences[0].output_token_ids for group in groups] == [[5] * 4] * 3
    assert [group.metrics.num_preemptions for group in groups] == [0, 0, 1]


def test_a_step_that_preempts_admits_nobody():
    sched = make_scheduler(num_blocks=4, block_size=2, caching=False, max_num_seqs=2)
    for index, prompt_len in enumerate([2, 2, 1]):
        sched.add(make_group(index, [index] * prompt_len))
    step(sched)
    output = step(sched)  # r0 takes the free block; r1, the latest, needs one too and gives up its own
    assert output.preempted == ("r1",)
    assert rows(sched, output) == [("r0", 2, 1)]
    assert sched.block_manager.num_free_blocks == 1
    assert rows_of(sched) == [("r0", 3, 1)]  # r1 needs two blocks; r2 would fit, but is not first
    drain(sched)


def test_a_preempted_request_hits_its_own_blocks():
    sched = make_scheduler(num_blocks=7, block_size=2)
    groups = [make_group(index, [10 + index] * 5, max_tokens=4) for index in range(2)]
    for group in groups:
        sched.add(group)
    outputs = [step(sched) for _ in range(4)]
    assert outputs[2].preempted == ("r1",)
    assert rows_of(sched) == [("r1", 4, 3)]  # of its three full blocks the last was evicted
    assert groups[1].metrics.num_cached_tokens == 0  # at its first admission
    drain(sched)


def test_watermark_holds_only_beside_running_requests():
    sched = make_scheduler(num_blocks=11, block_size=1, watermark=0.2)
    sched.add(make_group(0, [0] * 9, max_tokens=1))  # leaves one block, fewer than the watermark's two
    assert rows_of(sched) == [("r0", 0, 9)]
    sched.add(make_group(1, [1] * 5, max_tokens=3))
    sched.add(make_group(2, [2] * 4, max_tokens=1))  # would leave one
    sched.add(make_group(3, [3] * 1, max_tokens=1))  # would leave enough, but does not overtake
    assert rows_of(sched) == [("r1", 0, 5)]
    assert rows_of(sched) == [("r1", 5, 1)]
    drain(sched)


def test_a_prompt_over_the_pool_is_ignored_and_nothing_is_lost():
    sched = make_scheduler(num_blocks=5, block_size=4)
    groups = [make_group(0, [0] * 3), make_group(1, [1] * 17), make_group(2, [2] * 16, max_tokens=9)]
    for group in groups:
        sched.add(group)
    output = sched.schedule(7.0)
    assert rows(sched, output) == [("r0", 0, 3)]
    take_in(sched, output, 5, 8.0)
    ended = []
    while not groups[1].is_finished:
        output = sched.schedule(9.0)
        ended += output.ended
        take_in(sched, output, 5, 9.0)
    assert ended == ["r1"]
    assert groups[1].sequences[0].status is SequenceStatus.FINISHED_IGNORED
    assert groups[1].metrics.finished_time == 9.0
    drain(sched)
    assert groups[0].sequences[0].output_token_ids == [5] * 8
    # A prompt as large as the pool gets the one token that needs no slot.
    assert groups[2].sequences[0].output_token_ids == [5]
    assert groups[2].sequences[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED


def test_a_request_that_outgrows_the_pool_is_capped():
    sched = make_scheduler(num_blocks=5, block_size=4)
    groups = [make_group(index, [index] * 5, max_tokens=None) for index in range(3)]
    for group in groups:
        sched.add(group)
    drain(sched)
    for group in groups:
        assert group.sequences[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED
        assert group.sequences[0].output_token_ids == [5] * (16 + 1 - 5)


@pytest.mark.parametrize(
    ("params", "sampled", "num_output", "status", "reason"),
    [
        ({}, [5, EOS, 6], 2, "STOPPED", None),
        ({"ignore_eos": True, "max_tokens": 3}, [EOS] * 9, 3, "LENGTH_CAPPED", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [5, EOS], 2, "STOPPED", EOS),
        ({"stop_token_ids": [EOS, 7]}, [EOS], 1, "STOPPED", None),
        ({"stop_token_ids": [6, 7]}, [5, 7], 2, "STOPPED", 7),
        ({"max_tokens": 1, "stop_token_ids": [7]}, [7], 1, "STOPPED", 7),
        ({"max_tokens": 1}, [EOS], 1, "STOPPED", None),
        ({"min_tokens": 3, "stop_token_ids": [7]}, [EOS, 7, 7], 3, "STOPPED", 7),
        ({"min_tokens": 2, "max_tokens": 2}, [EOS, EOS], 2, "STOPPED", None),
        ({"max_tokens": None}, [5] * 99, 7, "LENGTH_CAPPED", None),  # max_model_len 10, prompt 3
    ],
)
def test_stop_conditions(params, sampled, num_output, status, reason):
    sched = make_scheduler(max_model_len=10)
    group = make_group(0, [3, EOS, 7], **params)
    sched.add(group)
    for num, token_id in enumerate(sampled[:num_output], 1):
        assert not group.is_finished
        output = sched.schedule(float(num))
        assert take_in(sched, output, token_id, num + 0.5).changed == [group]
    (seq,) = group.sequences
    assert (len(seq.output_token_ids), seq.status.name, seq.stop_reason) == (
        num_output,
        f"FINISHED_{status}",
        reason,
    )
    assert not sched.has_unfinished
    metrics = group.metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time) == (
        1.0,
        1.5,
        num_output + 0.5,
    )
    assert drain(sched) == 0


def test_prefix_hits_are_counted_and_computed_tokens_are_not_computed_again():
    sched = make_scheduler()
    groups = [
        make_group(0, list(range(10, 22)), max_tokens=1),
        make_group(1, list(range(10, 22)), max_tokens=1),
        make_group(2, [*range(10, 18), 99], max_tokens=1),
        make_group(3, list(range(10, 22)), max_tokens=1, salt="other"),
        make_group(4, list(range(10, 22)), max_tokens=1, prompt_logprobs=0),
    ]
    sched.add(groups[0])
    step(sched)
    for group in groups[1:]:
        sched.add(group)
    assert rows_of(sched) == [("r2", 8, 1), ("r1", 8, 4), ("r3", 0, 12), ("r4", 0, 12)]
    assert [group.metrics.num_cached_tokens for group in groups] == [0, 8, 8, 0, 0]
    assert drain(sched) == 0


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode", "scheduled", "preempted", "finished"])
def test_abort_in_every_state(when):
    sched = make_scheduler(num_blocks=8, block_size=2, budget=4, caching=False)
    other, group = make_group(0, [0] * 2, max_tokens=9), make_group(1, [1] * 6)
    sched.add(other)
    sched.add(group)
    if when in ("prefill", "decode", "preempted"):
        step(sched)
        assert group.sequences[0].num_computed_tokens == 2
    if when in ("decode", "preempted"):
        step(sched)
        step(sched)
        assert len(group.sequences[0].output_token_ids) == 1
    if when == "preempted":
        while not step(sched).preempted:
            pass
    if when == "finished":
        drain(sched)
    if when == "scheduled":
        output = sched.schedule(0.0)
        assert sched.abort("r1") is group
        assert take_in(sched, output, 5).changed == [other]
        assert group.sequences[0].num_computed_tokens == 0
    else:
        assert sched.abort("r1") is (None if when == "finished" else group)
    expected = "LENGTH_CAPPED" if when == "finished" else "ABORTED"
    assert group.sequences[0].status.name == f"FINISHED_{expected}"
    sched.block_manager.check_integrity()
    assert (group.metrics.finished_time is None) == (when != "finished")
    assert sched.abort("r1") is None
    assert sched.abort("no such request") is None
    drain(sched)
    assert len(other.sequences[0].output_token_ids) == 9


def test_finish_ends_now_and_a_second_reason_replaces_the_first():
    sched = make_scheduler()
    group, other = make_group(0, [0] * 5), make_group(1, [1] * 5, max_tokens=1)
    sched.add(group)
    sched.add(other)
    output = sched.schedule(1.0)
    sched.finish(group, group.sequences[0], SequenceStatus.FINISHED_ABORTED, 2.0)
    assert take_in(sched, output, 5, 3.0).changed == [other]
    assert group.sequences[0].output_token_ids == []
    assert group.metrics.finished_time == 2.0
    sched.finish(other, other.sequences[0], SequenceStatus.FINISHED_STOPPED, 4.0, "text")
    assert (other.sequences[0].status, other.sequences[0].stop_reason, other.metrics.finished_time) == (
        SequenceStatus.FINISHED_STOPPED,
        "text",
        3.0,
    )
    waiting = make_group(2, [2])
    sched.add(waiting)
    sched.finish(waiting, waiting.sequences[0], SequenceStatus.FINISHED_ABORTED, 5.0)
    assert drain(sched) == 0


def test_a_request_id_is_unique_among_the_unfinished():
    sched = make_scheduler()
    sched.add(make_group(0, [0]))
    for _ in range(2):  # waiting, then running
        with pytest.raises(AssertionError, match="r0"):
            sched.add(make_group(0, [0]))
        step(sched)
    drain(sched)
    sched.add(make_group(0, [0]))
    drain(sched)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_seqs": 0}, "`max_num_seqs` must be an integer of at least 1, got 0"),
        ({"budget": 0}, "`max_num_batched_tokens` must be an integer of at least 1, got 0"),
        ({"max_model_len": 0}, "`max_model_len` must be an integer of at least 1, got 0"),
        ({"watermark": 1.5}, "`watermark` must be a finite number in [0, 1], got 1.5"),
        ({"watermark": -0.1}, "`watermark` must be a finite number in [0, 1], got -0.1"),
        ({"scheduling_policy": "lifo"}, "`scheduling_policy` must be 'fcfs' or 'priority', got 'lifo'"),
        (
            {"preemption_mode": "drop"},
            "`preemption_mode` must be one of None, 'recompute', 'swap', got 'drop'",
        ),
        (
            {"preemption_mode": "none"},
            "`preemption_mode` must be one of None, 'recompute', 'swap', got 'none'",
        ),
        (
            {"scheduler_delay_factor": -0.1},
            "`scheduler_delay_factor` must be a finite number in [0, inf], got -0.1",
        ),
        (
            {"scheduler_delay_factor": float("nan")},
            "`scheduler_delay_factor` must be a finite number in [0, inf], got nan",
        ),
        (
            {"enable_chunked_prefill": False, "budget": 64, "max_model_len": 65},
            "`max_num_batched_tokens` must be an integer of at least 65 (max_model_len) without chunked "
            "prefill, got 64",
        ),
    ],
)
def test_bad_settings(setting, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_scheduler(**setting)


def test_prompts_first_without_chunks():
    sched = make_scheduler(budget=20, max_model_len=20, enable_chunked_prefill=False)
    for index, prompt_len in enumerate([4, 9, 8, 3]):
        sched.add(make_group(index, [index] * prompt_len))
    outputs = [rows_of(sched) for _ in range(2)]
    sched.add(make_group(4, [4] * 2))
    outputs += [rows_of(sched) for _ in range(2)]
    assert outputs == [
        [("r0", 0, 4), ("r1", 0, 9)],  # r2 would be cut; r3, though short, is not first
        [("r2", 0, 8), ("r3", 0, 3)],
        [("r4", 0, 2)],  # prompts and single tokens do not share a step
        [("r0", 4, 1), ("r1", 9, 1), ("r2", 8, 1), ("r3", 3, 1), ("r4", 2, 1)],
    ]
    drain(sched)


def test_seats_are_those_of_all_samples_to_come():
    sched = make_scheduler(max_num_seqs=5, caching=False)
    for index, (n, best_of) in enumerate([(2, None), (1, 3), (1, None)]):
        sched.add(make_group(index, [index] * 3, n=n, best_of=best_of, max_tokens=3))
    output = step(sched)
    assert samples_per_row(output) == [2, 3]
    assert rows(sched, output) == [("r0", 0, 3), ("r1", 0, 3)]
    assert rows_of(sched) == [("r0", 3, 1)] * 2 + [("r1", 3, 1)] * 3
    step(sched)
    assert rows_of(sched) == [("r2", 0, 3)]
    with pytest.raises(AssertionError, match="6 sequences"):
        sched.add(make_group(3, [3], n=6))
    drain(sched)


def test_new_requests_are_collected_as_long_as_the_delay_factor_says():
    sched = make_scheduler(scheduler_delay_factor=0.5)
    sched.add(make_group(0, [0] * 3, arrival=0.0))
    assert rows_of(sched, now=0.0) == [("r0", 0, 3)]  # nobody runs: no reason to wait
    sched.add(make_group(1, [1] * 3, arrival=2.0))
    assert rows_of(sched, now=4.0) == [("r0", 3, 1), ("r1", 0, 3)]  # waited 2 >= 0.5 * 4
    sched.add(make_group(2, [2] * 3, arrival=6.0))
    assert [len(step(sched, now=t).scheduled) for t in (7.0, 7.4, 7.5)] == [2, 2, 3]  # 1.5 >= 0.5 * 3
    drain(sched)


@pytest.mark.parametrize(
    ("mode", "num_swap_blocks", "is_swapped"),
    [
        (None, 20, [False, True]),
        ("swap", 20, [True, True]),
        ("recompute", 20, [False, False]),
        (None, 2, [False, False]),
    ],
)
def test_which_requests_are_swapped(mode, num_swap_blocks, is_swapped):
    """The paper's rule: recomputed, unless a request has several sequences; all are, without room."""
    for n, expected in zip((1, 2), is_swapped, strict=True):
        sched = make_scheduler(
            num_blocks=8, block_size=2, caching=False, preemption_mode=mode, num_swap_blocks=num_swap_blocks
        )
        groups = [make_group(0, [0] * 3, max_tokens=9), make_group(1, [1] * 3, n=n, max_tokens=5)]
        for group in groups:
            sched.add(group)
        while not (output := step(sched)).preempted:
            pass
        assert output.preempted == ("r1",)
        assert {seq.status.name for seq in groups[1].sequences} == {"SWAPPED" if expected else "WAITING"}
        assert bool(output.blocks_to_swap_out) == expected
        assert bool(sched.block_manager.swapped_tables) == expected
        drain(sched)
        assert [len(seq.output_token_ids) for group in groups for seq in group.sequences] == [9] + [5] * n
        assert groups[1].metrics.num_preemptions >= 1
        assert sched.block_manager.swap_pool.num_free == num_swap_blocks


def test_no_new_request_while_one_is_swapped_out():
    sched = make_scheduler(num_blocks=8, block_size=2, caching=False, num_swap_blocks=20)
    groups = [make_group(0, [0] * 3, max_tokens=9), make_group(1, [1] * 3, n=2, max_tokens=9)]
    for group in groups:
        sched.add(group)
    while not step(sched).preempted:
        pass
    sched.add(make_group(2, [2], max_tokens=1))  # would fit
    outputs, names = [], []
    while groups[1].sequences[0].status is SequenceStatus.SWAPPED:
        outputs.append(step(sched))
        names.append([r[0] for r in rows(sched, outputs[-1])])
    assert len(outputs) > 1
    assert all("r2" not in each for each in names[:-1])
    assert outputs[-1].blocks_to_swap_in
    assert groups[1].sequences[0].status is SequenceStatus.RUNNING
    drain(sched)


def test_lower_priority_values_go_first_and_take_blocks_and_seats():
    sched = make_scheduler(
        num_blocks=8, block_size=2, caching=False, max_num_seqs=2, scheduling_policy="priority"
    )
    groups = [make_group(index, [index] * 3, priority=p) for index, p in enumerate([3, 1, 2, 2, 0])]
    for group in groups[:3]:
        sched.add(group)
    assert rows_of(sched) == [("r1", 0, 3), ("r2", 0, 3)]  # two seats
    sched.add(groups[3])  # no better than r2: it came later
    assert rows_of(sched) == [("r1", 3, 1), ("r2", 3, 1)]
    sched.add(groups[4])
    output = step(sched)
    assert output.preempted == ("r2",)
    assert sorted(rows(sched, output)) == [("r1", 4, 1), ("r4", 0, 3)]
    now = 0.0
    while sched.has_unfinished:
        step(sched, now=(now := now + 1))
    assert groups[3].metrics.first_token_time < groups[0].metrics.first_token_time
    assert groups[4].metrics.finished_time < groups[2].metrics.finished_time < groups[3].metrics.finished_time


def test_priorities_are_refused_under_fcfs():
    with pytest.raises(AssertionError, match="does not support priorities"):
        make_scheduler().add(make_group(0, [0], priority=1))


def test_a_lack_of_token_budget_preempts_nobody():
    sched = make_scheduler(
        num_blocks=99, budget=20, max_model_len=20, enable_chunked_prefill=False, scheduling_policy="priority"
    )
    sched.add(make_group(0, [0] * 3, priority=5))
    step(sched)
    sched.add(make_group(1, [1] * 12, priority=0))
    sched.add(make_group(2, [2] * 12, priority=0))  # there are blocks and seats, but no tokens in this step
    output = step(sched)
    assert rows(sched, output) == [("r1", 0, 12)]
    assert output.preempted == ()
    assert rows_of(sched) == [("r2", 0, 12)]
    drain(sched)


def test_a_long_prompt_runs_in_a_window_that_the_pool_holds():
    """Ten blocks hold 20 tokens: enough for a window of 4 and chunks of up to 14 tokens."""
    sched = make_scheduler(num_blocks=11, block_size=2, groups=(CacheGroup(window=4),))
    group = make_group(0, [0] * 40, max_tokens=2)
    sched.add(group)
    drain(sched)
    assert group.sequences[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert len(group.sequences[0].output_token_ids) == 2


@pytest.mark.parametrize("num_swap_blocks", [0, 2, 99])
@pytest.mark.parametrize("mode", [None, "recompute", "swap"])
def test_a_group_comes_back_with_room_for_all_its_samples(mode, num_swap_blocks):
    """Room for its first sequence alone would admit it, and preempt it again, at every second step."""
    sched = make_scheduler(
        num_blocks=5, block_size=128, budget=512, num_swap_blocks=num_swap_blocks, preemption_mode=mode
    )
    groups = []
    for name, prompt_len, max_tokens, n in (("first", 10, 110, 1), ("samples", 100, 20, 4)):
        params = SamplingParams(n=n, seed=0, max_tokens=max_tokens, ignore_eos=True)
        groups.append(SequenceGroup.from_request(Request(name, [1] * prompt_len, params), 0.0))
        sched.add(groups[-1])
    drain(sched)
    assert [len(s.output_token_ids) for g in groups for s in g.sequences] == [110, 20, 20, 20, 20]
    assert [g.metrics.num_preemptions for g in groups] == [0, 1]

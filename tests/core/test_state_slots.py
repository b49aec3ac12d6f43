"""States of sequences beside their blocks: who may have which slot, and what a prefix that is found needs."""

import pytest
from helpers.scheduling import make_group, make_scheduler, step, take_in
from test_running_ahead import RunningAhead
from test_scheduler_simulation import Simulation, total

from jax_paged.core.features.interactive.request_edits import Rollback

SWAPS = {"preemption_mode": "swap", "num_swap_blocks": 300}


@pytest.mark.parametrize("num_state_slots", [3, 5, 9, 40])
def test_random_requests_with_states(num_state_slots: int) -> None:
    runs = [Simulation(seed, num_state_slots=num_state_slots).run() for seed in range(3)]
    runs += [Simulation(seed, num_state_slots=num_state_slots, **SWAPS).run() for seed in range(2)]
    assert total(runs, "preemptions") > 2
    assert num_state_slots < 9 or total(runs, "cached") > 5


@pytest.mark.thorough
@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
@pytest.mark.parametrize("num_state_slots", [4, 40])
def test_random_requests_with_states_that_run_ahead(num_state_slots: int, num_scheduler_steps: int) -> None:
    settings = {"num_state_slots": num_state_slots, "num_scheduler_steps": num_scheduler_steps}
    for seed in range(2):
        RunningAhead(seed, 2, **settings).run()
        RunningAhead(seed, 2, edits=0.1, **settings).run()


@pytest.mark.slow
def test_many_more_random_requests_with_states() -> None:
    for seed in range(100):
        for num_state_slots in (3, 4, 6, 9, 40):
            Simulation(seed, num_state_slots=num_state_slots, **(SWAPS if seed % 2 else {})).run()
            RunningAhead(seed, 2, num_state_slots=num_state_slots, edits=seed % 3 / 10).run()


def test_a_prefix_is_found_where_a_checkpoint_is() -> None:
    """Blocks of a prompt are cached everywhere, its state behind its last full block only."""
    sched = make_scheduler(num_blocks=64, block_size=4, num_state_slots=9)
    prompt = list(range(21))
    sched.add(make_group(0, prompt, max_tokens=2))
    first = step(sched)
    assert first.scheduled[0].checkpoint[0] == 20
    step(sched)
    for index, (text, num_cached) in enumerate([(prompt, 20), ([*prompt[:18], 1], 0), (prompt[:20], 16)], 1):
        sched.add(make_group(index, text, max_tokens=1))
        assert step(sched).scheduled[0].start == num_cached
    sched.block_manager.check_integrity()
    # Its blocks are not enough when the state is evicted.
    states = sched.block_manager.states
    for slot in range(states.pool.num_blocks):
        states.pool.remove_from_cache(slot)
    sched.add(make_group(9, prompt, max_tokens=1))
    assert step(sched).scheduled[0].start == 0


def test_the_checkpoint_of_an_output_moves_on() -> None:
    """A long output keeps one checkpoint, and leaves those of prompts where they are."""
    sched = make_scheduler(num_blocks=200, block_size=4, num_state_slots=6)
    sched.add(make_group(0, list(range(13)), max_tokens=1))
    step(sched)
    group = make_group(1, [50] * 5, max_tokens=60)
    sched.add(group)
    while sched.has_unfinished:
        step(sched)
    contents = [c.tokens for c in sched.block_manager.states.pool.contents if c is not None]
    text = group.sequences[0].tokens(0, 64)
    assert sorted(contents) == sorted([list(range(8, 12)), text[:4], text[60:]])


def test_nobody_runs_without_a_slot() -> None:
    sched = make_scheduler(num_state_slots=3)
    for index in range(3):
        sched.add(make_group(index, [index] * 5, max_tokens=6))
    step(sched)
    assert set(sched.queues.running) == {"r0", "r1"}
    assert [row.state_slot for row in step(sched).scheduled] == [1, 2]
    while sched.has_unfinished:
        step(sched)
    states = sched.block_manager.states
    assert states.pool.num_free == states.pool.num_usable == 2


def test_tokens_that_are_taken_back_are_computed_again() -> None:
    sched = make_scheduler(num_state_slots=5, caching=False)
    group = make_group(0, [1] * 5, max_tokens=20)
    sched.add(group)
    for _ in range(6):
        step(sched)
    sched.edit_request(Rollback("r0", 2))
    assert step(sched).scheduled[0].start == 0
    sched.block_manager.check_integrity()


def test_what_a_step_in_flight_was_to_keep_of_an_aborted_request_is_given_back() -> None:
    sched = make_scheduler(num_state_slots=9)
    sched.add(make_group(0, list(range(21)), max_tokens=2))
    output = sched.schedule(0.0)
    assert output.scheduled[0].checkpoint[0] == 20
    sched.abort("r0")
    take_in(sched, output, [7])
    states = sched.block_manager.states
    sched.block_manager.check_integrity()
    assert states.pool.num_free == states.pool.num_usable

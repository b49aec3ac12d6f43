"""States of sequences beside their blocks: who may have which slot, and what a prefix that is found needs."""

import pytest
from test_running_ahead import RunningAhead
from test_scheduler_simulation import Simulation, total


@pytest.mark.parametrize("num_state_slots", [3, 5, 9, 40])
def test_random_requests_with_states(num_state_slots: int) -> None:
    runs = [Simulation(seed, num_state_slots=num_state_slots).run() for seed in range(20)]
    swap = {"preemption_mode": "swap", "num_swap_blocks": 300}
    runs += [Simulation(seed, num_state_slots=num_state_slots, **swap).run() for seed in range(10)]
    assert total(runs, "preemptions") > 20
    assert total(runs, "cached") > 3 * num_state_slots


@pytest.mark.parametrize("burst_size", [1, 4])
@pytest.mark.parametrize("num_state_slots", [4, 9, 40])
def test_random_requests_with_states_that_run_ahead(num_state_slots: int, burst_size: int) -> None:
    settings = {"num_state_slots": num_state_slots, "burst_size": burst_size}
    for seed in range(15):
        RunningAhead(seed, 2, **settings).run()
        RunningAhead(seed, 2, edits=0.1, **settings).run()

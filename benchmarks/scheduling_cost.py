"""Python time of scheduling a step (schedule and update), by the number of requests that wait.

    python benchmarks/scheduling_cost.py

256 requests run, each a token a step, in a pool that holds them all; so every step is alike. Rounds of all
sizes take turns, so that whatever else the machine does falls on each. Of a round the median counts, of all
rounds the median and the smallest.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup
from jax_paged.sampling_params import SamplingParams

NUM_RUNNING, PROMPT_LEN = 256, 100


def make_scheduler(num_waiting: int) -> Scheduler:
    """Returns a scheduler with 256 running requests that have computed their prompts, and others waiting."""
    scheduler = Scheduler(
        block_manager=BlockManager(NUM_RUNNING * 256, 16, enable_prefix_caching=True),
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=NUM_RUNNING * PROMPT_LEN,
        max_model_len=4096,
        eos_token_ids=frozenset({7}),
    )
    params = SamplingParams(max_tokens=3000, seed=0)
    for i in range(NUM_RUNNING + num_waiting):
        prompt = [i, *range(PROMPT_LEN - 1 - i % 16)]  # blocks become full in turns
        group = SequenceGroup(str(i), [Sequence(prompt)], params, RequestMetrics(0.0))
        scheduler.add(group)
    for _ in range(2):
        step_s(scheduler)
    return scheduler


def step_s(scheduler: Scheduler) -> float:
    """Runs a step; returns the seconds that schedule() and update() take."""
    start = time.perf_counter()
    output = scheduler.schedule(0.0)
    scheduled = time.perf_counter()
    num_rows = len(output.scheduled)
    assert len(output.samples) == num_rows == NUM_RUNNING, num_rows
    result = ModelRunnerOutput(
        output.step_id,
        [[100] for _ in output.samples],
        [[TokenLogprobs(-1.0, 0, [], [])] for _ in output.samples],
        [True] * num_rows,
        [[]] * num_rows,
    )
    updating = time.perf_counter()
    scheduler.update(output, result, 0.0)
    return scheduled - start + time.perf_counter() - updating


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    schedulers = {n: make_scheduler(n) for n in args.waiting}
    rounds: dict[int, list[float]] = {n: [] for n in args.waiting}
    for _ in range(args.rounds):
        for n, scheduler in schedulers.items():
            rounds[n].append(statistics.median(step_s(scheduler) for _ in range(64)) * 1e3)

    def column(of: Callable[[list[float]], float]) -> dict[int, float]:
        return {n: of(times) for n, times in rounds.items()}

    median, best = column(statistics.median), column(min)
    first = args.waiting[0]
    print(f"{NUM_RUNNING} running; ms of schedule + update\n")
    print("| waiting | median | best | median / first | best / first |\n|" + " --- |" * 5)
    for n in args.waiting:
        ratios = f"{median[n] / median[first]:.2f} | {best[n] / best[first]:.2f}"
        print(f"| {n:,} | {median[n]:.2f} | {best[n]:.2f} | {ratios} |")
    print("RESULT " + json.dumps({str(n): round(best[n], 3) for n in args.waiting}))


if __name__ == "__main__":
    main()

"""Processor time of scheduling at a thousand requests per second, spread over many replicas of one model."""

import time
from typing import Any

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.result_updater import StepUpdate
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.simulator import simulate
from paper.devices import OPT_13B
from paper.lengths import ALPACA, MAX_MODEL_LEN, draw_trace
from paper.systems import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

RATE = 1000.0  # requests per second, over all replicas
BIN = 32  # width of the histogram bins (sequences per step)


class Timed(Scheduler):
    """Scheduler that measures the processor time of each step.

    Attributes:
        costs: Number of scheduled sequences and processor time (seconds) of each step.
    """

    costs: list[tuple[int, float]]

    def schedule(self, now: float) -> SchedulerOutput:
        """Schedules a step and measures its processor time."""
        start = time.process_time()
        output = super().schedule(now)
        self._seconds = time.process_time() - start
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Processes the results of a step and stores the processor time of both calls."""
        start = time.process_time()
        update = super().update(output, result, now)
        self.costs.append((len(output.scheduled), self._seconds + time.process_time() - start))
        return update


def replicas(num_replicas: int, first: int, last: int, per_replica: int) -> dict[str, Any]:
    """Simulates some of the replicas that share RATE requests per second (Alpaca lengths, OPT-13B).

    Each replica receives an equal share as Poisson arrivals of its own.

    Args:
        num_replicas: Number of replicas that share the rate.
        first: Index of the first simulated replica.
        last: Index after the last simulated replica.
        per_replica: Number of requests that each replica serves.

    Returns:
        num_requests, num_steps, num_rows: Totals; a row is one sequence in one step.
        scheduling_s, all_s: Processor time in schedule() and update(), and of the whole simulation.
        latency_s: Mean time from arrival to the end of a request.
        most_waiting: The longest queue.
        bins: A histogram over the number of sequences in a step: lower bound of the bin, number of steps, and
            processor time in the scheduler (seconds).
    """
    bins: dict[int, list[float]] = {}
    num_steps = num_rows = most_waiting = 0
    scheduling_s = latency_s = 0.0
    began = time.process_time()
    for replica in range(first, last):
        rate = RATE / num_replicas
        trace = draw_trace(ALPACA, rate, per_replica / rate, seed=2 * replica + 1)
        scheduler = Timed(
            block_manager=BlockManager(OPT_13B.num_slots // 16 + 1, 16, enable_prefix_caching=False),
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset(),
        )
        scheduler.costs = []
        result = simulate(trace, scheduler, OPT_13B.step_time())
        for rows, seconds in scheduler.costs:
            entry = bins.setdefault(rows // BIN * BIN, [0, 0.0])
            entry[0] += 1
            entry[1] += seconds
            num_rows += rows
            scheduling_s += seconds
        num_steps += len(scheduler.costs)
        most_waiting = max(most_waiting, int(result.steps["num_waiting"].max()))
        latency_s += float(np.sum(result.requests["finished_time"] - result.requests["arrival_time"]))
    num_requests = per_replica * (last - first)
    return {
        "num_requests": num_requests,
        "num_steps": num_steps,
        "num_rows": num_rows,
        "scheduling_s": round(scheduling_s, 3),
        "all_s": round(time.process_time() - began, 3),
        "latency_s": round(latency_s / num_requests, 3),
        "most_waiting": most_waiting,
        "bins": [[rows, int(n), round(seconds, 4)] for rows, (n, seconds) in sorted(bins.items())],
    }

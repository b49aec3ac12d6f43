"""Batch sizes and memory use of the PagedAttention paper (Figures 2 and 13), by simulation.

    python benchmarks/paper_simulation.py            two one-hour traces, each under two schedules
    python benchmarks/paper_simulation.py --million  the speed of the simulator: a million short requests

OPT-13B on an A100 with 40 GB: 15.7K slots for keys and values in blocks of 16. Lengths are drawn
log-normally with the paper's means, and cut at 1024 tokens; the spreads are our choice, as the paper shows
them in a figure only. Requests arrive as a Poisson process. The time of a step is the sum of what an A100
needs to read the weights, to multiply, and to read keys and values. Nothing is added for the host.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023, section 6.
"""

import argparse
import dataclasses
import time

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler import Scheduler
from jax_paged.lab.simulator import Request, SimulationResult, StepTimeModel, simulate

NUM_SLOTS = 15_700
NUM_PARAMS, NUM_LAYERS, HIDDEN_SIZE = 13e9, 40, 5120  # of OPT-13B, in 2 bytes each
BYTES_PER_S, FLOP_PER_S, UTILISATION = 1.5e12, 312e12, 0.5  # of an A100
S_PER_TOKEN = 2 * NUM_PARAMS / (FLOP_PER_S * UTILISATION)
STEP_TIME = StepTimeModel(
    base_s=2 * NUM_PARAMS / BYTES_PER_S,
    s_per_prefill_token=S_PER_TOKEN,
    s_per_decode_seq=S_PER_TOKEN,
    s_per_context_token=2 * 2 * NUM_LAYERS * HIDDEN_SIZE / BYTES_PER_S,
)
TRACE_S, WARM_UP_S = 3600, 600


@dataclasses.dataclass(frozen=True)
class Workload:
    """A trace of the paper.

    Args:
        rate: Requests per second.
        prompt, output: Mean tokens, and the standard deviation of their logarithm.
        paper_batch: Requests that the paper's system batched on average (Figure 13).
    """

    rate: float
    prompt: tuple[float, float]
    output: tuple[float, float]
    paper_batch: float


WORKLOADS = {
    "ShareGPT-like": Workload(2, (161.31, 1.2), (337.99, 0.9), 30.42),
    "Alpaca-like": Workload(30, (19.31, 0.5), (58.45, 0.9), 132.44),
}
SCHEDULES = {"prompts first, whole": (False, 2560), "chunked": (True, 2048)}


def draw_lengths(rng: np.random.Generator, count: int, mean: float, sigma: float) -> np.ndarray:
    """Returns int lengths in [1, 1024] of that mean: log-normal, but for the cut."""
    normal, mu = rng.standard_normal(count), np.log(mean)
    for _ in range(50):
        lengths = np.clip(np.rint(np.exp(mu + sigma * normal)), 1, 1024)
        mu += np.log(mean / lengths.mean())
    return lengths.astype(int)


def draw_trace(workload: Workload, count: int) -> list[Request]:
    """Returns the same requests each time."""
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / workload.rate, count))
    prompts, outputs = (draw_lengths(rng, count, *length) for length in (workload.prompt, workload.output))
    columns = (column.tolist() for column in (arrivals, prompts, outputs))
    return [Request(*row) for row in zip(*columns, strict=True)]


def run(trace: list[Request], block_size: int, chunked: bool, num_batched_tokens: int) -> SimulationResult:
    """Serves a trace under one of the schedules."""
    scheduler = Scheduler(
        block_manager=BlockManager(NUM_SLOTS // block_size + 1, block_size, enable_prefix_caching=False),
        max_num_seqs=256,
        max_num_batched_tokens=num_batched_tokens,
        max_model_len=2048,
        eos_token_ids=frozenset(),
        enable_chunked_prefill=chunked,
    )
    return simulate(trace, scheduler, STEP_TIME)


def report(workload: Workload, trace: list[Request], schedule: str, result: SimulationResult) -> str:
    """Returns a row of the table, all but its first column."""
    window = result.window(WARM_UP_S, TRACE_S)
    used = window.mean("num_blocks_used") / (NUM_SLOTS // result.block_size)
    latency_s = result.requests["finished_time"] - result.requests["arrival_time"]
    per_token_s = (latency_s / [request.output_len for request in trace]).mean()
    # Little's law: requests in the system = rate * latency.
    paper_s = workload.paper_batch / workload.rate / workload.output[0]
    return (
        f"{schedule} | {result.block_size} | {window.mean('num_running'):.2f} ({workload.paper_batch}) "
        f"| {window.share_of_slots_filled:.1%} | {used:.0%} | {window.steps['step_s'].mean() * 1e3:.1f} "
        f"| {per_token_s * 1e3:.0f} ({paper_s * 1e3:.0f}) | {result.requests['num_preemptions'].sum()} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--million", action="store_true", help="how long a million short requests take")
    if parser.parse_args().million:
        trace = draw_trace(WORKLOADS["Alpaca-like"], 1_000_000)
        start = time.process_time()
        steps = run(trace, 16, *SCHEDULES["chunked"]).steps
        seconds, num_rows = time.process_time() - start, steps["num_seqs"].sum()
        print(f"{len(trace)} requests, {len(steps)} steps, {num_rows} rows in {seconds:.0f} s of CPU time:")
        print(f"{len(trace) / seconds:.0f} requests/s, {seconds / num_rows * 1e6:.2f} us per row")
        return
    print(STEP_TIME)
    columns = ["trace", "schedule", "block size", "batched requests (the paper's)", "slots filled"]
    columns += ["blocks used", "ms per step", "ms per token (the paper's, by Little's law)", "preemptions"]
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for name, workload in WORKLOADS.items():
        trace = draw_trace(workload, round(workload.rate * TRACE_S))
        for schedule, settings in SCHEDULES.items():
            print(f"| {name} | {report(workload, trace, schedule, run(trace, 16, *settings))}", flush=True)
    for block_size in (8, 4):
        print(
            f"| {name} | {report(workload, trace, schedule, run(trace, block_size, *settings))}", flush=True
        )


if __name__ == "__main__":
    main()

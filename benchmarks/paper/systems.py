"""Simulation of the systems that the paper compares.

vLLM and Orca run with this project's scheduler. FasterTransformer runs batches one after another.
"""

import dataclasses
from collections.abc import Sequence as Items

import numpy as np

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.simulator import Request, SimulationResult, simulate
from paper.buddy import BuddyManager, Demand, Reserve, Usage
from paper.devices import Setup
from paper.lengths import MAX_MODEL_LEN

ORCAS: dict[str, Reserve] = {"Orca (Max)": "max", "Orca (Pow2)": "pow2", "Orca (Oracle)": "oracle"}
SYSTEMS = (*ORCAS, "vLLM")
# vLLM's limits at the time of the paper.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 256, 2560


@dataclasses.dataclass(frozen=True)
class Policy:
    """Settings of a system.

    Args:
        block_size: Number of tokens per block; for Orca, the smallest reservation.
        mixes: Whether prompts are computed in the same steps as decodes. False computes them in separate
            steps, before decodes.
        shares_prefixes: Whether vLLM caches the prefixes of prompts.
        preemption_mode: The argument of Scheduler.
    """

    block_size: int = 16
    mixes: bool = False
    shares_prefixes: bool = False
    preemption_mode: str | None = None


DEFAULT = Policy()


class UsageRecorder(Scheduler):
    """Scheduler that records the memory use of an Orca system once per simulated second."""

    usages: list[Usage]
    _next_s = 0.0

    def schedule(self, now: float) -> SchedulerOutput:
        """Schedules a step, and records the memory use if a second has passed."""
        output = super().schedule(now)
        if now >= self._next_s and isinstance(self.block_manager, BuddyManager):
            self.usages.append(self.block_manager.usage())
            self._next_s = now + 1
        return output


def make_scheduler(
    system: str, num_slots: int, trace: Items[Request], policy: Policy = DEFAULT
) -> UsageRecorder:
    """Returns the scheduler of a system, with an empty pool.

    Args:
        system: One of SYSTEMS.
        num_slots: Size of the pool (tokens).
        trace: The requests to serve, whose output lengths the Orca systems use.
        policy: Settings of the system.
    """

    def demand(seq: Sequence) -> Demand:
        request = trace[-1 - seq.prompt_token_ids[-1]]
        return Demand(request.output_len, request.beam_width or request.n)

    size = policy.block_size
    num_blocks = num_slots // size + 1
    if system in ORCAS:
        manager = BuddyManager(num_blocks, size, ORCAS[system], MAX_MODEL_LEN, demand)
    else:
        # The host memory for swapping is as large as the pool, so that it is never full.
        manager = BlockManager(num_blocks, size, policy.shares_prefixes, num_swap_blocks=num_blocks)
    scheduler = UsageRecorder(
        block_manager=manager,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=frozenset(),
        watermark=0.0 if system in ORCAS else 0.01,
        enable_chunked_prefill=policy.mixes,
        preemption_mode=policy.preemption_mode,
    )
    scheduler.usages = []
    return scheduler


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of serving a trace.

    Args:
        result: Result of the simulator.
        usages: Memory use of an Orca system, once per simulated second; empty for other systems.
    """

    result: SimulationResult
    usages: list[Usage]


def serve(
    system: str,
    setup: Setup,
    trace: Items[Request],
    policy: Policy = DEFAULT,
    *,
    stop_s: float = float("inf"),
) -> Outcome:
    """Simulates serving a trace; equal arguments give equal results.

    Args:
        system: One of SYSTEMS.
        setup: Model and GPUs.
        trace: The requests, in order of arrival.
        policy: Settings of the system.
        stop_s: Time at which the simulation ends (seconds).
    """
    scheduler = make_scheduler(system, setup.num_slots, trace, policy)
    result = simulate(trace, scheduler, setup.step_time(policy.block_size), stop_s=stop_s)
    return Outcome(result, scheduler.usages)


def normalized_latency(trace: Items[Request], finished_s: Items[float]) -> float:
    """Returns the paper's normalized latency: the mean of latency / output tokens over requests (seconds)."""
    per_token = [
        (end - request.arrival_s) / request.output_len for request, end in zip(trace, finished_s, strict=True)
    ]
    return float(np.mean(per_token))


def serve_static(setup: Setup, trace: Items[Request]) -> list[float]:
    """Returns the time at which each request of a trace ends with FasterTransformer and static batches.

    Whenever the GPUs are idle, a batch of the earliest waiting requests starts. Its size is limited by the
    memory, in which every request takes the maximum length of the model. All requests of a batch end when the
    longest one has ended.
    """
    max_batch = setup.num_slots // MAX_MODEL_LEN
    step_time = setup.step_time()
    finished: list[float] = []
    clock = 0.0
    while len(finished) < len(trace):
        clock = max(clock, trace[len(finished)].arrival_s)
        batch = [r for r in trace[len(finished) : len(finished) + max_batch] if r.arrival_s <= clock]
        longest = max(request.prompt_len for request in batch)
        clock += step_time.step_s(longest * len(batch), 0, 0, 0, 0)
        for i in range(1, max(request.output_len for request in batch)):
            clock += step_time.step_s(0, len(batch), len(batch) * (longest + i), 0, 0)
        finished += [clock] * len(batch)
    return finished

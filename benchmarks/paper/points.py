"""Points: function calls whose stored results make the figures. Arguments and results are JSON values."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from paper import measured, scale
from paper.devices import OPT_13B, SETUPS, Setup
from paper.lengths import MAX_MODEL_LEN, WORKLOADS, Workload, draw_lengths, draw_trace
from paper.systems import MAX_NUM_SEQS, ORCAS, Policy, normalized_latency, serve, serve_static

# Normalized latency (seconds per output token) at which the request rates of systems are compared. It is in
# the steep part of figure 12's curves.
LATENCY_LIMIT_S = 0.25
FASTER_TRANSFORMER = "FasterTransformer"


def batch(
    system: str,
    workload: str,
    rate: float,
    duration_s: float,
    sigma_shift: float = 0.0,
    sigmas: list[float] | None = None,
    mixes: bool = False,
    host_s: float | None = None,
) -> dict[str, Any]:
    """Simulates OPT-13B at one request rate. The results are means over the last three quarters of the time.

    Args:
        system: One of SYSTEMS.
        workload: Name of a workload.
        rate: Requests per second.
        duration_s: Time in which requests arrive (seconds).
        sigma_shift: Number that is added to the workload's sigmas (the spreads of its lengths).
        sigmas: Sigmas of prompts and outputs; None uses the workload's.
        mixes: Whether prompts are computed in the same steps as decodes.
        host_s: Host time per step (seconds); None uses the fitted HOST_S.

    Returns:
        batched: Mean number of running requests.
        memory: Percent of slots in the categories of buddy.Usage. For vLLM, only blocks in use count.
        per_token_ms: Time per output token by Little's law: batched / (rate * mean output length). This is
            valid if no queue grows.
        step_ms: Mean duration of a step.
        num_preemptions: Number of preemptions.
    """
    chosen = WORKLOADS[workload]
    prompt_sigma, output_sigma = sigmas or (chosen.prompt_sigma, chosen.output_sigma)
    chosen = dataclasses.replace(
        chosen, prompt_sigma=prompt_sigma + sigma_shift, output_sigma=output_sigma + sigma_shift
    )
    setup = OPT_13B if host_s is None else dataclasses.replace(OPT_13B, host_s=host_s)
    trace = draw_trace(chosen, rate, duration_s)
    outcome = serve(system, setup, trace, Policy(mixes=mixes), stop_s=duration_s)
    window = outcome.result.window(duration_s / 4, duration_s)
    if outcome.usages:
        usages = np.array(outcome.usages[len(outcome.usages) // 4 :])
        memory = usages.mean(axis=0) / usages.sum(axis=1).mean() * 100
    else:
        filled = window.share_of_slots_filled * 100
        memory = np.array([filled, 0, 0, 100 - filled])
    batched = window.mean("num_running")
    return {
        "batched": round(batched, 3),
        "memory": memory.round(2).tolist(),
        "per_token_ms": round(batched / rate / chosen.output_mean * 1e3, 2),
        "step_ms": round(float(window.steps["step_s"].mean()) * 1e3, 2),
        "num_preemptions": int(window.requests["num_preemptions"].sum()),
    }


def highest_rate(
    system: str,
    setup: str,
    workload: str,
    duration_s: float,
    n: int = 1,
    beam_width: int | None = None,
    shares_prefixes: bool = False,
) -> dict[str, Any]:
    """Finds the request rate at which the normalized latency of a system is LATENCY_LIMIT_S.

    Args:
        system: One of SYSTEMS, or FASTER_TRANSFORMER.
        setup: Name of a model.
        workload: Name of a workload.
        duration_s: Time in which requests arrive (seconds). Compared systems need the same time, because in
            an overload the latency grows with it.
        n: Number of samples per request.
        beam_width: Number of beams per request.
        shares_prefixes: Whether vLLM caches prefixes.

    Returns:
        rate: The rate (requests per second), interpolated between two simulated rates.
        runs: Pairs of rate and normalized latency for all simulated rates.
    """
    chosen, model = WORKLOADS[workload], SETUPS[setup]
    runs: dict[float, float] = {}

    def latency(rate: float) -> float:
        trace = draw_trace(chosen, rate, duration_s, n=n, beam_width=beam_width)
        if system == FASTER_TRANSFORMER:
            finished = serve_static(model, trace)
        else:
            policy = Policy(shares_prefixes=shares_prefixes)
            finished = serve(system, model, trace, policy).result.requests["finished_time"]
        runs[rate] = normalized_latency(trace, finished)
        return runs[rate]

    low = high = _likely_rate(system, model, chosen, beam_width or n)
    if latency(low) < LATENCY_LIMIT_S:
        while latency(high := high * 1.3) < LATENCY_LIMIT_S:
            low = high
            assert len(runs) < 20, "the trace is too short for a queue"
    else:
        while latency(low := low / 1.3) > LATENCY_LIMIT_S:
            high = low
    middle = (low * high) ** 0.5
    low, high = (middle, high) if latency(middle) < LATENCY_LIMIT_S else (low, middle)
    pairs = [[round(rate, 4), round(seconds, 4)] for rate, seconds in sorted(runs.items())]
    return {"rate": rate_between((low, runs[low]), (high, runs[high])), "runs": pairs}


def rate_between(below: tuple[float, float], above: tuple[float, float]) -> float:
    """Interpolates the rate at LATENCY_LIMIT_S between two pairs (rate, normalized latency)."""
    share = np.log(LATENCY_LIMIT_S / below[1]) / np.log(above[1] / below[1])
    return round(below[0] * (above[0] / below[0]) ** float(share), 4)


def sharing(workload: str, count: int, n: int = 1, beam_width: int | None = None) -> float:
    """Returns the percentage of blocks that sharing saves in vLLM, at half the rate that fills the memory."""
    chosen = WORKLOADS[workload]
    rate = _likely_rate("vLLM", OPT_13B, chosen, beam_width or n) / 2
    trace = draw_trace(chosen, rate, count / rate, n=n, beam_width=beam_width)
    result = serve("vLLM", OPT_13B, trace).result
    return round(result.window(0.2 * count / rate, count / rate).share_of_blocks_saved * 100, 2)


def block_size_latency(
    workload: str, block_size: int, rate: float, count: int, preemption_mode: str | None = None
) -> dict[str, float]:
    """Returns the normalized latency (ms) and the number of preemptions of vLLM with a block size."""
    trace = draw_trace(WORKLOADS[workload], rate, count / rate)
    policy = Policy(block_size=block_size, preemption_mode=preemption_mode)
    requests = serve("vLLM", OPT_13B, trace, policy).result.requests
    latency_ms = normalized_latency(trace, requests["finished_time"]) * 1e3
    return {"latency_ms": round(latency_ms, 2), "num_preemptions": int(requests["num_preemptions"].sum())}


def recovery_ms(block_size: int, num_tokens: int) -> dict[str, float]:
    """Returns the times to recompute a sequence, and to swap its blocks out and in (ms)."""
    step_time = OPT_13B.step_time(block_size)
    host_s = OPT_13B.host_s
    recompute_s = step_time.step_s(num_tokens, 0, 0, 0, 0) - host_s
    swap_s = 2 * -(-num_tokens // block_size) * step_time.swap_s
    return {"recompute": round(recompute_s * 1e3, 2), "swap": round(swap_s * 1e3, 2)}


def _likely_rate(system: str, setup: Setup, workload: Workload, num_seqs: int) -> float:
    """Returns an estimate of the request rate that fills the memory, as the start of a search."""
    prompts, outputs = draw_lengths(workload, 500)
    prompts = prompts + workload.prefix_len
    mean_context = np.average(prompts + outputs / 2, weights=outputs)
    if system == FASTER_TRANSFORMER or ORCAS.get(system) == "max":
        num_slots = MAX_MODEL_LEN
    elif system in ORCAS:
        num_slots = np.average(2.0 ** np.ceil(np.log2(prompts + outputs)), weights=outputs)
    else:
        num_slots = mean_context
    capacity = min(setup.num_slots / num_slots, MAX_NUM_SEQS)
    step_s = setup.step_time().step_s(0, round(capacity), round(capacity * mean_context), 0, 0)
    return round(float(capacity / num_seqs / step_s / outputs.mean()) * 0.8, 4)


KINDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        batch,
        highest_rate,
        sharing,
        block_size_latency,
        recovery_ms,
        measured.kernel_overhead,
        measured.engine_batches,
        measured.engine_sharing,
        measured.engine_prefix,
        measured.engine_recovery,
        scale.replicas,
    )
}
# These functions measure elapsed time, so nothing else may run at the same time.
ALONE = {"kernel_overhead", "engine_batches", "engine_prefix", "engine_recovery"}


@dataclasses.dataclass(frozen=True)
class Point:
    """A function call whose result is stored.

    Args:
        kind: Name of the function, a key of KINDS.
        key: Name and arguments as text, the key in the store.
    """

    kind: str
    key: str

    @classmethod
    def of(cls, kind: str, **arguments: Any) -> "Point":
        """Returns the point for a function and its arguments."""
        assert kind in KINDS, kind
        return cls(kind, f"{kind} {json.dumps(arguments, sort_keys=True)}")

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the function."""
        return json.loads(self.key.removeprefix(self.kind))


def compute(point: Point) -> Any:
    """Computes the value of a point."""
    return KINDS[point.kind](**point.arguments)

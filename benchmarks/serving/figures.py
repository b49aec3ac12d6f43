"""What a run of a scenario comes to: rates, latencies, use of the machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from serving.runner import Answer
from serving.workloads import Request

# What takes more than this many cores beside the engine disturbs it; then a measurement is repeated.
QUIET_CORES = 0.15


@dataclass(frozen=True)
class Figures:
    """One engine's run of one scenario.

    Args:
        output_tokens_per_s: Output tokens over the time from the first arrival to the last token.
        all_tokens_per_s: The same of prompt and output tokens.
        first_token_p50_s: Time from arrival to first token, the median of the requests.
        first_token_p99_s: The same, 99th percentile.
        per_token_p50_ms: A request's time per output token after the first, the median of the requests.
        per_token_p99_ms: The same, 99th percentile.
        gap_p99_ms: Time between two tokens of a request, 99th percentile of all.
        cores: Processor time over time, of the engine's processes.
        other_cores: The same, of everything else on the machine.
        peak_mib: The most resident memory, in MiB.
    """

    output_tokens_per_s: float
    all_tokens_per_s: float
    first_token_p50_s: float
    first_token_p99_s: float
    per_token_p50_ms: float
    per_token_p99_ms: float
    gap_p99_ms: float
    cores: float
    other_cores: float
    peak_mib: float

    def __str__(self) -> str:
        return (
            f"{self.output_tokens_per_s:.0f} output tokens/s, first token {self.first_token_p50_s:.2f} s, "
            f"then {self.per_token_p50_ms:.1f} ms; {self.cores:.2f} cores, others {self.other_cores:.2f}"
        )


def figures_of(
    requests: Sequence[Request],
    answers: Sequence[Answer],
    *,
    cores: float,
    other_cores: float,
    peak_mib: float,
) -> Figures:
    """Works out the figures of a run; the keywords are as Figures has them.

    Raises:
        ValueError: If a request did not get its tokens.
    """
    for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if answer.num_tokens != request.max_tokens:
            raise ValueError(f"request {i} got {answer.num_tokens} tokens of {request.max_tokens}")
    wall_s = max(answer.times[-1] for answer in answers)
    num_output = sum(answer.num_tokens for answer in answers)
    num_prompt = sum(len(request.prompt) for request in requests)
    first = [a.times[0] - r.arrival_s for r, a in zip(requests, answers, strict=True)]
    per_token = [(a.times[-1] - a.times[0]) / (a.num_tokens - 1) for a in answers]
    gaps = [later - earlier for a in answers for earlier, later in zip(a.times, a.times[1:], strict=False)]
    return Figures(
        output_tokens_per_s=num_output / wall_s,
        all_tokens_per_s=(num_output + num_prompt) / wall_s,
        first_token_p50_s=statistics.median(first),
        first_token_p99_s=_p99(first),
        per_token_p50_ms=statistics.median(per_token) * 1e3,
        per_token_p99_ms=_p99(per_token) * 1e3,
        gap_p99_ms=_p99(gaps) * 1e3,
        cores=cores,
        other_cores=other_cores,
        peak_mib=peak_mib,
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)]

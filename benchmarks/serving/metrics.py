"""Metrics of a run: rates, latencies, processor time and memory."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from serving.runner import Answer
from serving.workloads import Request

# A measurement is repeated if other processes used more cores than this.
QUIET_CORES = 0.15


@dataclass(frozen=True)
class Metrics:
    """Metrics of one engine in one round of a scenario.

    Args:
        output_tokens_per_s: Output tokens divided by the time from the start to the last token.
        all_tokens_per_s: Prompt and output tokens divided by the same time.
        first_token_p50_s: Time from arrival to first token (seconds), median of the requests.
        first_token_p99_s: Time from arrival to first token (seconds), 99th percentile.
        per_token_p50_ms: Mean time per output token after the first (milliseconds), median of the requests.
        per_token_p99_ms: Mean time per output token after the first (milliseconds), 99th percentile.
        gap_p99_ms: Time between two tokens of a request (milliseconds), 99th percentile of all gaps.
        cores: Processor time of the engine's processes divided by the elapsed time.
        other_cores: Processor time of all other processes divided by the elapsed time.
        peak_mib: Peak resident memory (MiB).
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


def metrics_of(
    requests: Sequence[Request],
    answers: Sequence[Answer],
    *,
    cores: float,
    other_cores: float,
    peak_mib: float,
) -> Metrics:
    """Returns the metrics of a run.

    Args:
        requests: The requests.
        answers: Their answers.
        cores: See Metrics.
        other_cores: See Metrics.
        peak_mib: See Metrics.

    Raises:
        ValueError: If a request does not have the expected number of tokens.
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
    return Metrics(
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

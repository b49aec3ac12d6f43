"""Results of a comparison as Markdown tables and as JSON."""

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from serving.compare import Comparison, Run
from serving.metrics import QUIET_CORES, Metrics
from serving.process import Startup
from serving.workloads import SCENARIOS

_COLUMNS = (
    "scenario",
    "engine",
    "output tokens/s",
    "speed of {first} relative to this",
    "all tokens/s",
    "first token s (p99)",
    "per token ms (p99)",
    "gap p99 ms",
    "cores",
    "peak MiB",
    "equal outputs",
)


def processor() -> str:
    """Returns the number of cores, the name of the processor and its most important vector instructions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    units = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    family = f"family {fields.get('cpu family', '?')} model {fields.get('model', '?')}"
    return f"{os.cpu_count()} cores of {fields.get('model name', '?')}, {family} ({', '.join(units)})"


def ratios(run: Run, first: Run) -> list[float]:
    """Returns for each round the speed of the first engine divided by the speed of this one.

    The speed is the output tokens per second or, in a paced scenario, the inverse of the time per token.
    """
    pairs = list(zip(run.rounds, first.rounds, strict=False))  # an engine that ended early has fewer rounds
    if SCENARIOS[run.scenario].is_paced:
        return [theirs.per_token_p50_ms / ours.per_token_p50_ms for theirs, ours in pairs]
    return [ours.output_tokens_per_s / theirs.output_tokens_per_s for theirs, ours in pairs]


def spread(values: Sequence[float], form: str = ".0f") -> str:
    """Returns the median as text; if there are several values, with the minimum and maximum in brackets."""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}}-{max(values):{form}})"


def firsts(runs: Sequence[Run]) -> dict[tuple[str, str], Run]:
    """Returns the run of the first engine for each dtype and scenario."""
    found: dict[tuple[str, str], Run] = {}
    for run in runs:
        found.setdefault((run.dtype, run.scenario), run)
    return found


def markdown(runs: Sequence[Run]) -> str:
    """Returns one table per dtype, with medians of the rounds and in some columns their range in brackets."""
    first_of = firsts(runs)
    text = ""
    for dtype in dict.fromkeys(run.dtype for run in runs):
        text += (
            f"### {dtype}\n\n"
            + _table_row(_COLUMNS).format(first=runs[0].engine)
            + "|---" * len(_COLUMNS)
            + "|\n"
        )
        for run in runs:
            if run.dtype == dtype and run.rounds:
                text += _row(run, first_of[dtype, run.scenario])
        text += "\n"
    return text


def pairs(runs: Sequence[Run]) -> str:
    """Returns a table with the speed of each engine of a source tree divided by the speed of each peer.

    It is empty if there are no peers, or only one engine of a tree, whose ratios `markdown` shows.
    """
    ours = list(dict.fromkeys(run.engine for run in runs if run.commit))
    peers = list(dict.fromkeys(run.engine for run in runs if not run.commit))
    if len(ours) < 2 or not peers:
        return ""
    found = {(run.dtype, run.scenario, run.engine): run for run in runs if run.rounds}
    names = ("dtype", "scenario", "engine", *(f"speed relative to {peer}" for peer in peers))
    text = "### Pairs\n\n" + _table_row(names) + "|---" * len(names) + "|\n"
    for (dtype, scenario, engine), run in found.items():
        if engine not in ours:
            continue
        cells = [dtype, SCENARIOS[scenario].title, engine]
        for peer in peers:
            of_peer = found.get((dtype, scenario, peer))
            speeds = ratios(of_peer, run) if of_peer else []
            cells.append(spread(speeds, ".2f") if speeds else "")
        text += _table_row(cells)
    return text + "\n"


def starts(startups: Mapping[str, Mapping[str, Startup]]) -> str:
    """Returns a table of the engines' starts."""
    names = ("dtype", "engine", "first answer s", "full speed s", "peak MiB", "resident MiB")
    text = "### Start\n\n" + _table_row(names) + "|---" * len(names) + "|\n"
    for dtype, of_dtype in startups.items():
        for label, startup in of_dtype.items():
            cells = [f"{startup.answer_s:.1f}", f"{startup.ready_s:.1f}"]
            cells += [f"{startup.peak_mib:.0f}", f"{startup.resident_mib:.0f}"]
            text += _table_row([dtype, label, *cells])
    return text + "\n"


def _row(run: Run, first: Run) -> str:
    def median(of: Callable[[Metrics], float]) -> float:
        return statistics.median(of(metrics) for metrics in run.rounds)

    others = median(lambda f: f.other_cores)
    disturbed = f" (others {others:.2f})" if others > QUIET_CORES else ""
    speeds = [] if run is first else ratios(run, first)
    cells = [
        SCENARIOS[run.scenario].title if run is first else "",
        run.engine,
        spread([f.output_tokens_per_s for f in run.rounds]),
        spread(speeds, ".2f") if speeds else "",
        f"{median(lambda f: f.all_tokens_per_s):.0f}",
        f"{median(lambda f: f.first_token_p50_s):.3f} ({median(lambda f: f.first_token_p99_s):.3f})",
        f"{median(lambda f: f.per_token_p50_ms):.1f} ({median(lambda f: f.per_token_p99_ms):.1f})",
        f"{median(lambda f: f.gap_p99_ms):.0f}",
        f"{median(lambda f: f.cores):.2f}{disturbed}",
        f"{median(lambda f: f.peak_mib):.0f}",
        "" if run.num_equal is None else f"{run.num_equal} of {run.num_requests}",
    ]
    return _table_row(cells)


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def tables(comparison: Comparison) -> str:
    """Returns all tables."""
    return markdown(comparison.runs) + pairs(comparison.runs) + starts(comparison.startups)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns all results so far, with the date and the processor."""
    return {
        "date": date.today().isoformat(),
        "processor": processor(),
        "versions": comparison.versions,
        "startups": {
            dtype: {label: asdict(startup) for label, startup in startups.items()}
            for dtype, startups in comparison.startups.items()
        },
        "failures": comparison.failures,
        "runs": [asdict(run) for run in comparison.runs],
    }


def write(comparison: Comparison, stem: Path) -> None:
    """Writes the results to STEM.json and the tables to STEM.md."""
    found = as_json(comparison)
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    versions = ", ".join(f"{label} {version}" for label, version in comparison.versions.items())
    commits = dict.fromkeys(f"{run.engine} at {run.commit}" for run in comparison.runs if run.commit)
    head = f"{found['processor']}; {found['date']}; {versions}; {', '.join(commits)}.\n\n"
    stem.with_suffix(".md").write_text(head + tables(comparison))

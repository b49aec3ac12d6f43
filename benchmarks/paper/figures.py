"""The figures: the points that each figure needs, and the conversion of points to rows and curves.

from paper import figures
from paper.store import Store
figures.rows(13, Store())  # from stored points
figures.complete(13, Store(folder))  # computes missing points
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from paper import published, runner
from paper.points import FASTER_TRANSFORMER, Point
from paper.scale import BIN
from paper.store import Store
from paper.systems import ORCAS, SYSTEMS

BLOCK_SIZES = (1, 4, 16, 64, 256)
# Sigmas of prompts and outputs in the project's first simulation of the paper, for comparison.
EARLIER_SIGMAS = {"ShareGPT": [1.2, 0.9], "Alpaca": [0.5, 0.9]}
EXPONENTIAL_SIGMAS = [0.833, 0.833]


@dataclasses.dataclass(frozen=True)
class Row:
    """A value of this project and the paper's value for it.

    Args:
        panel: Title of the panel that contains the bar.
        label: Label of the bar.
        ours: The value of this project.
        paper: The paper's value or range; None if the paper has none.
        band: Range of `ours` under other assumptions (see Figure.band); None if it was not computed.
        is_fitted: Whether HOST_S was fitted to this value.
    """

    panel: str
    label: str
    ours: float
    paper: float | tuple[float, float] | None
    band: tuple[float, float] | None = None
    is_fitted: bool = False

    @property
    def error(self) -> float | None:
        """The relative difference from the paper's value.

        0 if the paper's value is a range that contains `ours`; None if there is no such value, or it is 0.
        """
        if self.paper is None or self.paper == 0:
            return None
        low, high = self.paper if isinstance(self.paper, tuple) else (self.paper, self.paper)
        return min(self.ours / low - 1, 0.0) or max(self.ours / high - 1, 0.0)


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line with the points (x, y) in a panel."""

    panel: str
    label: str
    x: list[float]
    y: list[float]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure and the points that it is made from.

    Args:
        name: Its number in the paper, or a word for figures that the paper does not have.
        title: Title of the picture.
        unit: Unit of the rows' values.
        points: The required points.
        rows: Returns the rows for the values of the points.
        notes: Notes below the table, such as the definition of the paper's values.
        curves: Returns the lines. If it is set, the picture shows lines instead of the rows.
        axes: Labels of the x axis and the y axis of the lines.
        digits: Number of decimals.
        band: Description of the rows' band, for the legend.
    """

    name: str
    title: str
    unit: str
    points: list[Point]
    rows: Callable[[Any], list[Row]]
    notes: str
    curves: Callable[[Any], list[Curve]] | None = None
    axes: tuple[str, str] = ("", "")
    digits: int = 1
    band: str = "spreads of the lengths 0.2 lower and higher"


def _batch_point(system: str, workload: str, **settings: Any) -> Point:
    duration_s = {"ShareGPT": 3600, "Alpaca": 600}[workload]  # the paper's traces last an hour
    if settings:  # variants are simulated for a shorter time
        duration_s //= 3
    rate = published.BATCH_RATES[workload]
    return Point.of("batch", system=system, workload=workload, rate=rate, duration_s=duration_s, **settings)


def _band(values: Any, system: str, workload: str, read: Callable[[Any], float]) -> tuple[float, float]:
    ends = [read(values[_batch_point(system, workload, sigma_shift=shift)]) for shift in (-0.2, 0.2)]
    ours = read(values[_batch_point(system, workload)])
    return min([*ends, ours]), max([*ends, ours])


def _memory_rows(values: Any) -> list[Row]:
    rows = []
    for system, bars in published.MEMORY.items():
        for i, (label, paper) in enumerate(bars.items()):
            ours = values[_batch_point(system, "ShareGPT")]["memory"][i]
            band = _band(values, system, "ShareGPT", lambda value, i=i: value["memory"][i])
            rows.append(Row(system, label, ours, paper, band))
    return rows


def _batch_rows(values: Any) -> list[Row]:
    rows = []
    for workload, bars in published.BATCHES.items():
        for system, paper in bars.items():
            ours = values[_batch_point(system, workload)]["batched"]
            band = _band(values, system, workload, lambda value: value["batched"])
            is_fitted = (system, workload) == ("vLLM", "Alpaca")
            rows.append(
                Row(
                    f"{workload}, {published.BATCH_RATES[workload]:.0f}/s",
                    system,
                    ours,
                    paper,
                    band,
                    is_fitted,
                )
            )
    return rows


_BAND_POINTS = [
    _batch_point(system, workload, **settings)
    for workload in published.BATCHES
    for system in SYSTEMS
    for settings in ({}, {"sigma_shift": -0.2}, {"sigma_shift": 0.2})
]
# Points of figure 13 under alternative assumptions, for a table in docs/paper.md.
OTHER_POINTS = {
    "prompts in the steps of decodes, host time 19 ms": [
        _batch_point(system, workload, mixes=True, host_s=0.019)
        for workload in published.BATCHES
        for system in SYSTEMS[1:]
    ],
    "spreads of ShareGPT 1.2 (prompts), 0.9 (outputs); Alpaca 0.5, 0.9": [
        _batch_point(system, workload, sigmas=EARLIER_SIGMAS[workload])
        for workload in published.BATCHES
        for system in SYSTEMS[1:]
    ],
    "spreads of 0.833 also for Alpaca's prompts": [
        _batch_point(system, workload, sigmas=EXPONENTIAL_SIGMAS)
        for workload in published.BATCHES
        for system in SYSTEMS[1:]
    ],
}


def _rate_point(system: str, setup: str, workload: str, **settings: Any) -> Point:
    duration_s = 600 if workload in ("ShareGPT", "Chat") else 150
    if setup == "OPT-175B":
        duration_s //= 3  # the paper shortens it too
    if settings.get("n") or settings.get("beam_width"):
        duration_s = 60 if "n" in settings else 30
    return Point.of(
        "highest_rate", system=system, setup=setup, workload=workload, duration_s=duration_s, **settings
    )


_MODELS = ("OPT-13B", "OPT-66B", "OPT-175B")
_CURVE_SYSTEMS = (FASTER_TRANSFORMER, *SYSTEMS)


def _rate_rows(values: Any) -> list[Row]:
    rows = []
    for workload in ("ShareGPT", "Alpaca"):
        for setup in _MODELS:
            ours = values[_rate_point("vLLM", setup, workload)]["rate"]
            for system in (*reversed(ORCAS), FASTER_TRANSFORMER):
                ratio = ours / values[_rate_point(system, setup, workload)]["rate"]
                paper = published.RATES.get(system) if workload == "ShareGPT" else None
                rows.append(Row(f"{setup}, {workload}", f"vLLM over {system}", ratio, paper))
    return rows


def _rate_curves(values: Any) -> list[Curve]:
    curves = []
    for workload in ("ShareGPT", "Alpaca"):
        for setup in _MODELS:
            for system in _CURVE_SYSTEMS:
                runs = values[_rate_point(system, setup, workload)]["runs"]
                curves.append(Curve(f"{setup}, {workload}", system, *map(list, zip(*runs, strict=True))))
    return curves


_OUTPUT_COUNTS: dict[str, dict[str, int]] = {"1 sample": {}} | {
    f"{k} {what}": {name: k} for what, name in (("samples", "n"), ("beams", "beam_width")) for k in (2, 4, 6)
}


def _several_rows(values: Any) -> list[Row]:
    rows = []
    for label, settings in _OUTPUT_COUNTS.items():
        ours, orca = (
            values[_rate_point(system, "OPT-13B", "Alpaca", **settings)]["rate"]
            for system in ("vLLM", "Orca (Oracle)")
        )
        panel = "beam search" if "beams" in label else "samples"
        rows.append(Row(panel, label, ours / orca, published.SEVERAL_OUTPUTS.get(label)))
    return rows


def _sharing_point(workload: str, **settings: int) -> Point:
    counts = {("Alpaca", "n"): 4000, ("Alpaca", "beam_width"): 150, ("ShareGPT", "n"): 150}
    count = counts.get((workload, *settings), 40)
    return Point.of("sharing", workload=workload, count=count, **settings)


def _sharing_rows(values: Any) -> list[Row]:
    rows = []
    for workload, paper in published.SHARING.items():
        for label, settings in list(_OUTPUT_COUNTS.items())[1:]:
            kind = label.split()[1]
            ours = values[_sharing_point(workload, **settings)]
            rows.append(Row(f"{workload}, {kind}", label, ours, paper.get(label, paper.get(kind))))
    return rows


def _prefix_point(system: str, prefix_len: int, kind: str = "Translation") -> Point:
    return _rate_point(system, "OPT-13B", f"{kind}, {prefix_len}", shares_prefixes=system == "vLLM")


def _prefix_rows(values: Any) -> list[Row]:
    rows = []
    for n, paper in published.SHARED_PREFIX.items():
        ours, longer = (
            values[_prefix_point("vLLM", n, kind)]["rate"]
            / values[_prefix_point("Orca (Oracle)", n, kind)]["rate"]
            for kind in ("Translation", "Long translation")
        )
        band = (min(ours, longer), max(ours, longer))
        rows.append(Row("over Orca (Oracle)", f"prefix of {n} tokens", ours, paper, band))
    return rows


def _chat_rows(values: Any) -> list[Row]:
    ours = values[_rate_point("vLLM", "OPT-13B", "Chat")]["rate"]
    return [
        Row(
            "chat",
            f"vLLM over {system}",
            ours / values[_rate_point(system, "OPT-13B", "Chat")]["rate"],
            paper,
        )
        for system, paper in published.CHAT.items()
    ]


def _kernel_point(batch: int, context: int) -> Point:
    return Point.of("kernel_overhead", batch=batch, context=context, rounds=30)


def _kernel_rows(values: Any) -> list[Row]:
    return [
        Row(f"batch {batch}", f"context {n}", values[_kernel_point(batch, n)], published.KERNEL_OVERHEAD)
        for batch in (8, 32)
        for n in (64, 128, 256)
    ]


def _size_point(workload: str, block_size: int) -> Point:
    rate, count = {"ShareGPT": (1.8, 300), "Alpaca": (30.0, 1500)}[workload]
    return Point.of("block_size_latency", workload=workload, block_size=block_size, rate=rate, count=count)


def _size_rows(values: Any) -> list[Row]:
    return [
        Row(workload, f"blocks of {size}", values[_size_point(workload, size)]["latency_ms"], None)
        for workload in ("ShareGPT", "Alpaca")
        for size in BLOCK_SIZES
    ]


def _size_curves(values: Any) -> list[Curve]:
    return [
        Curve(
            "normalized latency",
            workload,
            list(map(float, BLOCK_SIZES)),
            [values[_size_point(workload, size)]["latency_ms"] for size in BLOCK_SIZES],
        )
        for workload in ("ShareGPT", "Alpaca")
    ]


def _recovery_point(block_size: int) -> Point:
    return Point.of("recovery_ms", block_size=block_size, num_tokens=256)


def _recovery_rows(values: Any) -> list[Row]:
    return [
        Row(
            how, f"blocks of {size}", values[_recovery_point(size)][how], published.RECOVERY_MS[how].get(size)
        )
        for how in ("recompute", "swap")
        for size in BLOCK_SIZES
    ]


def _recovery_curves(values: Any) -> list[Curve]:
    return [
        Curve(
            "a sequence of 256 tokens",
            how,
            list(map(float, BLOCK_SIZES)),
            [values[_recovery_point(size)][how] for size in BLOCK_SIZES],
        )
        for how in ("recompute", "swap")
    ]


def _mode_point(block_size: int, mode: str) -> Point:
    return Point.of(
        "block_size_latency",
        workload="ShareGPT",
        block_size=block_size,
        rate=2.6,
        count=300,
        preemption_mode=mode,
    )


def _mode_rows(values: Any) -> list[Row]:
    return [
        Row(mode, f"blocks of {size}", values[_mode_point(size, mode)]["latency_ms"], None)
        for mode in ("recompute", "swap")
        for size in BLOCK_SIZES
    ]


def _mode_curves(values: Any) -> list[Curve]:
    return [
        Curve(
            "normalized latency",
            mode,
            list(map(float, BLOCK_SIZES)),
            [values[_mode_point(size, mode)]["latency_ms"] for size in BLOCK_SIZES],
        )
        for mode in ("recompute", "swap")
    ]


_ENGINE = {
    "batches": Point.of("engine_batches", count=150, rounds=3),
    "sharing": Point.of("engine_sharing", count=32),
    "prefix": Point.of("engine_prefix", count=120, rounds=5),
    **{f"recovery {n}": Point.of("engine_recovery", block_size=n, count=100, rounds=3) for n in (4, 16, 64)},
}


def _engine_rows(values: Any) -> list[Row]:
    found = {name: values[point] for name, point in _ENGINE.items()}
    rows = [
        Row("13: requests at a time", system, found["batches"][system]["batched"], paper)
        for system, paper in published.BATCHES["ShareGPT"].items()
    ]
    base = found["batches"]["Orca (Oracle)"]["tokens_per_s"]
    rows += [
        Row("tokens/s, Orca (Oracle) = 1", system, found["batches"][system]["tokens_per_s"] / base, None)
        for system in SYSTEMS
    ]
    rows += [
        Row("15: blocks saved, %", label, ours, published.SHARING["Alpaca"][label])
        for label, ours in sorted(found["sharing"].items(), key=lambda item: item[0].split()[::-1])
    ]
    rows += [
        Row("16: over Orca (Oracle)", f"prefix of {n}", found["prefix"][str(n)], paper)
        for n, paper in published.SHARED_PREFIX.items()
    ]
    rows += [
        Row(
            "19b: time of recompute / time of swap",
            f"blocks of {n}",
            found[f"recovery {n}"]["recompute"] / found[f"recovery {n}"]["swap"],
            None,
        )
        for n in (4, 16, 64)
    ]
    return rows


NUM_REPLICAS = 40
_MILLION_REQUESTS = [
    Point.of("replicas", num_replicas=NUM_REPLICAS, first=i, last=i + 2, per_replica=25_000)
    for i in range(0, NUM_REPLICAS, 2)
]
# One replica each, for several numbers of replicas that share the rate.
_SHORT_RUNS = {
    n: Point.of("replicas", num_replicas=n, first=0, last=1, per_replica=4000) for n in (4, 8, 16, 160)
}


def _scale_rows(values: Any) -> list[Row]:
    total = million(values)
    rows = [Row("microseconds per row", f"{NUM_REPLICAS} replicas", total["us_per_row"], None)]
    for n, point in _SHORT_RUNS.items():
        value = values[point]
        rows.append(
            Row(
                "microseconds per row", f"{n} replicas", value["scheduling_s"] / value["num_rows"] * 1e6, None
            )
        )
    rows.sort(key=lambda row: int(row.label.split()[0]))
    return rows


def million(values: Any) -> dict[str, float]:
    """Returns the totals of the simulation of a million requests."""
    found = [values[point] for point in _MILLION_REQUESTS]
    sums = {name: sum(value[name] for value in found) for name in ("num_requests", "num_steps", "num_rows")}
    seconds = sum(value["scheduling_s"] for value in found)
    return sums | {
        "scheduling_s": seconds,
        "all_s": sum(value["all_s"] for value in found),
        "us_per_row": seconds / sums["num_rows"] * 1e6,
        "us_per_request": seconds / sums["num_requests"] * 1e6,
        "most_waiting": max(value["most_waiting"] for value in found),
    }


def longest_queue(values: Any) -> int:
    """Returns the maximum number of waiting requests at a replica in the run with the fewest replicas."""
    return values[_SHORT_RUNS[min(_SHORT_RUNS)]]["most_waiting"]


def _scale_curves(values: Any) -> list[Curve]:
    groups = {f"{NUM_REPLICAS} replicas": [values[point] for point in _MILLION_REQUESTS]}
    groups |= {f"{n} replicas": [values[point]] for n, point in _SHORT_RUNS.items()}
    curves = []
    for label, found in groups.items():
        steps: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for value in found:
            for rows, n, s in value["bins"]:
                steps[rows] = steps.get(rows, 0) + n
                seconds[rows] = seconds.get(rows, 0.0) + s
        bins = [rows for rows in sorted(steps) if steps[rows] >= 50]  # a mean of fewer steps is too noisy
        curves.append(
            Curve(
                "one schedule() and update()",
                label,
                [rows + BIN / 2 for rows in bins],
                [seconds[rows] / steps[rows] * 1e3 for rows in bins],
            )
        )
    return curves


FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(
            "2",
            "Use of the KV cache memory (OPT-13B, ShareGPT, 2 requests/s)",
            "% of the memory",
            [point for point in _BAND_POINTS if '"ShareGPT"' in point.key],
            _memory_rows,
            "For vLLM: percent of the slots in used blocks. Orca's `other` includes slots added by rounding.",
        ),
        Figure(
            "12",
            "Normalized latency by request rate",
            "ratio",
            [_rate_point(s, m, w) for m in _MODELS for w in ("ShareGPT", "Alpaca") for s in _CURVE_SYSTEMS],
            _rate_rows,
            "Ratio of the request rates at 0.25 s per token; the paper gives one range for all models.",
            _rate_curves,
            ("requests per second", "seconds per output token"),
            2,
        ),
        Figure(
            "13",
            "Average number of running requests (OPT-13B)",
            "requests",
            [*_BAND_POINTS, *(point for points in OTHER_POINTS.values() for point in points)],
            _batch_rows,
            "",
            digits=2,
        ),
        Figure(
            "14",
            "Request rate of vLLM over Orca (Oracle), several outputs (OPT-13B, Alpaca)",
            "ratio",
            [
                _rate_point(system, "OPT-13B", "Alpaca", **settings)
                for settings in _OUTPUT_COUNTS.values()
                for system in ("vLLM", "Orca (Oracle)")
            ],
            _several_rows,
            "With Orca, every output has its own region, and a forked beam copies all its tokens.",
            digits=2,
        ),
        Figure(
            "15",
            "Blocks saved by sharing (OPT-13B)",
            "% of the blocks",
            [
                _sharing_point(workload, **settings)
                for workload in published.SHARING
                for settings in list(_OUTPUT_COUNTS.values())[1:]
            ],
            _sharing_rows,
            "",
        ),
        Figure(
            "16",
            "Throughput of vLLM over Orca (Oracle) with a shared prefix (translation)",
            "ratio",
            [
                _prefix_point(system, n, kind)
                for n in published.SHARED_PREFIX
                for system in ("vLLM", "Orca (Oracle)")
                for kind in ("Translation", "Long translation")
            ],
            _prefix_rows,
            "",
            digits=2,
            band="sentences of 32 to 64 tokens",
        ),
        Figure(
            "17",
            "Chat: request rate of vLLM over Orca (OPT-13B)",
            "ratio",
            [_rate_point(system, "OPT-13B", "Chat") for system in SYSTEMS],
            _chat_rows,
            "",
            digits=2,
        ),
        Figure(
            "18a",
            "Attention through block tables compared with contiguous memory (measured, CPU)",
            "% slower",
            [_kernel_point(batch, n) for batch in (8, 32) for n in (64, 128, 256)],
            _kernel_rows,
            "One CPU kernel, with blocks of 16 or a block per sequence; the paper compares two GPU kernels.",
        ),
        Figure(
            "18b",
            "Normalized latency by block size (OPT-13B)",
            "ms per token",
            [_size_point(workload, size) for workload in ("ShareGPT", "Alpaca") for size in BLOCK_SIZES],
            _size_rows,
            "In the paper, latency is lowest for blocks of 16 to 128 (ShareGPT), and of 16 and 32 (Alpaca).",
            _size_curves,
            ("tokens per block", "ms per output token"),
        ),
        Figure(
            "19a",
            "Recomputing a preempted sequence, or swapping it out and in (OPT-13B)",
            "ms",
            [_recovery_point(size) for size in BLOCK_SIZES],
            _recovery_rows,
            "",
            _recovery_curves,
            ("tokens per block", "ms"),
        ),
        Figure(
            "19b",
            "Normalized latency with both methods (OPT-13B, ShareGPT, 2.6 requests/s)",
            "ms per token",
            [_mode_point(size, mode) for mode in ("recompute", "swap") for size in BLOCK_SIZES],
            _mode_rows,
            "In the paper, recomputing is better for blocks of 1 to 8, and swapping from 64.",
            _mode_curves,
            ("tokens per block", "ms per output token"),
        ),
        Figure(
            "measured",
            "The engine with the built-in model, at a quarter of OPT-13B's lengths (measured)",
            "",
            list(_ENGINE.values()),
            _engine_rows,
            "",
            digits=2,
        ),
        Figure(
            "scale",
            "Scheduling time of a million requests at 1,000 per second (OPT-13B, Alpaca)",
            "us per row",
            [*_MILLION_REQUESTS, *_SHORT_RUNS.values()],
            _scale_rows,
            "",
            _scale_curves,
            ("sequences in the step", "ms"),
            2,
        ),
    )
}


def names_of(number: str) -> list[str]:
    """Returns the names of the figures with a number: 18a and 18b for 18."""
    return [name for name in FIGURES if name in (number, f"{number}a", f"{number}b")]


def rows(name: str | int, store: Store) -> list[Row]:
    """Returns the rows of a figure from stored points."""
    return FIGURES[str(name)].rows(store)


def complete(name: str | int, store: Store, num_processes: int = 2) -> None:
    """Computes the missing points of a figure."""
    runner.complete(FIGURES[str(name)].points, store, num_processes)

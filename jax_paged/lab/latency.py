"""How long requests waited: distributions of latencies, of one run or of several; notebooks draw them."""

import dataclasses
import html
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from jax_paged.lab.axes import COLORS, Scale, axes, chart, legend, line, seconds

_WIDTH, _TOP, _BOTTOM, _PANEL, _LEFT, _GAP = 880, 34, 234, 236, 66, 46
_MAX_POINTS = 300
# Where half and nearly all of the requests are, and the marks that stand there.
_MARKS = (
    (0.5, "median", "M{x:.1f} {y:.1f}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"),
    (0.99, "99th percentile", "M{x:.1f} {y:.1f}m0 -5l5 5l-5 5l-5 -5z"),
)
QUEUE, FIRST, PER_TOKEN = "in the queue", "to the first token", "per token after the first"


class Served(Protocol):
    """Requests that were served, such as a Replay or a SimulationResult."""

    @property
    def num_output_tokens(self) -> np.ndarray:
        """Tokens of the longest output of each request."""
        ...

    def times_s(self, event: str) -> np.ndarray:
        """Returns the seconds from each arrival to an event of RequestMetrics; NaN for never."""
        ...


@dataclasses.dataclass(frozen=True)
class Latencies:
    """The latencies of runs.

    Args:
        seconds: By the name of the run, and by QUEUE (from the arrival to the first step), FIRST (from the
            arrival) and PER_TOKEN (the mean of a request's tokens after its first): ascending, of all
            requests that have got so far.
    """

    seconds: dict[str, dict[str, np.ndarray]]

    def percentile(self, run: str, latency: str, percent: float) -> float:
        """Returns the seconds that so many percent of the requests need at most; NaN if there are none."""
        found = self.seconds[run][latency]
        return float(np.percentile(found, percent, method="inverted_cdf")) if len(found) else float("nan")

    def __repr__(self) -> str:
        runs = (
            f"{run}: {len(found[FIRST]):,} requests, median to the first token "
            f"{_told(self.percentile(run, FIRST, 50))}"
            for run, found in self.seconds.items()
        )
        return f"<latencies: {'; '.join(runs) or 'of no run'}>"

    def _repr_html_(self) -> str:
        """Returns a drawing: inline SVG, without scripts and without anything loaded from elsewhere."""
        parts = [self._panel(i, name) for i, name in enumerate((QUEUE, FIRST, PER_TOKEN))]
        marks = [(line("M1 7H23", i), run) for i, run in enumerate(self.seconds)]
        marks += [
            (f'<path d="{path.format(x=12, y=7)}" fill="currentColor"/>', name) for _, name, path in _MARKS
        ]
        below = f"<div>{legend(marks)}</div>{self._table()}"
        return chart(_WIDTH, _BOTTOM + 40, "Latencies", repr(self)[12:-1], parts, below)

    def _panel(self, place: int, latency: str) -> str:
        left = _LEFT + place * (_PANEL + _GAP)
        every = np.concatenate([found[latency] for found in self.seconds.values()] or [np.zeros(0)])
        positive = every[every > 0]
        low, high = (positive.min(), positive.max()) if len(positive) else (1e-3, 1.0)
        x = Scale(low / 1.1, high * 1.1, left, left + _PANEL, is_log=True)
        y = Scale(0, 1, _BOTTOM, _TOP)
        shares = [(share, f"{share:.0%}" if not place else "") for share in (0, 0.25, 0.5, 0.75, 1)]
        parts = [axes(x, y, [(t, seconds(t)) for t in x.ticks(5)], shares, f"seconds {latency}")]
        if not place:
            middle = (_TOP + _BOTTOM) // 2
            label = "share of requests that need at most so long"
            parts.append(
                f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{label}</text>'
            )
        for kind, (run, found) in enumerate(self.seconds.items()):
            if n := len(values := found[latency]):
                parts.append(line(_path(values, x, y), kind))
                for share, name, path in _MARKS:
                    at = self.percentile(run, latency, 100 * share)
                    told = html.escape(f"{run}, {name} {latency}: {_told(at)} ({n:,} requests)")
                    mark = path.format(x=x(at), y=y(share))
                    parts.append(
                        f'<path d="{mark}" fill="{COLORS[kind % len(COLORS)]}" stroke="currentColor">'
                        f"<title>{told}</title></path>"
                    )
        return "".join(parts)

    def _table(self) -> str:
        cell = 'style="padding:1px 8px;text-align:right"'
        names = "".join(f'<th {cell} colspan="2">{name}</th>' for name in (QUEUE, FIRST, PER_TOKEN))
        marks = "".join(f"<th {cell}>{name}</th>" for _, name, _ in _MARKS) * 3
        rows = (
            f"<tr><th {cell}>{html.escape(run)}</th>"
            + "".join(
                f"<td {cell}>{_told(self.percentile(run, latency, 100 * share))}</td>"
                for latency in (QUEUE, FIRST, PER_TOKEN)
                for share, _, _ in _MARKS
            )
            + "</tr>"
            for run in self.seconds
        )
        head = f"<tr><th></th>{names}</tr><tr><th></th>{marks}</tr>"
        return f'<table style="border-collapse:collapse;font-size:12px">{head}{"".join(rows)}</table>'


def latencies(runs: Mapping[str, Served]) -> Latencies:
    """Returns how long the requests of some runs waited.

    Args:
        runs: Results of simulations or replays, by the names that they are to have.
    """
    return Latencies({name: _of_run(run) for name, run in runs.items()})


def _of_run(run: Served) -> dict[str, np.ndarray]:
    first, end, num_tokens = (
        run.times_s("first_token_time"),
        run.times_s("finished_time"),
        run.num_output_tokens,
    )
    several = num_tokens > 1
    per_token = (end - first)[several] / (num_tokens[several] - 1)
    found = {QUEUE: run.times_s("first_scheduled_time"), FIRST: first, PER_TOKEN: per_token}
    return {name: np.sort(values[~np.isnan(values)]) for name, values in found.items()}


def _path(values: np.ndarray, x: Scale, y: Scale) -> str:
    """Returns the share of the values that are at most so large, as a path; values are ascending."""
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
    points = (f"H{x(values[i]):.1f}V{y((i + 1) / len(values)):.1f}" for i in places.tolist())
    return f"M{x.start} {y.start}{''.join(points)}H{x.stop}"


def _told(value: float) -> str:
    return "never" if np.isnan(value) else seconds(value)

"""How long requests waited: distributions of latencies, of one run or of several; notebooks draw them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jax_paged.lab.axes import COLORS, Scale, axes, chart, line, seconds
from jax_paged.lab.simulator import SimulationResult
from jax_paged.lab.what_if import Replay

_WIDTH, _TOP, _BOTTOM, _PANEL, _LEFT, _GAP, _MAX_POINTS = 880, 34, 234, 236, 46, 56, 300
# Where half and nearly all of the requests are, and the marks that stand there.
_ROUND = "M{x:.1f} {y:.1f}m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
_SQUARE = "M{x:.1f} {y:.1f}m0 -5l5 5l-5 5l-5 -5z"
_MARKS = (0.5, "median", _ROUND), (0.99, "99th percentile", _SQUARE)
_NAMES = QUEUE, FIRST, PER_TOKEN = "in the queue", "to the first token", "per token after the first"


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
        words = "; ".join(map(self._words, self.seconds)) or "none"
        return f"<latencies, median and 99th percentile: {words}>"

    def _words(self, run: str) -> str:
        found = ((name, *(self.percentile(run, name, 100 * m[0]) for m in _MARKS)) for name in _NAMES)
        told = (f"{name} {seconds(middle)} and {seconds(most)}" for name, middle, most in found)
        return f"{run}: {', '.join(told)} ({len(self.seconds[run][FIRST]):,} requests)"

    def _repr_html_(self) -> str:
        """Returns a drawing: inline SVG, without scripts and without anything loaded from elsewhere."""
        panels = [self._panel(_LEFT + i * (_PANEL + _GAP), name) for i, name in enumerate(_NAMES)]
        marks = [(line("M1 7H23", i), self._words(run)) for i, run in enumerate(self.seconds)]
        dots = [(f'<path d="{d.format(x=12, y=7)}" fill="currentColor"/>', name) for _, name, d in _MARKS]
        text = "the share of requests that need at most so long; for each run, medians and 99th percentiles"
        return chart((_WIDTH, _BOTTOM + 40), "Latencies", text, panels, [*dots, *marks])

    def _panel(self, left: int, latency: str) -> str:
        every = np.concatenate([found[latency] for found in self.seconds.values()] or [np.zeros(0)])
        low, high = (every[every > 0].min(), every.max()) if every.any() else (1e-3, 1.0)
        x = Scale(low / 1.1, high * 1.1, left, left + _PANEL, is_log=True)
        y = Scale(0, 1, _BOTTOM, _TOP)
        shares = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
        parts = [axes(x, y, [(t, seconds(t)) for t in x.ticks(5)], shares, f"share of requests: {latency}")]
        for kind, (run, found) in enumerate(self.seconds.items()):
            parts.append(line(_path(found[latency], x, y), kind))
            for share, _, path in _MARKS if len(found[latency]) else ():
                at = self.percentile(run, latency, 100 * share)
                mark = f'd="{path.format(x=x(at), y=y(share))}" fill="{COLORS[kind % len(COLORS)]}"'
                parts.append(f'<path {mark} stroke="currentColor"/>')
        return "".join(parts)


def latencies(runs: Mapping[str, Replay | SimulationResult]) -> Latencies:
    """Returns how long the requests of some runs waited.

    Args:
        runs: Results of simulations or replays, by the names that they are to have.
    """
    return Latencies({name: _of_run(run) for name, run in runs.items()})


def _of_run(run: Replay | SimulationResult) -> dict[str, np.ndarray]:
    first, num_tokens = run.times_s("first_token_time"), run.num_output_tokens
    several = num_tokens > 1
    per_token = (run.times_s("finished_time") - first)[several] / (num_tokens[several] - 1)
    found = {QUEUE: run.times_s("first_scheduled_time"), FIRST: first, PER_TOKEN: per_token}
    return {name: np.sort(values[~np.isnan(values)]) for name, values in found.items()}


def _path(values: np.ndarray, x: Scale, y: Scale) -> str:
    """Returns the share of the values that are at most so large, as a path; values are ascending."""
    places = np.unique(np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int))
    points = (f"H{x(float(values[i])):.1f}V{y((i + 1) / len(values)):.1f}" for i in places.tolist())
    return f"M{x.start} {y.start}{''.join(points)}H{x.stop}"

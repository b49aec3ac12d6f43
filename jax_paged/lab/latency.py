"""Distributions of request latencies of one or several runs, with a drawing for notebooks."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.lab.figures import format_seconds, new_figure, png_of
from jax_paged.lab.simulator import SimulationResult
from jax_paged.lab.what_if import Replay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Marked percentiles, with their labels and matplotlib markers.
_MARKS = (50, "median", "o"), (99, "99th percentile", "D")
_LINE_STYLES = "-", "--", ":", "-."
_NAMES = QUEUE, FIRST, PER_TOKEN = "queue time", "time to first token", "time per output token"


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Request latencies of several runs.

    Args:
        seconds: Sorted latencies (seconds), by name of the run and then by type of latency. QUEUE is the time
            from arrival to the first step, FIRST the time from arrival to the first token, PER_TOKEN the mean
            time per token after the first. Requests that did not get that far are left out.
    """

    seconds: dict[str, dict[str, np.ndarray]]

    def percentile(self, run: str, latency: str, percent: float) -> float:
        """Returns a percentile of a latency (seconds); NaN if there are no values.

        Args:
            run: Name of the run.
            latency: QUEUE, FIRST or PER_TOKEN.
            percent: The percentile, in [0, 100].
        """
        found = self.seconds[run][latency]
        return float(np.percentile(found, percent, method="inverted_cdf")) if len(found) else float("nan")

    def __repr__(self) -> str:
        words = "; ".join(map(self._words, self.seconds)) or "none"
        return f"<latencies, median and 99th percentile: {words}>"

    def _words(self, run: str) -> str:
        found = ((name, *(self.percentile(run, name, mark[0]) for mark in _MARKS)) for name in _NAMES)
        parts = (
            f"{name} {format_seconds(middle)} and {format_seconds(most)}" for name, middle, most in found
        )
        return f"{run}: {', '.join(parts)} ({len(self.seconds[run][FIRST]):,} requests)"

    def _repr_png_(self) -> bytes | None:
        """Returns the drawing for a notebook; None without matplotlib, so that `repr` is shown."""
        return png_of(self.figure)

    def figure(self) -> "Figure":
        """Returns a drawing of the cumulative distribution of each latency.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure = new_figure(11, 3.5 + 0.2 * len(self.seconds))
        panels = figure.subplots(1, len(_NAMES), sharey=True)
        for axes, name in zip(panels, _NAMES, strict=True):
            self._draw(axes, name)
        panels[0].set_ylabel("share of requests")
        panels[0].yaxis.set_major_formatter("{x:.0%}")
        for _, name, marker in _MARKS:
            panels[0].plot([], [], marker, color="grey", label=name)
        for i, run in enumerate(self.seconds):
            panels[0].plot([], [], **_line(i), label=self._words(run))
        for text in figure.legend(loc="outside lower left", frameon=False).get_texts():
            text.set_parse_math(False)
        return figure

    def _draw(self, axes: Any, latency: str) -> None:
        """Draws the distribution of one latency, with a line per run."""
        every = np.concatenate([found[latency] for found in self.seconds.values()] or [np.zeros(0)])
        low, high = (every[every > 0].min() / 1.1, every.max() * 1.1) if every.any() else (1e-3, 1.0)
        axes.set(title=latency, xscale="log", xlim=(low, high))
        axes.xaxis.get_major_locator().set_params(subs=(1, 2, 5) if high < 100 * low else (1,))
        axes.xaxis.set_major_formatter(lambda value, _: format_seconds(value))
        axes.xaxis.set_minor_formatter(lambda *_: "")
        for i, (run, found) in enumerate(self.seconds.items()):
            if not len(found[latency]):
                continue
            axes.ecdf(np.maximum(found[latency], low), **_line(i))
            for percent, _, marker in _MARKS:
                at = max(self.percentile(run, latency, percent), low)
                axes.plot(at, percent / 100, marker, color=f"C{i}", markeredgecolor="black")


def _line(i: int) -> dict[str, str]:
    """Returns the style of a run's line; lines differ in color and dash pattern."""
    return {"color": f"C{i}", "linestyle": _LINE_STYLES[i % len(_LINE_STYLES)]}


def latencies(runs: Mapping[str, Replay | SimulationResult]) -> Latencies:
    """Returns the latencies of the requests of several runs.

    Example:
        >>> other = replay(lines, scheduler=lambda group: len(group.request.prompt_token_ids))
        >>> latencies({"recorded": replay(lines), "shortest first": other})

    Args:
        runs: Results of simulations or replays, by name.
    """
    return Latencies({name: _of_run(run) for name, run in runs.items()})


def _of_run(run: Replay | SimulationResult) -> dict[str, np.ndarray]:
    first, num_tokens = run.times_s("first_token_time"), run.num_output_tokens
    several = num_tokens > 1
    per_token = (run.times_s("finished_time") - first)[several] / (num_tokens[several] - 1)
    found = {QUEUE: run.times_s("first_scheduled_time"), FIRST: first, PER_TOKEN: per_token}
    return {name: np.sort(values[~np.isnan(values)]) for name, values in found.items()}

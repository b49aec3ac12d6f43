"""A timeline of steps: their tokens, waiting requests and preemptions, with a drawing for notebooks."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.figures import format_seconds, new_figure, png_of
from jax_paged.lab.pool_map import short_name
from jax_paged.lab.recording import replay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LANES = 24
# Colors of steps in which a sequence computes a single token, or several tokens.
_ONE, _SEVERAL = "C0", "C1"
# Fields of steps to draw as lines, with their labels and line styles.
_LINES = {
    "num_seqs": ("scheduled sequences", "-"),
    "num_waiting": ("waiting requests", "--"),
    "num_swapped": ("swapped-out requests", ":"),
}


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Steps of a run, in order.

    Shown as a drawing in a notebook.

    Args:
        steps: One row per step, as in Replay.steps or SimulationResult.steps.
        outputs: The scheduled steps, as in Replay.outputs. If given, the drawing has a lane for each request.
            A lane shows the request id if `outputs` contains the step in which the request was new.
    """

    steps: np.ndarray
    outputs: Sequence[SchedulerOutput] = ()

    def __repr__(self) -> str:
        tokens, preemptions = (self.steps[name].sum() for name in ("num_tokens", "num_preemptions"))
        return f"<timeline: {len(self.steps):,} steps, {tokens:,} tokens, {preemptions:,} preemptions>"

    def _repr_png_(self) -> bytes | None:
        """Returns the drawing for a notebook; None without steps or matplotlib, so that `repr` is shown."""
        return png_of(self.figure) if len(self.steps) else None

    def figure(self) -> "Figure":
        """Returns a drawing of the steps; there must be at least one step.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        lanes, num_left = _lanes(self.outputs)
        panels = {"tokens": 2.0, "queues": 1.3} | ({"lanes": 0.3 + 0.2 * len(lanes)} if lanes else {})
        figure = new_figure(10, 1.5 + sum(panels.values()))
        figure.suptitle(repr(self)[1:-1])
        axes = figure.subplot_mosaic(
            [[name] for name in panels], sharex=True, height_ratios=list(panels.values())
        )
        self._draw_counts(axes["tokens"], axes["queues"])
        if lanes:
            _draw_lanes(axes["lanes"], lanes)
        bottom, times_s = axes[list(panels)[-1]], self.steps["time_s"] - self.steps["time_s"][0]
        bottom.xaxis.set_major_formatter(
            lambda x, _: f"{x:,g}\n{format_seconds(times_s[int(x)])}" if 0 <= x < len(times_s) else ""
        )
        bottom.set_xlabel(f"and {num_left:,} more requests" * (num_left > 0), loc="left")
        figure.legend(loc="outside lower left", ncols=3, frameon=False)
        return figure

    def _draw_counts(self, tokens: Any, queues: Any) -> None:
        """Draws the tokens of each step, the length of each queue, and marks for preemptions."""
        steps = self.steps
        num_single = steps["num_tokens"] - steps["num_prefill_tokens"]
        tokens.stairs(
            steps["num_tokens"],
            fill=True,
            color=_SEVERAL,
            label="several tokens per sequence (prompts, drafts)",
        )
        tokens.stairs(num_single, fill=True, color=_ONE, label="one token per sequence (decode)")
        tokens.set_ylabel("tokens per step")
        for name, (label, style) in _LINES.items():
            if steps[name].any():
                queues.stairs(steps[name], baseline=None, linestyle=style, label=label)
        queues.set_ylabel("sequences and requests")
        preempted = np.flatnonzero(steps["num_preemptions"]) + 0.5
        for axes in (tokens, queues):
            axes.vlines(preempted, 0, 1, "grey", "dotted", transform=axes.get_xaxis_transform())
        top = tokens.get_xaxis_transform()
        tokens.plot(preempted, [0.95] * len(preempted), "kv", transform=top, label="preemption")


def timeline_of(lines: Iterable[str]) -> Timeline:
    """Returns the timeline of a recording.

    Args:
        lines: A complete recording, such as an open file or a list.

    Raises:
        ValueError: If the recording is invalid or its decisions can't be reproduced; see `recording.replay`.
    """
    return Timeline((run := replay(lines)).steps, run.outputs)


@dataclasses.dataclass
class _Lane:
    """The lane of one request.

    Args:
        steps: Steps in which the request computes tokens; the value is True if a sequence computes several
            tokens.
        preempted: Steps in which the request is preempted.
    """

    steps: dict[int, bool] = dataclasses.field(default_factory=dict)
    preempted: list[int] = dataclasses.field(default_factory=list)


def _lanes(outputs: Sequence[SchedulerOutput]) -> tuple[dict[str, _Lane], int]:
    """Returns the lanes to draw, in order of arrival, and the number of requests that are left out."""
    ids: dict[int, str] = {}
    lanes: dict[str, _Lane] = defaultdict(_Lane)
    for step, output in enumerate(outputs):
        ids |= {new.seq_id: new.request.request_id for new in output.new_sequences}
        for request_id in output.preempted:
            lanes[request_id].preempted.append(step)
        for row in output.scheduled:
            own = lanes[ids.get(row.seq_id, f"sequence {row.seq_id}")].steps
            own[step] = own.get(step, False) or row.num_tokens > 1
    lanes = {request_id: lane for request_id, lane in lanes.items() if lane.steps}
    # The requests with the most preemptions are drawn; ties are resolved by order of arrival.
    drawn = set(sorted(lanes, key=lambda r: -len(lanes[r].preempted))[:_MAX_LANES])
    return {r: lane for r, lane in lanes.items() if r in drawn}, len(lanes) - len(drawn)


def _runs(steps: list[int]) -> list[tuple[int, int]]:
    """Returns the first step and the length of each run of consecutive steps in an ascending list."""
    runs = itertools.groupby(enumerate(steps), lambda pair: pair[1] - pair[0])
    listed = ([step for _, step in run] for _, run in runs)
    return [(run[0], len(run)) for run in listed]


def _draw_lanes(axes: Any, lanes: dict[str, _Lane]) -> None:
    """Draws the steps in which each request computes tokens or is preempted."""
    for y, lane in enumerate(lanes.values()):
        axes.hlines(y, min(lane.steps), max(lane.steps) + 1, "grey", "dotted")
        for color, height in ((_ONE, 0.5), (_SEVERAL, 0.8)):
            bars = _runs([step for step, several in lane.steps.items() if several == (color == _SEVERAL)])
            axes.broken_barh(bars, (y, height), align="center", color=color)
        axes.plot(np.array(lane.preempted) + 0.5, [y] * len(lane.preempted), "kv", markersize=4)
    axes.set_yticks(range(len(lanes)), map(short_name, lanes), parse_math=False)
    axes.invert_yaxis()

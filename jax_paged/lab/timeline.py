"""A timeline of steps: what each computed, who waited, who lost its blocks; notebooks draw it."""

import dataclasses
import html
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.axes import COLORS, Scale, axes, chart, legend, line, seconds, stairs
from jax_paged.lab.pool_map import short_name
from jax_paged.lab.recording import replay

_WIDTH, _LEFT, _RIGHT, _MAX_COLUMNS = 780, 96, 768, 336
_TOKENS, _QUEUES, _LANES = (32, 140), (184, 252), 316  # from top to bottom, in pixels
_LANE, _MAX_LANES, _MAX_NAME = 16, 24, 13
_LINES = {"num_seqs": "rows", "num_waiting": "requests that wait", "num_swapped": "requests swapped out"}


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Steps in their order.

    Args:
        steps: One row per step, as Replay.steps and SimulationResult.steps have them.
        outputs: The same steps as they were decided, as in Replay.outputs: with them each request has a lane.
    """

    steps: np.ndarray
    outputs: Sequence[SchedulerOutput] = ()

    def __repr__(self) -> str:
        return f"<timeline: {self._summary()}>"

    def _repr_html_(self) -> str:
        """Returns a drawing: inline SVG, without scripts and without anything loaded from elsewhere."""
        drawing = _Drawing(self.steps, self.outputs) if len(self.steps) else None
        return "<p>no steps yet</p>" if drawing is None else drawing.html(self._summary())

    def _summary(self) -> str:
        steps = self.steps
        if not len(steps):
            return "no steps"
        lasted_s = steps["time_s"][-1] + steps["step_s"][-1] - steps["time_s"][0]
        return (
            f"{len(steps):,} steps in {seconds(lasted_s)}, with {steps['num_tokens'].sum():,} tokens, "
            f"{steps['num_prefill_tokens'].sum():,} of them in rows of more than one; "
            f"{steps['num_preemptions'].sum():,} preemptions; at most {steps['num_waiting'].max():,} "
            "requests waited at a time"
        )


def timeline_of(lines: Iterable[str]) -> Timeline:
    """Returns the timeline of a recording.

    Args:
        lines: As `recording.replay` takes them.

    Raises:
        ValueError: As `recording.replay` does.
    """
    told = replay(lines)
    return Timeline(told.steps, told.outputs)


class _Drawing:
    """Draws steps in columns, of one step each, or where there are many, of several.

    Args:
        steps: As Timeline has them, at least one.
        outputs: As Timeline has them.
    """

    def __init__(self, steps: np.ndarray, outputs: Sequence[SchedulerOutput]) -> None:
        self.steps, self.outputs = steps, outputs
        self.per_column = -(-len(steps) // _MAX_COLUMNS)
        self.starts = np.arange(0, len(steps), self.per_column)
        self.x = Scale(0, len(steps), _LEFT, _RIGHT)
        self.edges = [self.x(start) for start in (*self.starts.tolist(), len(steps))]

    def html(self, summary: str) -> str:
        tokens, queues = self._scale(["num_tokens"], *_TOKENS), self._scale(list(_LINES), *_QUEUES)
        lanes = list(self._lanes())
        drawn = [name for name in _LINES if self.steps[name].any()]
        foot = _LANES + _LANE * len(lanes) if lanes else _QUEUES[1] + 36
        parts = [
            axes(self.x, tokens, (), _counts(tokens), "tokens per step"),
            self._area("num_tokens", tokens, _SEVERAL),
            self._area("num_tokens", tokens, _ONE, minus="num_prefill_tokens"),
            axes(self.x, queues, self._x_ticks(), _counts(queues), "rows per step, and requests"),
            *(line(self._stairs(name, queues), i) for i, name in enumerate(drawn)),
            *self._preemptions(),
            *self._hovers(),
            f'<text x="{_LEFT}" y="{_LANES - 10}" font-weight="bold">who computes</text>' if lanes else "",
            *lanes,
        ]
        marks = [
            (f'<path d="M1 13V3H23V13z" {_ONE}/>', "rows of one token"),
            (
                f'<path d="M1 13V3H23V13z" {_SEVERAL}/>',
                "rows of more: prompts, what is computed again, drafts",
            ),
            *[(_triangle(12, 12), "preemption")] * bool(self.steps["num_preemptions"].any()),
            *((line("M1 7H23", i), _LINES[name]) for i, name in enumerate(drawn)),
        ]
        note = f"A column is the mean of {self.per_column} steps. " if self.per_column > 1 else ""
        return chart(_WIDTH, foot, "Timeline", summary, parts, f"<div>{note}{legend(marks)}</div>")

    def _means(self, name: str) -> np.ndarray:
        """Returns a field of the steps, by column."""
        sums = np.add.reduceat(self.steps[name].astype(np.float64), self.starts)
        return sums / np.diff([*self.starts, len(self.steps)])

    def _scale(self, names: list[str], top: int, bottom: int) -> Scale:
        most = max(float(self._means(name).max()) for name in names)
        return Scale(0, max(most * 1.05, 1), bottom, top)

    def _x_ticks(self) -> Iterator[tuple[float, str]]:
        times_s = self.steps["time_s"] - self.steps["time_s"][0]
        for tick in self.x.ticks(9):
            if tick < len(times_s):
                yield tick, ("step " if not tick else "") + f"{tick:,g}\n{seconds(times_s[int(tick)])}"

    def _stairs(self, name: str, y: Scale, minus: str | None = None) -> str:
        values = self._means(name) - (self._means(minus) if minus else 0)
        return stairs(self.edges, [y(value) for value in values])

    def _area(self, name: str, y: Scale, paint: str, minus: str | None = None) -> str:
        path = self._stairs(name, y, minus)
        return f'<path d="{path}V{y.start}H{self.edges[0]:.1f}z" {paint}/>'

    def _preemptions(self) -> Iterator[str]:
        for column in np.flatnonzero(self._means("num_preemptions")):
            at = (self.edges[column] + self.edges[column + 1]) / 2
            dots = f'<path d="M{at:.1f} {_TOKENS[0]}V{_QUEUES[1]}" {_DOTTED}/>'
            yield dots + _triangle(at, _TOKENS[0])

    def _hovers(self) -> Iterator[str]:
        """Yields what a pointer shows: one invisible box per column."""
        for column, (start, left, right) in enumerate(
            zip(self.starts, self.edges, self.edges[1:], strict=False)
        ):
            part = self.steps[start : start + self.per_column]
            name = f"step {start}" + (f" to {start + len(part) - 1}" if len(part) > 1 else "")
            told = [f"{name}, {seconds(part['step_s'].sum())}", f"{part['num_tokens'].sum():,} tokens"]
            told += [f"{self._means(field)[column]:.4g} {what}" for field, what in _LINES.items()]
            told += [f"{n:,} preemptions" for n in [part["num_preemptions"].sum()] if n]
            yield (
                f'<rect x="{left:.1f}" y="{_TOKENS[0]}" width="{right - left:.1f}" fill-opacity="0" '
                f'height="{_QUEUES[1] - _TOKENS[0]}"><title>{"; ".join(told)}</title></rect>'
            )

    def _lanes(self) -> Iterator[str]:
        """Yields a lane per request: in which columns it computes, and where it is preempted."""
        names: dict[int, str] = {}
        computed: dict[str, dict[int, bool]] = defaultdict(
            dict
        )  # by column, whether a row has several tokens
        preempted: dict[str, list[int]] = defaultdict(list)
        for step, output in enumerate(self.outputs):
            names |= {new.seq_id: new.request_id for new in output.new_sequences}
            column = step // self.per_column
            for request_id in output.preempted:
                preempted[request_id].append(column)
            for row in output.scheduled:
                own = computed[names[row.seq_id]]
                own[column] = own.get(column, False) or row.num_tokens > 1
        # Those that were preempted most, and then the first; they are drawn in the order in which they came.
        chosen = set(sorted(computed, key=lambda r: -len(preempted[r]))[:_MAX_LANES])
        lanes = [request_id for request_id in computed if request_id in chosen]
        for y, request_id in zip(itertools.count(_LANES, _LANE), lanes, strict=False):
            yield self._lane(short_name(request_id), computed[request_id], preempted[request_id], y)
        if left := len(computed) - len(lanes):
            y = _LANES + _LANE * len(lanes) + 11
            yield f'<text x="{_LEFT}" y="{y}">and {left:,} more, preempted no more often</text>'

    def _lane(self, name: str, columns: dict[int, bool], preempted: list[int], y: int) -> str:
        edges, order = self.edges, sorted(columns)
        label = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
        parts = [
            f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{html.escape(label)}</text>',
            f'<path d="M{edges[order[0]]:.1f} {y + 7}H{edges[order[-1] + 1]:.1f}" {_DOTTED}/>',
        ]
        start = order[0]
        for column, following in zip(order, [*order[1:], -1], strict=True):
            if following != column + 1 or columns[following] != columns[column]:
                paint, top, bottom = (_SEVERAL, 1, 13) if columns[column] else (_ONE, 3, 11)
                box = (
                    f"M{edges[start]:.1f} {y + top}H{edges[column + 1]:.1f}V{y + bottom}H{edges[start]:.1f}z"
                )
                parts.append(f'<path d="{box}" {paint}/>')
                start = following
        parts += [_triangle((edges[column] + edges[column + 1]) / 2, y + 11) for column in preempted]
        told = f"{name}: computes in {len(order):,} columns; {len(preempted):,} preemptions"
        return f"<g><title>{html.escape(told)}</title>{''.join(parts)}</g>"


_ONE = f'fill="{COLORS[0]}"'
_SEVERAL = f'fill="{COLORS[1]}" fill-opacity="0.35" stroke="{COLORS[1]}"'
_DOTTED = 'fill="none" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="1 2"'


def _counts(scale: Scale) -> list[tuple[float, str]]:
    return [(tick, f"{tick:,g}") for tick in scale.ticks(5)]


def _triangle(x: float, y: float) -> str:
    """Returns a mark that points down, at a place."""
    return f'<path d="M{x:.1f} {y}l-4.5 -8h9z" fill="currentColor"/>'

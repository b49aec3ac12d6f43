"""A timeline of steps: what each computed, who waited, who lost its blocks; notebooks draw it."""

import dataclasses
import html
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.axes import COLORS, Scale, axes, chart, line, seconds, stairs
from jax_paged.lab.pool_map import short_name
from jax_paged.lab.recording import replay

_WIDTH, _LEFT, _RIGHT, _MAX_COLUMNS = 780, 96, 768, 336
_TOP, _TOKENS, _QUEUES, _BOTTOM, _LANES, _LANE, _MAX_LANES, _MAX_NAME = 32, 140, 184, 252, 316, 16, 24, 13
_LINES = {"num_seqs": "rows", "num_waiting": "requests that wait", "num_swapped": "requests swapped out"}
_ONE = f'fill="{COLORS[0]}"'
_SEVERAL = f'fill="{COLORS[1]}" fill-opacity="0.35" stroke="{COLORS[1]}"'
_DOTTED = 'fill="none" stroke="currentColor" stroke-opacity="0.5" stroke-dasharray="1 2"'


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Steps in their order.

    Args:
        steps: One row per step, as Replay.steps and SimulationResult.steps have them.
        outputs: The same steps as they were decided, as in Replay.outputs: with them each request has a lane,
            under its id if they begin with the first step.
    """

    steps: np.ndarray
    outputs: Sequence[SchedulerOutput] = ()

    def __repr__(self) -> str:
        tokens, preemptions = (self.steps[name].sum() for name in ("num_tokens", "num_preemptions"))
        return f"<timeline: {len(self.steps):,} steps, {tokens:,} tokens, {preemptions:,} preemptions>"

    def _repr_html_(self) -> str:
        """Returns a drawing: inline SVG, without scripts and without anything loaded from elsewhere."""
        return (
            _drawing(self.steps, self.outputs, repr(self)[11:-1])
            if len(self.steps)
            else "<p>no steps yet</p>"
        )


def timeline_of(lines: Iterable[str]) -> Timeline:
    """Returns the timeline of a recording.

    Args:
        lines: As `recording.replay` takes them.

    Raises:
        ValueError: As `recording.replay` does.
    """
    return Timeline((told := replay(lines)).steps, told.outputs)


def _drawing(steps: np.ndarray, outputs: Sequence[SchedulerOutput], text: str) -> str:
    """Draws steps in columns, of one step each, or where there are many, of several."""
    num, x = -(-len(steps) // _MAX_COLUMNS), Scale(0, len(steps), _LEFT, _RIGHT)
    starts = list(range(0, len(steps), num))
    edges = [x(start) for start in (*starts, len(steps))]

    def means(values: np.ndarray) -> list[float]:
        return (np.add.reduceat(values, starts) / np.diff([*starts, len(steps)])).tolist()

    every = means(steps["num_tokens"])
    of_one = means(steps["num_tokens"] - steps["num_prefill_tokens"])
    lines = {name: means(steps[name]) for name in _LINES if steps[name].any()}
    tokens = Scale(0, max(every) + 1, _TOKENS, _TOP)
    queues = Scale(0, max(map(max, lines.values()), default=0) + 1, _BOTTOM, _QUEUES)
    areas = (
        f'<path d="{stairs(edges, map(tokens, values))}V{_TOKENS}H{_LEFT}z" {paint}/>'
        for values, paint in ((every, _SEVERAL), (of_one, _ONE))
    )
    middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    preemptions = (
        f'<path d="M{at:.1f} {_TOP}V{_BOTTOM}" {_DOTTED}/>{_triangle(at, _TOP)}'
        for at, number in zip(middles, means(steps["num_preemptions"]), strict=True)
        if number
    )
    times_s = (steps["time_s"] - steps["time_s"][0]).tolist()
    ticks = ((t, f"{t:,}\n{seconds(times_s[t])}") for t in map(int, x.ticks(10)) if t < len(steps))
    lanes = list(_lanes(outputs, num, edges))
    parts = [
        axes(x, tokens, (), ((t, f"{t:,g}") for t in tokens.ticks(5)), "tokens per step"),
        *areas,
        axes(x, queues, ticks, ((t, f"{t:,g}") for t in queues.ticks(5)), "rows and requests, over steps"),
        *(line(stairs(edges, map(queues, values)), i) for i, values in enumerate(lines.values())),
        *preemptions,
        *lanes,
    ]
    marks = [
        (f'<path d="M1 13V3H23V13z" {_ONE}/>', "rows of one token"),
        (f'<path d="M1 13V3H23V13z" {_SEVERAL}/>', "rows of several, as of prompts"),
        (_triangle(12, 12), "preemption"),
        *((line("M1 7H23", i), _LINES[name]) for i, name in enumerate(lines)),
        ("", f"steps per column: {num}"),
    ]
    return chart((_WIDTH, _LANES + _LANE * len(lanes)), "Timeline", text, parts, marks)


def _lanes(outputs: Sequence[SchedulerOutput], per_column: int, edges: list[float]) -> Iterator[str]:
    """Yields a lane per request: in which columns it computes, and where it is preempted."""
    names: dict[int, str] = {}
    # By request and column, whether a row has several tokens.
    computed: dict[str, dict[int, bool]] = defaultdict(dict)
    preempted: dict[str, list[int]] = defaultdict(list)
    for step, output in enumerate(outputs):
        names |= {new.seq_id: new.request.request_id for new in output.new_sequences}
        for request_id in output.preempted:
            preempted[request_id].append(step // per_column)
        for row in output.scheduled:
            own = computed[names.get(row.seq_id, f"sequence {row.seq_id}")]
            own[step // per_column] = own.get(step // per_column, False) or row.num_tokens > 1
    # Those that were preempted most, and then the first; they are drawn in the order in which they came.
    chosen = set(sorted(computed, key=lambda r: -len(preempted[r]))[:_MAX_LANES])
    lanes = [request_id for request_id in computed if request_id in chosen]
    for y, request_id in zip(itertools.count(_LANES, _LANE), lanes, strict=False):
        yield _lane(short_name(request_id), computed[request_id], preempted[request_id], y, edges)
    if left := len(computed) - len(lanes):
        yield f'<text x="{_LEFT}" y="{_LANES + _LANE * len(lanes) + 11}">and {left:,} more</text>'


def _lane(name: str, columns: dict[int, bool], preempted: list[int], y: int, edges: list[float]) -> str:
    order = sorted(columns)
    parts = [
        f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{html.escape(name[:_MAX_NAME])}</text>',
        f'<path d="M{edges[order[0]]:.1f} {y + 7}H{edges[order[-1] + 1]:.1f}" {_DOTTED}/>',
    ]
    for (_, is_several), run in itertools.groupby(enumerate(order), lambda p: (p[1] - p[0], columns[p[1]])):
        (_, first), *others = run
        paint, top, bottom = (_SEVERAL, 1, 13) if is_several else (_ONE, 3, 11)
        left, right = edges[first], edges[first + len(others) + 1]
        parts.append(f'<path d="M{left:.1f} {y + top}H{right:.1f}V{y + bottom}H{left:.1f}z" {paint}/>')
    parts += [_triangle((edges[column] + edges[column + 1]) / 2, y + 11) for column in preempted]
    told = f"computes in {len(order):,} columns; {len(preempted):,} preemptions"
    return f"<g><title>{html.escape(name)}: {told}</title>{''.join(parts)}</g>"


def _triangle(x: float, y: float) -> str:
    """Returns a mark that points down, at a place."""
    return f'<path d="M{x:.1f} {y}l-4.5 -8h9z" fill="currentColor"/>'

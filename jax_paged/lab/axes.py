"""Axes, lines and legends of charts, as SVG for light and dark screens; no colour says anything alone."""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

import numpy as np

# Blue and orange, green and purple: colour-blind readers tell the neighbours apart, and dashes say it again.
COLORS = ("hsl(210,60%,52%)", "hsl(28,75%,55%)", "hsl(165,60%,38%)", "hsl(320,45%,60%)")
DASHES = ("none", "7 3", "2 3", "9 3 2 3")
# Of the ticks of a logarithmic axis, from the finest to the coarsest: factors, and every how many decades.
_FACTORS = (
    ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), 1),
    *(((1, 2, 5), 1), ((1, 3), 1), ((1,), 1), ((1,), 2), ((1,), 3)),
)
_FAINT = 'stroke="currentColor" stroke-opacity="0.2"'


@dataclasses.dataclass(frozen=True)
class Scale:
    """Where on an axis a value stands.

    Args:
        low: The value at `start`.
        high: The value at `stop`, greater than `low`.
        start: A place, in pixels.
        stop: Another.
        is_log: Whether equal ratios are equally long; `low` is above 0 then.
    """

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the place of a value; one outside stands at the nearer end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self, most: int) -> list[float]:
        """Returns round values, hardly more than so many; those of a linear axis are whole numbers."""
        if not self.is_log:
            step = next(
                m * 10**k for k in range(12) for m in (1, 2, 5) if m * 10**k * most >= self.high - self.low
            )
            return [float(t) for t in range(math.ceil(self.low / step) * step, int(self.high) + 1, step)]
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        values: list[float] = []
        for factors, every in _FACTORS:
            values = [factor * 10.0**k for k in range(first, last + 1, every) for factor in factors]
            values = [v for v in values if self.low <= v <= self.high]
            if len(values) <= most:
                break
        return values


def seconds(value: float) -> str:
    """Returns a time with its unit, in three digits."""
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, factor = next((u for u in units if not value or round(value * u[1], 3) >= 1), units[-1])
    return f"{float(f'{value * factor:.3g}'):,g} {unit}"


def axes(
    x: Scale, y: Scale, x_ticks: Iterable[tuple[float, str]], y_ticks: Iterable[tuple[float, str]], title: str
) -> str:
    """Returns a panel without its curves: two lines, a grid, ticks with their labels, and a title.

    Args:
        x: The horizontal scale.
        y: The vertical scale.
        x_ticks: Values and labels; lines of a label are divided by line feeds.
        y_ticks: Values and labels.
        title: Says what `y` is, and in which unit; it stands above.
    """
    parts = [f'<text x="{x.start}" y="{y.stop - 8:g}" font-weight="bold">{html.escape(title)}</text>']
    for value, label in y_ticks:
        at = y(value)
        parts.append(f'<path d="M{x.start} {at:.1f}H{x.stop}" {_FAINT}/>')
        parts.append(f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in x_ticks:
        at = x(value)
        parts.append(f'<path d="M{at:.1f} {y.start}v5" stroke="currentColor"/>')
        for i, line in enumerate(label.splitlines()):
            parts.append(f'<text x="{at:.1f}" y="{y.start + 17 + 13 * i}" text-anchor="middle">{line}</text>')
    parts.append(f'<path d="M{x.start} {y.stop}V{y.start}H{x.stop}" fill="none" stroke="currentColor"/>')
    return "".join(parts)


def stairs(x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray) -> str:
    """Returns the path of a line that is level from x[i] to x[i + 1], at y[i]; x is one longer."""
    return f"M{x[0]:.1f} {y[0]:.1f}H{x[1]:.1f}" + "".join(
        f"V{at:.1f}H{to:.1f}" for at, to in zip(y[1:], x[2:], strict=True)
    )


def line(path: str, kind: int) -> str:
    """Returns a curve in the colour and the dashes of a kind, which is a number from 0 on."""
    color, dash = COLORS[kind % len(COLORS)], DASHES[kind % len(DASHES)]
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Returns marks with their meanings; a mark is SVG, 24 wide and 14 high."""
    return "".join(
        '<span style="display:inline-block;margin-right:1.4em"><svg viewBox="0 0 24 14" width="24" '
        f'height="14" style="vertical-align:-2px" aria-hidden="true">{mark}</svg> '
        f"{html.escape(meaning)}</span>"
        for mark, meaning in entries
    )


def chart(width: float, height: float, title: str, description: str, parts: Iterable[str], below: str) -> str:
    """Returns a whole drawing: inline SVG with a title and a description for readers of screens, and HTML."""
    return (
        '<div style="font-size:12px;line-height:1.6">'
        f"<div><b>{html.escape(title)}</b>: {html.escape(description)}</div>"
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" style="display:block;width:100%;'
        f'max-width:{width:g}px" font-size="11" fill="currentColor"><title>{html.escape(title)}</title>'
        f"<desc>{html.escape(description)}</desc>{''.join(parts)}</svg>{below}</div>"
    )

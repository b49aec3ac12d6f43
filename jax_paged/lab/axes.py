"""Axes, lines and legends of charts, as SVG for light and dark screens; no colour says anything alone."""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence

# Blue and orange, green and purple: colour-blind readers tell neighbours apart, and dashes say it again. Of
# these there is one more, so that twenty curves differ.
COLORS = ("hsl(210,60%,52%)", "hsl(28,75%,55%)", "hsl(165,60%,38%)", "hsl(320,45%,60%)")
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 3")


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

    def ticks(self, most: int) -> Sequence[float]:
        """Returns at most so many round values; those of a linear axis are whole numbers from 0 on."""
        if not self.is_log:
            tried = (range(0, int(self.high) + 1, m * 10**k) for k in range(12) for m in (1, 2, 5))
            return next(ticks for ticks in tried if len(ticks) <= most)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
        every = (m * 10.0**k for k in decades for m in (1, 1.5, 2, 3, 5, 7))
        ticks = [value for value in every if value <= self.high]
        inside = ([v for v in ticks[::n] if v >= self.low] for n in (1, 2, 6, 12, 18))
        return next(values for values in inside if len(values) <= most)


def seconds(value: float) -> str:
    """Returns a time with its unit, in three digits; NaN is never."""
    units = (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, factor = next((u for u in units if not value or round(value * u[1], 3) >= 1), units[-1])
    return "never" if math.isnan(value) else f"{float(f'{value * factor:.3g}'):,g} {unit}"


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
    for at, label in ((y(value), label) for value, label in y_ticks):
        parts.append(f'<path d="M{x.start} {at:.1f}H{x.stop}" stroke="currentColor" stroke-opacity="0.2"/>')
        parts.append(f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for at, label in ((x(value), label) for value, label in x_ticks):
        parts.append(f'<path d="M{at:.1f} {y.start}v5" stroke="currentColor"/>')
        for i, text in enumerate(label.splitlines()):
            parts.append(f'<text x="{at:.1f}" y="{y.start + 17 + 13 * i}" text-anchor="middle">{text}</text>')
    parts.append(f'<path d="M{x.start} {y.stop}V{y.start}H{x.stop}" fill="none" stroke="currentColor"/>')
    return "".join(parts)


def stairs(x: Sequence[float], y: Iterable[float]) -> str:
    """Returns the path of a line that is level from x[i] to x[i + 1], at y[i]; x is one longer."""
    steps = "".join(f"V{at:.1f}H{to:.1f}" for to, at in zip(x[1:], y, strict=True))
    return f"M{x[0]:.1f}{steps.replace('V', ' ', 1)}"


def line(path: str, kind: int) -> str:
    """Returns a curve in the colour and the dashes of a kind, which is a number from 0 on."""
    color, dash = COLORS[kind % len(COLORS)], DASHES[kind % len(DASHES)]
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"/>'


def chart(
    size: tuple[float, float], name: str, text: str, parts: Iterable[str], marks: Iterable[tuple[str, str]]
) -> str:
    """Returns a whole drawing: inline SVG, with a name and a text for readers of screens, and a legend.

    Args:
        size: Width and height.
        name: Stands above, before the text.
        text: Says in a sentence what is seen.
        parts: Of the SVG.
        marks: Of the legend: SVG, 24 wide and 14 high, and what it means.
    """
    name, text, (width, height) = html.escape(name), html.escape(text), size
    entries = (
        '<span style="display:inline-block;margin-right:1.4em"><svg viewBox="0 0 24 14" width="24" '
        f'style="vertical-align:-2px" aria-hidden="true">{mark}</svg> {html.escape(meaning)}</span> '
        for mark, meaning in marks
    )
    return (
        f'<div style="font-size:12px;line-height:1.6"><div><b>{name}</b>: {text}</div><svg role="img" '
        f'viewBox="0 0 {width} {height}" style="display:block;width:100%;max-width:{width}px" font-size="11" '
        f'fill="currentColor"><title>{name}</title><desc>{text}</desc>{"".join(parts)}</svg>'
        f"<div>{''.join(entries)}</div></div>"
    )

"""Drawing of figures as SVG, with bars or lines. They can be read without color and on dark screens."""

import io
import re
from pathlib import Path
from typing import Any

from paper.figures import Curve, Figure, Row
from paper.points import LATENCY_LIMIT_S, rate_between

# Okabe and Ito's colors for color-blind readers. Hatches and markers make the same distinctions without
# color.
OURS, PAPER = "#0072b2", "#e69f00"
LINES = (
    ("#0072b2", "o", "-"),
    ("#e69f00", "s", "--"),
    ("#009e73", "^", "-."),
    ("#cc79a7", "D", ":"),
    ("#56b4e9", "v", (0, (5, 1, 1, 1, 1, 1))),
)
# Colors of lines and background. On dark screens, the style DARK replaces them.
INK, BACKGROUND = "#1b1f24", "#fdfdfd"
DARK = """<style>@media (prefers-color-scheme: dark) {
 svg { color: #e6e6e6; } .ground { fill: #16191d !important; }
}</style>"""


def draw(figure: Figure, values: Any, path: Path) -> None:
    """Writes a figure as an SVG file.

    Args:
        figure: The figure.
        values: Values by point, such as a Store.
        path: Path of the file.
    """
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    matplotlib.rcParams["svg.hashsalt"] = "paper"  # makes the bytes of the file reproducible
    if figure.curves is not None:
        canvas = _lines(Canvas, figure, figure.curves(values))
    else:
        canvas = _bars(Canvas, figure, figure.rows(values))
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "hatch.linewidth": 0.6}):
        canvas.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_themed(text.getvalue()))


def _bars(canvas_class: Any, figure: Figure, rows: list[Row]) -> Any:
    panels = list(dict.fromkeys(row.panel for row in rows))
    num_columns = min(2, len(panels))
    num_rows = -(-len(panels) // num_columns)
    canvas = canvas_class(figsize=(10, 0.9 + 2.9 * num_rows), layout="constrained", facecolor=BACKGROUND)
    axes = list(canvas.subplots(num_rows, num_columns, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, panels, strict=False):
        chosen = [row for row in rows if row.panel == panel]
        top = 0.0
        for x, row in enumerate(chosen):
            place = x if row.paper is None else x - 0.2
            axis.bar(place, row.ours, 0.38, color=OURS, edgecolor=INK, linewidth=0.5)
            high = row.ours
            if row.band is not None:
                axis.vlines(place, *row.band, color=INK, linewidth=1.2)
                high = max(high, row.band[1])
            _label(axis, number(row.ours, figure.digits), place, max(high, 0))
            if row.paper is not None:
                low, end = row.paper if isinstance(row.paper, tuple) else (0.0, row.paper)
                axis.bar(
                    x + 0.2, end - low, 0.38, low, color=PAPER, edgecolor=INK, linewidth=0.5, hatch="///"
                )
                _label(axis, f"{low:g}-{end:g}" if low else number(end, figure.digits), x + 0.2, end)
                high = max(high, end)
            top = max(top, high)
        names = [
            row.label.replace(" over ", "\nover ") + ("\n(fitted)" if row.is_fitted else "") for row in chosen
        ]
        axis.set_xticks(range(len(chosen)), names, fontsize=7.5)
        axis.set_ylim(top=top * 1.15 or 1)
        axis.set_xlim(-0.6, len(chosen) - 0.4)
        axis.axhline(0, color=INK, linewidth=0.6)
        axis.set_title(panel, loc="left", fontsize=10, color=INK)
        _style_axes(axis)
    _set_title(canvas, f"{figure.title}, {figure.unit}" if figure.unit else figure.title)
    handles = _legend_handles(
        figure.band if any(row.band for row in rows) else None, any(row.paper is not None for row in rows)
    )
    canvas.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5, labelcolor=INK
    )
    return canvas


def _legend_handles(band: str | None, has_paper: bool) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=OURS, edgecolor=INK, label="this project")]
    if has_paper:
        handles.append(Patch(facecolor=PAPER, edgecolor=INK, hatch="///", label="the paper"))
    if band is not None:
        handles.append(Line2D([], [], color=INK, label=band))
    return handles


def _lines(canvas_class: Any, figure: Figure, curves: list[Curve]) -> Any:
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    labels = list(dict.fromkeys(curve.label for curve in curves))
    num_columns = min(3, len(panels))
    num_rows = -(-len(panels) // num_columns)
    canvas = canvas_class(figsize=(10, 1.2 + 3.0 * num_rows), layout="constrained", facecolor=BACKGROUND)
    axes = canvas.subplots(num_rows, num_columns, squeeze=False).flat
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        for curve in curves:
            if curve.panel != panel:
                continue
            color, mark, style = LINES[labels.index(curve.label)]
            (handles[curve.label],) = axis.plot(
                curve.x, curve.y, color=color, marker=mark, linestyle=style, markersize=4.5, label=curve.label
            )
            if figure.axes[0] == "tokens per block":
                for x, y in zip(curve.x, curve.y, strict=True):
                    _label(axis, f"{y:.3g}", x, y, -12 if labels.index(curve.label) % 2 else 5)
            elif len(panels) == 1:
                _label(axis, f"{curve.y[-1]:.2g}", curve.x[-1], curve.y[-1], 5)
        if figure.axes[0] == "tokens per block":
            axis.set_xscale("log", base=2)
            axis.set_xticks(curves[0].x, [f"{x:g}" for x in curves[0].x])
            axis.set_yscale("log")
            axis.margins(y=0.25)
        elif figure.name == "12":
            _over_rates(axis, [curve for curve in curves if curve.panel == panel])
        else:
            axis.set_ylim(bottom=0)
        axis.set_title(panel, loc="left", fontsize=10, color=INK)
        axis.set_xlabel(figure.axes[0], fontsize=9, color=INK)
        axis.set_ylabel(figure.axes[1], fontsize=9, color=INK)
        axis.label_outer()
        axis.tick_params(labelbottom=True)
        _style_axes(axis)
        axis.tick_params(which="minor", left=False, labelleft=False)
    _set_title(canvas, figure.title)
    canvas.legend(
        handles=list(handles.values()),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
    )
    return canvas


def _over_rates(axis: Any, curves: list[Curve]) -> None:
    """Adds the rate axis to a panel of figure 12, and labels the rate at which each line meets the limit."""
    axis.set_xscale("log")
    low, high = min(min(curve.x) for curve in curves) * 0.8, max(max(curve.x) for curve in curves) * 1.3
    ticks = [m * 10.0**k for k in range(-2, 3) for m in (1, 2, 5) if low <= m * 10.0**k <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_xlim(low, high)
    axis.set_ylim(0, 1)
    axis.axhline(LATENCY_LIMIT_S, color=INK, linewidth=0.6, linestyle=(0, (1, 2)))
    for i, curve in enumerate(curves):
        runs = list(zip(curve.x, curve.y, strict=True))
        below = max(run for run in runs if run[1] < LATENCY_LIMIT_S)
        rate = rate_between(below, min(run for run in runs if run > below and run[1] >= LATENCY_LIMIT_S))
        offset = (-3, 4) if i % 2 else (-3, -9)
        axis.annotate(
            f"{rate:.2g}",
            (rate, LATENCY_LIMIT_S),
            offset,
            textcoords="offset points",
            ha="right",
            fontsize=7,
            color=INK,
        )


def _set_title(canvas: Any, text: str) -> None:
    canvas.suptitle(text, x=0.01, ha="left", fontsize=11, color=INK)


def _style_axes(axis: Any) -> None:
    axis.set_facecolor("none")
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(INK)
    axis.tick_params(colors=INK, labelsize=8)


def _label(axis: Any, text: str, x: float, y: float, up: float = 2) -> None:
    axis.annotate(text, (x, y), (0, up), textcoords="offset points", ha="center", fontsize=7.5, color=INK)


def number(value: float, digits: int) -> str:
    """Returns the label of a bar: at most one decimal for values of 10 or more, otherwise `digits`."""
    return f"{value:.{min(digits, 1) if value >= 10 else digits}f}"


def _themed(svg: str) -> str:
    """Makes the colors INK and BACKGROUND of an SVG follow the reader's light or dark mode."""
    svg = svg.replace(f'style="fill: {BACKGROUND}"', f'style="fill: {BACKGROUND}" class="ground"')
    svg = re.sub(rf"(fill|stroke): {INK}", r"\1: currentColor", svg)
    return re.sub(r"(<svg [^>]*)>", rf'\1 color="{INK}" font-family="sans-serif">{DARK}', svg, count=1)

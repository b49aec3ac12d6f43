"""The page in docs/: every picture, and a table of ours beside the paper's, with the error."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from paper import figures, published
from paper.devices import HOST_S
from paper.figures import FIGURES, OTHER_POINTS, Figure, Row
from paper.picture import draw
from paper.store import RESULTS, Store
from paper.systems import SYSTEMS

DOCS = RESULTS.parent.parent.parent / "docs"


def write_figure(name: str, store: Store, pictures: Path, results: Path) -> None:
    """Writes a figure's picture and its JSON; the store has all that it needs."""
    figure = FIGURES[name]
    draw(figure, store, pictures / f"figure-{name}.svg")
    content: dict[str, Any] = {
        "figure": name,
        "title": figure.title,
        "unit": figure.unit,
        "rows": [dataclasses.asdict(row) | {"error": row.error} for row in figure.rows(store)],
    }
    if figure.curves is not None:
        content["curves"] = [dataclasses.asdict(curve) for curve in figure.curves(store)]
    (results / f"figure-{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def write_page(store: Store, path: Path) -> None:
    """Writes the page; its pictures lie in the folder paper/ beside it."""
    (path.parent / "paper").mkdir(parents=True, exist_ok=True)
    template = (Path(__file__).parent / "page.md").read_text()
    parts: dict[str, str] = {f"figure {name}": _section(figure, store) for name, figure in FIGURES.items()}
    parts["host"] = f"{HOST_S * 1e3:.1f}"
    parts["others"] = _others(store)
    total = figures.million(store)
    parts["million"] = (
        f"{total['num_requests']:,.0f} requests, {total['num_steps']:,.0f} steps and "
        f"{total['num_rows']:,.0f} rows took {total['scheduling_s']:.0f} s of processor time in the "
        f"scheduler and {total['all_s']:.0f} s in all: "
        f"{total['us_per_row']:.2f} us per row, {total['us_per_request']:.0f} us per request"
    )
    parts["queue"] = f"{figures.longest_queue(store):,}"
    for name, text in parts.items():
        template = template.replace("{{" + name + "}}", text)
    assert "{{" not in template, template[template.index("{{") :][:40]
    path.write_text(template)


def table(figure: Figure, values: Any) -> str:
    """Returns a figure's rows as a table in Markdown."""
    rows = figure.rows(values)
    has_band = any(row.band for row in rows)
    head = [
        "",
        "",
        f"ours, {figure.unit}" if figure.unit else "ours",
        *(["band"] if has_band else []),
        "the paper",
        "error",
    ]
    lines = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [row.panel, row.label, f"{row.ours:.{figure.digits}f}"]
        if has_band:
            low, high = row.band or (row.ours, row.ours)
            cells.append(f"{low:.{figure.digits}f} to {high:.{figure.digits}f}")
        cells += [_paper(row), _error(row, figure)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _section(figure: Figure, values: Any) -> str:
    return f"![{figure.title}](paper/figure-{figure.name}.svg)\n\n{table(figure, values)}\n\n{figure.notes}"


def _paper(row: Row) -> str:
    if isinstance(row.paper, tuple):
        return f"{row.paper[0]:g} to {row.paper[1]:g}"
    return "" if row.paper is None else f"{row.paper:g}"


def _error(row: Row, figure: Figure) -> str:
    if row.paper is None:
        return ""
    if row.is_fitted:
        return "fitted"
    if figure.unit.startswith("%"):
        low, high = row.paper if isinstance(row.paper, tuple) else (row.paper, row.paper)
        points = min(row.ours - low, 0.0) or max(row.ours - high, 0.0)
        return f"{points:+.1f} points" if points else "within"
    return f"{row.error:+.0%}" if row.error else "within" if isinstance(row.paper, tuple) else "0%"


def _others(values: Any) -> str:
    """Returns figure 13 under the choices that were not taken."""
    lines = ["| | " + " | ".join(f"{w}: {s}" for w in published.BATCHES for s in SYSTEMS[1:]) + " |"]
    lines.append("|" + " --- |" * (2 * len(SYSTEMS) - 1))
    papers = [published.BATCHES[w][s] for w in published.BATCHES for s in SYSTEMS[1:]]
    lines.append("| the paper | " + " | ".join(f"{paper:.2f}" for paper in papers) + " |")
    chosen = [row.ours for row in FIGURES["13"].rows(values) if row.label != SYSTEMS[0]]
    everything = {"as chosen": chosen} | {
        name: [values[point]["batched"] for point in points] for name, points in OTHER_POINTS.items()
    }
    for name, found in everything.items():
        cells = [f"{ours:.1f} ({ours / paper - 1:+.0%})" for ours, paper in zip(found, papers, strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)

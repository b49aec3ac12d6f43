"""Writing of docs/paper.md and of one SVG and JSON file per figure."""

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
    """Writes the SVG and the JSON file of a figure from stored points.

    Args:
        name: Key of FIGURES.
        store: Contains all points of the figure.
        pictures: Folder for the SVG.
        results: Folder for the JSON file.
    """
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
    """Writes docs/paper.md from the template page.md. The pictures are in the folder paper/ beside it."""
    (path.parent / "paper").mkdir(parents=True, exist_ok=True)
    template = (Path(__file__).parent / "page.md").read_text()
    parts: dict[str, str] = {f"figure {name}": _section(figure, store) for name, figure in FIGURES.items()}
    parts["host"] = f"{HOST_S * 1e3:.1f}"
    parts["others"] = _others(store)
    total = figures.million(store)
    parts["million"] = (
        f"{total['num_requests']:,.0f} requests ({total['num_rows']:,.0f} rows) took "
        f"{total['scheduling_s']:.0f} s of CPU time in the scheduler, "
        f"{total['us_per_request']:.0f} us per request"
    )
    parts["queue"] = f"{figures.longest_queue(store):,}"
    for name, text in parts.items():
        template = template.replace("{{" + name + "}}", text)
    assert "{{" not in template, template[template.index("{{") :][:40]
    path.write_text(template)


def table(figure: Figure, values: Any) -> str:
    """Returns a figure's rows as a table in Markdown.

    Each line of the table is a panel. If all panels have the same labels, each label is a column; otherwise
    one cell lists all values of the panel.
    """
    panels: dict[str, dict[str, str]] = {}
    rows = figure.rows(values)
    for row in rows:
        panels.setdefault(row.panel, {})[row.label] = _cell(row, figure)
    what = "ours (paper)" if any(row.paper is not None for row in rows) else "ours"
    head = f"{what}, {figure.unit}" if figure.unit else what
    labels = list(next(iter(panels.values())))
    if all(list(cells) == labels for cells in panels.values()):
        lines = [[head, *labels], *([panel, *cells.values()] for panel, cells in panels.items())]
    else:
        lists = ("; ".join(f"{label}: {cell}" for label, cell in cells.items()) for cells in panels.values())
        lines = [[head, ""], *([panel, cell] for panel, cell in zip(panels, lists, strict=True))]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(lines[0]), *text[1:]])


def _cell(row: Row, figure: Figure) -> str:
    """Returns a value, and in parentheses the paper's value."""
    ours = f"{row.ours:.{figure.digits}f}"
    fitted = ", fitted" if row.is_fitted else ""
    match row.paper:
        case None:
            return ours
        case low, high:
            return f"{ours} ({low:g}-{high:g})"
        case paper:
            return f"{ours} ({paper:g}{fitted})"


def _section(figure: Figure, values: Any) -> str:
    picture = f"![{figure.title}](paper/figure-{figure.name}.svg)"
    return "\n\n".join([picture, table(figure, values), *([figure.notes] if figure.notes else [])])


def _others(values: Any) -> str:
    """Returns a table of the errors in figure 13 under OTHER_POINTS, the alternative assumptions."""
    lines = ["| | " + " | ".join(f"{w}: {s}" for w in published.BATCHES for s in SYSTEMS[1:]) + " |"]
    lines.append("|" + "---|" * (2 * len(SYSTEMS) - 1))
    papers = [published.BATCHES[w][s] for w in published.BATCHES for s in SYSTEMS[1:]]
    for name, points in OTHER_POINTS.items():
        found = (values[point]["batched"] / paper - 1 for point, paper in zip(points, papers, strict=True))
        lines.append(f"| {name} | {' | '.join(f'{error:+.0%}' for error in found)} |")
    return "\n".join(lines)

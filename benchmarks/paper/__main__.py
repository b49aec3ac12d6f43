"""Command line of the reproduced evaluation. benchmarks/README.md describes it."""

import argparse
import sys
from pathlib import Path

from paper import page, runner
from paper.figures import FIGURES, names_of
from paper.store import RESULTS, Store


def main() -> None:
    """Computes the figures that the command line selects and writes them."""
    parser = argparse.ArgumentParser(
        prog="python -m paper", description="Reproduces the PagedAttention paper's evaluation."
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--figure", help=f"one of {', '.join(FIGURES)}; 18 and 19 select a and b")
    chosen.add_argument("--all", action="store_true", help="all figures, and the page docs/paper.md")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of the stored values (default: %(default)s)"
    )
    parser.add_argument(
        "--docs", type=Path, default=page.DOCS, help="folder for pictures and page (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, help="processes for simulations (default: 2)")
    args = parser.parse_args()
    names = list(FIGURES) if args.all else names_of(args.figure)
    if not names:
        parser.error(f"the figure must be one of {', '.join(FIGURES)}, got {args.figure!r}")
    store = Store(args.results)
    points = [point for name in names for point in FIGURES[name].points]
    try:
        runner.complete(points, store, args.processes)
    except KeyboardInterrupt:
        print(
            f"stopped; {store.path} has the finished points, and the next run continues from them",
            file=sys.stderr,
        )
        sys.exit(130)
    for name in names:
        page.write_figure(name, store, args.docs / "paper", args.results)
        print(f"figure {name}: {FIGURES[name].title}\n\n{page.table(FIGURES[name], store)}\n")
    if args.all:
        store.keep_only(points)
        page.write_page(store, args.docs / "paper.md")
        print(f"{args.docs / 'paper.md'}")


if __name__ == "__main__":
    main()

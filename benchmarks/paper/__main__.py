"""The command line of the evaluation; benchmarks/README.md describes it."""

import argparse
import sys
from pathlib import Path

from paper import page, runner
from paper.figures import FIGURES, names_of
from paper.store import RESULTS, Store


def main() -> None:
    """Runs the experiments that the command line selects."""
    parser = argparse.ArgumentParser(
        prog="python -m paper", description="Runs the PagedAttention paper's evaluation again."
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--figure", help=f"one of {', '.join(FIGURES)}; 18 and 19 mean both of theirs")
    chosen.add_argument("--all", action="store_true", help="all of them, and the page docs/paper.md")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where values are kept (default: %(default)s)"
    )
    parser.add_argument(
        "--docs", type=Path, default=page.DOCS, help="where pictures and page go (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=2, help="that simulate at a time (default: 2)")
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
            f"stopped; what is done is in {store.path}, and the next run goes on from there", file=sys.stderr
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

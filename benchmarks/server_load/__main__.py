"""Runs load tests of the server and prints a table. The exit status is 1 if a value exceeds its bound."""

import argparse
import asyncio
import sys
from pathlib import Path

from server_load.scenarios import SCENARIOS, Figure


def main() -> None:
    """Runs the chosen scenarios."""
    parser = argparse.ArgumentParser(prog="python -m server_load", description=__doc__)
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)} (default: all)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table to FILE")
    args = parser.parse_args()
    unknown = set(args.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"SCENARIO must be one of {', '.join(SCENARIOS)}, got {sorted(unknown)}")
    lines = ["| scenario | figure | value | at most |", "|---|---|---|---|"]
    holds = True
    print(*lines, sep="\n", flush=True)
    for name in args.scenarios or SCENARIOS:
        for figure in asyncio.run(SCENARIOS[name]()):
            holds &= figure.holds
            lines.append(_row(name, figure))
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(not holds)


def _row(name: str, figure: Figure) -> str:
    bound = "" if figure.bound is None else f"{figure.bound:g}" if figure.holds else f"**{figure.bound:g}**"
    return f"| {name} | {figure.name} | {figure.value:.4g} {figure.unit} | {bound} |"


if __name__ == "__main__":
    main()

"""Runs load tests of the server and prints a table. The exit status is 1 if a value exceeds its bound."""

import argparse
import asyncio
import sys
from pathlib import Path

from server_load.scenarios import SCENARIOS, Measurement


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
    lines = ["| scenario | measurement | value | at most |", "|---|---|---|---|"]
    holds = True
    print(*lines, sep="\n", flush=True)
    for name in args.scenarios or SCENARIOS:
        for measurement in asyncio.run(SCENARIOS[name]()):
            holds &= measurement.holds
            lines.append(_row(name, measurement))
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(not holds)


def _row(name: str, result: Measurement) -> str:
    bound = "" if result.bound is None else f"{result.bound:g}" if result.holds else f"**{result.bound:g}**"
    return f"| {name} | {result.name} | {result.value:.4g} {result.unit} | {bound} |"


if __name__ == "__main__":
    main()

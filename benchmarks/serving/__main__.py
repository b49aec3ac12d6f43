"""Command line of the comparison. benchmarks/README.md describes it."""

import argparse
import json
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from serving import picture, report
from serving.checkpoint import write_checkpoint
from serving.compare import Comparison, Plan
from serving.engines import ROOT, Launcher, parse_engine
from serving.process import MachineLock
from serving.workloads import GROUPS, SCENARIOS


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serving", description="Compares LLM engines on a CPU with workloads of a server."
    )
    parser.add_argument(
        "--engines",
        default="ours",
        help="comma-separated: ours, llm (LLM.generate), ours@TREE or llm@TREE (another source tree), vllm "
        "(compiled), vllm-eager, openvino, llama.cpp. Each can be followed by :NAME=VALUE, an argument of "
        "that engine, or by :weights=VALUE (gguf for ours and llm; fp16, int8 or int4 for openvino). Ratios "
        "are relative to the first engine (default: ours)",
    )
    parser.add_argument(
        "--scenarios",
        default="server",
        help=f"comma-separated: {', '.join(SCENARIOS)}; or a group: {', '.join(GROUPS)} (default: server)",
    )
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated (default: both)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds that count, after one warm-up round")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: random weights)")
    parser.add_argument(
        "--gguf", type=Path, help="the same model as a GGUF file, for llama.cpp and weights=gguf"
    )
    parser.add_argument(
        "--reference", type=Path, help="JSON file with the expected outputs of 'crowd' in float32 (token ids)"
    )
    parser.add_argument(
        "--peers", type=Path, default=ROOT / ".peers", help="folder with the environments of the peers"
    )
    parser.add_argument(
        "--under", default="", help="hold a lock with this command during measurements, such as 'flock FILE'"
    )
    parser.add_argument("--out", type=Path, help="write OUT.json, OUT.md and, for several engines, OUT.svg")
    return parser


def main() -> None:
    """Runs the comparison and prints the tables."""
    parser = make_parser()
    args = parser.parse_args()
    try:
        specs = [parse_engine(text) for text in args.engines.split(",")]
    except ValueError as error:
        parser.error(str(error))
    scenarios = []
    for name in args.scenarios.split(","):
        if name not in SCENARIOS and name not in GROUPS:
            parser.error(f"the scenario must be one of {', '.join((*SCENARIOS, *GROUPS))}, got {name!r}")
        scenarios += [SCENARIOS[member] for member in GROUPS.get(name, (name,))]
    if args.gguf is None and any(spec.needs_gguf for spec in specs):
        parser.error("--gguf must be set for llama.cpp and weights=gguf")
    model = (args.model or ROOT / "benchmarks" / "checkpoints" / "serving").resolve()
    if args.model is None:
        write_checkpoint(model)
    plan = Plan(
        engines=specs,
        scenarios=scenarios,
        dtypes=args.dtypes.split(","),
        num_rounds=args.rounds,
        vocab_size=json.loads((model / "config.json").read_text())["vocab_size"],
        reference=json.loads(args.reference.read_text()) if args.reference else None,
    )
    with tempfile.TemporaryDirectory() as logs:
        launcher = Launcher(model, args.peers.resolve(), Path(logs), args.gguf and args.gguf.resolve())
        missing = [spec for spec in specs if not launcher.python(spec).exists()]
        if missing:
            names = ", ".join(spec.label for spec in missing)
            print(f"skipped, because there is no environment for them (see make bench-peers): {names}")
            plan = replace(plan, engines=[spec for spec in specs if spec not in missing])
        comparison = Comparison(plan, launcher, MachineLock(shlex.split(args.under)), _say)

        def save() -> None:
            if args.out:
                report.write(comparison, args.out)

        comparison.run(save)
    print(f"\n{report.processor()}\n\n{report.tables(comparison)}")
    if args.out and len(plan.engines) > 1:
        picture.draw(comparison.runs, args.out.with_suffix(".svg"))
    if comparison.failures:
        sys.exit("\n".join(["failed:", *comparison.failures]))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

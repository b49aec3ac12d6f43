"""Throughput of the HTTP server as a share of the throughput of `LLM.generate`.

    python -m serving.http_share --dtypes float32,bfloat16 --rounds 8

Both run the same 64 requests and alternate round by round. The server and its 64 clients share the cores of
the machine with the model.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from serving.checkpoint import write_checkpoint
from serving.compare import measure
from serving.engines import ROOT, Launcher, commit_of, parse_engine
from serving.process import EngineProcess
from serving.workloads import SCENARIOS

MODES = {"1 step per dispatch": 1, "8 steps per dispatch": 8}


def main() -> None:
    """Runs the comparison and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m serving.http_share", description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16", help="comma-separated (default: both)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count, after one warm-up round")
    parser.add_argument("--model", type=Path, help="checkpoint folder (default: random weights)")
    args = parser.parse_args()
    model = (args.model or ROOT / "benchmarks" / "checkpoints" / "serving").resolve()
    if args.model is None:
        write_checkpoint(model)
    print(f"commit {commit_of(ROOT)}; medians (lowest and highest round) of {args.rounds} rounds\n")
    print("| dtype | decode steps | `LLM.generate`, output tokens/s | over HTTP | ratio |")
    print("|---|---|---|---|---|")
    for dtype in args.dtypes.split(","):
        with tempfile.TemporaryDirectory() as logs:
            compare(Launcher(model, ROOT / ".peers", Path(logs)), model, dtype, args.rounds)


def compare(launcher: Launcher, model: Path, dtype: str, num_rounds: int) -> None:
    """Measures one dtype and prints a row per mode."""
    scenario, vocab_size = SCENARIOS["http"], json.loads((model / "config.json").read_text())["vocab_size"]
    processes: dict[tuple[str, bool], EngineProcess] = {}
    speeds: dict[tuple[str, bool], list[float]] = {}
    try:
        for mode, num_steps in MODES.items():
            for over_http in (False, True):
                spec = parse_engine(f"{'ours' if over_http else 'llm'}:num_scheduler_steps={num_steps}")
                processes[mode, over_http] = launcher.start(spec, dtype, server=over_http)
                processes[mode, over_http].stop()
                speeds[mode, over_http] = []
        for round_ in range(num_rounds + 1):
            # The order alternates, because the position in a round affects the speed.
            for key in sorted(processes, reverse=round_ % 2 == 1):
                _, metrics = measure(processes[key], scenario.make(vocab_size, round_), scenario)
                if round_ > 0:
                    speeds[key].append(metrics.output_tokens_per_s)
    finally:
        for process in processes.values():
            process.close()
    for mode in MODES:
        plain, http = speeds[mode, False], speeds[mode, True]
        shares = [b / a for a, b in zip(plain, http, strict=True)]
        print(f"| {dtype} | {mode} | {_row(plain, 0)} | {_row(http, 0)} | {_row(shares, 3)} |", flush=True)


def _row(values: list[float], digits: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


if __name__ == "__main__":
    main()

"""Tests and measurements of the engine and the kernels on an NVIDIA GPU.

    make gpu-check                                        all parts, in less than 40 minutes
    make gpu-check ARGS='--part kernel-tests'             one part, in less than 10 minutes
    python benchmarks/gpu_check.py --allow-cpu --tiny     toy sizes, on any machine

The parts check the exactness of the engine, measure the throughput of 1B and 8B Llamas with random weights,
run the kernel tests, and compare the speed of the kernels with other implementations. A part consists of one
or several sections.

Required packages: jax, flax, numpy, safetensors, tokenizers and jaxtyping. jax-paged need not be installed,
and nothing is downloaded. Each section runs in a new process. If a section fails, hangs or runs out of
memory, it is reported and the others still run. The program prints a table and writes a JSON file. The exit
status is 1 if a section failed, and 2 if there is no GPU.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_engine
import gpu_kernels

ROOT = Path(__file__).resolve().parent.parent
PART_S = 520  # time limit of a part (seconds)

Report = dict[str, Any]


def device(_: bool) -> Iterator[Report]:
    """Yields the device, its driver, the versions of packages, and the commit."""
    import jax

    found = jax.devices()[0]
    stats = found.memory_stats() or {}
    status = _output("git", "-C", str(ROOT), "status", "--porcelain")
    yield {
        "platform": found.platform,
        "device": found.device_kind,
        "num_devices": jax.device_count(),
        "memory_limit_bytes": stats.get("bytes_limit"),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": None if status is None else bool(status),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def llama(hf_config: Report, backend: str) -> Callable[[bool], Iterator[Report]]:
    """Returns the section that measures the throughput of a Llama with an attention backend."""
    return lambda tiny: gpu_engine.throughput(hf_config, tiny, backend)


# By name: the function that runs the section, and its time limit (seconds).
SECTIONS: dict[str, tuple[Callable[[bool], Iterator[Report]], int]] = {
    "device": (device, 120),
    "exactness": (gpu_engine.exactness, 150),
    "llama-1b": (llama(gpu_engine.LLAMA_1B, "xla"), 150),
    "llama-8b": (llama(gpu_engine.LLAMA_8B, "xla"), 260),
    "agreement": (gpu_engine.agreement, 150),
    "llama-1b-pallas": (llama(gpu_engine.LLAMA_1B, "pallas"), 150),
    "llama-8b-pallas": (llama(gpu_engine.LLAMA_8B, "pallas"), 260),
    "self-check": (gpu_kernels.self_check, 300),
    "kernel-tests": (gpu_kernels.kernel_tests, PART_S),
    "kernel-speed": (gpu_kernels.kernel_speed, PART_S),
}
PARTS = {
    "self-check": ("self-check",),
    "kernel-tests": ("kernel-tests",),
    "engine": ("exactness", "llama-1b", "llama-8b"),
    "engine-pallas": ("agreement", "llama-1b-pallas", "llama-8b-pallas"),
    "kernel-speed": ("kernel-speed",),
}


def run_here(name: str, tiny: bool) -> int:
    """Runs a section in this process and prints each result as soon as it is known; returns the exit status.

    Args:
        name: Key of SECTIONS.
        tiny: Whether to use toy sizes.
    """
    sys.path.insert(0, str(ROOT))  # jax-paged need not be installed
    try:
        for result in SECTIONS[name][0](tiny):
            print(gpu_kernels.MARK + json.dumps(result), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(gpu_kernels.MARK + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def run_apart(name: str, flags: list[str], limit_s: float) -> Report:
    """Runs a section in a new process.

    Args:
        name: Key of SECTIONS.
        flags: Further options of the command line.
        limit_s: Time after which the process is killed (seconds).

    Returns:
        The results of the section. If it failed, they also have an "error".
    """
    start = time.perf_counter()
    command = [sys.executable, __file__, "--section", name, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    error = None
    try:
        output, _ = process.communicate(timeout=max(limit_s, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        error = f"not done after {limit_s:.0f} s"
    report: Report = {}
    for line in output.splitlines():
        if line.startswith(gpu_kernels.MARK):
            report |= json.loads(line.removeprefix(gpu_kernels.MARK))
    if error is None and process.returncode and "error" not in report:
        error = f"the process ended with code {process.returncode}"
    if error is not None:
        report["error"] = error
    return report | {"section_s": gpu_engine.since(start)}


def table(report: Report) -> str:
    """Returns the report as text."""
    found = report["device"]
    lines = [f"{found['device']}, driver {found['driver']}, jax {found['jax']}, commit {found['commit']}", ""]
    if report["is_tiny"]:
        lines.insert(1, "Toy sizes: the times below do not measure performance.")
    for name, result in report.get("exactness", {}).items():
        if isinstance(result, dict):
            equal = f"{result['equal']} of {result['requests']} equal"
            detail = f"{result['preemptions']} preemptions, {result['cached_tokens']} cached tokens"
            lines.append(f"exact: {name:<26}{equal:>18}   {detail}")
    for backend, errors in report.get("agreement", {}).get("log_probabilities", {}).items():
        lines.append(f"log-probabilities with {backend}: mean error {errors['mean_error']:.2g}")
    if "outcome" in report.get("self-check", {}):
        lines.append(
            f"self-check of the kernels: {report['self-check']['outcome']}, {report['self-check']['reason']}"
        )
    llamas = [name for name in SECTIONS if report.get(name, {}).get("rounds")]
    if llamas:
        lines += [
            "",
            f"{'':<16}{'tokens/s':>10}{'TTFT p50/p99 s':>18}{'decode step s':>15}{'compiled s':>12}",
        ]
    for name in llamas:
        for r in report[name]["rounds"]:
            ttft = f"{r['ttft_p50_s']:.2f}/{r['ttft_p99_s']:.2f}"
            row = f"{name:<16}{r['output_tokens_per_s']:>10.1f}{ttft:>18}{r['decode_step_p50_s']:>15.4f}"
            lines.append(f"{row}{report[name]['all_compiled_s']:>12.1f}")
    if "kernel-tests" in report or "kernel-speed" in report:
        lines += ["", *gpu_kernels.table(report)]
    failed = [
        f"FAILED {name}: {report[name]['error']}" for name in SECTIONS if "error" in report.get(name, {})
    ]
    return "\n".join([*lines, "", *(failed or ["all sections passed"])])


def main() -> int:
    """Runs the chosen parts, prints the table and writes the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/gpu-<device>[-<part>]-<date>.json"
    )
    parser.add_argument("--allow-cpu", action="store_true", help="run even if there is no GPU")
    parser.add_argument("--tiny", action="store_true", help="use toy sizes, to test this program")
    parser.add_argument("--part", choices=PARTS, help="run only the sections of this part")
    parser.add_argument("--section", choices=SECTIONS, help="run only this section, in this process")
    args = parser.parse_args()
    if args.section:
        return run_here(args.section, args.tiny)

    start = time.perf_counter()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    flags = ["--tiny"] * args.tiny
    report: Report = {"date": today, "is_tiny": args.tiny, "device": run_apart("device", flags, 120)}
    found = report["device"]
    if "error" in found or (found["platform"] != "gpu" and not args.allow_cpu):
        print(
            f"gpu_check needs an NVIDIA GPU and JAX with CUDA (the extra cuda13); JAX found: "
            f"{found.get('error', found.get('device'))}. To test the program without a GPU, add "
            "--allow-cpu --tiny.",
            file=sys.stderr,
        )
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", found["device"].lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / "-".join(
        ["gpu", slug, *([args.part] if args.part else []), f"{today}.json"]
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    part_start = start  # the time of the section "device" counts for the first part
    for part in [args.part] if args.part else PARTS:
        for name in PARTS[part]:
            print(f"{name} ...", file=sys.stderr, flush=True)
            limit_s = min(SECTIONS[name][1], PART_S - (time.perf_counter() - part_start))
            report[name] = run_apart(name, flags, limit_s)
            report["total_s"] = gpu_engine.since(start)
            # The file is written after every section, so that an interrupted run keeps its results.
            out.write_text(json.dumps(report, indent=2) + "\n")
        part_start = time.perf_counter()
    print(table(report))
    print(f"written to {out}")
    return int(any("error" in report.get(name, {}) for name in SECTIONS))


if __name__ == "__main__":
    sys.exit(main())

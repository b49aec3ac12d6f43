"""Checks engine and kernels on a GPU: exactness, throughput of Llamas of 1B and 8B with random weights,
the kernel tests, and the kernels' speed beside other implementations.

    make gpu-check                                        on a machine with an NVIDIA GPU; under 30 minutes
    make gpu-check ARGS='--part engine'                   under 9 minutes; or: kernel-tests, kernel-speed
    python benchmarks/gpu_check.py --allow-cpu --tiny     the same program at toy sizes, on any machine

Needs jax, flax, numpy, safetensors, tokenizers and jaxtyping; jax-paged itself need not be installed, nothing
is downloaded. Every section runs in a process of its own: one that fails, hangs or runs out of memory is
reported, the others run on clean memory. Prints a table and writes a JSON file; exits with 1 if anything
failed, with 2 if there is no GPU.
"""

import argparse
import datetime
import json
import math
import platform
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_kernels

ROOT = Path(__file__).resolve().parent.parent
PART_S = 560
MARK = "RESULT "

Report = dict[str, Any]

SMALL: Report = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    # 0.02 would give nearly the same token at every step.
    "initializer_range": 0.1,
}
LLAMA3: Report = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
LLAMA_1B: Report = LLAMA3 | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LLAMA_8B: Report = LLAMA3 | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
}


def device(_: bool) -> Iterator[Report]:
    """What the check runs on."""
    import jax

    found = jax.devices()[0]
    stats = found.memory_stats() or {}
    yield {
        "platform": found.platform,
        "device": found.device_kind,
        "num_devices": jax.device_count(),
        "memory_limit_bytes": stats.get("bytes_limit"),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "uncommitted_changes": _output("git", "-C", str(ROOT), "status", "--porcelain") not in ("", None),
    }


def exactness(tiny: bool) -> Iterator[Report]:
    """Greedy float32 tokens of the engine against the dense call, in every way that the engine can run."""
    from jax_paged.models.weights import random_model

    loaded = random_model(SMALL, "float32")
    rng = random.Random(0)
    prefix = [rng.randrange(512) for _ in range(48)]
    requests = []
    for i in range(16 if tiny else 64):
        tail = [rng.randrange(512) for _ in range(rng.choice([1, 15, 16, 17, 100, rng.randint(1, 150)]))]
        requests.append((prefix + tail if i % 2 else tail, rng.randint(8, 48)))
    longest = max(len(prompt) + num_tokens for prompt, num_tokens in requests)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32} if tiny else {"max_num_seqs": 32}
    engine = _engine(loaded, max_model_len=256, num_gpu_blocks_override=1024, **sizes)
    yield _compare("batched", loaded, requests, _run(engine, requests)[0])
    yield _compare("batched, cached prefixes", loaded, requests, _run(engine, requests)[0])
    some = requests[:4]
    yield _compare("one at a time", loaded, some, [_run(engine, [r])[0][0] for r in some])
    engine.close()
    engine = _engine(
        loaded,
        max_model_len=256,
        max_num_seqs=8 if tiny else 16,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        num_gpu_blocks_override=longest // 16 + 8,
    )
    states, _ = _run(engine, requests)
    engine.close()
    assert any(s.group.metrics.num_preemptions for s in states), "the pool is too large to preempt anyone"
    yield _compare("small pool, small budget", loaded, requests, states)


def _compare(name: str, loaded: Any, requests: list[tuple[list[int], int]], states: list[Any]) -> Report:
    """Compares outputs with the dense call on prompt and output: equal at each position is equal greedily."""
    import jax
    import numpy as np
    from flax import nnx

    tokens = np.zeros((len(requests), 256), np.int32)
    for row, (prompt, _), state in zip(tokens, requests, states, strict=True):
        text = prompt + state.seq.output_token_ids
        row[: len(text)] = text
    # The engine sees to its own precision.
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(loaded.model, tokens))
    num_equal, margin, distinct = 0, math.inf, set()
    for row, (prompt, num_tokens), state in zip(logits, requests, states, strict=True):
        dense = row[len(prompt) - 1 : len(prompt) - 1 + num_tokens]
        num_equal += state.seq.output_token_ids == dense.argmax(-1).tolist()
        second, best = np.sort(dense, axis=-1)[:, -2:].T
        margin = min(margin, float((best - second).min()))
        distinct |= set(state.seq.output_token_ids)
    found: Report = {
        "requests": len(requests),
        "equal": num_equal,
        "smallest_margin": margin,
        "distinct_tokens": len(distinct),
        "preemptions": sum(s.group.metrics.num_preemptions for s in states),
        "cached_tokens": sum(s.group.metrics.num_cached_tokens for s in states),
    }
    if num_equal < len(requests):
        raise AssertionError(f"{name}: tokens differ from the dense call's: {found}")
    return {name: found}


def throughput(hf_config: Report, tiny: bool) -> Iterator[Report]:
    """64 requests of 256 tokens in and 128 out, submitted at once, bfloat16."""
    import jax

    from jax_paged.models.weights import random_model

    num_requests, input_len, output_len = (4, 16, 8) if tiny else (64, 256, 128)
    if tiny:
        hf_config = hf_config | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
        hf_config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    start = time.perf_counter()
    loaded = random_model(hf_config, "bfloat16")
    jax.block_until_ready(loaded.model)
    yield {"weights_s": _since(start), "weight_bytes": loaded.weight_bytes}

    start = time.perf_counter()
    engine = _engine(
        loaded,
        max_model_len=64 if tiny else 1024,
        max_num_seqs=num_requests,
        max_num_batched_tokens=32 if tiny else 2048,
        enable_prefix_caching=False,
    )
    config = engine.runner.config
    yield {"ready_s": _since(start), "kv_cache_bytes": config.kv_cache_bytes, "backend": config.backend}
    engine.runner.wait_until_compiled()
    yield {"all_compiled_s": _since(start), "compile_plan": engine.runner.compile_plan().splitlines()}

    rng = random.Random(0)
    requests = [
        ([rng.randrange(config.vocab_size) for _ in range(input_len)], output_len)
        for _ in range(num_requests)
    ]
    _run(engine, requests)
    rounds = []
    for _ in range(2):
        start = time.perf_counter()
        states, steps = _run(engine, requests)
        wall_s = time.perf_counter() - start
        first = [s.group.metrics.first_token_time - s.group.metrics.arrival_time for s in states]
        decode = [s for s, is_decode in steps if is_decode]
        prefill = [s for s, is_decode in steps if not is_decode]
        rounds.append(
            {
                "output_tokens_per_s": round(num_requests * output_len / wall_s, 1),
                "wall_s": round(wall_s, 3),
                "ttft_p50_s": _percentile(first, 50),
                "ttft_p99_s": _percentile(first, 99),
                "prefill_steps": len(prefill),
                "prefill_step_p50_s": _percentile(prefill, 50),
                "decode_steps": len(decode),
                "decode_step_p50_s": _percentile(decode, 50),
                "decode_step_p99_s": _percentile(decode, 99),
            }
        )
        yield {"workload": f"{num_requests} x {input_len} in, {output_len} out", "rounds": rounds}
    stats = jax.devices()[0].memory_stats() or {}
    yield {"peak_bytes": stats.get("peak_bytes_in_use")}


def _engine(loaded: Any, **limits: Any) -> Any:
    from jax_paged import EngineArgs, LLMEngine

    args = EngineArgs(
        model="random weights",
        skip_tokenizer_init=True,
        attention_backend="xla",
        **limits,
    )
    return LLMEngine(args, loaded=loaded)


def _run(engine: Any, requests: list[tuple[list[int], int]]) -> tuple[list[Any], list[tuple[float, bool]]]:
    """Runs greedy requests submitted at once.

    Returns:
        The requests' states; and of each step its seconds, and whether all prompts were computed before.
    """
    from jax_paged import SamplingParams

    for i, (prompt, max_tokens) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    states: dict[str, Any] = {}
    steps = []
    while engine.has_unfinished_requests():
        is_decode = len(states) == len(requests)
        start = time.perf_counter()
        changed = engine.advance()
        steps.append((time.perf_counter() - start, is_decode))
        states |= {state.group.request_id: state for state in changed}
    for i, (_, max_tokens) in enumerate(requests):
        num_tokens = len(states[str(i)].seq.output_token_ids)
        assert num_tokens == max_tokens, f"request {i} ended after {num_tokens} of {max_tokens} tokens"
    return [states[str(i)] for i in range(len(requests))], steps


def _percentile(values: list[float], percent: float) -> float | None:
    """Returns the smallest value that `percent` of the values do not exceed; None of no values."""
    return round(sorted(values)[math.ceil(len(values) * percent / 100) - 1], 5) if values else None


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 2)


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


# Name -> (what it runs, most seconds).
SECTIONS: dict[str, tuple[Callable[[bool], Iterator[Report]], int]] = {
    "device": (device, 60),
    "exactness": (exactness, 150),
    "llama-1b": (lambda tiny: throughput(LLAMA_1B, tiny), 200),
    "llama-8b": (lambda tiny: throughput(LLAMA_8B, tiny), 300),
    "kernel-tests": (gpu_kernels.kernel_tests, 560),
    "kernel-speed": (gpu_kernels.kernel_speed, 560),
}
PARTS = {
    "engine": ("exactness", "llama-1b", "llama-8b"),
    "kernel-tests": ("kernel-tests",),
    "kernel-speed": ("kernel-speed",),
}


def run_here(name: str, tiny: bool) -> int:
    """Runs a section in this process and prints what it finds as it comes."""
    # The folders models and pallas_kernels install as parts of jax_paged; without installation they are
    # found at the top of the repository.
    sys.path.insert(0, str(ROOT))
    import jax_paged

    jax_paged.__path__.append(str(ROOT))
    try:
        for part in SECTIONS[name][0](tiny):
            print(MARK + json.dumps(part), flush=True)
    except Exception as error:
        traceback.print_exc()
        print(MARK + json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
        return 1
    return 0


def run_apart(name: str, flags: list[str], limit_s: float) -> Report:
    """Runs a section in a process of its own; returns what it has found, "error" included if it failed."""
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
        if line.startswith(MARK):
            report |= json.loads(line.removeprefix(MARK))
    if error is None and process.returncode and "error" not in report:
        error = f"the process ended with code {process.returncode}"
    if error is not None:
        report["error"] = error
    return report | {"section_s": _since(start)}


def table(report: Report) -> str:
    """Returns the report for people to read."""
    found = report["device"]
    lines = [f"{found['device']}, driver {found['driver']}, jax {found['jax']}, commit {found['commit']}", ""]
    if report["is_tiny"]:
        lines.insert(1, "Toy sizes: the times below say nothing about speed.")
    for name, result in report.get("exactness", {}).items():
        if isinstance(result, dict):
            equal = f"{result['equal']} of {result['requests']} equal"
            detail = f"{result['preemptions']} preemptions, {result['cached_tokens']} cached tokens"
            lines.append(f"exact: {name:<26}{equal:>18}   {detail}")
    if "llama-1b" in report:
        lines += [
            "",
            f"{'':<10}{'tokens/s':>10}{'TTFT p50/p99 s':>18}{'decode step s':>15}{'compiled s':>12}",
        ]
    for name in ("llama-1b", "llama-8b"):
        for r in report.get(name, {}).get("rounds", []):
            ttft = f"{r['ttft_p50_s']:.2f}/{r['ttft_p99_s']:.2f}"
            row = f"{name:<10}{r['output_tokens_per_s']:>10.1f}{ttft:>18}{r['decode_step_p50_s']:>15.4f}"
            lines.append(f"{row}{report[name]['all_compiled_s']:>12.1f}")
    if "kernel-tests" in report or "kernel-speed" in report:
        lines += ["", *gpu_kernels.table(report)]
    failed = [
        f"FAILED {name}: {report[name]['error']}" for name in SECTIONS if "error" in report.get(name, {})
    ]
    return "\n".join([*lines, "", *(failed or ["all sections passed"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-<device>-<date>.json")
    parser.add_argument("--allow-cpu", action="store_true", help="run without a GPU too")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to try the program out")
    parser.add_argument("--part", choices=PARTS, help="run this part alone")
    parser.add_argument("--section", choices=SECTIONS, help="run this one alone, here")
    args = parser.parse_args()
    if args.section:
        return run_here(args.section, args.tiny)

    start = time.perf_counter()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report: Report = {"date": today, "is_tiny": args.tiny}
    for part in ["device", *([args.part] if args.part else PARTS)]:
        part_start = time.perf_counter()
        for name in PARTS.get(part, (part,)):
            print(f"{name} ...", file=sys.stderr, flush=True)
            limit_s = min(SECTIONS[name][1], PART_S - (time.perf_counter() - part_start))
            report[name] = run_apart(name, ["--tiny"] * args.tiny, limit_s)
        found = report["device"].get("error", report["device"].get("device"))
        if "error" in report["device"] or (report["device"]["platform"] != "gpu" and not args.allow_cpu):
            print(
                f"gpu_check needs an NVIDIA GPU and a jax that sees it (the extra cuda13); jax found: "
                f"{found}. To try the program out without one: --allow-cpu --tiny",
                file=sys.stderr,
            )
            return 2
    report["total_s"] = _since(start)
    slug = re.sub(r"[^a-z0-9]+", "-", report["device"]["device"].lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / "-".join(
        ["gpu", slug, *([args.part] if args.part else []), f"{today}.json"]
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"written to {out}")
    return int(any("error" in report.get(name, {}) for name in SECTIONS))


if __name__ == "__main__":
    sys.exit(main())

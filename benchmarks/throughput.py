"""Throughput of the engine for a fixed workload: 64 greedy requests submitted at once.

    python benchmarks/throughput.py                                  random weights
    python benchmarks/throughput.py --model DIR --reference FILE     a checkpoint and its expected outputs

The prompts have 16 to 256 random tokens, the outputs 16 to 128 tokens; end tokens are ignored. Without
--model, the model is a Llama with random weights: 40M parameters, 8 layers, hidden size 512, 8 heads,
4 KV heads, vocabulary 8192, untied embeddings.
"""

import argparse
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

from serving.checkpoint import HF_CONFIG
from serving.workloads import crowd

START = time.time()


def process_start() -> float:
    """Returns the start time of this process as time.time(); outside Linux, when this module was imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except OSError:
        return START
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))


class DeviceTimer:
    """Wrapper of an engine's compiled programs that measures how long each of them runs.

    Attributes:
        seconds: Sum of all run times.
        steps: Run times of the steps (seconds), by program name.
    """

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.seconds = 0.0
        self.steps: dict[str, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def run(self, program: Any, *args: Any) -> Any:
        """Runs a program, waits for its result and returns the result."""
        import jax

        start = time.perf_counter()
        out = jax.block_until_ready(self._compiled.run(program, *args))
        elapsed = time.perf_counter() - start
        self.seconds += elapsed
        self.steps.setdefault(str(program), []).append(elapsed)
        return out


def main() -> None:
    """Runs the workload and prints the compile plan and the best round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder (default: random weights)")
    parser.add_argument("--reference", type=Path, help="JSON file with the 64 expected outputs (token ids)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3, help="runs of the workload (default: %(default)s)")
    parser.add_argument("--steps", action="store_true", help="print the median step time of each bucket")
    args = parser.parse_args()

    from jax_paged import LLM, SamplingParams
    from jax_paged.models.weights import random_model
    from jax_paged.worker.executor import LocalExecutor

    loaded = None if args.model else random_model(HF_CONFIG, args.dtype)
    llm = LLM(
        model=args.model or "random",
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enable_prefix_caching=False,
        loaded=loaded,
    )
    warm = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [300] * 8}], warm, use_tqdm=False)
    startup_s = time.time() - process_start()
    executor = llm.llm_engine.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor.runner
    runner.compiled.wait()
    compiled_s = time.time() - process_start()

    requests = crowd()
    prompts = [{"prompt_token_ids": r.prompt} for r in requests]
    params = [SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True) for r in requests]
    timer = runner.compiled = DeviceTimer(runner.compiled)
    rounds = []
    for _ in range(args.rounds):
        timer.seconds, timer.steps = 0.0, {}
        start, arrival = time.perf_counter(), time.monotonic()
        results = llm.generate(prompts, params, use_tqdm=False)
        wall_s = time.perf_counter() - start
        outputs = [list(r.outputs[0].token_ids) for r in results]
        first = sorted(r.metrics.first_token_time - arrival for r in results)
        rounds.append(
            {
                "wall_s": round(wall_s, 2),
                "output_tokens_per_s": round(sum(map(len, outputs)) / wall_s, 1),
                "ttft_p50_s": round(statistics.median(first), 3),
                "ttft_p99_s": round(first[-1], 3),
                "host_share": round(1 - timer.seconds / wall_s, 3),
                "steps": sum(map(len, timer.steps.values())),
            }
        )
        if args.steps:
            for name, times in sorted(timer.steps.items()):
                print(f"  {name:<14} {len(times):4d} steps, median {statistics.median(times) * 1e3:7.2f} ms")
    best = max(rounds, key=lambda r: r["output_tokens_per_s"])
    report: dict[str, Any] = {
        "dtype": args.dtype,
        **best,
        "all_rounds_tokens_per_s": [r["output_tokens_per_s"] for r in rounds],
        "startup_s": round(startup_s, 2),
        "all_buckets_compiled_s": round(compiled_s, 2),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "backend": runner.config.attention_backend,
    }
    if args.reference:
        expected = json.loads(args.reference.read_text())
        report["equal_to_reference"] = sum(a == b for a, b in zip(outputs, expected, strict=True))
    print(llm.compile_plan())
    print("RESULT " + json.dumps(report))


if __name__ == "__main__":
    main()

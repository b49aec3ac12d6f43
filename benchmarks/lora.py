"""Throughput with LoRA adapters, compared with an engine without enable_lora.

    python benchmarks/lora.py [--dtype bfloat16] [--slots 8] [--rank 16] [--seqs 32] [--rounds 3]

Greedy requests with random prompts are submitted at once; each gets the same number of output tokens. Three
runs alternate within each round: an engine without enable_lora; an engine with enable_lora whose requests use
no adapter; and the same engine where every request uses one of --slots adapters, which change all linear
maps. One warm-up round does not count. The output is one table row: tokens per second of the three runs
(medians), and the median ratios of the second and the third run to the first. The model is the one of
throughput.py (40M parameters). Only the largest mixed step and the largest decode step are compiled.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from serving.checkpoint import HF_CONFIG

from jax_paged import LLM, LoRARequest, SamplingParams
from jax_paged.models.features.lora.layers import lora_maps
from jax_paged.models.weights import LoadedModel, random_model


def write_adapter(folder: Path, loaded: LoadedModel, rank: int, seed: int) -> None:
    """Writes an adapter for all linear maps in PEFT's format, with random matrices."""
    rng, tensors = np.random.default_rng(seed), {}
    for m in lora_maps(loaded.model):
        for letter, shape in (("A", (rank, m.num_in)), ("B", (m.num_out, rank))):
            values = rng.normal(0, 0.02, shape).astype(np.float32)
            tensors[f"base_model.model.{m.name}.lora_{letter}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make(args: argparse.Namespace, **more: Any) -> LLM:
    """Returns an engine; `more` has further engine arguments."""
    return LLM(
        model="random",
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=args.prompt + args.tokens,
        max_num_seqs=args.seqs,
        kv_cache_memory_bytes=2**28,
        max_compile_s=0,
        loaded=random_model(HF_CONFIG, args.dtype),
        num_scheduler_steps=args.burst,
        matmul_backend=args.matmul_backend,
        **more,
    )


def main() -> None:
    """Measures and prints one row of the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--matmul-backend", default="auto")
    parser.add_argument("--slots", type=int, default=8, help="number of adapters (max_loras)")
    parser.add_argument("--rank", type=int, default=16, help="rank of each adapter")
    parser.add_argument("--seqs", type=int, default=32, help="number of requests")
    parser.add_argument("--prompt", type=int, default=64, help="length of each prompt (tokens)")
    parser.add_argument("--tokens", type=int, default=48, help="length of each output (tokens)")
    parser.add_argument("--burst", type=int, default=8, help="num_scheduler_steps")
    parser.add_argument("--rounds", type=int, default=3)
    text = "measure processor time instead of elapsed time, for a machine with other load"
    parser.add_argument("--cpu-time", action="store_true", help=text)
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    rng = np.random.default_rng(0)
    shape = (args.rounds + 1, args.seqs, args.prompt)
    prompts = rng.integers(5, HF_CONFIG["vocab_size"], shape).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"adapter-{i}" for i in range(args.slots)]
        loaded = random_model(HF_CONFIG, args.dtype)
        for seed, path in enumerate(paths):
            write_adapter(path, loaded, args.rank, seed)
        del loaded
        adapters = [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)]
        of_each = [adapters[i % args.slots] for i in range(args.seqs)]
        plain = make(args)
        adapted = make(args, enable_lora=True, max_loras=args.slots, max_lora_rank=args.rank)
        runs = [(plain, None), (adapted, None), (adapted, of_each)]
        rates = []
        for batch in prompts:
            seconds = []
            for llm, lora_request in runs:
                begin = clock()
                llm.generate(batch, params, use_tqdm=False, lora_request=lora_request)
                seconds.append(clock() - begin)
                llm.llm_engine.scheduler.forget_prefixes(None)
            rates.append(args.seqs * args.tokens / np.array(seconds))
    base, unused, used = np.array(rates[1:]).T
    backend = plain.llm_engine.config.matmul_backend
    what = f"{args.dtype} | {backend} | {args.slots} x {args.rank} | {args.seqs}"
    speeds = " | ".join(f"{np.median(x):.0f}" for x in (base, unused, used))
    ratios = " | ".join(f"{np.median(x / base):.2f}" for x in (unused, used))
    print(f"| {what} | {speeds} | {ratios} |")


if __name__ == "__main__":
    main()

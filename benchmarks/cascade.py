"""Throughput of requests with a common prefix, with and without cascade attention.

    python benchmarks/cascade.py [--dtype bfloat16] [--kv-heads 8] [--prefix 512] [--tail 32] [--rounds 3]

64 greedy requests are submitted at once. Their prompts have a common prefix of random tokens and a tail each;
each request gets the same number of output tokens. Two engines alternate within each round. They differ only
in `disable_cascade_attn`. One warm-up round does not count. In each round, the engine with cascade attention
also runs the tails without the prefix. That rate is an upper bound for the rate with the prefix. The output
is one table row: tokens per second without and with cascade attention (medians), the median ratio of the two,
the median ratio of the bound to the rate without cascade attention, and the number of equal outputs. The
model is the one of throughput.py (40M parameters, 8 heads, 4 KV heads).
"""

import argparse
import time

import numpy as np
from serving.checkpoint import HF_CONFIG

from jax_paged import LLM, SamplingParams
from jax_paged.models.weights import random_model
from jax_paged.worker.executor import LocalExecutor

NUM_REQUESTS = 64


def make(args: argparse.Namespace, is_off: bool) -> LLM:
    """Returns an engine that has compiled all its programs.

    Args:
        args: The options of the command line.
        is_off: Whether cascade attention is disabled.
    """
    llm = LLM(
        model=args.model or "random",
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=min(2048, args.prefix + args.tail + args.tokens),
        max_num_seqs=NUM_REQUESTS,
        kv_cache_memory_bytes=2**30,
        kv_cache_dtype=args.kv_cache_dtype,
        attention_backend=args.backend,
        disable_cascade_attn=is_off,
        loaded=None
        if args.model
        else random_model(HF_CONFIG | {"num_key_value_heads": args.kv_heads}, args.dtype),
    )
    assert isinstance(llm.llm_engine.executor, LocalExecutor)
    llm.llm_engine.executor.runner.compiled.wait()
    return llm


def main() -> None:
    """Measures and prints one row of the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", help="model to load, such as pagelet (default: random weights)")
    parser.add_argument("--kv-heads", type=int, default=4, help="KV heads of the random model (of 8 heads)")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--prefix", type=int, default=512, help="length of the common prefix (tokens)")
    parser.add_argument("--tail", type=int, default=32, help="length of the rest of each prompt (tokens)")
    parser.add_argument("--tokens", type=int, default=64, help="length of each output (tokens)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prefix = rng.integers(5, 2000, args.prefix).tolist()
    tails = rng.integers(5, 2000, (NUM_REQUESTS, args.tail)).tolist()
    prompts = [{"prompt_token_ids": prefix + tail} for tail in tails]
    tails_alone = [{"prompt_token_ids": tail} for tail in tails]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    on, off = make(args, is_off=False), make(args, is_off=True)
    rates, answers = [], {}
    for _ in range(args.rounds + 1):
        seconds = []
        for name, llm, batch in (("on", on, prompts), ("off", off, prompts), ("tails", on, tails_alone)):
            begin = time.perf_counter()
            outputs = llm.generate(batch, params, use_tqdm=False)
            seconds.append(time.perf_counter() - begin)
            answers[name] = [list(output.outputs[0].token_ids) for output in outputs]
        rates.append(NUM_REQUESTS * args.tokens / np.array(seconds))
    with_it, without, bound = np.array(rates[1:]).T
    same = sum(a == b for a, b in zip(answers["on"], answers["off"], strict=True))
    heads = "" if args.model else f"{args.kv_heads} kv heads | "
    backend = on.llm_engine.config.attention_backend
    what = f"{args.dtype} | {args.kv_cache_dtype} | {backend} | {heads}{args.prefix} + {args.tail}"
    ratios = " | ".join(f"{np.median(rate / without):.2f}" for rate in (with_it, bound))
    found = f"{np.median(without):.0f} | {np.median(with_it):.0f} | {ratios}"
    print(f"| {what} | {found} | {same} of {NUM_REQUESTS} |")


if __name__ == "__main__":
    main()

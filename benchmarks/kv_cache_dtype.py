"""Size and accuracy of a quantized KV cache with the built-in model (docs/kernels/quantized-kv-cache.md).

    python benchmarks/kv_cache_dtype.py [--out FILE] [--scales]

Two things are measured, each with an unquantized and with quantized caches:

- Texts: conversations about pagelet's topics, of up to 1,900 tokens. The engine's prompt log-probabilities
  give the perplexity and the most likely token at each position.
- Answers: greedy answers to questions in wordings that pagelet's training data does not contain, to questions
  from the training data, and to sums. All are requested together.

"same best token" and "same answer" compare with the engine whose cache has the dtype of the model.

`--scales` compares ways to choose the scales, including some that the engine does not have. It rounds the
keys and values of a dense forward pass, and prints the Kullback-Leibler divergence of the predictions from
those without rounding (nats per token).
"""

import argparse
import platform
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import AutoTokenizer

from jax_paged import LLM, SamplingParams
from jax_paged.models import causal_lm
from jax_paged.models.pagelet.dialogue import TEMPLATES, read_held_out, read_topics
from jax_paged.models.pagelet.evaluate import FOLDER, prompts, sum_questions
from jax_paged.models.weights import load_model

MAX_TEXT, NUM_TEXTS, NUM_SUMS, MAX_ANSWER = 1900, 24, 100, 64
CACHES = ("auto", "int8", "fp8_e4m3")
POOL_BYTES = 2**28


def texts(tokenizer: Any) -> list[list[int]]:
    """Returns the token ids of conversations of nearly MAX_TEXT tokens."""
    rng, topics, found = random.Random(0), read_topics(), []
    for _ in range(NUM_TEXTS):
        chat: list[dict[str, str]] = []
        text: list[int] = []
        for topic in rng.sample(topics, len(topics)):
            question = rng.choice(topic.written)
            chat += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": topic.answer},
            ]
            longer = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))["input_ids"]
            if len(longer) > MAX_TEXT:
                break
            text = longer
        found.append(text)
    return found


def questions(tokenizer: Any) -> list[list[int]]:
    """Returns the prompts (token ids) of all questions, in the order of the module docstring."""
    rng = random.Random(1)
    asked = [text for wordings in read_held_out().values() for text in wordings]
    asked += [rng.choice(topic.written) for topic in read_topics()]
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(NUM_SUMS)]
    return prompts(tokenizer, asked + sum_questions(TEMPLATES["sum"], pairs, 2)[0])


def measure(long: list[list[int]], short: list[list[int]], **settings: Any) -> dict[str, Any]:
    """Measures one engine.

    Args:
        long: Texts (token ids) whose log-probabilities are computed.
        short: Prompts (token ids) to answer.
        settings: Engine arguments.

    Returns:
        The attention backend, the number of blocks, the bytes of the weights and of one token's cache entry,
        the perplexity and the most likely tokens of the texts, and the answers.
    """
    with LLM(**({"model": "pagelet", "kv_cache_memory_bytes": POOL_BYTES} | settings)) as llm:
        engine = llm.llm_engine
        scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        scored = llm.generate([{"prompt_token_ids": t} for t in long], scoring, use_tqdm=False)
        logprobs, best = [], []
        for text, output in zip(long, scored, strict=True):
            for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True):
                logprobs.append(entry[token].logprob)
                best.append(next(t for t, found in entry.items() if found.rank == 1))
        greedy = SamplingParams(temperature=0, max_tokens=MAX_ANSWER, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in short], greedy, use_tqdm=False)
        config = engine.config
        return {
            "backend": config.attention_backend,
            "blocks": config.num_blocks,
            "weight_bytes": config.weight_bytes,
            "bytes": config.kv_cache_bytes // config.num_blocks / config.block_size,
            "perplexity": float(np.exp(-np.mean(logprobs))),
            "best": np.array(best),
            "answers": [tuple(output.outputs[0].token_ids) for output in outputs],
        }


def table(long: list[list[int]], short: list[list[int]]) -> str:
    """Returns the table for all combinations of dtype and cache dtype."""
    lines = [
        f"{len(long)} texts of {sum(map(len, long))} tokens; {len(short)} answers of up to {MAX_ANSWER} "
        f"tokens; a pool of {POOL_BYTES // 2**20} MiB; {platform.machine()}, jax {jax.__version__}.",
        "",
        "| dtype | kv_cache_dtype | bytes per token | blocks | perplexity | change | same best token | "
        "same answer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        runs = {cache: measure(long, short, dtype=dtype, kv_cache_dtype=cache) for cache in CACHES}
        reference = runs["auto"]
        for cache, run in runs.items():
            change = run["perplexity"] / reference["perplexity"] - 1
            same = (run["best"] == reference["best"]).mean()
            answers = sum(a == b for a, b in zip(run["answers"], reference["answers"], strict=True))
            lines.append(
                f"| {dtype} | {cache} | {run['bytes']:.0f} | {run['blocks']} | {run['perplexity']:.4f} | "
                f"{change:+.3%} | {same:.2%} | {answers} of {len(short)} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def rounded(x: jax.Array, kind: str, scale: str) -> jax.Array:
    """Returns keys or values [B, T, K, D] after quantization and dequantization.

    Args:
        x: The keys or values.
        kind: "int8" or "fp8_e4m3".
        scale: Which values share a scale: "token" (one scale per token and head), "token, power of 2",
            "block of 16" (one scale per 16 tokens and head) or "none" (no scale).
    """
    largest = jnp.abs(x).max(-1, keepdims=True)
    if scale == "block of 16":
        b, t, k, _ = x.shape
        largest = jnp.repeat(largest.reshape(b, t // 16, 16, k, 1).max(2), 16, axis=1)
    top = 127.0 if kind == "int8" else 448.0
    unit = jnp.where(largest > 0, largest, 1) / top
    if scale == "token, power of 2":  # the largest value becomes 64 to 127 (int8) or 128 to 255 (fp8)
        unit = jnp.exp2(jnp.floor(jnp.log2(unit * top)) - (6 if kind == "int8" else 7))
    if scale == "none":
        unit = jnp.ones_like(unit)
    if kind == "int8":
        return jnp.clip(jnp.round(x / unit), -128, 127) * unit
    return jnp.clip(x / unit, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype) * unit


def scales_table(long: list[list[int]]) -> str:
    """Returns the table of divergences of the dense model's predictions by cache dtype and type of scale."""
    model, plain = load_model(FOLDER, "float32").model, causal_lm.dense_attention
    tokens = np.array([text[:1024] for text in long[:8] if len(text) >= 1024])

    def logprobs(kind: str, scale: str) -> np.ndarray:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
            k, v = ((x if kind == "float32" else rounded(x, kind, scale)) for x in (k, v))
            return plain(q, k, v, **options)

        causal_lm.dense_attention = attend
        call = jax.jit(lambda row: jax.nn.log_softmax(model(row)))
        return np.concatenate([np.asarray(call(row[None])) for row in tokens])

    exact = logprobs("float32", "")
    lines = ["| kv_cache_dtype | one scale per | divergence |", "|---|---|---|"]
    cases = [
        (kind, s) for kind in ("int8", "fp8_e4m3") for s in ("token", "token, power of 2", "block of 16")
    ]
    for kind, scale in [*cases, ("fp8_e4m3", "none")]:
        divergence = (np.exp(exact) * (exact - logprobs(kind, scale))).sum(-1).mean()
        lines.append(f"| {kind} | {scale} | {divergence:.2e} |")
        print(lines[-1], flush=True)
    causal_lm.dense_attention = plain
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the measurements and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the table; it is also printed")
    parser.add_argument("--scales", action="store_true", help="compare types of scales instead")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    long = texts(tokenizer)
    found = scales_table(long) if args.scales else table(long, questions(tokenizer))
    if args.out is not None:
        args.out.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()

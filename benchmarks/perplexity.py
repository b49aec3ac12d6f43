"""Perplexity of a real model with quantized weights: benchmarks/results/perplexity-*.md.

    python benchmarks/perplexity.py --model FOLDER --gguf FILE [--llama-cpp PROGRAM] [--out FILE]

The text is the beginning of the docstrings of MODULES. It is divided as in llama-perplexity: into chunks of
512 tokens without a start token. The first 257 tokens of a chunk do not count. PROGRAM is llama-perplexity,
which runs with the same text and the GGUF file.
"""

import argparse
import ast
import hashlib
import importlib.util
import math
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.engines import commit_of
from serving.report import processor
from transformers import AutoTokenizer

from jax_paged import LLM, SamplingParams

ROOT = Path(__file__).parents[1]
CHUNK = 512
POOL_BYTES = 2**29
MODULES = (
    "statistics",
    "difflib",
    "logging",
    "subprocess",
    "collections",
    "inspect",
    "typing",
    "threading",
    "email.message",
)


@dataclass(frozen=True)
class Case:
    """Weights and arguments of an engine.

    Args:
        weights: Name in the table.
        dtype: Dtype of the activations.
        from_gguf: Whether the weights come from the GGUF file.
        arguments: Further engine arguments.
    """

    weights: str
    dtype: str
    from_gguf: bool
    arguments: dict[str, Any]


CASES = (
    Case("float32", "float32", False, {}),
    Case("bfloat16", "bfloat16", False, {}),
    Case("int8", "bfloat16", False, {"quantization": "int8"}),
    Case("int4", "bfloat16", False, {"quantization": "int4"}),
    Case("GGUF", "float32", True, {}),
    Case("GGUF", "bfloat16", True, {}),
)


def docstrings() -> Iterator[str]:
    """Yields the docstrings of MODULES: first of a module, then of classes and functions, then of methods."""
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def make_text(tokenizer: Any, num_tokens: int) -> tuple[str, list[int]]:
    """Returns the beginning of the docstrings that has `num_tokens` tokens, and its token ids."""
    whole = "\n\n".join(filter(None, docstrings()))
    offsets = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) < num_tokens:
        raise ValueError(f"--tokens must be at most {len(offsets)}, got {num_tokens}")
    text = whole[: offsets[num_tokens - 1][1]]
    return text, tokenizer(text, add_special_tokens=False)["input_ids"]


def perplexity(model: Path, tokens: list[int], case: Case) -> float:
    """Returns the perplexity of whole chunks of the tokens."""
    chunks = [tokens[start : start + CHUNK] for start in range(0, len(tokens) - CHUNK + 1, CHUNK)]
    settings = {"max_model_len": 2 * CHUNK, "max_num_seqs": 8, "kv_cache_memory_bytes": POOL_BYTES}
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(str(model), dtype=case.dtype, skip_tokenizer_init=True, **settings, **case.arguments) as llm:
        outputs = llm.generate([{"prompt_token_ids": chunk} for chunk in chunks], params, use_tqdm=False)
    total, count = 0.0, 0
    for chunk, output in zip(chunks, outputs, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None, "they were requested"
        for i in range(CHUNK // 2 + 1, CHUNK):
            entry = entries[i]
            assert entry is not None, "only the first token has none"
            total -= entry[chunk[i]].logprob
            count += 1
    return math.exp(total / count)


def perplexity_of_llama_cpp(program: Path, gguf: Path, text: str, num_chunks: int) -> float:
    """Returns the perplexity that llama-perplexity prints.

    Raises:
        RuntimeError: If it fails, or if its tokenizer makes another number of chunks.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_text(text)
        command = [str(program), "-m", str(gguf), "-f", str(file), "-c", str(CHUNK)]
        command += ["--threads", str(len(os.sched_getaffinity(0)))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    found = re.search(r"Final estimate: PPL = ([\d.]+)", printed)
    if done.returncode or found is None or f"over {num_chunks} chunks" not in printed:
        raise RuntimeError(f"llama-perplexity did not report {num_chunks} chunks: {printed[-2000:]}")
    return float(found[1])


def main() -> None:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder with float weights")
    parser.add_argument("--gguf", type=Path, help="the same model as a GGUF file")
    parser.add_argument("--llama-cpp", type=Path, help="llama-perplexity")
    parser.add_argument(
        "--tokens", type=int, default=40_000, help="tokens of the text (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="file for the table")
    args = parser.parse_args()
    text, tokens = make_text(AutoTokenizer.from_pretrained(args.model), args.tokens)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    lines = [
        f"{len(tokens)} tokens (docstrings of Python {platform.python_version()}, SHA-256 {digest}), chunks "
        f"of {CHUNK}; {processor()}; commit {commit_of(ROOT)}.",
        "",
        "| weights | activations | perplexity | change |",
        "|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    first = None

    def add(weights: str, activations: str, value: float) -> None:
        nonlocal first
        first = first or value
        lines.append(f"| {weights} | {activations} | {value:.4f} | {value / first - 1:+.2%} |")
        print(lines[-1], flush=True)

    for case in CASES:
        if args.gguf or not case.from_gguf:
            value = perplexity(args.gguf if case.from_gguf else args.model, tokens, case)
            add(case.weights, case.dtype, value)
    if args.llama_cpp and args.gguf:
        value = perplexity_of_llama_cpp(args.llama_cpp, args.gguf, text, len(tokens) // CHUNK)
        add("GGUF, llama.cpp", "8 bits", value)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Size and quality of the built-in model with quantized weights: benchmarks/results/quantization-*.md.

    python benchmarks/quantization.py [--out FILE] [--texts N]
    python benchmarks/quantization.py --products

The texts, questions and columns are the same as in kv_cache_dtype.py; the reference is the float32 model. The
quantized checkpoints are the built-in model with its linear maps rounded to nearest: fp8 with one scale per
matrix or per block, and int4 in the format of compressed-tensors, with a scale and a zero point for each
output and group of inputs. Methods that use activations, such as AWQ and GPTQ, are designed to lose less.

`--products` measures the time of one matrix product on this machine's CPU, for quantized matrices and for
floats (with oneDNN or XLA), and which share of the memory's speed it reaches. Such products take most of the
time of a decode step.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from kv_cache_dtype import MAX_ANSWER, measure, questions, texts
from safetensors.numpy import load_file, save_file
from serving.engines import commit_of
from serving.report import processor
from transformers import AutoTokenizer

from jax_paged.models.pagelet.evaluate import FOLDER
from jax_paged.pallas_kernels.native import products, quantized_products
from jax_paged.pallas_kernels.native.quantized_products import PackedQuantized

ROOT = Path(__file__).parents[1]
# Products: values of K, number of columns, numbers of rows of x, and bytes of kernels that exceed the caches.
SIZES, COLUMNS, ROWS, COPIED_BYTES = (576, 2048, 4096), 4096, (1, 2, 4, 8, 16, 64, 256), 96 * 2**20
NUM_CORES = len(os.sched_getaffinity(0))


def packed(numbers: np.ndarray) -> np.ndarray:
    """Returns 4-bit numbers [rows, columns] as int32 words of eight columns each."""
    words = numbers.astype(np.uint32).reshape(len(numbers), -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    return np.ascontiguousarray(np.bitwise_or.reduce(words, axis=-1)).view(np.int32)


def int4(weight: np.ndarray, group_size: int) -> dict[str, np.ndarray]:
    """Returns the tensors of a 4-bit matrix [out, in] in the format of compressed-tensors.

    Args:
        weight: float32 [out, in].
        group_size: Number of inputs that share a scale and a zero point.
    """
    groups = weight.reshape(len(weight), -1, group_size)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    scales = ((high - low) / 15).astype(np.float32)
    zeros = np.round(-low / scales)
    numbers = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 15)
    return {
        "weight_packed": packed(numbers.reshape(weight.shape)),
        "weight_scale": scales,
        "weight_zero_point": np.ascontiguousarray(packed(zeros.T).T),
        "weight_shape": np.array(weight.shape, np.int64),
    }


def fp8(weight: np.ndarray, block: int | None) -> dict[str, np.ndarray]:
    """Returns the tensors of an fp8 matrix [out, in].

    Args:
        weight: float32 [out, in].
        block: Size of the square blocks with one scale each; None for one scale for the whole matrix.
    """
    rows, columns = weight.shape if block is None else (block, block)
    blocks = weight.reshape(len(weight) // rows, rows, -1, columns)
    scales = np.abs(blocks).max((1, 3), keepdims=True) / 448
    values = (blocks / scales).astype(ml_dtypes.float8_e4m3fn).reshape(weight.shape)
    name, shape = ("weight_scale", ()) if block is None else ("weight_scale_inv", scales.shape[::2])
    return {"weight": values, name: scales.astype(np.float32).reshape(shape)}


def int4_config(group_size: int) -> dict[str, Any]:
    """Returns the quantization_config of a checkpoint with matrices from `int4`."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# By name: the quantization_config, and the function that quantizes a matrix.
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], dict[str, np.ndarray]]]] = {
    "fp8 checkpoint, a scale per matrix": ({"quant_method": "fp8"}, lambda x: fp8(x, None)),
    "fp8 checkpoint, blocks of 128 x 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda x: fp8(x, 128),
    ),
    "int4 checkpoint, groups of 128": (int4_config(128), lambda x: int4(x, 128)),
    "int4 checkpoint, groups of 32": (int4_config(32), lambda x: int4(x, 32)),
}


def write(name: str, folder: Path) -> str:
    """Writes the built-in model with quantized linear maps; returns the folder as text.

    Args:
        name: Key of CHECKPOINTS.
        folder: Folder to create.
    """
    quantization, make = CHECKPOINTS[name]
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "data", "__pycache__"))
    tensors = dict(load_file(FOLDER / "model.safetensors"))
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        stem = key.removesuffix("weight")
        tensors |= {stem + end: x for end, x in make(tensors.pop(key).astype(np.float32)).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((FOLDER / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def table(num_texts: int) -> str:
    """Returns the table of sizes and quality for all types of weights, measured with `num_texts` texts."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    long, short = texts(tokenizer)[:num_texts], questions(tokenizer)
    lines = [
        f"Commit {commit_of(ROOT)}, {time.strftime('%Y-%m-%d')}, jax {jax.__version__}, {processor()}. "
        f"{len(long)} texts of {sum(map(len, long))} tokens; "
        f"{len(short)} answers of up to {MAX_ANSWER} tokens.",
        "",
        "| weights | activations | MiB | perplexity | change | same best token | same answer |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {
            "float32": {},
            "bfloat16": {"dtype": "bfloat16"},
            "int8, on the fly": {"quantization": "int8"},
            "fp8, on the fly": {"quantization": "fp8"},
        }
        for i, name in enumerate(CHECKPOINTS):
            kinds[name] = {"model": write(name, Path(folder) / str(i))}
        reference: dict[str, Any] = {}
        for kind, settings in kinds.items():
            run = measure(long, short, **({"dtype": "float32"} | settings))
            reference = reference or run
            change = run["perplexity"] / reference["perplexity"] - 1
            same = (run["best"] == reference["best"]).mean()
            answers = sum(a == b for a, b in zip(run["answers"], reference["answers"], strict=True))
            dtype, mebibytes = settings.get("dtype", "float32"), run["weight_bytes"] / 2**20
            lines.append(
                f"| {kind} | {dtype} | {mebibytes:.1f} | {run['perplexity']:.4f} | {change:+.3%} | "
                f"{same:.2%} | {answers} of {len(short)} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def read_speed(memory: np.ndarray) -> float:
    """Returns how fast all cores together read memory (bytes per second).

    Args:
        memory: int8, much larger than the caches.
    """
    parts = np.array_split(memory, 64 * NUM_CORES)
    with ThreadPoolExecutor(NUM_CORES) as pool:
        start = time.perf_counter()
        list(pool.map(np.maximum.reduce, parts))
        return memory.nbytes / (time.perf_counter() - start)


def packed_kernel(kind: str, group_size: int | None, rows: int, extra: str | None) -> PackedQuantized:
    """Returns a packed kernel [rows, COLUMNS] with random numbers.

    Args:
        kind: "int4", "int8" or "fp8".
        group_size: Number of rows in a group; None for all.
        rows: Number of rows.
        extra: "zeros", "offsets" or None.
    """
    rng, group = np.random.default_rng(0), group_size or rows
    numbers = rng.integers(0, 127, (rows // 2 if kind == "int4" else rows, COLUMNS), np.uint8)
    scales = np.full((rows // group, COLUMNS), 0.01, np.float32)
    extras = {"zeros": np.full(scales.shape, 8, np.uint8), "offsets": -scales, None: None}
    made = quantized_products.pack(numbers, scales, kind=kind, group_size=group, offsets=extras[extra])
    return jax.tree.map(jnp.asarray, made)


def product_cases(rows: int) -> dict[str, tuple[Any, Callable[[Any, Any], Any], str]]:
    """Returns kernels [rows, COLUMNS] by name, each with its product and the dtype of x."""

    def by_native(x: Any, kernel: Any) -> Any:
        return quantized_products.multiply(x, kernel, x.dtype)

    def by_onednn(x: Any, kernel: Any) -> Any:
        return products.multiply(x, kernel, COLUMNS, x.dtype)

    kinds: list[tuple[str, str, int | None, str | None]] = [
        ("int4, groups of 64", "int4", 64, None),
        ("int4, groups of 64, zero points", "int4", 64, "zeros"),
        ("int4, groups of 32, offsets", "int4", 32, "offsets"),
        ("int8, a scale per column", "int8", None, None),
        ("int8, groups of 32", "int8", 32, None),
        ("fp8, a scale per column", "fp8", None, None),
    ]
    cases: dict[str, tuple[Any, Callable[[Any, Any], Any], str]] = {
        name: (packed_kernel(kind, group, rows, extra), by_native, "float32")
        for name, kind, group, extra in kinds
    }
    for dtype in ("float32", "bfloat16"):
        floats = jax.random.normal(jax.random.key(0), (rows, COLUMNS), dtype)
        if products.problem(jnp.dtype(dtype)) is None:
            cases[f"{dtype}, oneDNN"] = products.pack(floats), by_onednn, dtype
        else:
            cases[f"{dtype}, XLA"] = floats, jnp.matmul, dtype
    return cases


def times(num_rounds: int = 5) -> str:
    """Returns the table of product times for all types of matrices.

    Each program multiplies by copies of a matrix that the caches cannot hold together. Reading memory and
    products alternate.

    Args:
        num_rounds: Number of rounds, whose median counts.
    """
    memory = np.ones(256 * 2**20, np.int8)
    lines = [
        f"One product [rows, K] x [K, {COLUMNS}] with kernels in memory: ms, GB/s, and share of the speed at "
        f"which {NUM_CORES} cores read memory. {processor()}, jax {jax.__version__}, median of {num_rounds} "
        "rounds.",
        "",
        "| K | kernel | MiB | " + " | ".join(f"{n} rows" if n > 1 else "1 row" for n in ROWS) + " |",
        "|---|---|---|" + "---|" * len(ROWS),
    ]
    print("\n".join(lines), flush=True)
    for size in SIZES:
        for name, (kernel, product, dtype) in product_cases(size).items():
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(kernel))
            num_copies = max(2, -(-COPIED_BYTES // num_bytes))
            copies = [jax.tree.map(jnp.copy, kernel) for _ in range(num_copies)]
            run = jax.jit(lambda x, copies, product=product: sum(product(x, copy) for copy in copies))
            inputs = [jnp.ones((n, size), dtype) for n in ROWS]
            for x in inputs:
                run(x, copies).block_until_ready()
            found = np.empty((num_rounds, len(ROWS), 2))
            for i in range(num_rounds):
                for j, x in enumerate(inputs):
                    start = time.perf_counter()
                    run(x, copies).block_until_ready()
                    seconds = (time.perf_counter() - start) / num_copies
                    found[i, j] = seconds, num_bytes / seconds / read_speed(memory)
            medians = np.median(found, axis=0)
            cells = [f"{1e3 * t:.2f}, {num_bytes / t / 1e9:.1f}, {share:.2f}" for t, share in medians]
            lines.append(f"| {size} | {name} | {num_bytes / 2**20:.1f} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the measurements and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the table; it is also printed")
    parser.add_argument("--texts", type=int, default=24, help="number of texts (default: %(default)s)")
    parser.add_argument("--products", action="store_true", help="measure single matrix products instead")
    args = parser.parse_args()
    found = times() if args.products else table(args.texts)
    if args.out is not None:
        args.out.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()

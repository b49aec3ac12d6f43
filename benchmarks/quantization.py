"""Size and quality of the built-in model with quantized weights: benchmarks/results/quantization-*.md.

    python benchmarks/quantization.py [--out FILE] [--texts N]
    python benchmarks/quantization.py --products

The texts, questions and columns are the same as in kv_cache_dtype.py; the reference is the float32 model. The
quantized checkpoints are the built-in model with its linear maps rounded to nearest: fp8 with one scale per
matrix or per block, and int4 in the format of compressed-tensors, with a scale and a zero point for each
output and group of inputs. Methods that use activations, such as AWQ and GPTQ, are designed to lose less.

`--products` measures the time of one matrix product with few rows on this machine, for float matrices (with
oneDNN and with XLA) and for quantized ones. Such products take most of the time of a decode step on a CPU.
"""

import argparse
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
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
from jax_paged.models.quantization.online import quantize
from jax_paged.models.quantization.quantized_linear import QuantizedArrays, dense, multiply
from jax_paged.pallas_kernels.native import products

ROOT = Path(__file__).parents[1]
SHAPE, ROWS = (2048, 8192), (1, 8, 64)


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


def times() -> str:
    """Returns the table of product times for all types of matrices (milliseconds, best of 20)."""
    lines = [
        f"One product [rows, {SHAPE[0]}] x [{SHAPE[0]}, {SHAPE[1]}], in ms, best of 20; "
        f"{platform.machine()}, jax {jax.__version__}, {jax.default_backend()}.",
        "",
        "| dtype of rows | matrix | MiB | " + " | ".join(f"{n} rows" for n in ROWS) + " |",
        "|---|---|---|" + "---|" * len(ROWS),
    ]
    kernel = jax.random.normal(jax.random.key(0), SHAPE)
    int8_matrix = quantize(kernel, "int8")
    int4_matrix = QuantizedArrays(
        jnp.zeros((SHAPE[0] // 2, SHAPE[1]), jnp.uint8), jnp.ones((SHAPE[0] // 128, SHAPE[1]))
    )
    int4_matrix = int4_matrix._replace(zeros=jnp.full(int4_matrix.scales.shape, 8, jnp.uint8))
    assert dense(int4_matrix, 128, "float32").shape == SHAPE
    for dtype in (jnp.float32, jnp.bfloat16):
        floats = kernel.astype(dtype)
        cases: dict[str, tuple[Any, Any]] = {
            "floats, XLA": (floats, lambda x, k: x @ k),
            "int8": (int8_matrix, lambda x, k: multiply(x, k, SHAPE[0], x.dtype)),
            "fp8": (quantize(kernel, "fp8"), lambda x, k: multiply(x, k, SHAPE[0], x.dtype)),
            "int4, groups of 128": (int4_matrix, lambda x, k: multiply(x, k, 128, x.dtype)),
        }
        if products.problem(dtype) is None:
            multiply_packed = lambda x, k: products.multiply(x, k, SHAPE[1], x.dtype)  # noqa: E731
            cases = {"floats, oneDNN": (products.pack(floats), multiply_packed)} | cases
        for name, (held, product) in cases.items():
            cells, call = [], jax.jit(product)
            for rows in ROWS:
                x, best = jnp.ones((rows, SHAPE[0]), dtype), float("inf")
                for _ in range(20):
                    start = time.perf_counter()
                    call(x, held).block_until_ready()
                    best = min(best, time.perf_counter() - start)
                cells.append(f"{1000 * best:.1f}")
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(held)) / 2**20
            lines.append(f"| {jnp.dtype(dtype).name} | {name} | {size:.0f} | {' | '.join(cells)} |")
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

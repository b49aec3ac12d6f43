"""What smaller weights save and what they change, on the built-in model: the table of docs/quantization.md.

    python benchmarks/quantization.py [--out FILE] [--texts N]
    python benchmarks/quantization.py --products

Texts, answers and what is said of them are those of kv_cache_dtype.py. The kernels of four bits are rounded
to the nearest, with a scale and a zero for every group of rows and each column, and written as a
compressed-tensors checkpoint; quantisers that look at activations, as AWQ and GPTQ do, are made to lose less.

`--products` times one product of a few rows on this machine: kernels of floats, packed by oneDNN or not,
beside small ones. It says how a decode step on a CPU fares.
"""

import argparse
import json
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kv_cache_dtype import MAX_ANSWER, measure, questions, texts
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from jax_paged.models.pagelet.evaluate import FOLDER
from jax_paged.models.small_kernels import Parts, dense, multiply, quantize
from jax_paged.pallas_kernels.native import products

GROUPS = (32, 128)
SHAPE, ROWS = (2048, 8192), (1, 8, 64)


def packed(numbers: np.ndarray) -> np.ndarray:
    """Returns numbers of four bits as words of eight columns."""
    words = numbers.astype(np.uint32).reshape(len(numbers), -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    return np.ascontiguousarray(np.bitwise_or.reduce(words, axis=-1)).view(np.int32)


def write_int4(folder: Path, group_size: int) -> None:
    """Writes the built-in model with linear maps of four bits."""
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "data", "__pycache__"))
    tensors = dict(load_file(FOLDER / "model.safetensors"))
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        weight, stem = tensors.pop(key).astype(np.float32), key.removesuffix("weight")
        groups = weight.reshape(len(weight), -1, group_size)
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scales = ((high - low) / 15).astype(np.float32)
        zeros = np.round(-low / scales)
        numbers = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 15)
        tensors |= {
            f"{stem}weight_packed": packed(numbers.reshape(weight.shape)),
            f"{stem}weight_scale": scales,
            f"{stem}weight_zero_point": np.ascontiguousarray(packed(zeros.T.copy()).T),
            f"{stem}weight_shape": np.array(weight.shape, np.int64),
        }
    save_file(tensors, folder / "model.safetensors")
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": False,
    }
    config = json.loads((FOLDER / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps(config))


def table(num_texts: int) -> str:
    """Returns the rows of all kinds of weights."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    long, short = texts(tokenizer)[:num_texts], questions(tokenizer)
    lines = [
        f"{len(long)} texts of {sum(map(len, long))} tokens; {len(short)} answers of up to {MAX_ANSWER} "
        f"tokens; float32 activations; {platform.machine()}, jax {jax.__version__}.",
        "",
        "| weights | MiB | perplexity | change | same best token | same answer |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, dict[str, Any]] = {"float32": {}, "int8": {"quantization": "int8"}}
        kinds["fp8"] = {"quantization": "fp8"}
        for size in GROUPS:
            write_int4(Path(folder) / f"int4-{size}", size)
            kinds[f"int4, groups of {size}"] = {"model": f"{folder}/int4-{size}"}
        own: dict[str, Any] = {}
        for kind, settings in kinds.items():
            run = measure(long, short, dtype="float32", **settings)
            own = own or run
            change = run["perplexity"] / own["perplexity"] - 1
            same = (run["best"] == own["best"]).mean()
            answers = sum(a == b for a, b in zip(run["answers"], own["answers"], strict=True))
            lines.append(
                f"| {kind} | {run['weight_bytes'] / 2**20:.1f} | {run['perplexity']:.4f} | {change:+.3%} | "
                f"{same:.2%} | {answers} of {len(short)} |"
            )
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def times() -> str:
    """Returns the milliseconds of products with kernels of every kind: the best of several."""
    lines = [
        f"A product of rows with a kernel {SHAPE[0]} x {SHAPE[1]}, in ms: the best of 20; "
        f"{platform.machine()}, jax {jax.__version__}, {jax.default_backend()}.",
        "",
        "| type of rows | kernel | MiB | " + " | ".join(f"{n} rows" for n in ROWS) + " |",
        "|---|---|---|" + "---|" * len(ROWS),
    ]
    kernel = jax.random.normal(jax.random.key(0), SHAPE)
    byte = quantize(kernel, "int8")
    four = Parts(jnp.zeros((SHAPE[0] // 2, SHAPE[1]), jnp.uint8), jnp.ones((SHAPE[0] // 128, SHAPE[1])))
    four = four._replace(zeros=jnp.full(four.scales.shape, 8, jnp.uint8))
    assert dense(four, 128, "float32").shape == SHAPE
    for dtype in (jnp.float32, jnp.bfloat16):
        floats = kernel.astype(dtype)
        cases: dict[str, tuple[Any, Any]] = {
            "floats, XLA": (floats, lambda x, k: x @ k),
            "int8": (byte, lambda x, k: multiply(x, k, SHAPE[0], x.dtype)),
            "fp8": (quantize(kernel, "fp8"), lambda x, k: multiply(x, k, SHAPE[0], x.dtype)),
            "int4, groups of 128": (four, lambda x, k: multiply(x, k, 128, x.dtype)),
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file to write the table to")
    parser.add_argument("--texts", type=int, default=24, help="how many texts")
    parser.add_argument("--products", action="store_true", help="time products instead")
    args = parser.parse_args()
    found = times() if args.products else table(args.texts)
    if args.out is not None:
        args.out.write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()

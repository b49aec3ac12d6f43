"""Loading time and peak host memory for a random checkpoint with the shape of Llama 3.2 1B (2.5 GB).

    python benchmarks/loading.py                     writes the checkpoint to a temporary folder
    python benchmarks/loading.py --folder DIR        keeps it in DIR, or uses the checkpoint that is there

The weights are bfloat16. Each measurement runs three times, in a new process each time, and the fastest run
counts. The file is in the page cache, so the disk does not matter. "read" only copies the bytes of the file
into memory, which every loader has to do. "load" loads the model.
"""

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> None:
    """Writes the safetensors file and config.json; only one tensor is in memory at a time."""
    import numpy as np

    hidden, inner, kv = 2048, 8192, 512
    shapes = {"model.embed_tokens.weight": (128256, hidden), "model.norm.weight": (hidden,)}
    for i in range(HF_CONFIG["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    header, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            # The upper 16 bits of a float32 number are a bfloat16 number.
            values = rng.standard_normal(int(np.prod(shape)), np.float32) * np.float32(0.02)
            f.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))


def memory_bytes(field: str) -> int:
    """Returns a field of /proc/self/status, such as "VmRSS", in bytes. Works on Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(what: str, folder: Path) -> dict[str, float]:
    """Runs the measurement "read" or "load" in this process.

    Returns:
        Elapsed and processor time (seconds), size of the data, resident memory before and peak resident
        memory (bytes).
    """
    import jax
    import numpy as np

    from jax_paged.models.weights import load_model

    jax.block_until_ready(jax.numpy.zeros(8))
    before = memory_bytes("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    if what == "read":
        kept: Any = np.fromfile(folder / "model.safetensors", np.uint8)
        num_bytes = kept.nbytes
    else:
        kept = load_model(folder)
        num_bytes = kept.weight_bytes
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "bytes": num_bytes,
        "before_bytes": before,
        "peak_bytes": memory_bytes("VmHWM"),
    }


def main() -> None:
    """Runs both measurements and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="checkpoint folder (default: a temporary folder)")
    parser.add_argument("--measure", choices=("read", "load"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "config.json").exists():
            write_checkpoint(folder)
        for what in ("read", "load"):
            command = [sys.executable, __file__, "--measure", what, "--folder", str(folder)]
            runs = []
            for _ in range(3):
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                runs.append(json.loads(out.splitlines()[-1]))
            best = min(runs, key=lambda run: run["seconds"])
            size, seconds, peak = best["bytes"], best["seconds"], best["peak_bytes"]
            own = (peak - best["before_bytes"]) / size
            speed = f"{size / seconds / 1e9:.2f} GB/s of {size / 1e9:.2f} GB"
            print(f"{what}: {seconds:.2f} s ({best['cpu_seconds']:.2f} s of processor time), {speed}")
            print(f"  peak host memory: {peak / size:.2f} times the weights, {own:.2f} without imports")
        print(f"{os.cpu_count()} cores")


if __name__ == "__main__":
    main()

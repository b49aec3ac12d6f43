"""Compilation of all kernels and of the step of an 8B Llama for GPUs that this machine does not have.

    make kernels-compile                                in its own environment (4.5 GB)
    make kernels-compile KERNELS_PYTHON=/path/python    in another environment with jax[cuda13]
    ... ARGS='--only ragged'                            only some checks; prints the tables
    ... ARGS=--accept                                   writes the reference for later runs

XLA and ptxas do the same work as on a machine with a GPU, except autotuning. Nothing is run, so no times of
kernels are measured. Each check runs in a new process, because the compiler may abort.

The exit status is 1 if

- a kernel does not compile, spills registers, or lacks the instructions that it should contain,
- ptxas serializes the wgmma instructions of a kernel,
- a count of an inner loop is more than 5% above results/kernel-loops.json (see sass_loops.py),
- a step copies a pool.

The tables of all checks go to results/kernels-compile.md.
"""

import argparse
import concurrent.futures
import dataclasses
import datetime
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "benchmarks" / "results" / "kernels-compile.md"
ACCEPTED = ROOT / "benchmarks" / "results" / "kernel-loops.json"
# Fields of sass_loops.Loop, in the order of the numbers in kernel-loops.json.
COUNTS = ("instructions", "barriers", "waits", "memory", "tensor", "cycles")
MAX_RATIO = 1.05  # of a count, compared with kernel-loops.json
BEGIN, END = "<!-- kernels-compile: begin -->", "<!-- kernels-compile: end -->"
MARK = "RESULT "  # prefix of the line with the result of a process
NUM_BLOCKS = 4096
# Patterns of PTX instructions, by their name in the tables.
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"(?<!w)\bmma\.sync",
    "TMA": r"cp\.async\.bulk\.tensor\S*shared\S*\.global",
    "TMA store": r"cp\.async\.bulk\S*\.global\.shared",
    "cp.async": r"cp\.async\.c[ag]\b",
}
BLACKWELL = ("b200", "rtx5090")
# Instructions that the kernels of an op must contain on a GPU.
EXPECTED = {
    ("paged_decode", "h100"): {"mma", "TMA"},
    ("paged_decode", "a100"): {"mma", "cp.async"},
    ("ragged_attention", "h100"): {"wgmma", "TMA"},
    ("ragged_attention", "a100"): {"mma", "cp.async"},
    **{key: {"mma", "TMA"} for key in itertools.product(("paged_decode", "ragged_attention"), BLACKWELL)},
    ("grouped_matmul", "h100"): {"wgmma", "TMA", "TMA store"},
}


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """One op with its shapes and options. The defaults are Llama 8B's heads, page size 16 and bfloat16."""

    op: str
    gpu: str
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    kv_cache_dtype: str = "auto"
    has_bias: bool = False

    def __str__(self) -> str:
        shape = f"{self.heads}/{self.kv_heads} x {self.head_dim}, page {self.page_size}, {self.dtype}"
        flags = {"window": self.window, "soft cap": self.soft_cap, "sinks": self.has_sinks}
        flags |= {"bias": self.has_bias, f"{self.kv_cache_dtype} pool": self.is_quantized}
        return f"{self.op} {self.gpu} {shape}" + "".join(f", {k}" for k, v in flags.items() if v)

    @property
    def is_quantized(self) -> bool:
        """Whether the pool is quantized. Then the kernels do not copy pages asynchronously."""
        return self.kv_cache_dtype != "auto"


@dataclasses.dataclass(frozen=True)
class ExpertCheck:
    """The products of a layer's experts: rows [rows, size] times one of `groups` matrices [size, width]."""

    gpu: str
    rows: int
    groups: int
    size: int
    width: int
    dtype: str = "bfloat16"
    op: str = "grouped_matmul"

    def __str__(self) -> str:
        return f"{self.op} {self.gpu} {self.rows} rows, {self.shape}, {self.dtype}"

    @property
    def shape(self) -> str:
        """The shape of all matrices, as text."""
        return f"{self.groups} x {self.size} x {self.width}"


@dataclasses.dataclass(frozen=True)
class StepCheck:
    """A step of the engine with an 8B Llama, including the output matrix and the sampler."""

    gpu: str
    backend: str
    is_decode: bool
    num_tokens: int
    num_seqs: int
    one_graph: bool = False

    def __str__(self) -> str:
        kind = f"decode {self.num_seqs}" if self.is_decode else f"mixed {self.num_tokens}x{self.num_seqs}"
        return f"step {self.gpu} {self.backend} {kind}" + ", one graph" * self.one_graph


Check = KernelCheck | ExpertCheck | StepCheck


def all_checks() -> list[Check]:
    """Returns all checks, in the order of the tables."""
    checks: list[Check] = []
    for gpu in ("h100", "a100"):
        for op in ("write_kv", "copy_blocks"):
            checks += [KernelCheck(op, gpu, kv_cache_dtype=name) for name in ("auto", "int8")]
        for op in ("paged_decode", "ragged_attention"):
            make = lambda op=op, gpu=gpu, **options: KernelCheck(op, gpu, **options)  # noqa: E731
            checks += [make(head_dim=d) for d in (64, 96, 128, 256)]
            checks += [make(head_dim=80, page_size=32), make(page_size=32), make(page_size=64)]
            checks += [make(head_dim=256, page_size=64), make(dtype="float16")]
            checks += [make(heads=h, kv_heads=k) for h, k in ((32, 32), (28, 4), (128, 8))]
            checks += [make(window=4096), make(soft_cap=50.0), make(has_sinks=True)]
            everything: dict[str, Any] = {"window": 4096, "soft_cap": 50.0, "has_sinks": True}
            checks += [make(head_dim=d, **everything) for d in (64, 96, 128, 256)]
            checks += [make(head_dim=d, has_bias=True) for d in (64, 128)]
            checks += [make(head_dim=d, kv_cache_dtype="int8") for d in (64, 128, 256)]
            checks += [make(head_dim=80, page_size=32, kv_cache_dtype="int8")]
            checks += [make(page_size=64, kv_cache_dtype="int8"), make(kv_cache_dtype="fp8_e4m3")]
            checks += [make(kv_cache_dtype="fp8_e4m3", **everything)]
    checks += [KernelCheck(op, "h100", head_dim=80) for op in ("paged_decode", "ragged_attention")]
    everything = {"window": 4096, "soft_cap": 50.0, "has_sinks": True}
    for gpu in BLACKWELL:
        for op in ("paged_decode", "ragged_attention"):
            make = lambda op=op, gpu=gpu, **options: KernelCheck(op, gpu, **options)  # noqa: E731
            checks += [make(head_dim=d) for d in (64, 80, 96, 128, 256)]
            checks += [make(page_size=64), make(dtype="float16"), make(heads=28, kv_heads=4)]
            checks += [make(head_dim=d, **everything) for d in (64, 128, 256)]
    # Mixtral 8x7B and Qwen3 30B-A3B, with 32 and with 2,048 tokens.
    for per_token, groups, size, width in ((2, 8, 4096, 14336), (2, 8, 14336, 4096), (8, 128, 2048, 768)):
        checks += [ExpertCheck("h100", n * per_token, groups, size, width) for n in (32, 2048)]
    checks += [ExpertCheck("h100", 64, 8, 4096, 14336, "float16"), ExpertCheck("h100", 2, 8, 4096, 14336)]
    decode, mixed = (True, 32, 32), (False, 2048, 256)
    checks += [StepCheck("h100", "pallas", *decode, one_graph=graph) for graph in (False, True)]
    checks += [StepCheck("h100", "pallas", True, 256, 256, one_graph=True)]
    checks += [StepCheck("h100", "pallas", *mixed, one_graph=True)]
    checks += [StepCheck("h100", "xla", *decode, one_graph=True)]
    return [
        *checks,
        StepCheck("a100", "pallas", *decode, one_graph=True),
        StepCheck("a100", "pallas", *mixed, one_graph=True),
    ]


def run_here(check: Check, dump: Path) -> dict[str, Any]:
    """Runs one check in this process.

    Args:
        check: The check.
        dump: Folder of the compiler's dumps.

    Returns:
        Compile times, counts of pool copies and graphs, bytes of temporary memory, kernels and inner loops.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import jax
    from jax.experimental import topologies

    target = (ROOT / "benchmarks" / "targets" / f"{check.gpu}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=target
    )
    device = topology.devices[0]
    start = time.perf_counter()
    with jax.default_device(device):
        lower_check: Any = {KernelCheck: lower_op, ExpertCheck: lower_experts, StepCheck: lower_step}
        lower, pool_shape = lower_check[type(check)](check, device)
        lowered = lower()
    lowered_at = time.perf_counter()
    from jax_paged.worker.compilation.compiler import ONE_GRAPH

    options: Any = ONE_GRAPH if isinstance(check, StepCheck) and check.one_graph else {}
    compiled = lowered.compile(compiler_options=options)
    compiled_at = time.perf_counter()
    memory = compiled.memory_analysis()
    assert memory is not None
    # A quantized pool also occurs with its last dimensions merged, as the kernels receive it.
    shapes = [pool_shape, (*pool_shape[:3], math.prod(pool_shape[3:]))]
    pool = "|".join(rf"\w+\[{','.join(map(str, shape))}\]" for shape in shapes)
    copies = re.findall(rf"= (?:{pool})\S* copy(?:-start)?\(", compiled.as_text())
    found: dict[str, Any] = {
        "lower_s": round(lowered_at - start, 1),
        "compile_s": round(compiled_at - lowered_at, 1),
        "pool_copies": len(copies),
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": read_kernels(dump),
    }
    if not isinstance(check, StepCheck):
        found["loops"] = read_loops(dump)
    for file in dump.glob("*thunk_sequence_after_thunk_passes.txt"):
        top = [line for line in file.read_text().splitlines() if re.match(r"\d+: ", line)]
        graphs = sum("kCommandBuffer" in line for line in top)
        found |= {"graphs": graphs, "outside_graphs": len(top) - graphs}
    return found


def lower_op(check: KernelCheck, device: Any) -> tuple[Callable[[], Any], tuple[int, ...]]:
    """Returns a function that lowers an op for a device, and the shape of the pool."""
    import jax
    import jax.numpy as jnp

    from jax_paged.pallas_kernels import ops
    from jax_paged.pallas_kernels.quantization import DTYPES

    sharding, num_seqs, num_rows = jax.sharding.SingleDeviceSharding(device), 32, 512

    def spec(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    dtype = jnp.dtype(check.dtype)
    pool_shape = (NUM_BLOCKS, 2, check.kv_heads, check.page_size, check.head_dim + check.is_quantized)
    pool = spec(*pool_shape, dtype=DTYPES.get(check.kv_cache_dtype, dtype))
    rows = spec(num_rows, check.kv_heads, check.head_dim, dtype=dtype)
    tables, lens = spec(num_seqs, 512), spec(num_seqs)
    options: dict[str, Any] = {"backend": "pallas"}
    args: tuple[Any, ...]
    if check.op == "write_kv":
        args = (pool, rows, rows, spec(num_rows))
    elif check.op == "copy_blocks":
        args = (pool, spec(32), spec(32))
    else:
        options |= {"scale": check.head_dim**-0.5, "window": check.window, "soft_cap": check.soft_cap}
        num_rows = num_seqs if check.op == "paged_decode" else num_rows
        args = (spec(num_rows, check.heads, check.head_dim, dtype=dtype), pool, tables, lens)
        args += () if check.op == "paged_decode" else (spec(num_seqs + 1),)
        args += (spec(check.heads, dtype=jnp.float32),) * check.has_sinks
        args += (spec(check.heads, 128, dtype=jnp.float32),) * check.has_bias

    def run(*args: Any) -> Any:
        assert not (check.has_sinks and check.has_bias)
        name = "sinks" if check.has_sinks else "distance_bias" if check.has_bias else None
        last = {} if name is None else {name: args[-1]}
        return getattr(ops, check.op)(*args[: len(args) - len(last)], **options, **last)

    in_place = (0,) if check.op in ("write_kv", "copy_blocks") else ()
    jitted = jax.jit(run, donate_argnums=in_place)
    return lambda: jitted.trace(*args).lower(), pool_shape


def lower_experts(check: ExpertCheck, device: Any) -> tuple[Callable[[], Any], tuple[int, ...]]:
    """Returns a function that lowers the products of experts, and the shape of their matrices."""
    import jax

    from jax_paged.pallas_kernels.grouped_matmul import grouped_matmul

    sharding = jax.sharding.SingleDeviceSharding(device)
    shapes = ((check.rows, check.size), (check.groups, check.size, check.width), (check.groups,))
    dtypes = (check.dtype, check.dtype, "int32")
    args = [jax.ShapeDtypeStruct(*x, sharding=sharding) for x in zip(shapes, dtypes, strict=True)]
    jitted = jax.jit(lambda *args: grouped_matmul(*args, backend="pallas"))
    return lambda: jitted.trace(*args).lower(), shapes[1]


def lower_step(check: StepCheck, device: Any) -> tuple[Callable[[], Any], tuple[int, ...]]:
    """Returns a function that lowers a step for a device, and the shape of a layer's pool."""
    import numpy as np
    from engine_step import LLAMA_8B, abstract_context
    from jax.sharding import Mesh

    from jax_paged.worker.compilation.buckets import Bucket
    from jax_paged.worker.traced_step import StepProgram

    mesh = Mesh(np.array([device]), ("tensor",))
    context = abstract_context(LLAMA_8B, mesh, num_blocks=NUM_BLOCKS, backend=check.backend)
    program = StepProgram(Bucket(check.is_decode, check.num_tokens, check.num_seqs))
    return lambda: program.lower(context), context.pool()[0].shape


def read_kernels(dump: Path) -> dict[str, dict[str, Any]]:
    """Returns registers, spills, shared memory and instruction counts of each Mosaic kernel, by its name.

    If a name occurs several times, the result describes the kernel with the most registers, with the largest
    number of spilled bytes of all.
    """
    kernels: dict[str, dict[str, Any]] = {}
    for file in sorted(dump.glob("*.ptxas")):
        name, text = re.sub(r"_\d+$", "", file.stem), file.read_text()
        ptx = file.with_suffix(".ptx").read_text()
        # Python and the compiler number the kernels differently, so all files with this name are read.
        resources = "".join(path.read_text() for path in dump.glob(f"{name}_*.resources.txt"))
        counts = {k: len(re.findall(pattern, ptx)) for k, pattern in INSTRUCTIONS.items()}
        found = {
            "registers": max(map(int, re.findall(r"Used (\d+) registers", text))),
            "spill_bytes": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text))),
            "smem_bytes": max(map(int, re.findall(r"smem_scratch_bytes=(\d+)", resources))),
            "instructions": {k: n for k, n in counts.items() if n},
            "is_serialized": "instructions are serialized" in text,
        }
        known = kernels.get(name, found)
        spill_bytes = max(found["spill_bytes"], known["spill_bytes"])
        kernels[name] = max(known, found, key=lambda kernel: kernel["registers"]) | {
            "spill_bytes": spill_bytes
        }
    return kernels


def read_loops(dump: Path) -> dict[str, list[dict[str, int]]]:
    """Returns the inner loops of each Mosaic kernel, by its name. Kernels without loops are left out.

    Raises:
        FileNotFoundError: If nvdisasm is not installed.
    """
    import sass_loops

    listings = sorted(dump.glob("*.sass_ctrl"))
    if not listings:
        raise FileNotFoundError("Error: no listing of machine code; run pip install nvidia-cuda-nvdisasm")
    found = {re.sub(r"_\d+$", "", file.stem): sass_loops.read_loops(file) for file in listings}
    return {name: [dataclasses.asdict(loop) for loop in loops] for name, loops in found.items() if loops}


def run_apart(check: Check) -> dict[str, Any]:
    """Returns the result of `run_here` from a new process, or {"error": message} if that fails."""
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_TO": dump,
            "XLA_FLAGS": f"--xla_dump_to={dump}",
        }
        command = [sys.executable, __file__, "--run", str(check), "--dump", dump]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("-----")]
        message = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
        return {"error": f"exit {done.returncode}: {message[:300]}"}
    return json.loads(results[-1].removeprefix(MARK))


def worse_loops(
    found: dict[str, list[dict[str, int]]], accepted: dict[str, list[list[int]]] | None
) -> list[str]:
    """Returns messages about inner loops that are worse than the reference.

    Args:
        found: The inner loops by kernel.
        accepted: The counts in kernel-loops.json; None if the file does not contain the check.
    """
    if accepted is None:
        return ["its loops were never accepted (ARGS=--accept)"]
    out = [f"{name} has other loops than accepted" for name in accepted.keys() ^ found.keys()]
    for name in accepted.keys() & found.keys():
        if len(found[name]) != len(accepted[name]):
            out.append(f"{name} has {len(found[name])} inner loops, accepted are {len(accepted[name])}")
            continue
        for number, (new, old) in enumerate(zip(found[name], accepted[name], strict=True)):
            out += [
                f"loop {number} of {name} has {new[key]} {key}, accepted are {count}"
                for key, count in zip(COUNTS, old, strict=True)
                if new[key] > MAX_RATIO * count
            ]
    return out


def problems(check: Check, found: dict[str, Any]) -> list[str]:
    """Returns messages about the problems of a check, except its inner loops; empty if there are none."""
    if "error" in found:
        return [found["error"]]
    out = [f"{name} spills" for name, kernel in found["kernels"].items() if kernel["spill_bytes"]]
    out += [
        f"wgmma of {name} is serialized"
        for name, kernel in found["kernels"].items()
        if kernel["is_serialized"]
    ]
    if found["pool_copies"]:
        out.append(f"{found['pool_copies']} copies of a pool")
    if not isinstance(check, StepCheck):
        seen = {k for kernel in found["kernels"].values() for k in kernel["instructions"]}
        missing = EXPECTED.get((check.op, check.gpu), set()) - seen
        if isinstance(check, KernelCheck) and check.is_quantized:
            missing -= {"TMA", "cp.async"}
        out += [f"no {name}" for name in sorted(missing)]
        out += ["no kernel"] * (not found["kernels"])
    return out


def table(results: list[tuple[Check, dict[str, Any]]]) -> str:
    """Returns the tables of results/kernels-compile.md."""
    lines = [
        "| op | GPU | heads | head_dim | page | | kernel | registers | spills | shared memory | has |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for check, found in results:
        if isinstance(check, StepCheck):
            continue
        if isinstance(check, ExpertCheck):
            row = [check.op, check.gpu, f"{check.rows} rows, {check.shape}", "", "", flags(check)]
        else:
            heads = f"{check.heads}/{check.kv_heads}"
            row = [check.op, check.gpu, heads, check.head_dim, check.page_size, flags(check)]
        for name, k in found.get("kernels", {}).items() or {"**failed**": None}.items():
            cells = ["", "", "", ""]
            if k is not None:
                counts = ", ".join(f"{n} {name}" for name, n in k["instructions"].items())
                cells = [k["registers"], k["spill_bytes"], f"{k['smem_bytes'] / 1024:.0f} KB", counts]
            lines.append(f"| {' | '.join(map(str, [*row, name, *cells]))} |")
    lines += ["", *loop_table(results)]
    lines += [
        "",
        "| step | GPU | backend | options | pool copies | graphs | outside | temporary | lowered | compiled |",  # noqa: E501
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for check, found in results:
        if not isinstance(check, StepCheck):
            continue
        name = str(check).split(f"{check.backend} ")[1].split(",")[0]
        cells = [name, check.gpu, check.backend, "one graph" if check.one_graph else "default"]
        if "error" in found:
            cells += ["**failed**", *[""] * 5]
        else:
            cells += [found["pool_copies"], found["graphs"], found["outside_graphs"]]
            cells += [
                f"{found['temp_bytes'] / 2**20:.0f} MiB",
                f"{found['lower_s']} s",
                f"{found['compile_s']} s",
            ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def loop_table(results: list[tuple[Check, dict[str, Any]]]) -> list[str]:
    """Returns the lines of the table of inner loops, for Llama 8B's heads without options."""
    lines = [
        "| op | GPU | head_dim | page | kernel | loop | instructions | barriers | waits | memory | tensor "
        "| model cycles |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for check, found in results:
        # The counts of the other checks are only in kernel-loops.json.
        if not isinstance(check, KernelCheck) or (check.heads, check.kv_heads) != (32, 8) or flags(check):
            continue
        for name, loops in found.get("loops", {}).items():
            for number, loop in enumerate(loops):
                cells = [check.op, check.gpu, check.head_dim, check.page_size, name, number]
                lines.append(f"| {' | '.join(map(str, [*cells, *(loop[key] for key in COUNTS)]))} |")
    return lines


def flags(check: KernelCheck | ExpertCheck) -> str:
    """Returns the options of a check that differ from the defaults, as text."""
    names = [check.dtype] * (check.dtype != "bfloat16")
    if isinstance(check, ExpertCheck):
        return ", ".join(names)
    names += ["window"] * bool(check.window) + ["soft cap"] * bool(check.soft_cap)
    names += ["sinks"] * check.has_sinks + ["bias"] * check.has_bias
    return ", ".join(names + [f"{check.kv_cache_dtype} pool"] * check.is_quantized)


def accept(results: list[tuple[Check, dict[str, Any]]]) -> None:
    """Writes the inner loops to kernel-loops.json and keeps the entries of checks that did not run."""
    kept = json.loads(ACCEPTED.read_text())["loops"] if ACCEPTED.exists() else {}
    found = {
        str(check): {
            name: [[loop[key] for key in COUNTS] for loop in loops] for name, loops in kernels.items()
        }
        for check, result in results
        if (kernels := result.get("loops"))
    }
    names = [str(check) for check in all_checks()]
    rows = {name: loops for name in names if (loops := found.get(name, kept.get(name)))}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(loops)}" for name, loops in rows.items())
    heading = (
        f'{{\n  "counts": {json.dumps(COUNTS)},\n  "made_by": {json.dumps(versions())},\n  "loops": {{\n'
    )
    ACCEPTED.write_text(f"{heading}{lines}\n  }}\n}}\n")
    print(f"written to {ACCEPTED}")


def versions() -> str:
    """Returns the date, the commit and the versions of JAX, as text."""
    import jax
    import jaxlib

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() or "unknown"
    return f"{today}, commit {commit}, jax {jax.__version__}, jaxlib {jaxlib.__version__}, deviceless."


def main() -> int:
    """Runs the checks and writes the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run only the checks whose names contain this text")
    parser.add_argument(
        "--accept", action="store_true", help="write results/kernel-loops.json instead of comparing with it"
    )
    parser.add_argument("--dry", action="store_true", help="do not write results/kernels-compile.md")
    parser.add_argument("--jobs", type=int, default=2, help="checks at the same time (default: %(default)s)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    checks = all_checks()
    if args.run:
        found = run_here(next(check for check in checks if str(check) == args.run), args.dump)
        print(MARK + json.dumps(found))
        return 0

    checks = [check for check in checks if args.only in str(check)]
    accepted = json.loads(ACCEPTED.read_text())["loops"] if ACCEPTED.exists() else {}
    results: list[tuple[Check, dict[str, Any]]] = []
    num_failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for check, found in zip(checks, pool.map(run_apart, checks), strict=True):
            wrong = problems(check, found)
            if found.get("loops") and not args.accept:
                wrong += worse_loops(found["loops"], accepted.get(str(check)))
            num_failed += bool(wrong)
            print(f"{'FAILED' if wrong else 'ok':<7}{check}  {'; '.join(wrong)}", flush=True)
            results.append((check, found))
    text = f"{versions()}\n\n{table(results)}"
    if args.accept:
        accept(results)
    if args.dry or args.only:
        print(text)
    else:
        before, rest = DOC.read_text().split(BEGIN)
        DOC.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
        print(f"written to {DOC}")
    print(f"{len(checks) - num_failed} of {len(checks)} checks passed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())

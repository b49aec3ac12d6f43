"""Collectives and memory of an 8B Llama's step on several H100s, from compilation without GPUs.

    make devices-compile                                in the environment of kernels-compile (4.5 GB)
    make devices-compile KERNELS_PYTHON=/path/python    in another environment with jax[cuda13]
    make devices-check                                  only one and four GPUs; downloads 200 MB; runs in CI

XLA does the same work as on a machine with GPUs, except autotuning. Nothing is run, so no times are measured.
The exit status is 1 if a step on several devices

- has other collectives than two all-reduces per layer, one for the embeddings, and one all-gather of logits,
- gathers or copies an array of the pool, or
- has more than 1.1 times the temporary memory of the step on one device.

The table of all checks goes to benchmarks/results/devices-compile.md.
"""

import argparse
import collections
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "benchmarks" / "results" / "devices-compile.md"
BEGIN, END = "<!-- devices-compile: begin -->", "<!-- devices-compile: end -->"
MARK = "RESULT "  # prefix of the line with the result of a process
NUM_BLOCKS = 4096
MAX_RATIO = 1.1  # of temporary memory, compared with one device
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
BYTES = {"bf16": 2, "f32": 4, "s32": 4}


class Check(NamedTuple):
    """A step to compile for a number of H100s.

    Args:
        num_hosts: Number of machines.
        gpus_per_host: Number of GPUs per machine.
        num_tokens: Number of token rows. 64 means a decode step of 64 sequences, other values a mixed step.
    """

    num_hosts: int
    gpus_per_host: int
    num_tokens: int

    @property
    def size(self) -> int:
        """The total number of GPUs."""
        return self.num_hosts * self.gpus_per_host


CHECKS = [Check(*hosts, t) for t in (64, 2048) for hosts in ((1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4))]


def compile_step(check: Check, dump: Path) -> dict[str, Any]:
    """Compiles a step in this process.

    Args:
        check: The step.
        dump: Folder of XLA's dumps.

    Returns:
        The number of collectives by name and the bytes of their results, the bytes of temporary memory, the
        number of copies and gathers of pool arrays, and the result of `graphs`.
    """
    import jax
    import numpy as np
    from engine_step import LLAMA_8B, abstract_context
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from jax_paged.worker.compilation.buckets import Bucket
    from jax_paged.worker.compilation.compiler import ONE_GRAPH
    from jax_paged.worker.traced_step import StepProgram

    target = (ROOT / "benchmarks" / "targets" / "h100.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology=f"{check.num_hosts}x1x{check.gpus_per_host}",
        target_config=target,
    )
    mesh = Mesh(np.array(topology.devices), ("tensor",))
    context = abstract_context(LLAMA_8B, mesh, num_blocks=NUM_BLOCKS)
    with jax.default_device(topology.devices[0]):
        lowered = StepProgram(Bucket(check.num_tokens == 64, check.num_tokens, 64)).lower(context)
        compiled = lowered.compile(compiler_options=dict(ONE_GRAPH))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found: collections.Counter[str] = collections.Counter()
    num_bytes: collections.Counter[str] = collections.Counter()
    for result, name in re.findall(rf"= ([^=]*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", text):
        found[name] += 1
        # An asynchronous collective ("-start") lists several shapes; the last one is the shape of its result.
        dtype, shape = re.findall(r"(\w+)\[([\d,]*)\]", result)[-1]
        num_bytes[name] += BYTES[dtype] * math.prod(map(int, filter(None, shape.split(","))))
    pool = rf"\w+\[{NUM_BLOCKS},2,[\d,]+\]"
    return {
        "collectives": found,
        "bytes": num_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "pool_moves": len(re.findall(rf"= [^=]*{pool}[^=]* (?:copy|all-gather|gather)(?:-start)?\(", text)),
        "graphs": graphs(dump),
    }


def graphs(dump: Path) -> list[int]:
    """Returns the number of CUDA graphs of a step, and the number of operations outside of graphs."""
    *_, file = sorted(dump.glob("*thunk_sequence_after_thunk_passes.txt"))
    top = [line for line in file.read_text().splitlines() if re.match(r"\d+: ", line)]
    num_graphs = sum("kCommandBuffer" in line for line in top)
    return [num_graphs, len(top) - num_graphs]


def run_apart(check: Check) -> dict[str, Any]:
    """Returns the result of `compile_step` from a new process, or {"error": message} if that fails."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), *sys.path])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as dump:
        environment["XLA_FLAGS"] = f"--xla_dump_to={dump}"
        command = [sys.executable, __file__, "--run", *map(str, check), dump]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    results = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not results:
        lines = [line for line in done.stderr.splitlines() if "Error" in line] or [done.stderr[-300:]]
        return {"error": f"exit {done.returncode}: {lines[-1][:300]}"}
    return json.loads(results[-1].removeprefix(MARK))


def problems(check: Check, found: dict[str, Any], alone: dict[str, Any], num_layers: int) -> list[str]:
    """Returns messages about the problems of a step; empty if there are none.

    Args:
        check: The step.
        found: The result of `compile_step` for it.
        alone: The result for the same step on one device.
        num_layers: Number of layers of the model.
    """
    if "error" in found:
        return [found["error"]]
    wanted = {"all-reduce": 2 * num_layers + 1, "all-gather": 1} if check.size > 1 else {}
    out = [] if found["collectives"] == wanted else [f"collectives {found['collectives']}, expected {wanted}"]
    if found["pool_moves"]:
        out.append(f"{found['pool_moves']} copies or gathers of pool arrays")
    if found["temp_bytes"] > MAX_RATIO * alone.get("temp_bytes", math.inf):
        out.append(f"{found['temp_bytes']} bytes of temporary memory, {alone['temp_bytes']} on one device")
    return out


def table(results: dict[Check, dict[str, Any]]) -> str:
    """Returns the table for devices-compile.md."""
    lines = [
        "| hosts x GPUs | token rows | all-reduces | MiB | all-gathers | MiB | others | pool copies "
        "| temporaries, MiB | graphs | outside |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for check, found in results.items():
        cells: list[Any] = [f"{check.num_hosts} x {check.gpus_per_host}", check.num_tokens]
        if "error" in found:
            cells += ["**failed**", *[""] * 8]
        else:
            counts, sizes = found["collectives"], found["bytes"]
            for name in COLLECTIVES[:2]:
                cells += [counts.get(name, 0), f"{sizes.get(name, 0) / 2**20:.1f}"]
            cells += [sum(counts.get(name, 0) for name in COLLECTIVES[2:]), found["pool_moves"]]
            cells += [f"{found['temp_bytes'] / 2**20:.1f}", *found["graphs"]]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the checks and writes the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", nargs=4, metavar=("HOSTS", "GPUS", "ROWS", "DUMP"), help=argparse.SUPPRESS)
    parser.add_argument(
        "--size", type=int, help="check only one GPU and SIZE GPUs of one machine; do not write the table"
    )
    args = parser.parse_args()
    if args.run:
        print(MARK + json.dumps(compile_step(Check(*map(int, args.run[:3])), Path(args.run[3]))))
        return 0
    from engine_step import LLAMA_8B

    results, wrong = dict[Check, dict[str, Any]](), 0
    asked = [
        c for c in CHECKS if args.size is None or (c.num_hosts, c.gpus_per_host) in ((1, 1), (1, args.size))
    ]
    for check in asked:
        results[check] = found = run_apart(check)
        alone = results[Check(1, 1, check.num_tokens)]
        messages = problems(check, found, alone, LLAMA_8B["num_hidden_layers"])
        wrong += bool(messages)
        name = f"{check.num_hosts} x {check.gpus_per_host} GPUs, {check.num_tokens} rows"
        print(f"{name}: {'; '.join(messages) or 'ok'} {found.get('collectives', '')}", flush=True)
    if args.size is None:
        begin, rest = DOC.read_text(encoding="utf-8").split(BEGIN)
        end = rest.split(END)[1]
        DOC.write_text(f"{begin}{BEGIN}\n{table(results)}\n{END}{end}", encoding="utf-8")
    print(f"{len(results) - wrong} of {len(results)} checks passed")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

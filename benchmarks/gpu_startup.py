"""Compile time of the GPU programs of an engine with an 8B Llama, per bucket, without a GPU.

    python benchmarks/gpu_startup.py            in an environment with jax[cuda13] (see kernels_compile.py)
    python benchmarks/gpu_startup.py --backend xla --gpu a100

XLA and ptxas do the same work as on a machine with a GPU, except autotuning, so a real start takes longer.
The programs are compiled one after another in one process, with an empty cache. "core s" is the processor
time of all threads and of the compilers that XLA starts; other load on the machine hardly changes it. "s" is
the elapsed time. The row "(ready)" is the total of the first two programs, with which an engine is ready.
"""

import argparse
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_BLOCKS = 4096


def seconds() -> tuple[float, float]:
    """Returns the current time, and the processor time of this process and its children (both in seconds)."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.perf_counter(), sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    """Compiles all buckets and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--gpu", default="h100", choices=("h100", "a100"), help="GPU to compile for (default: %(default)s)"
    )
    parser.add_argument(
        "--backend",
        default="pallas",
        choices=("pallas", "xla"),
        help="attention backend (default: %(default)s)",
    )
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

    import jax
    import numpy as np
    from engine_step import LLAMA_8B, abstract_context
    from jax.experimental import topologies
    from jax.sharding import Mesh

    from jax_paged.worker.compilation.buckets import plan_buckets
    from jax_paged.worker.compilation.compiler import NUM_COMPILE_THREADS, ONE_GRAPH
    from jax_paged.worker.traced_step import StepProgram

    target = (ROOT / "benchmarks" / "targets" / f"{args.gpu}.txtpb").read_text()
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=target
    )
    device = topology.devices[0]
    options: Any = ONE_GRAPH if args.backend == "pallas" else {}
    buckets = plan_buckets(args.max_num_seqs, args.max_num_batched_tokens)
    totals = np.zeros(4)
    print(f"{args.gpu}, {args.backend}, jax {jax.__version__}, {len(buckets)} steps\n")
    print("| step | traced and lowered, core s | s | compiled, core s | s | temporaries |")
    print("|---|---|---|---|---|---|")
    with jax.default_device(device):
        mesh = Mesh(np.array([device]), ("tensor",))
        context = abstract_context(
            LLAMA_8B,
            mesh,
            num_blocks=NUM_BLOCKS,
            backend=args.backend,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
        )
        # An engine compiles in this order: first the largest mixed step and the largest decode step.
        largest = [max(b for b in buckets if b.is_decode is kind) for kind in (False, True)]
        for bucket in [*largest, *(b for b in buckets if b not in largest)]:
            start = seconds()
            lowered = StepProgram(bucket).lower(context)
            traced = seconds()
            compiled = lowered.compile(compiler_options=options)
            done = seconds()
            memory = compiled.memory_analysis()
            assert memory is not None
            # Processor time and elapsed time: of tracing and lowering, then of compiling.
            costs = np.subtract([*traced[::-1], *done[::-1]], [*start[::-1], *traced[::-1]])
            totals += costs
            cells = [f"{x:.1f}" for x in costs]
            print(
                f"| {bucket} | {' | '.join(cells)} | {memory.temp_size_in_bytes / 2**20:.0f} MiB |",
                flush=True,
            )
            if bucket == largest[-1]:
                print(f"| (ready) | {' | '.join(f'{x:.1f}' for x in totals)} | |", flush=True)
    print(f"| all | {' | '.join(f'{x:.1f}' for x in totals)} | |")
    print(f"\nAn engine traces one program at a time and compiles {NUM_COMPILE_THREADS} programs at a time.")


if __name__ == "__main__":
    main()

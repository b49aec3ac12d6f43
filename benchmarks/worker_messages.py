"""Cost of messages between the processes of an engine, and of steps in one process and in two processes.

    python benchmarks/worker_messages.py [--out FILE]

Messages: one process sends a message with an array, which stands for the buffers of a step. The other process
answers with a few bytes as soon as it has received everything. The round trip is an upper bound of the cost.

Steps: decode steps of a small random model on two devices, in one process and in two processes, with tensor
parallelism and with pipeline parallelism. A pipeline has two engines; only one of them has requests here.
"""

import argparse
import contextlib
import multiprocessing
import platform
import socket
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_paged import EngineArgs, LLMEngine, SamplingParams
from jax_paged.engine.executors import ExecutorFactory
from jax_paged.models.weights import random_checkpoint
from jax_paged.worker.distributed.channel import Channel

SIZES, NUM_MESSAGES, NUM_STEPS = (1, 4, 16, 64, 256), 2000, 200
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}


def answer(connection: socket.socket) -> None:
    """Answers messages until the connection is closed."""
    channel = Channel(connection)
    with contextlib.suppress(OSError):
        while True:
            channel.receive()
            channel.send(None)


def message_times(kib: int) -> list[float]:
    """Returns the round-trip times of messages with an array of `kib` KiB (milliseconds)."""
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    channel, array = Channel(ours), np.zeros(kib * 256, np.int32)
    # The header is as long as that of a step: a program and the ids of its arguments and results.
    header = ["decode 64", ["weights", *range(100_000, 100_070), None], list(range(100_070, 100_140))]
    times = []
    for _ in range(NUM_MESSAGES):
        start = time.perf_counter()
        channel.send(header, [array])
        channel.receive()
        times.append(1e3 * (time.perf_counter() - start))
    channel.close()
    process.join()
    return times[NUM_MESSAGES // 10 :]


def step_times(folder: Path, backend: str, **sizes: int) -> list[float]:
    """Returns the times of decode steps of eight requests (milliseconds).

    Args:
        folder: Folder of the checkpoint.
        backend: The distributed executor backend: "uni" (one process) or "mp" (two processes).
        sizes: Engine arguments that set the parallelism.
    """
    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        distributed_executor_backend=backend,  # pyright: ignore[reportArgumentType]
        **sizes,  # pyright: ignore[reportArgumentType]
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=400,
        swap_space=0,
    )
    with contextlib.ExitStack() as stack:
        executors = ExecutorFactory()
        engine, *_ = [
            stack.enter_context(LLMEngine(args, executors.make(i, args))) for i in range(args.num_engines)
        ]
        engine.executor.wait_until_compiled()
        params = SamplingParams(temperature=0, max_tokens=NUM_STEPS, ignore_eos=True)
        for i in range(8):
            engine.add_request(str(i), {"prompt_token_ids": [8, 9, 10 + i]}, params)
        times = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            times.append(1e3 * (time.perf_counter() - start))
    return times[10:-10]


def row(name: str, times: list[float]) -> str:
    """Returns a row of the table."""
    ninety = statistics.quantiles(times, n=10)[-1]
    return f"| {name} | {statistics.median(times):.3f} | {ninety:.3f} | {min(times):.3f} |"


def main() -> None:
    """Runs all measurements and prints the table or writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the table (default: standard output)")
    out: Path | None = parser.parse_args().out
    jax.config.update("jax_num_cpu_devices", 2)
    lines = [
        f"# Messages between the processes of an engine, {date.today()}",
        "",
        f"`python benchmarks/worker_messages.py`; {platform.machine()}, jax {jax.__version__}; milliseconds.",
        "",
        "| | p50 | p90 | minimum |",
        "|---|---|---|---|",
        *(row(f"round trip of a message of {kib} KiB", message_times(kib)) for kib in SIZES),
    ]
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint(Path(folder), CONFIG, "float32")
        for backend, name in (("uni", "one process"), ("mp", "two processes")):
            for size, how in (("tensor_parallel_size", "tensor"), ("pipeline_parallel_size", "pipeline")):
                times = step_times(Path(folder), backend, **{size: 2})
                lines.append(row(f"decode step on two devices in {name}, {how} parallelism", times))
    text = "\n".join(lines) + "\n"
    print(text) if out is None else out.write_text(text)


if __name__ == "__main__":
    main()

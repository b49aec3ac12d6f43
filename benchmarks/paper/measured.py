"""Measurements of the engine with the built-in model on a CPU, with paged memory and with Orca's memory.

Scheduler and model are the same in all systems; only the block manager differs. OPT-13B's number of slots and
maximum length and ShareGPT's lengths are divided by 4. The lengths of Alpaca and of translations are not.
"""

import dataclasses
import functools
import inspect
import json.decoder
import statistics
import time
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np

from jax_paged import BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler import Scheduler
from paper.buddy import BuddyManager, Demand
from paper.lengths import ALPACA, SHAREGPT, WORKLOADS, Workload, draw_lengths
from paper.systems import ORCAS

SCALE = 4
NUM_SLOTS = 15_700 // SCALE
MAX_LEN = 2048 // SCALE
FIRST_REQUEST_TOKEN = 16  # last prompt token of request 0; smaller ids are special tokens of the model


class Job(NamedTuple):
    """A request of a measurement.

    Args:
        prompt: Token ids. The last one is FIRST_REQUEST_TOKEN plus the index of the request.
        params: Sampling or beam search parameters.
        demand: Size of the request, which the Orca systems use.
    """

    prompt: list[int]
    params: SamplingParams | BeamSearchParams
    demand: Demand


class Run(NamedTuple):
    """Result of serving some jobs.

    Args:
        seconds: Time until the last job ended.
        batched: Mean number of running requests over the steps.
        saved: Share of blocks that sharing saved, from the sums over all steps.
        num_preemptions: Number of preemptions of all requests.
    """

    seconds: float
    batched: float
    saved: float
    num_preemptions: int


def make_engine(block_size: int = 16, max_num_seqs: int = 64) -> LLMEngine:
    """Returns an engine whose pool holds NUM_SLOTS tokens, ready to measure."""
    args = EngineArgs(
        model="pagelet",
        dtype="float32",
        max_model_len=MAX_LEN,
        block_size=block_size,
        num_gpu_blocks_override=NUM_SLOTS // block_size + 1,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MAX_LEN,
        skip_tokenizer_init=True,
    )
    engine = LLMEngine(args)
    engine.executor.wait_until_compiled()
    return engine


@functools.cache
def _text() -> tuple[int, ...]:
    """Returns token ids of Python source code, a kind of text that the built-in model knows."""
    from jax_paged.engine.text.tokenizer import Tokenizer
    from jax_paged.models.checkpoint import resolve_model_dir

    tokenizer = Tokenizer(str(resolve_model_dir("pagelet")))
    lines = inspect.getsource(json.decoder).splitlines(keepends=True)
    return tuple(token_id for line in lines for token_id in tokenizer.hf.encode(line))


def make_jobs(workload: Workload, count: int, n: int = 1, beam_width: int | None = None) -> list[Job]:
    """Returns requests whose prompts are the workload's prefix and a part of `_text`."""
    text = _text()
    prefix = list(text[: workload.prefix_len])
    jobs = []
    for i, (prompt_len, output_len) in enumerate(zip(*draw_lengths(workload, count), strict=True)):
        start = (i * 97) % (len(text) - MAX_LEN)
        prompt = [*prefix, *text[start : start + int(prompt_len) - 1], FIRST_REQUEST_TOKEN + i]
        params: SamplingParams | BeamSearchParams
        if beam_width is None:
            params = SamplingParams(
                n=n, seed=i, max_tokens=int(output_len), ignore_eos=True, detokenize=False
            )
        else:
            params = BeamSearchParams(beam_width, max_tokens=int(output_len), ignore_eos=True)
        jobs.append(Job(prompt, params, Demand(int(output_len), beam_width or n)))
    return jobs


def scheduler_of(
    system: str, jobs: Items[Job], *, shares_prefixes: bool = False, preemption_mode: str | None = None
) -> type[Scheduler]:
    """Returns a scheduler class with the block manager of a system. The Orca systems know the jobs' sizes."""

    def demand(seq: Sequence) -> Demand:
        return jobs[seq.prompt_token_ids[-1] - FIRST_REQUEST_TOKEN].demand

    class SystemScheduler(Scheduler):
        def __init__(self, *, block_manager: BlockManager, **settings: Any) -> None:
            num_blocks, size = block_manager.pool.num_blocks, block_manager.block_size
            if system in ORCAS:
                max_len = settings["max_model_len"]
                manager = BuddyManager(num_blocks, size, ORCAS[system], max_len, demand)
                settings["watermark"] = 0.0
            else:
                num_swap_blocks = block_manager.swap_pool.num_usable
                manager = BlockManager(num_blocks, size, shares_prefixes, num_swap_blocks=num_swap_blocks)
            settings["preemption_mode"] = preemption_mode
            super().__init__(block_manager=manager, **settings)

    return SystemScheduler


def serve(idle_engine: LLMEngine, system: str, jobs: Items[Job], **settings: Any) -> Run:
    """Serves jobs that all arrive at once, with the block manager of a system.

    Args:
        idle_engine: An engine without requests, whose executor is used.
        system: One of SYSTEMS.
        jobs: The jobs.
        settings: Further arguments of `scheduler_of`.
    """
    engine = LLMEngine(
        idle_engine.args, idle_engine.executor, scheduler=scheduler_of(system, jobs, **settings)
    )
    manager, size = engine.scheduler.block_manager, engine.config.block_size
    if manager.enable_prefix_caching:
        prefix_len = min(len(job.prompt) for job in jobs) // size * size
        engine.pin_prefix({"prompt_token_ids": jobs[0].prompt[:prefix_len]})
    for i, job in enumerate(jobs):
        engine.add_request(str(i), {"prompt_token_ids": job.prompt}, job.params)
    groups = list(engine.scheduler.queues.waiting.values())
    batched, saved, start = [], [], time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        batched.append(len(engine.scheduler.queues.running))
        num_blocks = sum(len(table) for (table,) in manager.block_tables.values())
        num_used = manager.num_usable_blocks - manager.num_free_blocks - manager.pool.num_held
        if num_blocks:
            saved.append((num_blocks, num_blocks - num_used))
    seconds = time.perf_counter() - start
    num_blocks, num_saved = np.array(saved).sum(axis=0)
    num_preemptions = sum(group.metrics.num_preemptions for group in groups)
    return Run(seconds, float(np.mean(batched)), float(num_saved / num_blocks), num_preemptions)


def engine_batches(count: int, rounds: int) -> dict[str, dict[str, float]]:
    """Measures figure 13: mean number of running requests, and output tokens per second, for each system."""
    workload = _quarter(SHAREGPT)
    jobs = make_jobs(workload, count)
    num_tokens = sum(job.demand.output_len for job in jobs)
    with make_engine() as engine:
        found = _in_turns(engine, {name: (name, jobs, {}) for name in (*ORCAS, "vLLM")}, rounds)
    return {
        name: {
            "batched": round(statistics.median(run.batched for run in runs), 2),
            "tokens_per_s": round(num_tokens / statistics.median(run.seconds for run in runs), 1),
        }
        for name, runs in found.items()
    }


def engine_sharing(count: int) -> dict[str, float]:
    """Measures figure 15: percent of blocks that samples and beams save, with Alpaca's lengths."""
    workload = dataclasses.replace(ALPACA, max_len=MAX_LEN)
    found: dict[str, float] = {}
    with make_engine() as engine:
        for several in (2, 4, 6):
            samples, beams = make_jobs(workload, count, n=several), make_jobs(workload, count, 1, several)
            found[f"{several} samples"] = round(serve(engine, "vLLM", samples).saved * 100, 2)
            found[f"{several} beams"] = round(serve(engine, "vLLM", beams).saved * 100, 2)
    return found


def engine_prefix(count: int, rounds: int) -> dict[str, float]:
    """Measures figure 16: throughput relative to Orca (Oracle), by the length of the shared prefix."""
    found: dict[str, float] = {}
    with make_engine() as engine:
        for prefix_len in (80, 341):
            workload = dataclasses.replace(WORKLOADS[f"Translation, {prefix_len}"], max_len=MAX_LEN)
            jobs = make_jobs(workload, count)
            turns = {
                "vLLM": ("vLLM", jobs, {"shares_prefixes": True}),
                "Orca (Oracle)": ("Orca (Oracle)", jobs, {}),
            }
            runs = _in_turns(engine, turns, rounds)
            ratios = [
                orca.seconds / ours.seconds
                for ours, orca in zip(runs["vLLM"], runs["Orca (Oracle)"], strict=True)
            ]
            found[str(prefix_len)] = round(statistics.median(ratios), 3)
    return found


def engine_recovery(block_size: int, count: int, rounds: int) -> dict[str, float]:
    """Measures figure 19b: time of all jobs with recomputation and with swapping (seconds).

    The result also contains the number of preemptions of one run with swapping.
    """
    workload = _quarter(SHAREGPT)
    jobs = make_jobs(workload, count)
    modes = {mode: ("vLLM", jobs, {"preemption_mode": mode}) for mode in ("recompute", "swap")}
    with make_engine(block_size) as engine:
        found = _in_turns(engine, modes, rounds)
    seconds = {mode: round(statistics.median(run.seconds for run in runs), 3) for mode, runs in found.items()}
    return seconds | {"num_preemptions": found["swap"][0].num_preemptions}


def kernel_overhead(batch: int, context: int, rounds: int) -> float:
    """Measures figure 18a on a CPU: additional time of attention through block tables, in percent.

    The native kernel attends to blocks of 16 tokens in random order, and to one block per sequence.
    """
    import jax
    import jax.numpy as jnp

    from jax_paged.pallas_kernels import ops

    heads, head_dim = 8, 64
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.normal(size=(batch, heads, head_dim)), jnp.float32)
    lens = jnp.full(batch, context, jnp.int32)
    cases: list[tuple[Any, Any]] = []
    for size in (16, context):
        per_seq = context // size
        blocks = 1 + rng.permutation(batch * per_seq)
        shape = (1 + batch * per_seq, 2, heads, size, head_dim)
        pool = jnp.asarray(rng.normal(size=shape), jnp.float32)
        cases.append((pool, jnp.asarray(blocks.reshape(batch, per_seq), jnp.int32)))

    @jax.jit
    def attend(query: jax.Array, pool: jax.Array, tables: jax.Array) -> jax.Array:
        for _ in range(20):  # repeated in one program, so that the time of the call does not count
            query = ops.paged_decode(query, pool, tables, lens, scale=head_dim**-0.5, backend="native")
        return query

    times: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for found, case in zip(times, cases, strict=True):
            start = time.perf_counter()
            attend(query, *case).block_until_ready()
            found.append(time.perf_counter() - start)
    paged, whole = (statistics.median(found[1:]) for found in times)
    return round((paged / whole - 1) * 100, 1)


def _in_turns(
    engine: LLMEngine, turns: dict[str, tuple[str, Items[Job], Any]], rounds: int
) -> dict[str, list[Run]]:
    """Serves jobs in several ways, which alternate round by round, after a warm-up round.

    Args:
        engine: The engine, without requests.
        turns: By name: the system, the jobs, and further arguments of `scheduler_of`.
        rounds: Number of rounds that count.
    """
    found: dict[str, list[Run]] = {name: [] for name in turns}
    for i in range(rounds + 1):
        for name, (system, jobs, settings) in turns.items():
            run = serve(engine, system, jobs, **settings)
            if i:
                found[name].append(run)
    return found


def _quarter(workload: Workload) -> Workload:
    means = {"prompt_mean": workload.prompt_mean / SCALE, "output_mean": workload.output_mean / SCALE}
    return dataclasses.replace(workload, **means, max_len=MAX_LEN)

"""The jitted step: nothing compiles after the start, the pool is updated in place, close() frees it."""

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
import pytest
from helpers.real_model import (
    VOCAB_SIZE,
    Request,
    greedy_requests,
    make_engine,
    mixed_requests,
    reschedule,
    run,
    steps_of,
    tokens_of,
)

from jax_paged import BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.pallas_kernels import native
from jax_paged.worker.block_mover import FEW_COPIES, SWAP_BLOCKS, SwapOutProgram
from jax_paged.worker.block_tables import WriteBlockTablesProgram
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.executor import LocalExecutor
from jax_paged.worker.features.prompt_logprobs import PromptLogprobsProgram
from jax_paged.worker.model_runner import ModelRunner
from jax_paged.worker.sampling.token_counts import ResetTokenCountsProgram
from jax_paged.worker.traced_step import StepProgram

pytestmark = pytest.mark.thorough

TRACED = "/jax/core/compile/jaxpr_trace_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compile_events() -> Iterator[list[str]]:
    """Collects JAX's own reports of what it traces and compiles."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in (TRACED, COMPILED):
            events.append(f"{event} {kwargs.get('fun_name')}")

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def runner_of(engine: LLMEngine) -> ModelRunner:
    assert isinstance(engine.executor, LocalExecutor)
    return engine.executor.runner


@pytest.fixture(scope="module")
def session_engine(session_engine_of_all_buckets: LLMEngine) -> LLMEngine:
    return session_engine_of_all_buckets


def test_nothing_compiles_after_the_start(engine: LLMEngine) -> None:
    with compile_events() as events:
        jax.jit(lambda x: x + 1)(np.ones(3))
    assert any(e.startswith(TRACED) for e in events)
    assert any(e.startswith(COMPILED) for e in events)

    runner = runner_of(engine)
    used = set()
    choose = runner.compiled.smallest_ready

    def note_bucket(*variant: Any, **sizes: Any) -> Bucket:
        bucket = choose(*variant, **sizes)
        used.add(bucket)
        return bucket

    requests = mixed_requests(seed=3, count=400, max_prompt=60, max_output=6)
    requests += greedy_requests(seed=7, count=100)
    order = np.random.default_rng(0).permutation(len(requests))
    num_traces = runner.compiled.num_traces
    with compile_events() as events, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.compiled, "smallest_ready", note_bucket)
        for i in range(0, 20, 2):
            run(engine, [requests[j] for j in order[i : i + 2]])
        run(engine, [requests[j] for j in order[20:]])
    assert events == []
    assert runner.compiled.num_traces == num_traces
    assert used == set(runner.buckets)


def test_nothing_compiles_for_copies_and_swaps(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    sampled = SamplingParams(n=4, temperature=1, seed=1, max_tokens=50, ignore_eos=True)
    greedy = SamplingParams(temperature=0)
    # Four samples of 341 tokens take more blocks than one call swaps; 16 sequences are forked in one step.
    prompts = [rng.integers(0, VOCAB_SIZE, n).tolist() for n in (341, 341, 20, 21, 22, 23, 341)]
    requests = [Request(prompt, sampled) for prompt in prompts]
    requests += [Request(p, greedy, BeamSearchParams(w, 30)) for w, p in ((2, prompts[0]), (10, prompts[2]))]
    reschedule(engine, num_blocks=74)
    steps = steps_of(engine, monkeypatch)
    with compile_events() as events:
        run(engine, requests)
    assert events == []
    num_copies = [len(step.blocks_to_copy) for step in steps]
    assert max(num_copies) > FEW_COPIES
    assert any(0 < n <= FEW_COPIES for n in num_copies)
    assert max(len(step.blocks_to_swap_out) for step in steps) > SWAP_BLOCKS
    assert max(len(step.blocks_to_swap_in) for step in steps) > SWAP_BLOCKS


def assert_pool_is_not_copied(engine: LLMEngine) -> None:
    """No program has temporaries of its size; what writes to pool or batch slots does it in place."""
    runner, pool_bytes = runner_of(engine), engine.config.kv_cache_bytes
    assert pool_bytes == sum(x.nbytes for x in runner.arrays["kv_cache"])
    (counts,), (tables,) = runner.arrays["token_counts"], runner.arrays["block_tables"]
    for program in runner.compiled.programs:
        memory = runner.compiled[program].memory
        assert memory is not None
        assert memory.temp_size_in_bytes < 0.1 * pool_bytes, program
        if isinstance(program, StepProgram):
            assert memory.alias_size_in_bytes >= pool_bytes + counts.nbytes + tables.nbytes, program
        elif isinstance(program, ResetTokenCountsProgram):
            assert memory.alias_size_in_bytes >= counts.nbytes
        elif isinstance(program, WriteBlockTablesProgram):
            assert memory.alias_size_in_bytes >= tables.nbytes
        elif not isinstance(program, SwapOutProgram | PromptLogprobsProgram):  # which only read
            assert memory.alias_size_in_bytes >= pool_bytes, program


def test_pool_is_not_copied(session_engine: LLMEngine) -> None:
    assert_pool_is_not_copied(session_engine)


def test_temporaries_do_not_grow_with_the_pool(session_engine: LLMEngine) -> None:
    """A copy of the pool would, at any size; steps of a single row once made one."""
    runner = runner_of(session_engine)
    for bucket in (runner.buckets[0], runner.buckets[-1]):
        temps = []
        for num_blocks in (500, 5000):
            context = dataclasses.replace(runner.context, num_blocks=num_blocks)
            memory = StepProgram(bucket).lower(context).compile().memory_analysis()
            assert memory is not None
            temps.append(memory.temp_size_in_bytes)
        assert temps[1] - temps[0] < 0.01 * 4500 * runner.context.block_bytes, bucket


@pytest.mark.parametrize(
    "backend",
    ["xla", pytest.param("native", marks=pytest.mark.skipif(not native.is_built(), reason="not built"))],
)
def test_a_burst_copies_neither_pool_nor_weights(session_engine: LLMEngine, backend: Any) -> None:
    """The loop holds what a single step does: its temporaries are no larger, whatever the pool's size."""
    runner = runner_of(session_engine)
    weight_bytes = session_engine.config.weight_bytes
    for num_seqs in (1, 16):
        temps = []
        for num_blocks, num_steps in ((500, 1), (500, 8), (5000, 8)):
            context = dataclasses.replace(runner.context, num_blocks=num_blocks, backend=backend)
            bucket = Bucket(True, num_seqs, num_seqs, num_steps)
            memory = StepProgram(bucket).lower(context).compile().memory_analysis()
            assert memory is not None
            assert memory.alias_size_in_bytes >= num_blocks * runner.context.block_bytes
            temps.append(memory.temp_size_in_bytes)
        step, burst, with_a_larger_pool = temps
        assert burst - step < 0.2 * weight_bytes, num_seqs
        assert with_a_larger_pool - burst < 0.01 * 4500 * runner.context.block_bytes, num_seqs


@pytest.mark.slow
def test_pool_of_the_default_engine_is_not_copied() -> None:
    with LLMEngine(EngineArgs()) as engine:
        engine.executor.wait_until_compiled()
        assert_pool_is_not_copied(engine)


def test_pool_stays_where_it_is(engine: LLMEngine) -> None:
    def in_place() -> list[jax.Array]:
        arrays = runner_of(engine).arrays
        return [*arrays["kv_cache"], *arrays["token_counts"], *arrays["block_tables"]]

    before = in_place()
    pointers = [x.unsafe_buffer_pointer() for x in before]
    run(engine, [Request([1, 2, 3], SamplingParams(temperature=0, max_tokens=5, presence_penalty=1.0))])
    assert all(x.is_deleted() for x in before)
    assert [x.unsafe_buffer_pointer() for x in in_place()] == pointers


def test_two_engines_and_close(checkpoint: Path, engine: LLMEngine) -> None:
    def live_bytes() -> int:
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    requests = greedy_requests(seed=8, count=8)
    expected = tokens_of(run(engine, requests))
    before = live_bytes()
    # The settings of shared_engine, so that the compilation cache has its programs.
    settings = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    other = make_engine(checkpoint, few_buckets=True, num_gpu_blocks_override=2000, **settings)
    assert live_bytes() > before + other.config.kv_cache_bytes
    for engine_, prefix in ((engine, "a"), (other, "b")):
        for i, request in enumerate(requests):
            engine_.add_request(f"{prefix}{i}", request.prompt, request.params)
    outputs = {}
    while engine.has_unfinished_requests() or other.has_unfinished_requests():
        for engine_ in (engine, other):
            outputs |= {o.request_id: o for o in engine_.step() if o.finished}
    for prefix in "ab":
        assert tokens_of([outputs[f"{prefix}{i}"] for i in range(len(requests))]) == expected

    # Closed in the middle of a request.
    other.add_request("last", requests[0].prompt, requests[0].params)
    other.step()
    other.close()
    other.close()
    assert live_bytes() == before
    with pytest.raises(RuntimeError, match="closed"):
        other.step()
    assert tokens_of(run(engine, requests)) == expected

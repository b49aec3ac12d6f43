"""200 random requests through the real engine, greedy and float32: equal to a dense call without a cache.

The oracle needs no decoding loop: when a dense call over prompt and output finds each output token to be
the best one after those before it, greedy decoding without a cache gives that output, by induction.
"""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import (
    TOLERANCE,
    DenseModel,
    Request,
    add,
    assert_no_block_lost,
    ends_rightly,
    finished_outputs,
    greedy_requests,
    make_engine,
    margin,
    reschedule,
    reset,
    run,
    run_alone,
    set_prefix_caching,
    tokens_of,
)

from jax_paged import LLMEngine
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker.batch_builder import StepInputs
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.step_rows import LogitsRows

# Of this seed's requests every token leads by more than TOLERANCE, so no rounding can change one.
SEED = 3
REQUESTS = greedy_requests(SEED, 200)


@pytest.fixture(scope="module")
def expected(session_engine: LLMEngine, dense: DenseModel) -> list[list[int]]:
    """The greedy outputs: the engine's of a first run, checked against the dense model."""
    outputs = run(reset(session_engine), REQUESTS)
    for output, logits, request in zip(outputs, dense.output_logits(outputs), REQUESTS, strict=True):
        token_ids = list(output.outputs[0].token_ids)
        assert logits.argmax(-1).tolist() == token_ids
        assert margin(logits) > TOLERANCE
        assert ends_rightly(request, token_ids)
    return tokens_of(outputs)


@pytest.mark.thorough
def test_requests_are_as_demanding_as_they_should_be(expected: list[list[int]]) -> None:
    prompts = [r.prompt for r in REQUESTS]
    assert len(prompts) == 200
    assert min(map(len, prompts)) <= 3
    assert max(map(len, prompts)) >= 299
    assert max(map(len, expected)) >= 90
    for size in (4, 16, 32):
        for rest in (0, 1, size - 1):
            assert sum(len(p) % size == rest for p in prompts) >= 10
            assert sum((len(p) + len(t)) % size == rest for p, t in zip(prompts, expected, strict=True)) >= 10
    others = [tuple(p[:16]) for p in prompts]
    assert sum(others.count(prefix) > 1 for prefix in others) >= 80
    assert len({t for tokens in expected for t in tokens}) > 300
    assert sum(len(set(tokens)) for tokens in expected) > 0.8 * sum(map(len, expected))


def test_batched_without_prefix_caching(engine: LLMEngine, expected: list[list[int]]) -> None:
    set_prefix_caching(engine, False)
    outputs = run(engine, REQUESTS)
    assert tokens_of(outputs) == expected
    assert all(o.num_cached_tokens == 0 for o in outputs)


def test_batched_with_prefix_caching(engine: LLMEngine, expected: list[list[int]]) -> None:
    cold = run(engine, REQUESTS)
    assert tokens_of(cold) == expected
    assert sum(o.num_cached_tokens for o in cold) > 1000
    warm = run(engine, REQUESTS)
    assert tokens_of(warm) == expected
    # The pool holds all: each prompt is found but for its last tokens, one at least.
    assert [o.num_cached_tokens for o in warm] == [(len(r.prompt) - 1) // 16 * 16 for r in REQUESTS]


@pytest.mark.thorough
def test_alone(engine: LLMEngine, expected: list[list[int]]) -> None:
    set_prefix_caching(engine, False)
    assert tokens_of(run_alone(engine, REQUESTS)) == expected


@pytest.mark.thorough
def test_all_buckets(session_engine_of_all_buckets: LLMEngine, expected: list[list[int]]) -> None:
    engine = reset(session_engine_of_all_buckets)
    assert tokens_of(run(engine, REQUESTS)) == expected
    reset(engine)
    assert tokens_of(run_alone(engine, REQUESTS[:50])) == expected[:50]


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [16, 64])
def test_token_budget(engine: LLMEngine, expected: list[list[int]], budget: int) -> None:
    engine.scheduler.max_num_batched_tokens = budget
    assert tokens_of(run(engine, REQUESTS)) == expected


@pytest.mark.thorough
def test_block_size_32(checkpoint: Path, expected: list[list[int]]) -> None:
    settings = {"block_size": 32, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with make_engine(checkpoint, few_buckets=True, num_gpu_blocks_override=1500, **settings) as engine:
        cold = run(engine, REQUESTS)
        warm = run(engine, REQUESTS)
    assert tokens_of(cold) == expected
    assert tokens_of(warm) == expected
    assert [o.num_cached_tokens for o in warm] == [(len(r.prompt) - 1) // 32 * 32 for r in REQUESTS]


@pytest.mark.parametrize("enable_prefix_caching", [pytest.param(False, marks=pytest.mark.slow), True])
def test_small_pool_and_block_size_4(
    shared_engine: LLMEngine, expected: list[list[int]], enable_prefix_caching: bool
) -> None:
    # The pool holds 404 tokens: the longest request alone.
    reschedule(shared_engine, num_blocks=102, enable_prefix_caching=enable_prefix_caching)
    # The longest request fits just so; those with much output for their prompt come first, and grow together.
    order = sorted(range(200), key=lambda i: len(REQUESTS[i].prompt) - 2 * len(expected[i]))
    outputs = run(shared_engine, [REQUESTS[i] for i in order])
    assert tokens_of(outputs) == [expected[i] for i in order]
    assert sum(o.metrics.num_preemptions for o in outputs) >= 50


def test_requests_that_arrive_and_leave_at_any_time(engine: LLMEngine, expected: list[list[int]]) -> None:
    rng = np.random.default_rng(0)
    engine.scheduler.max_num_batched_tokens = 100
    waiting, outputs, aborted = list(range(len(REQUESTS))), {}, set()
    while waiting or engine.has_unfinished_requests():
        for i in waiting[: rng.integers(0, 3)]:
            engine.add_request(str(i), REQUESTS[i].prompt, REQUESTS[i].params)
            waiting.remove(i)
        unfinished = [*engine.scheduler.queues.running, *engine.scheduler.queues.waiting]
        if unfinished and rng.random() < 0.03:
            request_id = unfinished[rng.integers(len(unfinished))]
            engine.abort_request(request_id)
            aborted.add(request_id)
        outputs |= {int(o.request_id): o for o in engine.step() if o.finished}
    assert_no_block_lost(engine)
    assert len(outputs) + len(aborted) == len(REQUESTS)
    assert len(aborted) >= 5
    assert {i: list(o.outputs[0].token_ids) for i, o in outputs.items()} == {i: expected[i] for i in outputs}


def test_what_unwritten_blocks_hold_does_not_matter(engine: LLMEngine, expected: list[list[int]]) -> None:
    runner = engine.executor.runner
    runner.fill_kv_cache(jnp.nan)
    assert tokens_of(run(engine, REQUESTS)) == expected
    # Prefill and decode of other lengths over blocks that others have used, past their ends NaN.
    set_prefix_caching(engine, False)
    assert tokens_of(run(engine, REQUESTS[::-1])) == expected[::-1]
    runner.fill_kv_cache(0)


Damage = Callable[[dict[str, np.ndarray], SchedulerOutput], None]


def _shift_a_slot(view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
    view["slot_mapping"][0, 0] += 1


def _skip_the_last_token(view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
    view["context_lens"][0, : len(output.scheduled)] -= 1


def _shift_a_position(view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
    view["positions"][0] += 1


def _swap_two_blocks(view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
    places, blocks = view["table_changes"]
    if np.diff(places[:2]) == 1:
        blocks[:2] = blocks[1::-1]


def _read_the_neighbours_row(view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
    view["logits_rows"][0] += 1


def _move_a_border(view: dict[str, np.ndarray], output: SchedulerOutput) -> None:
    if len(output.scheduled) > 1:
        view["query_start_loc"][1] -= 1


@pytest.mark.parametrize(
    "damage",
    [
        _shift_a_slot,
        _skip_the_last_token,
        _shift_a_position,
        _swap_two_blocks,
        _read_the_neighbours_row,
        _move_a_border,
    ],
)
def test_a_mistake_in_the_batch_is_noticed(
    engine: LLMEngine, expected: list[list[int]], damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine.executor.runner
    builder = runner.builder
    build = builder.build

    def build_wrongly(output: SchedulerOutput, logits_rows: LogitsRows, bucket: Bucket) -> StepInputs:
        inputs = build(output, logits_rows, bucket)
        damage(inputs.fields, output)
        return inputs

    monkeypatch.setattr(builder, "build", build_wrongly)
    set_prefix_caching(engine, False)
    subset: list[Request] = REQUESTS[:24]
    assert tokens_of(run(engine, subset)) != expected[:24]


def test_sharing_of_different_prefixes_is_noticed(
    engine: LLMEngine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix cache that looks at the length alone."""
    prefixes = engine.scheduler.block_manager.prefixes
    content = prefixes._content

    def forgetful(seq, i, salt):
        real = content(seq, i, salt)
        return real._replace(hash=bytes([i]) * 32, tokens=[0] * 16, parent=b"")

    monkeypatch.setattr(prefixes, "_content", forgetful)
    add(engine, REQUESTS[:40])
    outputs = finished_outputs(engine)
    assert tokens_of([outputs[str(i)] for i in range(40)]) != expected[:40]

"""Several decode steps in one: every output is that of one step at a time, and no block is lost."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    drain,
    greedy_requests,
    make_engine,
    mixed_requests,
    nan_embedding,
    reschedule,
    reset,
    run,
    run_alone,
    steps_of,
    tokens_of,
)
from test_exactness import REQUESTS, expected

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.lab.recording import replay
from jax_paged.outputs import RequestOutput

__all__ = ["expected"]  # the fixture, here with the outputs of bursts
SIZE = 8
RNG = np.random.default_rng(11)


@pytest.fixture(scope="module")
def session_engine(checkpoint: Path) -> Iterator[LLMEngine]:
    """In place of the engine that all tests share: one with bursts."""
    with make_engine(
        checkpoint,
        few_buckets=True,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=2000,
        num_scheduler_steps=SIZE,
    ) as engine:
        yield engine


@pytest.fixture(params=[1, 2], ids=["one in flight", "two in flight"])
def bursting(engine: LLMEngine, request: pytest.FixtureRequest) -> Iterator[LLMEngine]:
    engine._core.max_in_flight = request.param
    yield engine
    while engine.has_unfinished_requests():
        engine.step()
    engine._core.max_in_flight = 1


def without_bursts(engine: LLMEngine, **settings: Any) -> LLMEngine:
    """Makes the engine idle, with a new scheduler that has no bursts; returns it."""
    reschedule(reset(engine), num_scheduler_steps=1, **settings)
    return engine


def in_turns(
    engine: LLMEngine, requests: list[Request], least: int, **settings: Any
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Returns the outputs without bursts, one step in flight, and with them, of which there are some."""
    depth, engine._core.max_in_flight = engine._core.max_in_flight, 1
    expected = run(without_bursts(engine, **settings), requests)
    engine._core.max_in_flight = depth
    reschedule(engine, **settings)
    with pytest.MonkeyPatch.context() as patch:
        steps = steps_of(engine, patch)
        outputs = run(engine, requests)
    assert sum(bool(step.num_multi_step_tokens) for step in steps) >= least
    return expected, outputs


def assert_same(expected: list[RequestOutput], outputs: list[RequestOutput]) -> None:
    for before, after in zip(expected, outputs, strict=True):
        for want, got in zip(before.outputs, after.outputs, strict=True):
            assert list(got.token_ids) == list(want.token_ids)
            assert (got.text, got.finish_reason) == (want.text, want.finish_reason)
            assert got.stop_reason == want.stop_reason
            assert got.cumulative_logprob == pytest.approx(want.cumulative_logprob, abs=30 * TOLERANCE)
            assert (got.logprobs is None) == (want.logprobs is None)
            for a, b in zip(want.logprobs or (), got.logprobs or (), strict=True):
                assert a.keys() == b.keys()
                assert all(abs(a[t].logprob - b[t].logprob) < TOLERANCE for t in a)
                assert [a[t].rank for t in a] == [b[t].rank for t in a]


def prompt(length: int) -> list[int]:
    return RNG.integers(0, VOCAB_SIZE, length).tolist()


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": 40} | values))


@pytest.mark.thorough
def test_tokens_that_end_sequences_in_the_middle(bursting: LLMEngine) -> None:
    """Stop tokens, stop strings, max_tokens and max_model_len, at every place in a burst."""
    text = prompt(9)
    (known,) = run(without_bursts(bursting), [Request(text, greedy(ignore_eos=True))])[0].outputs
    tokens = list(known.token_ids)
    for at in range(2, 12):
        limits = [greedy(max_tokens=at), greedy(stop_token_ids=[tokens[at]], ignore_eos=True, logprobs=2)]
        detokenized = bursting.tokenizer.decode(tokens[: at + 1]) if bursting.tokenizer else ""
        strings = [detokenized[-2:], detokenized[-1:]]
        limits += [greedy(stop=[s], ignore_eos=True, logprobs=0) for s in strings]
        limits += [greedy(stop=[strings[0]], ignore_eos=True, min_tokens=3, include_stop_str_in_output=True)]
        limits += [greedy(ignore_eos=True)]
        assert_same(*in_turns(bursting, [Request(text, params) for params in limits], 3))
    assert_same(
        *in_turns(bursting, [Request(prompt(n), greedy()) for n in (50, 51, 55, 3)], 1, max_model_len=62)
    )


def test_every_kind_of_parameter(bursting: LLMEngine) -> None:
    """As many requests as there are seats, so that nobody waits."""
    for seed in range(3):
        requests = mixed_requests(seed, 14, max_prompt=20, max_output=40)
        assert_same(*in_turns(bursting, requests, 3))
    requests = [
        Request(prompt(5), SamplingParams(n=4, seed=1, max_tokens=30, logprobs=3)),
        Request(prompt(14), SamplingParams(n=2, best_of=4, seed=2, max_tokens=25, presence_penalty=0.8)),
        Request(prompt(7), SamplingParams(seed=3, max_tokens=33, repetition_penalty=1.3, top_k=9)),
        Request(prompt(7), greedy(frequency_penalty=0.9)),
        Request(prompt(8), greedy(allowed_token_ids=list(range(3, VOCAB_SIZE, 5)), frequency_penalty=2.0)),
        Request(
            prompt(8), SamplingParams(seed=4, min_tokens=6, stop_token_ids=list(range(7)), max_tokens=30)
        ),
    ]
    assert_same(*in_turns(bursting, requests, 3))


def test_what_needs_the_host_turns_bursts_off_for_a_while(
    bursting: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (known,) = run(without_bursts(bursting), [Request(prompt(9), greedy(ignore_eos=True))])
    words = [list(known.outputs[0].token_ids[3:5]), [known.outputs[0].token_ids[8]]]
    others = [
        Request(list(known.prompt_token_ids), greedy(max_tokens=12, bad_words_token_ids=words)),
        Request(prompt(4), SamplingParams(), BeamSearchParams(3, max_tokens=12)),
        Request(prompt(4), greedy(max_tokens=12, stop_token_ids=list(range(100, 120)))),
    ]
    for request in others:
        requests = [request, Request(prompt(5), greedy(max_tokens=40, ignore_eos=True))]
        assert_same(*in_turns(bursting, requests, 2))
        reschedule(bursting)
        steps = steps_of(bursting, monkeypatch)
        run(bursting, requests)
        for step in steps:
            assert not step.num_multi_step_tokens or {
                steps.named[row.seq_id][0].request_id for row in step.scheduled
            } == {"1"}


def test_nan_in_the_middle(bursting: LLMEngine) -> None:
    """It ends its request after the tokens that came before it, with all of its samples."""
    text = prompt(9)
    (known,) = run(without_bursts(bursting), [Request(text, greedy(ignore_eos=True))])
    drawn = list(known.outputs[0].token_ids)
    at = next(i for i in range(4, 20) if drawn.index(drawn[i]) == i and drawn[i] not in text)
    requests = [
        Request(text, greedy(ignore_eos=True)),
        Request(text, SamplingParams(temperature=0.05, n=3, seed=0, max_tokens=40, ignore_eos=True)),
        Request(prompt(5), greedy(logit_bias={drawn[at]: -100.0})),
    ]
    with nan_embedding(bursting, [drawn[at]]):
        expected, outputs = in_turns(bursting, requests, 3, enable_prefix_caching=False)
    assert_same(expected, outputs)
    assert list(outputs[0].outputs[0].token_ids) == drawn[: at + 1]
    assert [o.outputs[0].finish_reason for o in outputs] == [
        "abort",
        "abort",
        expected[2].outputs[0].finish_reason,
    ]


def test_requests_that_arrive_and_leave_at_any_time(
    bursting: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = greedy_requests(3, 40)
    expected = tokens_of(run(without_bursts(bursting), requests))
    rng = np.random.default_rng(0)
    reschedule(bursting)
    steps = steps_of(bursting, monkeypatch)
    waiting, outputs, num_aborted = list(range(len(requests))), {}, 0
    while waiting or bursting.has_unfinished_requests():
        if waiting and (rng.random() < 0.1 or not bursting.has_unfinished_requests()):
            i = waiting.pop(0)
            bursting.add_request(str(i), requests[i].prompt, requests[i].params)
        running = list(bursting.scheduler.queues.running)
        if running and rng.random() < 0.02:
            bursting.abort_request(running[rng.integers(len(running))])
            num_aborted += 1
        outputs |= {int(o.request_id): o for o in bursting.step() if o.finished}
    assert_no_block_lost(bursting)
    assert sum(bool(step.num_multi_step_tokens) for step in steps) > 30
    assert len(outputs) + num_aborted == len(requests)
    got = {i: list(o.outputs[0].token_ids) for i, o in outputs.items()}
    assert got == {i: expected[i] for i in outputs}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_small_pool(bursting: LLMEngine, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Four requests at a time begin in it and outgrow it."""
    lengths = zip(range(3, 27), itertools.cycle((45, 80, 99)), strict=False)
    requests = [Request(prompt(n), greedy(max_tokens=most, ignore_eos=True)) for n, most in lengths]
    expected = tokens_of(run(without_bursts(bursting), requests))
    reschedule(bursting, num_blocks=60, preemption_mode=mode)
    steps = steps_of(bursting, monkeypatch)
    outputs = [o for few in itertools.batched(requests, 4) for o in run(bursting, list(few))]
    assert tokens_of(outputs) == expected
    assert sum(o.metrics.num_preemptions for o in outputs) >= 6
    assert sum(bool(step.num_multi_step_tokens) for step in steps) > 20


def test_a_recording_replays(bursting: LLMEngine) -> None:
    lines: list[str] = []
    reschedule(bursting, num_blocks=120)
    bursting.record(lines.append)
    for few in itertools.batched(greedy_requests(4, 20), 5):
        add(bursting, list(few))
        drain(bursting)
    assert sum('"burst": [8' in line for line in lines) > 10
    assert replay(lines).num_steps > 40
    spoilt = [line.replace('"burst": [8', '"burst": [7', 1) for line in lines]
    with pytest.raises(ValueError, match="burst"):
        replay(spoilt)


def test_a_step_tells_how_many_tokens_it_may_bring(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reschedule(engine)
    steps = steps_of(engine, monkeypatch)
    run(engine, [Request(prompt(6), greedy(max_tokens=n, ignore_eos=True)) for n in (1, 4, 12)])
    assert [step.num_multi_step_tokens for step in steps] == [(), (3, 8), (3,)]


def test_one_burst_after_another_while_the_first_is_in_flight(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds the last tokens on the device, and leaves a sequence alone that has ended with one of them."""
    text = prompt(6)
    (known,) = run(without_bursts(engine), [Request(text, greedy(ignore_eos=True))])
    tokens = list(known.outputs[0].token_ids)
    at = next(i for i in range(3, 9) if tokens.index(tokens[i]) == i)
    requests = [
        Request(text, greedy(ignore_eos=True)),
        Request(text, greedy(ignore_eos=True, stop_token_ids=[tokens[at]])),
    ]
    monkeypatch.setattr(engine._core, "max_in_flight", 2)
    reschedule(engine)
    steps, results = steps_of(engine, monkeypatch), []
    result = engine.executor.result
    monkeypatch.setattr(engine.executor, "result", lambda: results.append(result()) or results[-1])
    outputs = run(engine, requests)
    assert tokens_of(outputs) == [tokens, tokens[: at + 1]]
    assert [len(step.num_multi_step_tokens) for step in steps[1:3]] == [2, 2]
    assert [len(drawn) for drawn in results[1].token_ids] == [8, at]
    assert [len(drawn) for drawn in results[2].token_ids] == [8, 0]


def test_off_is_off(shared_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = steps_of(shared_engine, monkeypatch)
    run(shared_engine, [Request(prompt(5), greedy(ignore_eos=True))])
    assert not any(step.num_multi_step_tokens for step in steps)
    assert not any("multi-step" in name for name in shared_engine.executor.buckets)


@pytest.mark.slow
def test_200_requests_are_those_of_the_dense_call(bursting: LLMEngine, expected: list[list[int]]) -> None:
    """All together, which `expected` compares; alone, in a small pool, and after NaN."""
    runner: Any = bursting.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
    for enable_prefix_caching in (True, False):
        reschedule(bursting, enable_prefix_caching=enable_prefix_caching)
        runner.fill_kv_cache(np.nan)
        with pytest.MonkeyPatch.context() as patch:
            steps = steps_of(bursting, patch)
            assert tokens_of(run_alone(bursting, REQUESTS)) == expected
        assert sum(bool(step.num_multi_step_tokens) for step in steps) > 1000
        for few in (5, 40):
            reschedule(bursting, num_blocks=102, enable_prefix_caching=enable_prefix_caching)
            outputs = [o for some in itertools.batched(REQUESTS, few) for o in run(bursting, list(some))]
            assert tokens_of(outputs) == expected
    runner.fill_kv_cache(0)

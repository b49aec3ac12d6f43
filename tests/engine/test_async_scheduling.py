"""Steps that begin before the host knows what the last one has drawn: the same outputs, and no block lost."""

import asyncio
from collections.abc import Callable, Iterator
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
    finished_outputs,
    greedy_requests,
    mixed_requests,
    reschedule,
    reset,
    run,
    set_prefix_caching,
    steps_of,
    tokens_of,
)
from helpers.scripted_engine import ScriptedExecutor, no_block_lost
from helpers.scripted_engine import run as run_scripted

from jax_paged import AsyncLLMEngine, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.model_runner_output import NO_TOKEN
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.lab.recording import replay
from jax_paged.outputs import RequestOutput

REQUESTS = greedy_requests(3, 100)
RNG = np.random.default_rng(5)


@pytest.fixture
def ahead(engine: LLMEngine) -> Iterator[LLMEngine]:
    """The engine that all tests share, with two steps in flight."""
    engine._core.max_in_flight = 2
    yield engine
    engine._core.max_in_flight = 1
    while engine.has_unfinished_requests():
        engine.step()


def in_turns(engine: LLMEngine, requests: list[Request]) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Returns the outputs with one step in flight, and with two."""
    engine._core.max_in_flight = 1
    expected = run(reset(engine), requests)
    engine._core.max_in_flight = 2
    return expected, run(reset(engine), requests)


def test_greedy_requests(ahead: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, outputs = in_turns(ahead, REQUESTS)
    assert tokens_of(outputs) == tokens_of(expected)
    set_prefix_caching(ahead, False)
    steps = steps_of(ahead, monkeypatch)
    assert tokens_of(run(ahead, REQUESTS)) == tokens_of(expected)
    rows = [row for step in steps for row in step.scheduled]
    assert sum(row.token_ids == [NO_TOKEN] for row in rows) > 0.8 * sum(map(len, tokens_of(expected)))


@pytest.mark.thorough
def test_a_small_pool(ahead: LLMEngine) -> None:
    expected = tokens_of(run(ahead, REQUESTS))
    for mode in ("recompute", "swap"):
        reschedule(ahead, num_blocks=45, max_num_batched_tokens=50, preemption_mode=mode)
        outputs = run(ahead, REQUESTS)
        assert tokens_of(outputs) == expected
        assert sum(o.metrics.num_preemptions for o in outputs) >= 10


def test_every_kind_of_parameter(ahead: LLMEngine) -> None:
    requests = mixed_requests(1, 60, max_prompt=60, max_output=30)
    for before, after in zip(*in_turns(ahead, requests), strict=True):
        (want,), (got,) = before.outputs, after.outputs
        assert got.token_ids == want.token_ids
        assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
        assert (got.logprobs is None) == (want.logprobs is None)
        for a, b in zip(want.logprobs or (), got.logprobs or (), strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[t].logprob - b[t].logprob) < TOLERANCE for t in a)
        assert (before.prompt_logprobs is None) == (after.prompt_logprobs is None)


def prompt(length: int) -> list[int]:
    return RNG.integers(0, VOCAB_SIZE, length).tolist()


def test_samples_beams_bad_words_and_stop_strings_together(ahead: LLMEngine) -> None:
    def params(**values: Any) -> SamplingParams:
        return SamplingParams(**({"max_tokens": 24, "seed": 1} | values))

    requests = [Request(prompt(n), params(n=4)) for n in (3, 16, 40)]
    requests += [Request(prompt(9), params(n=2, best_of=4)), Request(prompt(31), params(temperature=0.0))]
    requests += [Request(prompt(7), params(), BeamSearchParams(3, max_tokens=12))]
    greedy = run(ahead, requests[4:5])[0].outputs[0].token_ids
    words = [list(greedy[3:5]), [greedy[8]]]
    requests += [Request(requests[4].prompt, params(temperature=0.0, bad_words_token_ids=words))]
    requests += [Request(prompt(n), params(stop=["e", "t", "!", "(", "9"])) for n in (5, 17)]
    requests += [Request(prompt(12), params(presence_penalty=0.8, frequency_penalty=0.4))]
    requests += [Request(prompt(12), params(min_tokens=9, stop_token_ids=list(range(0, VOCAB_SIZE, 9))))]
    expected, outputs = in_turns(ahead, requests)
    for before, after in zip(expected, outputs, strict=True):
        for want, got in zip(before.outputs, after.outputs, strict=True):
            assert (got.text, list(got.token_ids)) == (want.text, list(want.token_ids))
            assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)


def test_requests_that_arrive_and_leave_at_any_time(ahead: LLMEngine) -> None:
    expected = tokens_of(run(ahead, REQUESTS))
    rng = np.random.default_rng(0)
    waiting, outputs, num_aborted = list(range(len(REQUESTS))), {}, 0
    while waiting or ahead.has_unfinished_requests():
        for i in waiting[: rng.integers(0, 3)]:
            ahead.add_request(str(i), REQUESTS[i].prompt, REQUESTS[i].params)
            waiting.remove(i)
        unfinished = [*ahead.scheduler.queues.running, *ahead.scheduler.queues.waiting]
        if unfinished and rng.random() < 0.05:
            ahead.abort_request(unfinished[rng.integers(len(unfinished))])
            num_aborted += 1
        outputs |= {int(o.request_id): o for o in ahead.step() if o.finished}
    assert_no_block_lost(ahead)
    assert num_aborted > 3
    assert len(outputs) + num_aborted == len(REQUESTS)
    assert {i: list(o.outputs[0].token_ids) for i, o in outputs.items()} == {i: expected[i] for i in outputs}


def test_a_recording_replays(ahead: LLMEngine) -> None:
    lines: list[str] = []
    reschedule(ahead, num_blocks=90)
    ahead.record(lines.append)
    add(ahead, REQUESTS[:40])
    drain(ahead)
    kinds = [line.split('"')[3] for line in lines]
    assert [k for k in kinds if k in ("schedule", "update")][:3] == ["schedule", "schedule", "update"]
    assert replay(lines).num_steps > 40


def test_nothing_is_left_in_flight(ahead: LLMEngine) -> None:
    """The last request ends while a step computes a token more; then there is nothing to do."""
    add(ahead, [Request(REQUESTS[0].prompt, SamplingParams(temperature=0, max_tokens=30))])
    tokens = finished_outputs(ahead)["0"].outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[tokens[10]])
    add(ahead, [Request(REQUESTS[0].prompt, stop)])
    outputs = finished_outputs(ahead)
    assert list(outputs["0"].outputs[0].token_ids) == list(tokens[: tokens.index(tokens[10]) + 1])
    assert ahead.step() == []
    assert_no_block_lost(ahead)


def test_prefixes_can_be_pinned_after_the_last_output(ahead: LLMEngine) -> None:
    """A step that was dispatched before its requests had ended is still in flight then."""
    prompt = REQUESTS[0].prompt[:1] * 40
    add(ahead, [Request(prompt, SamplingParams(temperature=0, max_tokens=30))])
    tokens = finished_outputs(ahead)["0"].outputs[0].token_ids
    stop = SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[tokens[4]])
    add(ahead, [Request(prompt, stop)])
    while not any(output.finished for output in ahead.step()):
        pass
    assert ahead._core._in_flight
    ahead.unpin_prefix(ahead.pin_prefix({"prompt_token_ids": prompt}))
    assert_no_block_lost(ahead)


Scripted = Callable[..., tuple[EngineArgs, ScriptedExecutor]]


class Calls(ScriptedExecutor):
    """Notes the order in which the engine calls it."""

    def __init__(self, args: EngineArgs) -> None:
        super().__init__(args)
        self.calls: list[str] = []

    def dispatch(self, output: SchedulerOutput) -> None:
        self.calls.append(f"dispatch {output.step_id}")
        super().dispatch(output)

    def result(self) -> Any:
        self.calls.append(f"result {self._dispatched[0].step_id}")
        return super().result()


def test_a_step_is_dispatched_before_the_result_of_the_last_is_asked_for(folder: str) -> None:
    args = EngineArgs(model=folder, async_scheduling=True)
    executor = Calls(args)
    engine = LLMEngine(args, executor)
    engine.add_request("a", "text?")
    assert run_scripted(engine)["a"].outputs[0].text == "text"
    assert executor.calls[:5] == ["dispatch 0", "dispatch 1", "result 0", "dispatch 2", "result 1"]
    assert no_block_lost(engine)
    assert not engine.has_unfinished_requests()


def test_without_it_every_result_comes_first(folder: str) -> None:
    args = EngineArgs(model=folder, async_scheduling=False)
    executor = Calls(args)
    engine = LLMEngine(args, executor)
    engine.add_request("a", "text?")
    run_scripted(engine)
    assert executor.calls[:4] == ["dispatch 0", "result 0", "dispatch 1", "result 1"]


def test_an_error_in_flight_leaves_no_client_waiting(scripted: Scripted) -> None:
    args, executor = scripted(async_scheduling=True)

    def fail(output: SchedulerOutput) -> None:
        raise RuntimeError("the device is gone")

    async def main() -> None:
        engine = AsyncLLMEngine(args, executor)
        try:
            executor.during_step = fail
            with pytest.raises(RuntimeError, match="the device is gone"):
                async for _ in await engine.submit("text?", None, "a"):
                    pass
        finally:
            engine.shutdown()

    asyncio.run(main())


def test_streams_of_many_clients(scripted: Scripted) -> None:
    args, executor = scripted(async_scheduling=True)

    async def main() -> list[str]:
        engine = AsyncLLMEngine(args, executor)

        async def ask(i: int) -> str:
            stream = await engine.submit(f"question {i}?", SamplingParams(max_tokens=50), str(i))
            return "".join([output.outputs[0].text async for output in stream])

        try:
            return await asyncio.gather(*(ask(i) for i in range(20)))
        finally:
            engine.shutdown()

    assert asyncio.run(main()) == [f"question {i}" for i in range(20)]

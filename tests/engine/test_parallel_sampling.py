"""Several samples of one prompt: each is what a request of its own with its seed draws."""

import asyncio
import dataclasses
import time
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    drain,
    reschedule,
    run,
    run_alone,
    steps_of,
)
from helpers.wrapped_executor import WrappedExecutor

from jax_paged import AsyncLLMEngine, BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.engine.composition import make_input_processor
from jax_paged.outputs import CompletionOutput, RequestOutput

RNG = np.random.default_rng(2)
PROMPTS = {length: RNG.integers(0, VOCAB_SIZE, length).tolist() for length in (1, 3, 4, 5, 15, 16, 17, 45)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "stop ids": {"stop_token_ids": list(range(0, VOCAB_SIZE, 8))},
    "min_tokens": {"stop_token_ids": list(range(0, VOCAB_SIZE, 8)), "min_tokens": 6},
    "stop strings": {"stop": ["e", "t", "!", "(", "9", "a"], "logprobs": 0},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {5: 4.0, 9: 5.0, 200: -50.0}, "top_k": 20, "logprobs": 1},
    "ends": {"logit_bias": {7: 3.0}},
    "filters": {"top_p": 0.8, "min_p": 0.02, "temperature": 1.4},
}


def request(prompt: list[int], n: int = 4, **settings: Any) -> Request:
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20, "seed": 2**40 + len(prompt)}
    return Request(prompt, SamplingParams(n=n, **(params | settings)))


def singles(requests: list[Request]) -> list[Request]:
    """The samples of all requests, each as a request of its own."""
    return [
        dataclasses.replace(r, params=dataclasses.replace(p, n=1, best_of=None, seed=p.seed_of(i)))
        for r in requests
        for p in [r.params]
        for i in range(p.best_of or p.n)
    ]


def content(output: CompletionOutput) -> dict[str, Any]:
    """All of an output but its index, log-probabilities apart (they are compared to a tolerance)."""
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    return {name: getattr(output, name) for name in names}


def assert_equal_logprobs(output: CompletionOutput, single: CompletionOutput) -> None:
    """A batch of another shape may round a log-probability differently, by up to 2e-5 per token."""
    assert output.cumulative_logprob == pytest.approx(single.cumulative_logprob, abs=4e-4)
    assert (output.logprobs is None) == (single.logprobs is None)
    for ours, theirs in zip(output.logprobs or [], single.logprobs or [], strict=True):
        assert list(ours) == list(theirs)
        for token_id, entry in ours.items():
            assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=2e-5)
            assert entry.rank == theirs[token_id].rank
            assert entry.decoded_token == theirs[token_id].decoded_token


def assert_samples_equal(outputs: list[RequestOutput], alone: list[RequestOutput]) -> None:
    """Of requests without best_of."""
    rest = iter(alone)
    for output in outputs:
        assert [o.index for o in output.outputs] == list(range(len(output.outputs)))
        for completion in output.outputs:
            (single,) = next(rest).outputs
            assert content(completion) == content(single), output.request_id
            assert_equal_logprobs(completion, single)
    assert next(rest, None) is None


REQUESTS = [request(p, **s) for p, s in zip([*PROMPTS.values(), PROMPTS[17]], SETTINGS.values(), strict=True)]


@pytest.fixture(scope="module")
def alone(session_shared_engine: LLMEngine) -> list[RequestOutput]:
    reschedule(session_shared_engine)
    return run_alone(session_shared_engine, singles(REQUESTS))


def test_cases_are_as_demanding_as_they_should_be(alone: list[RequestOutput]) -> None:
    texts = {tuple(o.outputs[0].token_ids) for o in alone}
    assert len(texts) == len(alone), "samples differ"
    reasons = {name: set() for name in SETTINGS}
    for i, output in enumerate(alone):
        completion = output.outputs[0]
        reasons[list(SETTINGS)[i // 4]].add((completion.finish_reason, type(completion.stop_reason)))
    assert ("stop", int) in reasons["stop ids"]
    assert ("stop", int) in reasons["min_tokens"]
    assert ("stop", str) in reasons["stop strings"]
    assert ("stop", type(None)) in reasons["ends"]
    assert ("length", type(None)) in reasons["plain"]
    lengths = [{len(o.outputs[0].token_ids) for o in alone[i : i + 4]} for i in range(0, len(alone), 4)]
    assert sum(len(x) > 2 for x in lengths) >= 3, "samples of one request end at different times"


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [4, 16])
def test_samples_equal_single_requests(
    request: pytest.FixtureRequest, alone: list[RequestOutput], enable_prefix_caching: bool, block_size: int
) -> None:
    engine = request.getfixturevalue("shared_engine" if block_size == 4 else "engine")
    reschedule(engine, enable_prefix_caching=enable_prefix_caching)
    assert_samples_equal(run(engine, REQUESTS), alone)
    assert_samples_equal(run(engine, REQUESTS[::-1])[::-1], alone)


def test_one_prefill_forked(shared_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts at a block boundary and one token off: what is copied, and that nothing is computed twice."""
    for length, num_copies in ((1, 3), (15, 3), (16, 0), (17, 3)):
        steps = steps_of(shared_engine, monkeypatch)
        (output,) = run(shared_engine, [request(PROMPTS[length], max_tokens=6, ignore_eos=True)])
        assert [len(o.token_ids) for o in output.outputs] == [6] * 4
        assert sum(step.num_batched_tokens for step in steps) == length + 4 * 5
        assert [len(step.blocks_to_copy) for step in steps][:2] == [0, num_copies]
        assert sum(len(step.blocks_to_copy) for step in steps) == num_copies
        monkeypatch.undo()


def test_seeds_of_samples(shared_engine: LLMEngine) -> None:
    params = SamplingParams(n=3, seed=7)
    seeds = [params.seed_of(i) for i in range(1000)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Without a seed the engine gives one: samples differ, and so do requests.
    unseeded = request(PROMPTS[5], seed=None, ignore_eos=True)
    outputs = run(shared_engine, [unseeded, unseeded])
    assert len({tuple(o.token_ids) for output in outputs for o in output.outputs}) == 8
    # Greedy samples are all the same.
    (greedy,) = run(shared_engine, [request(PROMPTS[5], temperature=0.0)])
    assert len({tuple(o.token_ids) for o in greedy.outputs}) == 1


def test_best_of(shared_engine: LLMEngine, alone: list[RequestOutput]) -> None:
    best_of = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, n=n, best_of=4))
        for r, n in zip(REQUESTS, (1, 2, 3, 4, 1, 2, 3, 2, 2), strict=True)
    ]
    add(shared_engine, best_of)
    outputs = {}
    while shared_engine.has_unfinished_requests():
        for output in shared_engine.step():
            n = output.finished or int(output.request_id) == 3
            assert bool(output.outputs) == n, "which are the best is known at the end"
            outputs[output.request_id] = output
    assert_no_block_lost(shared_engine)
    for i, r in enumerate(best_of):
        four = [o.outputs[0] for o in alone[4 * i : 4 * i + 4]]
        if r.params.n < 4:
            four.sort(key=lambda o: -o.cumulative_logprob)
            ranked = [o.cumulative_logprob for o in four]
            assert min(-np.diff(ranked)) > 1e-3, "the case hangs on rounding"
        ours = outputs[str(i)].outputs
        assert [content(o) for o in ours] == [content(o) for o in four[: r.params.n]]
        assert [o.index for o in ours] == list(range(r.params.n))


def test_abort_half_way(shared_engine: LLMEngine, alone: list[RequestOutput]) -> None:
    add(shared_engine, REQUESTS[:3])
    for _ in range(7):
        shared_engine.step()
    state = shared_engine.abort_request("1")
    assert state is not None
    for i, output in enumerate(state.output().outputs):
        assert output.finish_reason == "abort"
        assert output.token_ids == alone[4 + i].outputs[0].token_ids[: len(output.token_ids)]
    outputs = drain(shared_engine)
    assert_samples_equal([outputs["0"], outputs["2"]], alone[:4] + alone[8:12])


@pytest.fixture
def stream_engine(shared_engine: LLMEngine) -> AsyncLLMEngine:
    """An engine on the same executor, stepped by a thread; closing it does not close the executor.

    Its steps leave the event loop time to read what has come: a busy machine would join the parts else.
    """
    executor = WrappedExecutor(shared_engine.executor, before=lambda output: time.sleep(0.01))
    return AsyncLLMEngine(shared_engine.args, executor)


def test_streams(stream_engine: AsyncLLMEngine, alone: list[RequestOutput]) -> None:
    """The parts of all samples join to the same outputs; two streams are read late, so that parts join."""

    async def consume(i: int) -> tuple[RequestOutput, int]:
        stream = await stream_engine.submit(REQUESTS[i].prompt, REQUESTS[i].params, str(i))
        if i % 4 == 1:
            await asyncio.sleep(0.5)
        parts = [part async for part in stream]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        total = parts[0]
        for part in parts[1:]:
            total.extend(part)
        return total, len(parts)

    async def main() -> list[tuple[RequestOutput, int]]:
        return await asyncio.gather(*(consume(i) for i in range(len(REQUESTS))))

    try:
        results = asyncio.run(main())
    finally:
        stream_engine.close()
    assert_samples_equal([output for output, _ in results], alone)
    assert sum(count > 5 for _, count in results) >= 3
    assert_no_block_lost(stream_engine.engine)


def test_streams_left_and_aborted(stream_engine: AsyncLLMEngine, alone: list[RequestOutput]) -> None:
    async def main() -> tuple[RequestOutput, list[RequestOutput]]:
        left = stream_engine.generate(REQUESTS[0].prompt, REQUESTS[0].params, "left")
        async for output in left:
            if output.outputs[3].token_ids:
                break
        await left.aclose()
        aborted = await stream_engine.submit(REQUESTS[1].prompt, REQUESTS[1].params, "aborted")
        kept = asyncio.create_task(collect(REQUESTS[2]))
        first = await anext(aborted)
        stream_engine.abort("aborted")
        async for part in aborted:
            first.extend(part)
        return first, await kept

    async def collect(r: Request) -> list[RequestOutput]:
        return [o async for o in stream_engine.generate(r.prompt, r.params, "kept")]

    try:
        aborted, kept = asyncio.run(main())
    finally:
        stream_engine.close()
    assert_samples_equal(kept[-1:], alone[8:12])
    for i, output in enumerate(aborted.outputs):
        assert output.finish_reason == "abort"
        assert output.token_ids == alone[4 + i].outputs[0].token_ids[: len(output.token_ids)]
    assert_no_block_lost(stream_engine.engine)


def test_streams_of_which_the_best_is_known_at_the_end(
    shared_engine: LLMEngine, stream_engine: AsyncLLMEngine
) -> None:
    params = dataclasses.replace(REQUESTS[1].params, n=2, best_of=3)
    requests = {"best_of": params, "beams": BeamSearchParams(3, max_tokens=10)}

    async def collect(name: str) -> list[RequestOutput]:
        return [o async for o in stream_engine.generate(REQUESTS[1].prompt, requests[name], name)]

    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*map(collect, requests))

    try:
        streamed = asyncio.run(main())
    finally:
        stream_engine.close()
    reschedule(shared_engine)
    for name, outputs in zip(requests, streamed, strict=True):
        shared_engine.add_request(name, REQUESTS[1].prompt, requests[name])
        whole = drain(shared_engine)[name]
        assert all(not output.outputs and not output.finished for output in outputs[:-1])
        assert [content(o) for o in outputs[-1].outputs] == [content(o) for o in whole.outputs]
        assert len(whole.outputs) == {"best_of": 2, "beams": 3}[name]


def test_a_group_that_can_never_fit_is_refused(shared_engine: LLMEngine) -> None:
    config = dataclasses.replace(shared_engine.input_processor._config, num_blocks=21)
    checker = make_input_processor(config, None)
    prompt = [5] * 68  # 17 full blocks, that all share; each sequence needs one of its own
    checker.check(prompt, SamplingParams(n=3), "", 0)
    checker.check(prompt, SamplingParams(n=4, max_tokens=1), "", 0)  # their only tokens are never written
    for params in (SamplingParams(n=2, best_of=4), BeamSearchParams(4)):
        with pytest.raises(
            ValueError, match=r"KV blocks needed by 4 sequences for `prompt` must be at most 20 .*got 21"
        ):
            checker.check(prompt, params, "", 0)

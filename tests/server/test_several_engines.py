"""A server of two engines: its requests, its metrics, and its end if one of them fails."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.scripted_engine import LONG, ScriptedExecutor, no_block_lost
from server.conftest import Served, serving

from jax_paged import EngineArgs, SamplingParams
from jax_paged.engine.replicas.replicated_engine import ReplicatedEngine
from jax_paged.server.observability.metrics import Metrics
from jax_paged.server.observability.state import State

PROMPT = "{} is a text that is long enough to be cached, at least in its first part?"


@pytest.fixture
def engine(scripted: Callable[..., Any]) -> Iterator[ReplicatedEngine]:
    args, executor = scripted(data_parallel_size=2)
    engine = ReplicatedEngine(args, [executor, ScriptedExecutor(args)])
    yield engine
    for replica in engine.replicas:
        if replica.error is None:
            Served.wait_until(lambda r=replica: not r.engine.has_unfinished_requests(), "none runs")
            assert no_block_lost(replica.engine)
    engine.close()


@pytest.fixture
def two(engine: ReplicatedEngine) -> Iterator[Served]:
    with serving(engine, "scripted", developer_routes=True) as served:
        yield served


def executors(engine: ReplicatedEngine) -> list[ScriptedExecutor]:
    return [replica.engine.executor for replica in engine.replicas]  # pyright: ignore[reportReturnType]


def by_engine(served: Served, name: str) -> dict[str, float]:
    """Returns the values of a metric, by its label `engine`."""
    lines = served.client.get("../metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"vllm:{name}{{")]
    return {line.split('engine="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_requests_are_spread_and_counted_by_engine(two: Served) -> None:
    for i in range(12):
        assert two.complete(PROMPT.format(i))["choices"][0]["text"] == PROMPT.format(i)[:-1][:24]
    counts = by_engine(two, "request_prompt_tokens_count")
    assert set(counts) == {"0", "1"}
    assert sum(counts.values()) == 12
    assert min(counts.values()) > 0
    assert by_engine(two, "generation_tokens_total") == {e: 24 * n for e, n in counts.items()}
    assert set(by_engine(two, "num_requests_waiting")) == {"0", "1", "any"}
    assert two.metrics()["steps_total"] >= 12 * 24


def test_conversations_stay_where_they_are(two: Served) -> None:
    places: dict[int, set[str]] = {}
    prompts = [PROMPT.format(i) for i in range(6)]
    for _ in range(4):
        for i, prompt in enumerate(prompts):
            before = by_engine(two, "request_prompt_tokens_count")
            answer = two.complete(prompt, max_tokens=5)
            after = by_engine(two, "request_prompt_tokens_count")
            places.setdefault(i, set()).update(e for e in after if after[e] > before[e])
            prompts[i] = f"{prompt}{answer['choices'][0]['text']} and so on {i}?"
    assert all(len(found) == 1 for found in places.values())
    assert {e for found in places.values() for e in found} == {"0", "1"}
    assert min(by_engine(two, "prefix_cache_hits_total").values()) > 0


def test_requests_that_bring_no_seed_get_those_of_a_single_engine(
    engine: ReplicatedEngine, scripted: Callable[..., Any]
) -> None:
    async def main() -> None:
        streams = [await engine.submit(PROMPT.format(i), LONG, str(i)) for i in range(8)]
        for stream in streams:
            assert [part async for part in stream][-1].finished

    asyncio.run(main())
    first, second = (executor.seeds for executor in executors(engine))
    with_one = ReplicatedEngine(*[x if i == 0 else [x] for i, x in enumerate(scripted())])
    expected = [with_one.engine.seeds.getrandbits(63) for _ in range(8)]
    with_one.close()
    assert not first.keys() & second.keys()
    assert [(first | second)[str(i)] for i in range(8)] == expected


def test_a_request_is_aborted_wherever_it_runs(engine: ReplicatedEngine) -> None:
    for executor in executors(engine):
        executor.during_step = lambda output: time.sleep(0.1)

    async def main() -> None:
        streams = [await engine.submit(PROMPT.format(i), LONG, str(i)) for i in range(4)]
        taken = await engine.submit(PROMPT.format(7), LONG, "3")
        with pytest.raises(ValueError, match=r"`request_id` must be .*got '3'"):
            await anext(taken)
        for stream in streams:
            await anext(stream)
        assert sum(engine.replicas[0].load + engine.replicas[1].load) == 4
        await engine.abort("0")
        await engine.abort(["1", "2"])
        for executor in executors(engine):
            executor.during_step = lambda output: None
        ends = [[part async for part in stream][-1].outputs[0].finish_reason for stream in streams]
        assert ends == ["abort", "abort", "abort", "stop"]

    asyncio.run(main())


def test_generate_on_several_engines(engine: ReplicatedEngine) -> None:
    async def text_of(i: int) -> str:
        outputs = engine.generate(PROMPT.format(i), SamplingParams(max_tokens=None), str(i))
        return [output async for output in outputs][-1].outputs[0].text

    async def main() -> list[str]:
        return await asyncio.gather(*map(text_of, range(9)))

    assert asyncio.run(main()) == [PROMPT.format(i)[:-1] for i in range(9)]


def test_an_engine_that_dies_ends_the_others(two: Served, engine: ReplicatedEngine) -> None:
    may_fail = threading.Event()

    def fail(output: object) -> None:
        assert may_fail.wait(120)
        raise RuntimeError("device lost")

    def wait(output: object) -> None:
        may_fail.wait(120)
        time.sleep(0.5)

    executors(engine)[1].during_step = fail
    executors(engine)[0].during_step = wait
    answers: dict[int, str] = {}

    def ask(i: int) -> None:
        body = {"prompt": PROMPT.format(i), "max_tokens": 60, "stream": i % 2 == 0}
        answers[i] = two.client.post("/completions", json=body).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    two.wait_until(lambda: all(replica.load[1] for replica in engine.replicas), "both run")
    two.wait_until(lambda: sum(sum(replica.load) for replica in engine.replicas) == 6, "all have come")
    assert two.client.get("../health").status_code == 200
    may_fail.set()
    two.wait_until(lambda: engine.error is not None, "one has failed")
    two.server.lifecycle.tick(time.monotonic())  # as the server does ten times a second
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert len(answers) == 6
    assert all("the engine has stopped: device lost" in answer for answer in answers.values())
    assert two.client.get("../health").status_code == 503
    assert two.client.post("/completions", json={"prompt": "a?"}).status_code == 503


def test_what_several_engines_can_t_do_is_the_client_s_error(two: Served) -> None:
    for route, what in (("sleep", "sleep"), ("wake_up", "wake up")):
        answer = two.client.post(f"../{route}")
        assert answer.status_code == 400
        assert f"`data_parallel_size` must be 1 to {what}, got 2" in answer.text
    answer = two.client.post("../update_weights", json={"model_path": "/"})
    assert (answer.status_code, "must be 1 to update weights" in answer.text) == (400, True)
    assert two.client.get("../is_sleeping").json() == {"is_sleeping": False}


def test_the_page_shows_all_engines(engine: ReplicatedEngine) -> None:
    for executor in executors(engine):
        executor.during_step = lambda output: time.sleep(0.1)
    state = State(engine, Metrics(engine, "scripted", lambda: 0), "scripted")

    async def main() -> None:
        streams = [await engine.submit(PROMPT.format(i), LONG, str(i)) for i in range(6)]
        while sum(len(replica.engine.scheduler.queues) for replica in engine.replicas) < 6:
            await asyncio.sleep(0.01)
        shown = state.snapshot()
        for stream in streams:
            stream.abort()
        assert shown["about"]["num_engines"] == 2
        assert shown["pool"]["num_blocks"] == 2 * 39
        assert sum(length for length, _ in shown["pool"]["cells"]) == 2 * 39
        assert {request["id"] for request in shown["requests"]} == set("012345")
        assert shown["queues"]["running"] + shown["queues"]["waiting"] == 6
        assert shown["pool"]["num_used"] > 0

    asyncio.run(asyncio.wait_for(main(), 120))


def test_bad_sizes(scripted: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"`data_parallel_size` must be at most 4 because JAX sees.*got 9"):
        ReplicatedEngine(EngineArgs(data_parallel_size=9))

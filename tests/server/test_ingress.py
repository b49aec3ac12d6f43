"""An ingress before replicas in this process, which are lost at every point of their answers; no Ray."""

import asyncio
import collections
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import Request
from helpers.copying_model import write_copying_model
from prometheus_client.parser import text_string_to_metric_families
from server.conftest import Served

from jax_paged import AsyncLLMEngine, EngineArgs
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.ray_serve import continuation
from jax_paged.server.ray_serve.continuation import ReplicaCall, ReplicaLostError, ResponsePart
from jax_paged.server.ray_serve.ingress import Ingress, ResponseStream, _call, prefix_key
from jax_paged.server.ray_serve.replica import Replica

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ASK = {"messages": [{"role": "user", "content": "What is a block table?"}]}
USAGE = {"stream_options": {"include_usage": True}}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": "def f(", "temperature": 0, "max_tokens": 12}),
    "drawn": (COMPLETIONS, {"prompt": "def f(", "temperature": 1, "seed": 5, "max_tokens": 12}),
    "without a seed": (COMPLETIONS, {"prompt": ["def f("] * 2, "temperature": 2, "max_tokens": 8, **USAGE}),
    "several": (COMPLETIONS, {"prompt": ["def f(", "class A"], "n": 2, "seed": 3, "max_tokens": 7, **USAGE}),
    "echo": (COMPLETIONS, {"prompt": "def f(", "echo": True, "logprobs": 2, "max_tokens": 8, "seed": 1}),
    "chat": (CHATS, {**ASK, "seed": 2, "max_tokens": 16, "logprobs": True, "top_logprobs": 2, **USAGE}),
    "penalties": (
        CHATS,
        {**ASK, "seed": 2, "max_tokens": 24, "presence_penalty": 1.5, "frequency_penalty": 1, **USAGE},
    ),
    "continuous usage": (
        CHATS,
        {**ASK, "seed": 4, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        | {"max_tokens": 9},
    ),
    "form": (
        CHATS,
        {**ASK, "seed": 6, "max_tokens": 40, "guided_regex": r"[a-f]{3,9} (yes|no)[0-9]{4}"},
    ),
    "response": (
        RESPONSES,
        {"input": "What is a page?", "seed": 8, "max_output_tokens": 12, "top_logprobs": 1}
        | {"include": ["message.output_text.logprobs"]},
    ),
}


class Replicas:
    """Sends a request to replicas in turn, and loses each of them after so many parts of a stream.

    Args:
        replicas: Asked in turn.
        cuts: How many parts come before each loss; who is asked later is not lost.
    """

    def __init__(self, replicas: list[Replica], *cuts: int) -> None:
        self.num_calls = 0
        self._replicas = replicas
        self._cuts = cuts

    async def send(self, call: ReplicaCall) -> ResponseStream:
        i, self.num_calls = self.num_calls, self.num_calls + 1
        call.progress.tried_replicas.append(f"number {i}")
        left = self._cuts[i] if i < len(self._cuts) else None
        answering = self._replicas[i % len(self._replicas)].answer(call)
        try:
            async for part in answering:
                if left is not None and isinstance(part, ResponsePart):
                    if left == 0:
                        raise ReplicaLostError("it was killed")
                    left -= 1
                yield part
        finally:
            await answering.aclose()


async def two() -> tuple[int, int]:
    return 2, 2


@contextlib.asynccontextmanager
async def client_of(
    replicas: Replicas, count: Callable[[], Awaitable[tuple[int, int]]] = two
) -> AsyncIterator[httpx.AsyncClient]:
    ingress = Ingress(replicas.send, count, 10_000)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await ingress.answer(Request(scope, receive)))(scope, receive, send)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
        yield client


async def ask(replicas: Replicas, path: str, body: dict[str, Any]) -> httpx.Response:
    async with client_of(replicas) as client:
        return await client.post(path, json=body)


async def ask_lossy(
    replicas: list[Replica], cuts: tuple[int, ...], num_calls: int, path: str, body: dict[str, Any]
) -> httpx.Response:
    """Asks replicas that are lost, until so many had to be called for one answer.

    On a busy machine parts are joined, and there may be fewer than were to come before a loss.
    """
    for _ in range(50):
        lossy = Replicas(replicas, *cuts)
        answer = await ask(lossy, path, body)
        if lossy.num_calls == num_calls:
            return answer
    pytest.fail(f"no answer had so many parts: {answer.text}")


def events(text: str) -> list[dict[str, Any]]:
    """Returns the events of a stream; what is no event fails the test."""
    assert text.endswith("\n\n")
    found = [event.splitlines()[-1].removeprefix("data: ") for event in text.split("\n\n")[:-1]]
    assert found.count("[DONE]") == (found[-1] == "[DONE]")
    return [json.loads(event) for event in found if event != "[DONE]"]


def merged(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a client makes of the chunks of a stream, however these are cut."""
    whole: dict[str, Any] = {}
    for name in ("id", "created", "object", "model"):
        assert len({chunk[name] for chunk in found}) == 1, f"several {name}"
    for chunk in found:
        for choice in chunk["choices"]:
            merge(whole.setdefault(choice["index"], {}), choice)
            if chunk.get("usage"):
                whole.setdefault("so far", {})[choice["index"]] = chunk["usage"]["completion_tokens"]
    usage = found[-1].get("usage") or {}
    return whole | {"usage": [usage.get(n) for n in ("prompt_tokens", "completion_tokens")]}


def merge(whole: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        old = whole.get(name)
        if name == "id":
            continue
        if isinstance(value, dict):
            merge(whole.setdefault(name, {}), value)
        elif name == "tool_calls":
            for call in value:
                merge(whole.setdefault((name, call["index"]), {}), call)
        elif isinstance(value, str | list) and name not in ("role", "finish_reason", "type"):
            whole[name] = value if old is None else old + value
        elif value is not None or old is None:
            whole[name] = value


def typed(found: list[dict[str, Any]]) -> list[Any]:
    """Returns what a client makes of the typed events of a response."""
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    deltas = [event for event in found if event["type"].endswith(".delta")]
    rest = [event["type"] for event in found if not event["type"].endswith(".delta")]
    output, counts = found[-1]["response"]["output"], found[-1]["response"]["usage"]
    ids = {event["response"]["id"] for event in found if "response" in event}
    ids |= {event["item_id"] for event in found if "item_id" in event}
    assert len(ids) == 2, "of the response and of its item"
    contents = [item["content"] for item in output]
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    return [rest, "".join(event["delta"] for event in deltas), logprobs, contents, counts["output_tokens"]]


def made_of(path: str, answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return typed(events(answer.text)) if path == RESPONSES else merged(events(answer.text))


def is_same(value: Any, other: Any) -> bool:
    """Compares answers; log-probabilities computed again as a prompt's are not equal to the last bit."""
    if isinstance(value, dict):
        same = value.keys() == other.keys()
        return same and all(is_same(value[name], other[name]) for name in value)
    if isinstance(value, list):
        return len(value) == len(other) and all(map(is_same, value, other))
    return value == pytest.approx(other, abs=1e-3) if isinstance(value, float) else value == other


@pytest.fixture
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation.secrets, "randbits", lambda _: 77)


def replica_of(served: Served) -> Replica:
    return Replica(OpenAIServer(served.server.engine, "pagelet"))


@pytest.mark.thorough
@pytest.mark.usefixtures("fixed_seed")
@pytest.mark.parametrize("case", BODIES)
def test_a_stream_that_is_cut_anywhere_goes_on(served: Served, case: str) -> None:
    path, body = BODIES[case]
    asyncio.run(check_cuts(lambda: replica_of(served), path, {**body, "stream": True}))
    served.wait_until_idle()


async def check_cuts(make: Callable[[], Replica], path: str, body: dict[str, Any]) -> None:
    replicas = [make(), make()]
    undisturbed = made_of(path, whole := await ask(Replicas(replicas), path, body))
    for cut in range(whole.text.count("\n\n")):
        lossy = Replicas(replicas, cut)
        assert is_same(made_of(path, await ask(lossy, path, body)), undisturbed), f"cut after {cut}"
        assert lossy.num_calls <= 2
    assert is_same(made_of(path, await ask_lossy(replicas, (3, 2), 3, path, body)), undisturbed)


def test_equal_prompts_without_a_seed_get_different_answers(served: Served) -> None:
    path, body = BODIES["without a seed"]
    answer = asyncio.run(ask(Replicas([replica_of(served)]), path, {**body, "stream": True}))
    whole = merged(events(answer.text))
    assert whole[0]["text"] != whole[1]["text"]


@pytest.mark.parametrize("stop", ["lock ta", "ock tab"])
def test_a_stop_string_that_spans_the_seam_ends_the_answer(scripted: Any, stop: str) -> None:
    engine = AsyncLLMEngine(*scripted())
    engine.engine.executor.during_step = lambda _: time.sleep(0.004)  # so that parts are not joined
    try:
        body = {"prompt": "a block table is?", "stop": [stop], "max_tokens": 40, "stream": True}
        make = lambda: Replica(OpenAIServer(engine, "scripted"))  # noqa: E731
        asyncio.run(check_cuts(make, COMPLETIONS, body))
    finally:
        engine.close()


def test_a_whole_answer_is_asked_for_again(served: Served) -> None:
    path, body = BODIES["drawn"]

    async def main() -> None:
        replicas = [replica_of(served), replica_of(served)]
        whole = (await ask(Replicas(replicas), path, body)).json()
        lossy = Replicas(replicas, 0)
        again = (await ask(lossy, path, body)).json()
        assert (again["choices"], lossy.num_calls) == (whole["choices"], 2)

    asyncio.run(main())


def test_a_replica_with_other_settings_does_not_go_on(served: Served) -> None:
    path, body = BODIES["greedy"]
    other = Replica(OpenAIServer(served.server.engine, "pagelet", ServerOptions(max_prompts=2)))
    answer = asyncio.run(ask_lossy([replica_of(served), other], (3,), 2, path, {**body, "stream": True}))
    *parts, last = events(answer.text)
    assert (len(parts), last["error"]["message"]) == (
        3,
        "the remaining replicas have other settings",
    )
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("cut", [0, 4])
@pytest.mark.parametrize("case", ["greedy", "chat", "response"])
def test_a_stream_that_ends_every_replica_ends_with_an_error(served: Served, case: str, cut: int) -> None:
    path, body = BODIES[case]
    answer = asyncio.run(ask_lossy([replica_of(served)], (cut, 0, 0), 3, path, {**body, "stream": True}))
    message = "3 replicas were lost; last error: it was killed"
    if cut == 0:
        # Its status was sent with the begin, or there is none yet.
        assert message in answer.text
        return
    *_, last = events(answer.text)
    assert message in (last["message"] if path == RESPONSES else last["error"]["message"])
    assert "[DONE]" not in answer.text


def test_an_engine_that_stops_loses_its_replica(served: Served, scripted: Any) -> None:
    async def main() -> None:
        broken, whole = AsyncLLMEngine(*scripted()), AsyncLLMEngine(*scripted())
        try:
            replicas = [Replica(OpenAIServer(engine, "scripted")) for engine in (broken, whole)]
            body = {"prompt": "a block table is?", "max_tokens": 40, "stream": True}
            undisturbed = made_of(COMPLETIONS, await ask(Replicas(replicas[1:]), COMPLETIONS, body))

            def fail(_: Any) -> None:
                if broken.engine.executor.num_steps == 6:
                    raise RuntimeError("the device is gone")

            broken.engine.executor.during_step = fail
            lossy = Replicas(replicas)
            assert made_of(COMPLETIONS, await ask(lossy, COMPLETIONS, body)) == undisturbed
            assert lossy.num_calls == 2
            with pytest.raises(ReplicaLostError, match="the device is gone"):
                replicas[0].check()
            # Nor does it begin anything.
            assert (await ask(Replicas(replicas), COMPLETIONS, {**body, "stream": False})).status_code == 200
        finally:
            whole.close()
            broken.engine.close()

    asyncio.run(main())


def test_an_engine_that_hangs_is_noticed(scripted: Any) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine(*scripted())
        replica = Replica(OpenAIServer(engine, "scripted", ServerOptions(step_timeout=0.1)))
        replica.check()
        go_on = threading.Event()
        engine.engine.executor.during_step = lambda _: go_on.wait(120)
        lossy = Replicas([replica])
        asking = asyncio.create_task(ask(lossy, COMPLETIONS, {"prompt": "a?", "stream": True}))
        while not (engine.step_began and time.monotonic() - engine.step_began > 0.2):
            await asyncio.sleep(0.01)
        with pytest.raises(ReplicaLostError, match="the engine hangs"):
            replica.check()
        answer = await asking
        assert (answer.status_code, lossy.num_calls) == (503, 3)
        assert "3 replicas were lost; last error: the engine hangs" in answer.text
        go_on.set()
        engine.close()

    asyncio.run(main())


def test_what_a_replica_refuses_is_refused(served: Served) -> None:
    async def main() -> None:
        replicas = Replicas([replica_of(served)])
        refused = await ask(replicas, COMPLETIONS, {"prompt": "a", "temperature": -1, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        long = await ask(replicas, COMPLETIONS, {"prompt": "a" * 10_001})
        assert (long.status_code, replicas.num_calls) == (413, 1)

    asyncio.run(main())


@pytest.mark.slow
def test_calls_of_tools_go_on(tmp_path: Any) -> None:
    text = 'Now <tool_call>\n{"name": "f", "arguments": {"a": "{x}"}}\n</tool_call>'
    engine = AsyncLLMEngine(EngineArgs(str(write_copying_model(tmp_path)), dtype="float32", max_num_seqs=2))
    try:
        options = ServerOptions(tool_call_parser="hermes", reasoning_parser="qwen3")
        tool = {"type": "function", "function": {"name": "f"}}
        body = {"messages": [{"role": "user", "content": text}], "tools": [tool], "temperature": 0}
        make = lambda: Replica(OpenAIServer(engine, "copying", options))  # noqa: E731
        asyncio.run(check_cuts(make, CHATS, {**body, "max_tokens": 200, "stream": True}))
    finally:
        engine.close()


def test_health_counts_replicas() -> None:
    async def get(num_running: int) -> httpx.Response:
        async def count() -> tuple[int, int]:
            return num_running, 2

        async with client_of(Replicas([]), count) as client:
            return await client.get("/health")

    degraded, down = asyncio.run(get(1)), asyncio.run(get(0))
    assert (degraded.status_code, down.status_code) == (200, 503)
    assert degraded.json() == {"status": "ok", "replicas": {"running": 1, "wanted": 2}}
    assert down.json()["error"]["message"] == "0 of 2 replicas are running"


def test_metrics_are_those_of_all_replicas(served: Served) -> None:
    async def main() -> str:
        replicas = [replica_of(served), replica_of(served)]
        path, body = BODIES["greedy"]
        await ask(Replicas(replicas), path, body)
        async with client_of(Replicas(replicas)) as client:
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE vllm:request_success_total counter") == 1
    num_ended: collections.Counter[str] = collections.Counter()
    for sample in families["vllm:request_success"].samples:
        num_ended[sample.labels["replica"]] += int(sample.value * sample.name.endswith("_total"))
    assert num_ended == {"number 0": 1, "number 1": 0}


def test_requests_that_begin_alike_have_one_key() -> None:
    def key(**fields: Any) -> str | None:
        return prefix_key(json.dumps(fields).encode())

    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    turns = [*first, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And?"}]
    assert key(messages=first) == key(messages=turns, temperature=1)
    assert key(messages=first) != key(messages=turns[1:])
    assert key(messages=first) != key(messages=first, cache_salt="mine")
    assert key(prompt="x" * 300) == key(prompt="x" * 400) == key(prompt=["x" * 256, "y"])
    assert key(prompt=[1] * 300) == key(prompt=[[1] * 400, [2]]) != key(prompt=[1] * 200)
    assert key(input="Hi") is not None
    assert [key(), key(prompt=""), key(prompt=[]), prefix_key(b"[]"), prefix_key(b"{")] == [None] * 5


def test_head_is_asked_of_replicas_as_get() -> None:
    scope = {"type": "http", "method": "HEAD", "path": "/v1/models", "query_string": b"", "headers": []}
    assert _call(Request(scope), b"").method == "GET"

"""A real server on a free port of 127.0.0.1: of pagelet, or of an engine whose tokens are scripted."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from helpers.listening import listening
from helpers.metric_values import metric_values
from helpers.waiting import wait_until
from helpers.wrapped_executor import WrappedExecutor

from jax_paged import AsyncLLMEngine, EngineArgs, LLMEngine
from jax_paged.core.model_runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions


class Steps:
    """Stands between an engine and its device: slows steps down, fails them, or spoils their results.

    Args:
        engine: The engine; idle.
        monkeypatch: Undoes it.
    """

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_samples = 0  # tokens that were drawn so far
        self.delay_s = 0.0
        self.before: Callable[[], None] = lambda: None  # what it raises, the step raises
        self.spoiled: tuple[int, int] | None = None  # (seed of a sequence, its output tokens): see spoil
        self._engine = engine
        executor = WrappedExecutor(engine.executor, self._begin, self._end)
        monkeypatch.setattr(engine._core, "executor", executor)
        # So that a step that is slowed down, failed or spoiled is the last that was begun.
        monkeypatch.setattr(engine._core, "max_in_flight", 1)

    def spoil(self, seed: int, num_output_tokens: int) -> None:
        """Makes the logits NaN of the sequences with a seed, in the step after so many output tokens."""
        self.spoiled = (seed, num_output_tokens)

    def _begin(self, output: SchedulerOutput) -> None:
        time.sleep(self.delay_s)
        self.before()

    def _end(self, output: SchedulerOutput, result: ModelRunnerOutput) -> ModelRunnerOutput:
        self.num_samples += len(output.samples)
        is_finite = list(result.is_finite)
        for i, row in enumerate(output.scheduled):
            named = self._engine.scheduler.find(row.seq_id)
            assert named is not None, row
            _, seq = named
            if (seq.seed, len(seq.output_token_ids)) == self.spoiled:
                is_finite[i] = False
        return dataclasses.replace(result, is_finite=is_finite)


@dataclasses.dataclass
class Served:
    """A running server, the client for it, and the engine behind it."""

    client: httpx.Client
    server: OpenAIServer

    @property
    def engine(self) -> LLMEngine:
        return self.server.engine.engine

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any = "def f(", **body: Any) -> dict[str, Any]:
        return self.post("/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 24, **body})

    def chat(self, content: Any = "What is a block table?", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return self.post("/chat/completions", messages=messages, **{"temperature": 0, **body})

    def stream(
        self, path: str, *, on_first_event: Callable[[], None] = lambda: None, **body: Any
    ) -> list[dict[str, Any]]:
        """Returns the chunks of an answer that is streamed; the last is an error if it has failed."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = []
            for line in filter(None, answer.iter_lines()):
                if not events:
                    on_first_event()
                events.append(line.removeprefix("data: "))
        has_failed = "error" in json.loads(events[-2 if events[-1] == "[DONE]" else -1])
        assert has_failed == (events[-1] != "[DONE]"), "an answer that is not whole has no end"
        return [json.loads(event) for event in events if event != "[DONE]"]

    def metrics(self) -> dict[str, float]:
        """Returns the values of all metrics, by their names without what they all have in common."""
        return metric_values(self.client.get("../metrics").text)

    @staticmethod
    def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        wait_until(condition, what, timeout_s)

    def wait_for_requests(self, num: int, since: dict[str, float]) -> dict[str, float]:
        """Waits until so many requests more have been counted; returns by how much each metric has grown."""

        def grew() -> dict[str, float]:
            return {name: value - since.get(name, 0) for name, value in self.metrics().items()}

        def num_ended() -> float:
            return sum(value for name, value in grew().items() if name.startswith("request_success_total"))

        self.wait_until(lambda: num_ended() >= num, f"{num} requests are counted")
        return grew()

    def wait_until_idle(self, timeout_s: float = 120) -> None:
        """Waits until nothing runs; then all blocks must be free."""
        self.wait_until(lambda: not self.engine.has_unfinished_requests(), "no request runs", timeout_s)
        manager = self.engine.scheduler.block_manager
        manager.check_integrity()
        assert manager.num_free_blocks == manager.num_usable_blocks


@contextlib.contextmanager
def serving(engine: ServingEngine, model_name: str, **options: Any) -> Iterator[Served]:
    server = OpenAIServer(engine, model_name, ServerOptions(port=0, **options))
    with (
        listening(server) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client,
    ):
        yield Served(client, server)
    engine.close()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    # float32, so that no output depends on which other requests share its steps.
    args = EngineArgs(
        dtype="float32",
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=512,
        num_gpu_blocks_override=600,
    )
    with serving(AsyncLLMEngine(args), "pagelet") as served:
        yield served


@pytest.fixture
def steps(served: Served, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps of the server of pagelet."""
    return Steps(served.engine, monkeypatch)


@pytest.fixture
def scripted_engine(scripted: Callable[..., Any]) -> Iterator[LLMEngine]:
    with LLMEngine(*scripted()) as engine:
        yield engine


@pytest.fixture
def scripted_server(scripted: Callable[..., Any]) -> Iterator[Served]:
    """A server that a test may break: it answers "text?" with text, and has 9 blocks of 16 tokens."""
    with serving(AsyncLLMEngine(*scripted(num_gpu_blocks_override=10)), "scripted") as served:
        yield served


@pytest.fixture
def scripted_steps(scripted_server: Served, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(scripted_server.engine, monkeypatch)

"""A real server of pagelet on a free port of 127.0.0.1."""

import dataclasses
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from jax_paged import AsyncLLMEngine, EngineArgs
from jax_paged.server.app import OpenAIServer


@dataclasses.dataclass
class Served:
    """A running server, the client for it, and the engine behind it."""

    client: httpx.Client
    server: OpenAIServer

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any = "def f(", **body: Any) -> dict[str, Any]:
        return self.post("/completions", prompt=prompt, **{"temperature": 0, "max_tokens": 24, **body})

    def chat(self, content: Any = "What is a block table?", **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        return self.post("/chat/completions", messages=messages, **{"temperature": 0, **body})

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Returns the chunks of an answer that is streamed."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def wait_until_idle(self, timeout_s: float = 10) -> None:
        """Waits until nothing runs; then all blocks must be free."""
        engine = self.server.engine.engine
        end = time.monotonic() + timeout_s
        while engine.has_unfinished_requests():
            assert time.monotonic() < end, "requests still run"
            time.sleep(0.01)
        manager = engine.scheduler.block_manager
        manager.check_integrity()
        assert manager.num_free_blocks == manager.num_usable_blocks


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
    engine = AsyncLLMEngine(args)
    server = OpenAIServer(engine, "pagelet")
    config = uvicorn.Config(server.app(), "127.0.0.1", 0, log_config=None, timeout_graceful_shutdown=2)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
        yield Served(client, server)
    running.should_exit = True
    thread.join()
    engine.close()

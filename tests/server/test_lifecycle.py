"""How the server ends: with its requests, without them, or because its engine fails or hangs."""

import contextlib
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from server.conftest import Served, Steps

from jax_paged import AsyncLLMEngine
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.launch.server import Server
from jax_paged.server.lifecycle import DRAINED, ENGINE_FAILED, REQUESTS_ABORTED

ROOT = Path(__file__).parents[2]
LONG = "abcdefghijklmnopqrstuvwxyz?"  # the scripted engine answers with the text before the question mark


@dataclasses.dataclass
class Ending:
    """A server as the command starts it, with steps that a test can stop."""

    served: Served
    server: Server
    thread: threading.Thread
    steps: Steps

    @property
    def url(self) -> str:
        return str(self.served.client.base_url).removesuffix("/v1/")

    def status(self, path: str) -> int:
        return httpx.get(f"{self.url}/{path}", timeout=10).status_code

    def signal(self) -> None:
        self.server.handle_exit(15, None)

    def exit_code(self) -> int:
        """Waits for the end of the server."""
        self.thread.join(timeout=30)
        assert not self.thread.is_alive()
        return self.served.server.lifecycle.exit_code


@pytest.fixture
def ending(scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ending]]:
    """Starts a server with certain options."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Ending:
            engine = stack.enter_context(contextlib.closing(AsyncLLMEngine(*scripted())))
            openai = OpenAIServer(engine, "scripted", ServerOptions(**options))
            config = uvicorn.Config(
                openai.app(), "127.0.0.1", 0, log_config=None, timeout_graceful_shutdown=2
            )
            server = Server(config, openai)
            thread = threading.Thread(target=server.run)
            thread.start()
            while not server.started:
                time.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=60))
            steps = Steps(engine.engine, monkeypatch)
            stack.callback(thread.join)
            stack.callback(server.handle_exit, 15, None)
            stack.callback(server.handle_exit, 15, None)
            return Ending(Served(client, openai), server, thread, steps)

        yield start


def test_a_server_that_nobody_asks_ends_at_once(ending):
    running = ending()
    assert [running.status(path) for path in ("health", "ping", "ready")] == [200, 200, 200]
    running.signal()
    assert running.exit_code() == DRAINED


def test_running_requests_end_and_new_ones_are_refused(ending):
    running = ending()
    running.steps.delay_s = 0.1
    begun = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        stream = pool.submit(
            running.served.stream, "/completions", prompt=LONG, max_tokens=26, on_first_event=begun.set
        )
        whole = pool.submit(running.served.complete, LONG, max_tokens=26)
        assert begun.wait(30)
        running.signal()
        assert [running.status(path) for path in ("health", "ready")] == [200, 503]
        refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a?"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert "".join(chunk["choices"][0]["text"] for chunk in stream.result()) == LONG[:-1]
        assert whole.result()["choices"][0]["text"] == LONG[:-1]
    assert running.exit_code() == DRAINED


@pytest.mark.parametrize("timeout", [0.3, 30])
def test_what_takes_longer_than_the_timeout_or_a_second_signal_ends_with_an_error(ending, timeout, caplog):
    running = ending(shutdown_timeout=timeout)
    running.steps.delay_s = 0.3
    begun = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(
            running.served.stream, "/completions", prompt=LONG, max_tokens=26, on_first_event=begun.set
        )
        assert begun.wait(30)
        whole = pool.submit(running.served.client.post, "/completions", json={"prompt": LONG})
        Served.wait_until(lambda: running.served.server.lifecycle.num_active == 2, "both run")
        running.signal()
        if timeout == 30:
            running.signal()
        *chunks, error = stream.result()
        assert all("choices" in chunk for chunk in chunks)
        assert error["error"]["message"] == "the server is shutting down"
        assert whole.result().status_code == 503
    assert running.exit_code() == REQUESTS_ABORTED
    assert "Traceback" not in caplog.text


def test_an_engine_that_fails_ends_the_server(ending):
    running = ending()

    def fail() -> None:
        raise RuntimeError("device lost")

    running.steps.before = fail
    answer = running.served.client.post("/completions", json={"prompt": "a?"})
    assert (answer.status_code, "device lost" in answer.text) == (503, True)
    assert running.status("health") == 503
    assert running.exit_code() == ENGINE_FAILED


def test_an_engine_that_hangs_is_found_and_may_leave_the_server_up(ending, caplog):
    running = ending(step_timeout=0.5, stay_on_engine_failure=True)
    let_go, begun = threading.Event(), threading.Event()
    try:
        with ThreadPoolExecutor(2) as pool:
            running.steps.delay_s = 0.05
            stream = pool.submit(running.served.stream, "/completions", prompt=LONG, on_first_event=begun.set)
            assert begun.wait(30)
            running.steps.before = lambda: let_go.wait(60)
            *_, error = stream.result(timeout=10)
            assert "the engine hangs" in error["error"]["message"]
        assert running.status("health") == 503
        answer = running.served.client.post("/completions", json={"prompt": "a?"})
        assert (answer.status_code, "the engine hangs" in answer.text) == (503, True)
        assert "let_go.wait" in caplog.text  # where it hangs
        assert running.thread.is_alive()
    finally:
        let_go.set()


def test_a_request_that_comes_while_the_engine_hangs_is_told_too(ending):
    running = ending(step_timeout=1, stay_on_engine_failure=True)
    let_go, begun = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        let_go.wait(60)

    try:
        running.steps.before = hang
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(running.served.client.post, "/completions", json={"prompt": "a?"})]
            assert begun.wait(30)
            asked.append(pool.submit(running.served.client.post, "/completions", json={"prompt": "a?"}))
            for answer in asked:
                assert answer.result(timeout=20).status_code == 503
                assert "the engine hangs" in answer.result().text
        Served.wait_until(lambda: running.served.server.lifecycle.num_active == 0, "nothing is active")
    finally:
        let_go.set()


def test_a_path_that_ends_with_a_line_break_is_no_route(ending):
    running = ending()
    for path in ("/v1/completions%0a", "/v1/comple%00tions", "/health%0d"):
        assert httpx.post(f"{running.url}{path}", json={"prompt": "a?"}).status_code == 404


HANGING = """
import threading
from jax_paged.engine.llm_engine import LLMEngine
from jax_paged.server.launch.cli import main

LLMEngine.advance = lambda self: threading.Event().wait()
main(["--port", "0", "--step-timeout", "0.5", "--max-num-seqs", "2", "--max-num-batched-tokens", "16",
      "--max-model-len", "64", "--num-gpu-blocks-override", "8"])
"""


@pytest.mark.thorough
def test_a_server_whose_engine_hangs_exits():
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        while "http://" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
        url = line.split(" at ")[1].split(". ")[0]
        answer = httpx.post(f"{url}/completions", json={"prompt": "a"}, timeout=30)
        assert answer.status_code == 503
        assert process.wait(timeout=30) == ENGINE_FAILED
        assert "an engine step takes more than 0.5 s" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()

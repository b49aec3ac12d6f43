"""Requests that do not end well: clients that leave, logits that are not finite, an engine that stops."""

import contextlib
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_paged import SamplingParams

CHAT = [{"role": "user", "content": "What is a block table?"}]
LONG = {"prompt": ["a b c", "d e f"], "max_tokens": 480, "ignore_eos": True}
NOT_FINITE = {"prompt": "a", "seed": 666, "ignore_eos": True}


class Gate:
    """Lets the first num_free steps pass, and holds the others back until it is opened."""

    def __init__(self, num_free: int) -> None:
        self._num_free = num_free
        self._opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self) -> None:
        self._num_free -= 1
        if self._num_free < 0:
            self.reached.set()
            assert self._opened.wait(30), "nobody has opened the gate"

    def open(self) -> None:
        self._opened.set()


def leave_during_a_stream(served, steps, body):
    steps.delay_s = 0.01
    with served.client.stream("POST", "/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
        tables = served.engine.scheduler.block_manager.block_tables
        served.wait_until(lambda: len(tables) == 2 * body["n"], "all choices run")


def leave_before_the_answer(served, steps, body, num_steps=2):
    steps.before = gate = Gate(num_steps)
    steps.delay_s = 0.01
    url = served.client.base_url
    try:
        with contextlib.closing(http.client.HTTPConnection(url.host, url.port)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            assert gate.reached.wait(30)
    finally:
        gate.open()


def leave_before_a_stream(served, steps, body):
    leave_before_the_answer(served, steps, {**body, "stream": True}, num_steps=0)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("leave", [leave_during_a_stream, leave_before_the_answer, leave_before_a_stream])
def test_a_client_that_leaves_frees_its_blocks_and_is_counted(served, steps, leave, n):
    served.wait_until_idle()
    before = served.metrics()
    leave(served, steps, {**LONG, "n": n})
    served.wait_until_idle()
    grew = served.wait_for_requests(2, since=before)
    assert grew['request_success_total{finished_reason="abort"}'] == 2
    prompts = [served.engine.tokenizer.encode(prompt) for prompt in LONG["prompt"]]
    assert grew["prompt_tokens_total"] == sum(map(len, prompts))
    assert grew["generation_tokens_total"] == steps.num_samples
    assert steps.num_samples < 2 * n * LONG["max_tokens"]


@pytest.mark.parametrize(("n", "index"), [(1, 0), (3, 1)])
def test_non_finite_logits_are_an_error_of_one_request(served, steps, n, index):
    body = {**NOT_FINITE, "n": n}
    expected = served.complete()["choices"]
    steps.spoil(SamplingParams(seed=666).seed_of(index), 2)
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(served.complete)
        bad = pool.submit(served.client.post, "/completions", json=body)
        assert good.result()["choices"] == expected
    assert bad.result().status_code == 500
    assert "non-finite logits" in bad.result().json()["error"]["message"]
    served.wait_until_idle()


@pytest.mark.parametrize(("n", "index"), [(1, 0), (3, 1)])
def test_non_finite_logits_end_a_stream_with_an_error(served, steps, n, index):
    steps.spoil(SamplingParams(seed=666).seed_of(index), 2)
    steps.before = gate = Gate(1)
    chunks = served.stream("/completions", **NOT_FINITE, n=n, on_first_event=gate.open)
    assert chunks[0]["choices"]
    assert "non-finite logits" in chunks[-1]["error"]["message"]
    assert all("error" not in chunk for chunk in chunks[:-1])
    served.wait_until_idle()


def test_an_error_before_the_first_token_of_a_stream_is_its_status(served, steps):
    steps.spoil(666, 0)
    for path, prompt in (("/completions", {"prompt": "a"}), ("/chat/completions", {"messages": CHAT})):
        answer = served.client.post(path, json={**prompt, "seed": 666, "stream": True})
        assert answer.status_code == 500, answer.text
        assert "non-finite logits" in answer.json()["error"]["message"]
    served.wait_until_idle()


class Panic(BaseException):
    """What a library in another language may raise."""


@pytest.mark.parametrize("error", [RuntimeError("device lost"), Panic("device lost")])
def test_an_engine_that_has_stopped_says_so(served, monkeypatch, error):
    assert served.client.get("../health").json() == {"status": "ok"}
    monkeypatch.setattr(served.server.engine, "error", error)
    for answer in (
        served.client.get("../health"),
        served.client.post("/completions", json={"prompt": "a"}),
        served.client.post("/chat/completions", json={"messages": CHAT, "stream": True}),
    ):
        assert answer.status_code == 503
        assert "device lost" in answer.json()["error"]["message"]


def test_an_error_without_a_message_is_named(served, monkeypatch):
    monkeypatch.setattr(served.server.engine, "error", MemoryError())
    assert "MemoryError" in served.client.get("../health").json()["error"]["message"]


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_every_client_gets_an_error_when_the_engine_stops(scripted_server, scripted_steps, kind):
    running, stop = threading.Event(), threading.Event()

    def fail():
        running.set()
        assert stop.wait(30)
        raise kind("device lost")

    scripted_steps.before = fail

    def ask(**body):
        return scripted_server.client.post("/completions", json={"prompt": "abc?", **body})

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(ask)
        assert running.wait(30)
        bodies = ({"stream": True}, {"prompt": ["abc?", "de?"]}, {"prompt": ["abc?", "de?"], "stream": True})
        others = [pool.submit(ask, **body) for body in bodies]
        stop.set()
        for answer in (first, *others):
            assert answer.result().status_code == 503
            assert "device lost" in answer.result().json()["error"]["message"]
    assert scripted_server.client.get("../health").status_code == 503


@pytest.fixture
def no_room(scripted_server):
    """A prompt that does not fit beside a pinned prefix."""
    scripted_server.engine.pin_prefix("p" * 112)
    return "a" * 60


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
def test_a_request_that_never_ran_is_an_error(scripted_server, no_room, stream, is_chat):
    if is_chat:
        path, body = "/chat/completions", {"messages": [{"role": "user", "content": no_room}]}
    else:
        path, body = "/completions", {"prompt": no_room}
    answer = scripted_server.client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("server_error", None)
    assert "the KV cache is too small" in error["message"]
    assert "--num-gpu-blocks-override" in error["message"]
    assert scripted_server.metrics()['request_success_total{finished_reason="error"}'] == 1
    assert scripted_server.complete("abc?")["choices"][0]["text"] == "abc"


def test_a_prompt_that_never_ran_is_an_error_beside_one_that_did(scripted_server, no_room):
    prompts = ["abc?", no_room]
    assert scripted_server.client.post("/completions", json={"prompt": prompts}).status_code == 503
    with scripted_server.client.stream(
        "POST", "/completions", json={"prompt": prompts, "stream": True}
    ) as answer:
        text = answer.read().decode()
    assert "the KV cache is too small" in text  # an event, if the other prompt's text came first

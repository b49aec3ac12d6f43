"""The page at / and its state, without a browser; test_browser.py uses one."""

import base64
import hashlib
import json
import re
import threading
import time

import pytest
from starlette.testclient import TestClient

from jax_paged import AsyncLLMEngine, SamplingParams
from jax_paged.core.request import Request, RequestMetrics, Sequence, SequenceGroup
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.observability.state import State, _request
from jax_paged.server.routes.status_page import content_security_policy


def page(served):
    return served.client.get("../")


def state(served):
    time.sleep(0.5)  # an older one may be kept for 0.4 s
    answer = served.client.get("../ui/state")
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def expanded(pool):
    return [code for length, code in pool["cells"] for _ in range(length)]


def test_the_page_may_run_its_own_script_and_nothing_else(served):
    answer = page(served)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_loads_nothing_from_elsewhere_and_writes_no_html(served):
    text = page(served).text
    assert set(re.findall(r"https?://[^'\"\s)]+", text)) <= {"http://www.w3.org/2000/svg"}
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        " style=",
        " onclick",
    ):
        assert word not in text
    assert not re.search(r"""(?:href|src)=["'](?!data:)""", text)


def test_a_page_of_two_scripts_has_no_policy():
    with pytest.raises(ValueError):
        content_security_policy("<script></script><script></script><style></style>")


def test_the_page_takes_every_key_that_the_server_takes_and_no_other(served):
    (pattern,) = re.findall(r"isKey = text => /(.*)/\.test", page(served).text)

    def is_key(text):
        try:
            return with_all_keys(ServerOptions(api_key=(text,)), None).api_key == (text,)
        except ValueError:
            return False

    for text in ["", "two words", "a" * 64, *map(chr, range(1, 0x2100))]:
        assert is_key(text) == bool(re.fullmatch(pattern, text)), text


def test_without_ui_there_is_no_page(scripted):
    engine = AsyncLLMEngine(*scripted())
    found = {}
    for ui in (True, False):
        client = TestClient(OpenAIServer(engine, "m", ServerOptions(ui=ui)).app())
        found[ui] = [client.get(path).status_code for path in ("/", "/ui/state")]
    engine.close()
    assert found == {True: [200, 200], False: [404, 404]}


def test_where_a_key_is_set_the_page_is_open_and_its_state_is_not(scripted):
    engine = AsyncLLMEngine(*scripted())
    client = TestClient(OpenAIServer(engine, "m", ServerOptions(api_key=("secret",))).app())
    assert client.get("/").status_code == 200
    assert client.get("/ui/state").status_code == 401
    assert client.get("/ui/state", headers={"Authorization": "Bearer secret"}).status_code == 200
    engine.close()


def test_the_state_of_an_idle_server(served):
    served.complete(max_tokens=3)
    served.wait_until_idle()
    now = state(served)
    config = served.engine.config
    assert now["model"] == "pagelet"
    assert now["has_chat"] is True
    assert now["stopped"] is None
    assert now["requests"] == []
    assert now["queues"] == {"running": 0, "swapped": 0, "waiting": 0}
    pool = now["pool"]
    assert (pool["num_used"], pool["num_shared"], pool["shared"], pool["not_full"]) == (0, 0, [], [])
    assert len(expanded(pool)) == pool["num_blocks"] == config.num_blocks - 1
    assert set(expanded(pool)) <= {0, 1}
    assert expanded(pool).count(1) == pool["num_cached"]
    assert now["done"]["generated_tokens"] > 0
    assert now["latency"]["first_token"]["p50"] <= now["latency"]["first_token"]["p90"]
    assert now["programs"]["compiled"] <= now["programs"]["all"]


def test_the_state_while_requests_run_names_who_holds_what_and_no_text(served, steps):
    served.wait_until_idle()
    steps.delay_s = 0.02
    secret = "xylophone quartz " * 12
    body = {"prompt": secret, "max_tokens": 200, "ignore_eos": True, "n": 2, "temperature": 1}
    threads = [threading.Thread(target=served.complete, kwargs=body) for _ in range(2)]
    for thread in threads:
        thread.start()
    served.wait_until(lambda: len(served.engine.scheduler.queues.running) == 2, "both run")
    now = state(served)
    pool, requests = now["pool"], now["requests"]
    assert [request["status"] for request in requests] == ["running"] * 2
    assert [request["num_sequences"] for request in requests] == [2, 2]
    codes = expanded(pool)
    assert 4 in codes
    assert 5 in codes
    held = sum(code >= 3 for code in codes)
    assert abs(held - pool["num_used"]) <= 4  # read one after another, a step may lie in between
    assert pool["num_shared"] > 0  # the prompt's blocks
    assert all(codes[block] >= 3 for block, _ in pool["shared"])
    assert all(0 <= n < pool["block_size"] for _, n in pool["not_full"])
    assert "xylophone" not in json.dumps(now)
    for thread in threads:
        thread.join()
    served.wait_until_idle()


def test_a_beam_search_may_be_without_a_beam_for_a_moment():
    ended = Sequence([1, 2, 3])
    for completed, num_prompt_tokens in (([ended], 3), ([], 0)):
        request = Request("a", [1, 2, 3], SamplingParams())
        group = SequenceGroup(request, [], RequestMetrics(0.0), completed=completed)
        shown = _request(group, "running", 1.0)
        assert (shown["num_prompt_tokens"], shown["num_sequences"]) == (num_prompt_tokens, 0)


def test_pinned_prefixes_are_told_apart(served):
    served.wait_until_idle()
    name = served.engine.pin_prefix("def read(self, path):\n" * 8)
    assert 2 in expanded(state(served)["pool"])
    served.engine.unpin_prefix(name)


def test_reading_the_state_does_not_disturb_the_engine(served):
    """The same answers come, and no reading fails, while the state is read all the time."""
    expected = served.complete(max_tokens=40, ignore_eos=True)["choices"]
    ended = threading.Event()
    failed = []

    def read():
        reader = State(served.server.engine, served.server.metrics, "m")
        while not ended.is_set():
            try:
                reader._snapshot(time.monotonic())
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(6):
        body = {"prompt": ["def f("] * 6, "max_tokens": 40, "ignore_eos": True}
        texts = [choice["text"] for choice in served.complete(**body)["choices"]]
        assert texts == [expected[0]["text"]] * 6
    ended.set()
    thread.join()
    assert failed == []

"""The routes that --developer-routes switches on: sleep, waking up, other weights."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.listening import listening
from helpers.metric_values import metric_values
from safetensors.numpy import load_file, save_file

from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions

PAGELET = Path(__file__).parents[2] / "models" / "pagelet"
BODY: dict[str, Any] = {"prompt": "def read(self", "temperature": 0, "max_tokens": 16}


@pytest.fixture
def client(served: Any) -> Iterator[httpx.Client]:
    options = ServerOptions(port=0, developer_routes=True, allowed_origins=("https://chat.example.org",))
    engine = served.server.engine
    with (
        listening(OpenAIServer(engine, "pagelet", options)) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        yield client
        if engine.engine.is_sleeping():
            assert client.post("/wake_up").status_code == 200
    served.wait_until_idle()


def text_of(client: httpx.Client) -> str:
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def refused(answer: httpx.Response, *parts: str) -> None:
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400, message
    for part in parts:
        assert part in message


def is_sleeping(client: httpx.Client) -> bool:
    return client.get("/is_sleeping").json()["is_sleeping"]


def test_without_the_switch_there_are_no_such_routes(served: Any) -> None:
    for path in ("sleep", "wake_up", "update_weights"):
        assert served.client.post(f"../{path}", json={}).status_code == 404
    for path in ("is_sleeping", "weight_version"):
        assert served.client.get(f"../{path}").status_code == 404
    assert "/sleep" not in served.client.get("../openapi.json").json()["paths"]


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_sleeps_says_so(client: httpx.Client, level: int) -> None:
    before = text_of(client)
    assert not is_sleeping(client)
    assert client.post(f"/sleep?level={level}").json() == {"is_sleeping": True}
    answer = client.post("/v1/completions", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "sleeping")
    assert "the engine is asleep" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    assert [client.get(path).status_code for path in ("/health", "/ready")] == [200, 503]
    states = metric_values(client.get("/metrics").text)
    asleep = {key: value for key, value in states.items() if "sleep_state" in key}
    assert sorted(asleep.values()) == [0, 0, 1]
    name = "weights_offloaded" if level == 1 else "discard_all"
    assert [key for key, value in asleep.items() if value] == [key for key in asleep if name in key]
    assert client.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
    assert client.post("/v1/completions", json=BODY).status_code == 503
    assert client.post("/wake_up", params={"tags": ["kv_cache"]}).json() == {"is_sleeping": False}
    assert client.get("/ready").status_code == 200
    assert text_of(client) == before


def test_a_stream_goes_on_after_a_sleep(client: httpx.Client, steps: Any) -> None:
    steps.delay_s = 0.002
    body = {**BODY, "max_tokens": 200, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        text = json.loads(next(lines))["choices"][0]["text"]
        assert client.post("/sleep?level=1&mode=keep").status_code == 200
        threading.Timer(0.2, lambda: client.post("/wake_up")).start()
        events = list(lines)
    assert events[-1] == "[DONE]"
    assert text + "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_who_leaves_before_the_server_sleeps_calls_it_off(client: httpx.Client, steps: Any) -> None:
    steps.delay_s = 0.002
    body = {**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(client.base_url.join("/sleep"), timeout=0.05)
        assert list(lines)[-1] == "data: [DONE]"
    assert not is_sleeping(client)
    assert text_of(client)


def test_what_is_wrong_is_refused(client: httpx.Client) -> None:
    before = text_of(client)
    refused(
        client.post("/sleep?level=3&mode=now"),
        "`level` must be 1 or 2, got 3",
        "`mode` must be one of 'wait', 'abort', 'keep', got 'now'",
    )
    refused(client.post("/sleep?level=deep"), "`level` is invalid: ")
    refused(client.post("/sleep?levle=2"), "must be among ['level', 'mode'], got ['levle']")
    refused(client.post("/wake_up"), "must be called while the engine is asleep")
    assert client.get("/sleep").status_code == 405
    assert not is_sleeping(client)
    assert client.post("/sleep").status_code == 200
    refused(client.post("/sleep"), "must be called while the engine is awake")
    refused(
        client.post("/wake_up?tags=pool&tags=7"),
        "each of `tags` must be 'weights' or 'kv_cache', got 'pool'",
        "got '7'",
    )
    assert is_sleeping(client)
    assert client.post("/wake_up").status_code == 200
    assert text_of(client) == before


def test_pages_of_other_origins_are_refused(client: httpx.Client) -> None:
    for path in ("/sleep", "/wake_up"):
        answer = client.post(path, headers={"Origin": "https://example.org"})
        assert answer.status_code == 403
    assert not is_sleeping(client)
    headers = {"Origin": "https://chat.example.org"}
    assert client.post("/sleep", headers=headers).status_code == 200
    assert client.post("/wake_up", headers=headers).status_code == 200


def test_weights_of_a_folder(client: httpx.Client, served: Any, tmp_path: Path) -> None:
    before = text_of(client)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((PAGELET / name).read_text())
    tensors = load_file(PAGELET / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][::-1].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    body = {"model_path": str(tmp_path), "weight_version": "other"}
    answer = client.post("/update_weights", json=body)
    assert (answer.status_code, answer.json()) == (200, {"weight_version": "other"})
    assert client.get("/weight_version").json() == {"weight_version": "other"}
    assert 'jax_paged_weight_version_info{weight_version="other"} 1.0' in client.get("/metrics").text
    assert text_of(client) != before
    answer = client.post("/update_weights", json={"model_path": str(PAGELET)})
    assert answer.status_code == 200
    assert text_of(client) == before


def test_weights_that_can_not_be_served(
    client: httpx.Client, served: Any, steps: Any, checkpoint: Path, tmp_path: Path
) -> None:
    steps.delay_s = 0.005
    before, version = text_of(client), client.get("/weight_version").json()

    def update(**body: Any) -> httpx.Response:
        return client.post("/update_weights", json=body)

    refused(
        update(model_path="/no/such/folder", running="stop"),
        "a folder on this machine",
        "`running` must be one of 'error', 'recompute', 'keep', got 'stop'",
    )
    refused(update(model_path="meta-llama/Llama-3.2-1B"), "must be a folder on this machine")
    refused(update(), "`model_path` is missing")
    refused(update(model_path=7), "`model_path` is invalid: ")
    refused(update(model_path=str(tmp_path)), "config.json does not exist")
    refused(update(model_path=str(checkpoint)), "`vocab_size` must be 2048, got 384", "`hidden_size` must be")
    refused(update(model_path=str(PAGELET), weight_version=""), "`weight_version` must be")
    (tmp_path / "config.json").write_text((PAGELET / "config.json").read_text())
    tensors = load_file(PAGELET / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:5].copy()
    tensors["extra"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    parts = "model.norm.weight must have shape", "extra is unexpected", "embed_tokens.weight is missing"
    refused(update(model_path=str(tmp_path)), *parts)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    refused(update(model_path=str(tmp_path)), "is incomplete or not a safetensors file")
    with client.stream(
        "POST", "/v1/completions", json={**BODY, "max_tokens": 400, "ignore_eos": True, "stream": True}
    ) as answer:
        lines = answer.iter_lines()  # which ends the request where nobody holds it
        next(lines)
        refused(update(model_path=str(PAGELET)), "requests are running")
        refused(update(model_path=str(checkpoint), running="keep"), "`vocab_size` must be 2048, got 384")
    served.wait_until_idle()
    assert client.get("/weight_version").json() == version
    assert text_of(client) == before

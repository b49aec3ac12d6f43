"""Adapters over HTTP: requests name them as their model; they are loaded and unloaded while others run."""

import asyncio
import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from helpers.adapters import write_random
from helpers.listening import listening
from helpers.real_model import make_executor

from jax_paged import AsyncLLMEngine, EngineArgs, LoRARequest, SamplingParams
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.cli import parse_args
from jax_paged.server.launch.options import ServerOptions


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("adapters")
    return [write_random(base / str(i), checkpoint, 1 + i, i) for i in range(4)]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[AsyncLLMEngine]:
    args = EngineArgs(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=200,
        matmul_backend="xla",
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=3,
    )
    engine = AsyncLLMEngine(args, make_executor(args))
    yield engine
    engine.close()


@pytest.fixture
def client(engine: AsyncLLMEngine, folders: list[Path]) -> Iterator[httpx.Client]:
    modules = f"first={folders[0]}", json.dumps({"name": "second", "path": str(folders[1])})
    for number in engine.engine.list_loras():
        engine.engine.remove_lora(number)
    for number in range(1, 20):
        engine.engine.remove_lora(number)
    options = ServerOptions(port=0, lora_modules=modules, allow_runtime_lora_updating=True)
    server = OpenAIServer(engine, "base", options)
    with listening(server) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client


def names(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def complete(client: httpx.Client, model: str, prompt: str = "def f(") -> str:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_requests_name_an_adapter_as_their_model(client: httpx.Client) -> None:
    cards = client.get("/v1/models").json()["data"]
    assert [(card["id"], card.get("parent")) for card in cards] == [
        ("base", None),
        ("first", "base"),
        ("second", "base"),
    ]
    assert client.get("/v1/models/second").json() == cards[2]
    texts = [complete(client, name) for name in ("base", "first", "second")]
    assert len(set(texts)) == 3
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        again = list(pool.map(lambda i: complete(client, ("base", "first", "second")[i % 3]), range(12)))
    assert again == texts * 4
    answer = client.post("/v1/responses", json={"model": "first", "input": "def f("})
    assert answer.status_code in (200, 400)  # the tokenizer has no chat template
    assert client.post("/tokenize", json={"model": "second", "prompt": "a"}).status_code == 200


def test_adapters_are_loaded_and_unloaded_while_others_run(
    client: httpx.Client, engine: AsyncLLMEngine, folders: list[Path]
) -> None:
    runner = engine.engine.executor.runner  # pyright: ignore[reportAttributeAccessIssue]
    runner.compiled.wait()
    traces, wanted = runner.compiled.num_traces, [complete(client, name) for name in ("base", "first")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        traffic = [pool.submit(complete, client, ("base", "first")[i % 2]) for i in range(24)]
        texts = []
        for i in (2, 3, 2, 3):
            body = {"lora_name": "more", "lora_path": str(folders[i])}
            answer = client.post("/v1/load_lora_adapter", json=body)
            assert (answer.status_code, answer.text) == (
                200,
                "Success: LoRA adapter 'more' added successfully.",
            )
            texts.append(complete(client, "more"))
            answer = client.post("/v1/unload_lora_adapter", json={"lora_name": "more"})
            assert answer.text == "Success: LoRA adapter 'more' removed successfully."
        assert [future.result() for future in traffic] == wanted * 12
    assert texts[:2] == texts[2:]
    assert len({*texts, *wanted}) == 4
    assert runner.compiled.num_traces == traces
    assert names(client) == ["base", "first", "second"]


def test_what_can_not_be_loaded_is_refused_and_the_server_goes_on(
    client: httpx.Client, folders: list[Path], checkpoint: Path, tmp_path: Path
) -> None:
    wanted = complete(client, "first")
    large = str(write_random(tmp_path / "large", checkpoint, 17, 0))
    for path, body, status, part in (
        ("load", {"lora_name": "x", "lora_path": str(tmp_path / "gone")}, 400, "can't be read"),
        (
            "load",
            {"lora_name": "x", "lora_path": large},
            400,
            "must be at most 16 (max_lora_rank), got 17",
        ),
        ("load", {"lora_name": "first", "lora_path": str(folders[2])}, 400, "a name that is not in use"),
        ("load", {"lora_name": "base", "lora_path": str(folders[2])}, 400, "a name that is not in use"),
        ("load", {"lora_name": "x"}, 400, "`lora_path` is missing"),
        ("load", {"lora_name": "", "lora_path": "x"}, 400, "lora_name"),
        ("load", {"lora_name": 5, "lora_path": "x"}, 400, "`lora_name` is invalid: "),
        (
            "unload",
            {"lora_name": "x"},
            404,
            "`lora_name` must be a loaded adapter ('first', 'second'), got 'x'",
        ),
        ("unload", {}, 400, "`lora_name` is missing"),
    ):
        answer = client.post(f"/v1/{path}_lora_adapter", json=body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert part in error["message"]
        wrong_path = any(word in part for word in ("read", "rank", "lora_path"))
        assert error["param"] == ("lora_path" if wrong_path else "lora_name")
    for i, status in ((2, 200), (3, 400)):
        body = {"lora_name": f"adapter {i}", "lora_path": str(folders[i])}
        answer = client.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == status
    assert (
        "`max_cpu_loras` must be an integer of at least 4 to add another adapter, got 3"
        in answer.json()["error"]["message"]
    )
    for body in ({"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        answer = client.post(path, json={"model": "other", **body})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "must be one of 'base', 'first', 'second'" in answer.json()["error"]["message"]
    assert complete(client, "first") == wanted


def test_coroutines_name_an_adapter_too(engine: AsyncLLMEngine, folders: list[Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    adapter = LoRARequest("own", 50, str(folders[0]))

    async def text(request_id: str, lora_request: LoRARequest | None) -> str:
        outputs = [o async for o in engine.generate("def f(", params, request_id, lora_request)]
        return outputs[-1].outputs[0].text

    async def both() -> list[str]:
        return await asyncio.gather(text("0", None), text("1", adapter), text("2", adapter))

    base, one, other = asyncio.run(both())
    assert base != one == other


def test_loading_needs_an_option(engine: AsyncLLMEngine) -> None:
    server = OpenAIServer(engine, "base", ServerOptions(port=0))
    with listening(server) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/load_lora_adapter", json={})
        assert answer.status_code == 404


def test_the_command_line_takes_adapters_as_vllm_does() -> None:
    args = parse_args(
        ["serve", "m", "--enable-lora", "--lora-modules", "a=x", "b=y", "--lora-modules", "c=z"]
    )
    assert ServerOptions.from_cli_args(args).lora_modules == ("a=x", "b=y", "c=z")
    assert EngineArgs.from_cli_args(args).enable_lora


@pytest.mark.parametrize("text", ["x", "=x", "x=", "{", '{"name": "x"}', '{"name": 1, "path": "x"}'])
def test_adapters_of_the_command_line_that_are_none(engine: AsyncLLMEngine, text: str) -> None:
    with pytest.raises(ValueError, match="each of `lora_modules` must be name=path or"):
        OpenAIServer(engine, "base", ServerOptions(port=0, lora_modules=(text,)))

"""The application within another one: mounted in FastAPI or Starlette, and an engine without the server."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

import jax_paged
from jax_paged import AsyncLLMEngine
from jax_paged.engine.errors import EngineDeadError
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions

KEY = {"Authorization": "Bearer a-key"}


@pytest.fixture
def server(scripted: Callable[..., Any]) -> Iterator[OpenAIServer]:
    with contextlib.closing(AsyncLLMEngine(*scripted())) as engine:
        yield OpenAIServer(engine, "scripted", ServerOptions(api_key=("a-key",)))


def in_fastapi(app: ASGIApp, **settings: Any) -> ASGIApp:
    outer = FastAPI(**settings)
    outer.get("/own")(lambda: {"own": True})
    outer.mount("/llm", app)
    return outer


def in_starlette(app: ASGIApp) -> ASGIApp:
    return Starlette(routes=[Mount("/llm", app)])


def nested(app: ASGIApp) -> ASGIApp:
    return Starlette(routes=[Mount("/a", Starlette(routes=[Mount("/llm", app)]))])


async def ask(app: ASGIApp, method: str, path: str, root_path: str = "", **settings: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, root_path=root_path)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **settings)


@pytest.mark.parametrize(
    ("wrap", "root", "proxy"),
    [
        (in_fastapi, "/llm", ""),
        (in_starlette, "/llm", ""),
        (nested, "/a/llm", ""),
        (in_fastapi, "/llm", "/proxy"),  # the proxy removes its prefix
        (in_fastapi, "/proxy/llm", "/proxy"),  # and does not
    ],
)
def test_every_route_of_a_mounted_application(
    server: OpenAIServer, wrap: Callable[..., ASGIApp], root: str, proxy: str
) -> None:
    app = wrap(server.app())

    async def get(path: str, **settings: Any) -> httpx.Response:
        return await ask(app, "GET", path, root_path=proxy, **settings)

    async def answers() -> None:
        for path in ("/health", "/ready", "/"):
            assert (await get(root + path)).status_code == 200
        assert (await get(f"{root}/v1/models")).status_code == 401
        for path in ("/v1/models", "/v1/models/scripted", "/metrics", "/docs", "/ui/state", "/openapi.json"):
            answer = await get(root + path, headers=KEY)
            assert answer.status_code == 200, (path, answer.text)
        servers = (await get(f"{root}/openapi.json", headers=KEY)).json()["servers"]
        assert servers[0] == {"url": proxy + root.removeprefix(proxy)}
        body = {"prompt": "text?", "max_tokens": 9}
        answer = await ask(app, "POST", f"{root}/v1/completions", root_path=proxy, json=body, headers=KEY)
        assert answer.json()["choices"][0]["text"] == "text"
        metrics = await get(f"{root}/metrics", headers=KEY)
        assert 'route="/v1/completions",status="200"} 1' in metrics.text
        assert (await get(f"{root}/nothing", headers=KEY)).status_code == 404
        assert (await get("/elsewhere/v1/models", headers=KEY)).status_code == 404

    asyncio.run(answers())


def test_the_application_that_mounts_keeps_its_own_routes(server: OpenAIServer) -> None:
    app = in_fastapi(server.app())
    assert asyncio.run(ask(app, "GET", "/own")).json() == {"own": True}
    assert "/own" in asyncio.run(ask(app, "GET", "/openapi.json")).json()["paths"]


def test_a_mount_and_the_root_path_of_the_server_that_runs_it(server: OpenAIServer) -> None:
    """uvicorn --root-path puts the prefix in front of the path."""
    app = in_fastapi(server.app())
    assert asyncio.run(ask(app, "GET", "/proxy/llm/health", root_path="/proxy")).status_code == 200


def test_a_key_file_is_read_without_the_command_line(server: OpenAIServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("other-key\n")
    app = OpenAIServer(server.engine, "scripted", ServerOptions(api_key_file=str(file))).app()
    assert asyncio.run(ask(app, "GET", "/v1/models")).status_code == 401
    headers = {"Authorization": "Bearer other-key"}
    assert asyncio.run(ask(app, "GET", "/v1/models", headers=headers)).status_code == 200


@contextlib.contextmanager
def running(app: ASGIApp) -> Iterator[str]:
    """Runs an application with uvicorn's own settings; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    own = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=own.run, args=([listener],))
    thread.start()
    while not own.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        own.should_exit = True
        thread.join()


def test_lifespan_and_streams_of_a_mounted_application(server: OpenAIServer) -> None:
    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with server.lifespan():
            yield

    with running(in_fastapi(server.app(), lifespan=lifespan)) as url:
        assert httpx.get(f"{url}/llm", follow_redirects=True).url == f"{url}/llm/"  # relative links work
        body = {"prompt": "text?", "max_tokens": 9, "stream": True}
        events = httpx.post(f"{url}/llm/v1/completions", json=body, headers=KEY).text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "text"
        assert httpx.head(f"{url}/llm/health").status_code == 200
    assert server.lifecycle.is_draining


def test_lifespan_watches_the_engine(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    monkeypatch.setattr(server.lifecycle, "tick", ticks.append)

    async def run() -> None:
        async with server.lifespan():
            while len(ticks) < 2:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_mounted_application_says_that_its_engine_has_failed(server: OpenAIServer) -> None:
    app = in_fastapi(server.app())
    server.engine.fail(EngineDeadError("broken"))
    server.lifecycle.tick(time.monotonic())
    assert asyncio.run(ask(app, "GET", "/llm/ready")).status_code == 503
    assert asyncio.run(ask(app, "GET", "/own")).status_code == 200


def test_the_example_of_the_documentation(
    scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An application that mounts the server, and uses the engine in a route of its own."""
    section = Path("docs/server.md").read_text().partition("## Mount in another application")[2]
    monkeypatch.setattr(jax_paged, "AsyncLLMEngine", lambda _: AsyncLLMEngine(*scripted()))
    names: dict[str, Any] = {}
    exec(section.partition("```python\n")[2].partition("```")[0], names)
    with running(names["app"]) as url:
        assert httpx.get(f"{url}/complete", params={"prompt": "text?"}).text == "text"
        answer = httpx.post(f"{url}/llm/v1/completions", json={"prompt": "text?"}, headers=KEY)
        assert answer.json()["choices"][0]["text"] == "text"
    assert names["engine"].stopped_error is not None

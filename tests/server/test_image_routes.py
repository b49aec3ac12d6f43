"""Images over HTTP: in data URLs of chats; hostile ones are the client's fault, and hold nobody up."""

import base64
import io
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.listening import listening
from helpers.pictures import drawn
from helpers.real_model import make_executor
from PIL import Image

from jax_paged import AsyncLLMEngine, EngineArgs
from jax_paged.engine.features.multimodal import image_messages
from jax_paged.server import preprocessing
from jax_paged.server.app import OpenAIServer
from jax_paged.server.launch.options import ServerOptions

FOLDER = Path(__file__).parents[1] / "models" / "image_fixtures" / "smolvlm_tied"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    args = EngineArgs(
        model=str(FOLDER),
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=100,
        matmul_backend="xla",
        limit_mm_per_prompt={"image": 2},
    )
    engine = AsyncLLMEngine(args, make_executor(args))
    server = OpenAIServer(engine, "base", ServerOptions(port=0))
    with listening(server) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client
    engine.close()


def url_of(seed: int) -> str:
    out = io.BytesIO()
    Image.fromarray(drawn(50, 40, seed)).save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def ask(client: httpx.Client, *urls: Any, **body: Any) -> httpx.Response:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "Which?"}]}]
    given = {"messages": messages, "temperature": 0, "max_tokens": 8}
    return client.post("/v1/chat/completions", json=given | body)


def test_chat_with_images(client: httpx.Client) -> None:
    first, second = (ask(client, url_of(seed)) for seed in (1, 2))
    assert first.status_code == second.status_code == 200, first.text
    assert first.json()["choices"] != second.json()["choices"]
    assert first.json()["usage"]["prompt_tokens"] == second.json()["usage"]["prompt_tokens"] > 45
    with client.stream("POST", "/v1/chat/completions", json=_body(url_of(1)) | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert "data: [DONE]" in answer.read().decode()
    plain = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert plain.status_code == 200


def _body(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}


def bomb(width: int, height: int) -> str:
    """Returns a small file that claims to have many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    file = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (
            ["http://127.0.0.1:1/a.png"],
            "`image_url.url` must be a data:image/...;base64 URL because allowed_media_domains",
        ),
        (
            ["file:///etc/passwd"],
            "`image_url.url` must be a data:image/...;base64 URL because allowed_media_domains",
        ),
        (
            ["data:image/png;base64,AAAA"],
            "`image_url.url` must be the URL of an image in one of the formats PNG, JPEG, WEBP, GIF, BMP (",
        ),
        (
            ["data:image/png;base64,?"],
            "`image_url.url` must be base64 (Only base64 data is allowed), got 'data:image/png;base64,?'",
        ),
        ([url_of(1)[:-80]], "image"),
        ([url_of(1)] * 3, "the number of images in `messages` must be an integer in [0, 2], got 3"),
        ([5], "image_url"),
    ],
)
def test_bad_images(client: httpx.Client, urls: list[Any], message: str) -> None:
    answer = ask(client, *urls)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert len(answer.text) < 2000


@pytest.mark.parametrize("part", [{}, {"image": None}, {"image": [[[1, 2, 3]]]}, {"image_pil": "a"}])
def test_json_holds_no_image_of_pillow(client: httpx.Client, part: dict[str, Any]) -> None:
    kind = "image_pil" if "image_pil" in part else "image"
    messages = [{"role": "user", "content": [{"type": kind, **part}]}]
    answer = client.post("/v1/chat/completions", json={"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert '"image_url": {"url": "data:image/...;base64,..."}' in error["message"]
    assert "Pillow" not in error["message"]
    given = {"prompt": "<image>", "multi_modal_data": {"image": part.get("image", 5)}}
    answer = client.post("/v1/completions", json={"prompt": given})
    assert answer.status_code == 400
    assert "Pillow" not in answer.json()["error"]["message"]


@pytest.mark.parametrize("side", [6000, 10_000, 30_000])  # beyond our limit, and both of Pillow's
def test_a_bomb_is_not_decoded(client: httpx.Client, side: int) -> None:
    answer = ask(client, bomb(side, side))
    assert answer.status_code == 400, answer.text
    assert "pixels" in answer.json()["error"]["message"]


def test_a_jpeg_of_many_scans_is_not_decoded(client: httpx.Client) -> None:
    """Each of them is a few bytes, and a pass over all pixels."""
    out = io.BytesIO()
    Image.fromarray(drawn(50, 40, 1)).save(out, "JPEG", progressive=True)
    file = out.getvalue()
    first = file.rindex(b"\xff\xda")
    for num, status in ((1, 200), (200, 400)):
        many = file[:first] + file[first:-2] * num + file[-2:]
        answer = ask(client, f"data:image/jpeg;base64,{base64.b64encode(many).decode()}")
        assert answer.status_code == status, answer.text
    assert (
        "the number of scans of the JPEG in `image_url.url` must be an integer in [0, 100], got 209"
        in answer.json()["error"]["message"]
    )


def test_images_are_decoded_beside_the_event_loop(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    decode = image_messages.image_of_url

    def note(url: str, domains: tuple[str, ...]) -> Any:
        threads.append(threading.current_thread().name)
        return decode(url, domains)

    monkeypatch.setattr(image_messages, "image_of_url", note)
    assert client.post("/v1/chat/completions", json=_body(url_of(3))).status_code == 200
    assert [name.startswith("images") for name in threads] == [True]


def test_images_are_fetched_where_nobody_waits_for_them(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host may take seconds: neither long texts, whose lane is held up, nor images that are here wait."""
    has_asked, may_answer = threading.Event(), threading.Event()
    decode = image_messages.image_of_url

    def answer_late(url: str, domains: tuple[str, ...]) -> Any:
        if url.startswith("data:"):
            return decode(url, domains)
        has_asked.set()
        assert may_answer.wait(60)
        return decode(url_of(3), domains)

    monkeypatch.setattr(image_messages, "image_of_url", answer_late)
    monkeypatch.setattr(preprocessing, "_LONG_TEXT", 10)
    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(ask, client, "http://a.example.org/a.png") for _ in range(3)]
        assert has_asked.wait(60)
        try:
            assert ask(client, url_of(1)).status_code == 200
            assert not any(answer.done() for answer in slow)
        finally:
            may_answer.set()
        assert [answer.result().status_code for answer in slow] == [200] * 3

"""Images at URLs: from allowed hosts only, and no more of them than fits."""

import io
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from helpers.pictures import drawn
from PIL import Image

from jax_paged import EngineArgs
from jax_paged.engine.features.multimodal import image_fetch
from jax_paged.engine.features.multimodal.image_reader import image_of_url

HOST = "127.0.0.1"


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(drawn(20, 30, 1)).save(file, "PNG")
    return file.getvalue()


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, ThreadingHTTPServer)
        port = self.server.server_port
        moved = {"/near": "/a.png", "/far": f"http://localhost:{port}/a.png", "/disk": "file:///etc/passwd"}
        self.send_response(302 if self.path in moved else 404 if self.path == "/none" else 200)
        if self.path in moved:
            self.send_header("Location", moved[self.path])
        self.end_headers()
        if self.path == "/a.png":
            self.wfile.write(png())
        while self.path in ("/huge", "/slow"):
            try:
                self.wfile.write(bytes(2**20 if self.path == "/huge" else 1))
            except OSError:
                break
            time.sleep(0.05 * (self.path == "/slow"))

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer((HOST, 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["/a.png", "/near"])
def test_an_image_of_an_allowed_host(address: str, path: str) -> None:
    image = image_of_url(address + path, (HOST,))
    np.testing.assert_array_equal(np.asarray(image), drawn(20, 30, 1))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none", "404"),
        ("/far", "an http.* URL with one of allowed_media_domains.*got 'http://localhost"),
        ("/disk", "file:.*not allowed"),
        ("/text", "`image_url.url` must be the URL of an image in one of the formats PNG.*/text"),
        ("/huge", "the number of bytes at `image_url.url` must be at most 33554432, got "),
    ],
)
def test_what_is_not_taken(address: str, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_of_url(address + path, (HOST,))


def test_a_host_that_never_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_fetch, "TIMEOUT_S", 0.5)
    with pytest.raises(
        ValueError, match=r"a URL that can be fetched \(the download took more than 0.5 s\), got .*/slow"
    ):
        image_of_url(f"{address}/slow", (HOST,))


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost/a.png",
        "http://127.0.0.1.example.org/a.png",
        "http://user@127.0.0.1/a.png",
        "ftp://127.0.0.1/a.png",
        "file:///etc/passwd",
        "http://[/a.png",
        "http://127.0.0.1:a.example.org:80/a.png",
        "http://127.0.0.1:%40example.org:80/a.png",
        "http://127.0.0.1:99999/a.png",
        "a.png",
    ],
)
def test_other_hosts(url: str) -> None:
    with pytest.raises(ValueError, match=r"`image_url\.url` must be .*one of allowed_media_domains.*, got "):
        image_of_url(url, (HOST,))
    with pytest.raises(ValueError, match="because allowed_media_domains is empty, got "):
        image_of_url(url)


@pytest.mark.parametrize("given", ["a.org", [""], ["http://a.org"], ["a.org/b"], ["a.org:80"], [3]])
def test_bad_domains(given: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allowed_media_domains"):
        EngineArgs(model=str(tmp_path), allowed_media_domains=given)  # pyright: ignore[reportArgumentType]

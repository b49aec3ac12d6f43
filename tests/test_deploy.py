"""The files in deploy/ name options, files and routes that there are."""

import contextlib
import fnmatch
import http.server
import json
import os
import re
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from jax_paged.config.engine_args import EngineArgs
from jax_paged.server.launch.cli import main, parse_args
from jax_paged.server.launch.health import check_health, options_of_process
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.lifecycle import REQUESTS_ABORTED

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"


def command_lines():
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    yield "Dockerfile", [*json.loads(entry), *json.loads(command)]
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^    command: \[(.*)\]$", compose, re.MULTILINE)
    yield "compose.yaml", [*json.loads(entry), *listed.split(", ")]
    unit = (DEPLOY / "systemd" / "jax-paged.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    (arguments,) = re.findall(r'^Environment="JAX_PAGED_ARGS=(.*)"$', unit, re.MULTILINE)
    yield "jax-paged.service", shlex.split(start.replace("$JAX_PAGED_ARGS", arguments))


@pytest.mark.parametrize(("file", "words"), command_lines())
def test_command_lines_are_understood(file, words):
    program, *rest = words
    assert Path(program).name == "jax-paged"
    args = parse_args(rest)
    assert EngineArgs.from_cli_args(args).model == "pagelet"
    options = ServerOptions.from_cli_args(args)
    assert options.log_format == "json"
    assert options.port == 8000


def test_the_unit_waits_longer_than_the_server_drains():
    unit = (DEPLOY / "systemd" / "jax-paged.service").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(seconds) > ServerOptions().shutdown_timeout
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"^    stop_grace_period: (\d+)s", compose, re.MULTILINE)
    assert int(seconds) > ServerOptions().shutdown_timeout


def test_a_unit_that_cut_requests_off_when_it_stopped_has_not_failed():
    unit = (DEPLOY / "systemd" / "jax-paged.service").read_text(encoding="utf-8")
    assert re.findall(r"^SuccessExitStatus=(.*)$", unit, re.MULTILINE) == [str(REQUESTS_ABORTED)]


def test_files_that_compose_mounts_are_there():
    compose = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    mounted = re.findall(r"- (\./[^:]+):", compose)
    assert len(mounted) == 3
    for name in mounted:
        assert (DEPLOY / name).exists()
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "jax-paged.json").read_text(encoding="utf-8"))
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel lies over another
    assert max(x for x, _ in cells) < 24


# What the image is built from.


def is_sent(path: str) -> bool:
    """Returns whether Docker sends a file to the builder: by the last line of .dockerignore that fits."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern, includes = line.removeprefix("!").strip("/"), line.startswith("!")
        parts = path.split("/")
        # A pattern fits a file if it fits the file or a folder that holds it.
        if any(fits("/".join(parts[:n]), pattern) for n in range(1, len(parts) + 1)):
            sent = includes
    return sent


def fits(path: str, pattern: str) -> bool:
    if pattern.startswith("**/"):
        tails = path.split("/")
        return any(fits("/".join(tails[i:]), pattern[3:]) for i in range(len(tails)))
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_docker_gets_what_the_wheel_is_built_from_and_nothing_else():
    names = {"LICENSE", "MANIFEST.in", "README.md", "constraints.txt", "pyproject.toml", "setup.py"}
    folders = ("jax_paged", "models", "pallas_kernels")
    for path in tracked():
        assert is_sent(path) == (path in names or path.split("/")[0] in folders), path


def test_docker_gets_nothing_that_git_ignores():
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    for line in filter(None, lines):
        name = line.strip("/").replace("*", "x")
        is_anchored = "/" in line.rstrip("/")
        for folder in (
            ("",)
            if is_anchored
            else ("", "deploy/", "jax_paged/", "models/pagelet/", "pallas_kernels/native/")
        ):
            for path in (f"{folder}{name}", f"{folder}{name}/file"):
                assert not is_sent(path), path
    for path in (
        ".git/config",
        "deploy/api-key",
        "keys",
        "new-folder/file",
        "jax_paged/.env",
        "model.safetensors",
    ):
        assert not is_sent(path), path


def test_the_wheel_holds_all_files_of_the_packages():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["jax_paged"]
    folders = {(ROOT / package.replace(".", "/")).resolve(): package for package in settings["packages"]}
    for path in map(ROOT.joinpath, tracked()):
        package = next((folders[parent] for parent in path.parents if parent in folders), None)
        if package is None or path.is_symlink() or path.suffix in (".cc", ".h"):  # compiled
            continue
        name = path.relative_to((ROOT / package.replace(".", "/")).resolve()).as_posix()
        patterns = settings["package-data"].get(package, [])
        assert (path.suffix == ".py" and "/" not in name) or any(fits(name, p) for p in patterns), path
    assert (ROOT / "jax_paged" / "py.typed").read_text() == ""


# The health check.


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers /health with the status of the server."""

    def do_GET(self):
        self.send_response(self.server.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def a_server(host="127.0.0.1", context=None, status=200):
    """Runs a server; returns its port."""
    kind = type("Server", (http.server.ThreadingHTTPServer,), {})
    kind.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with kind((host, 0), Handler) as server:
        server.status = status
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    cert, key = (str(tmp_path_factory.mktemp("tls") / name) for name in ("cert", "key"))
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=other"
    subprocess.run([*line.split(), "-out", cert, "-keyout", key], check=True, capture_output=True)
    return cert, key


def test_the_image_asks_the_server_by_its_own_options():
    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^HEALTHCHECK .*\\\n    CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert json.loads(command) == ["jax-paged", "health", "--pid", "1"]


def health(*words):
    with pytest.raises(SystemExit) as end:
        main(["health", *words])
    return end.value.code


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_health_follows_host_and_port(listens_on, capsys):
    with a_server(listens_on) as port:
        assert health("--host", listens_on, "--port", str(port), "--root-path", "/llm") == 0
        assert capsys.readouterr().out == "healthy\n"
    assert "refused" in health("--host", listens_on, "--port", str(port))


def test_health_is_not_that_of_a_server_that_has_failed():
    with a_server(status=503) as port:
        assert "has responded with status 503" in health("--port", str(port))
    assert "`port` must be the port on which the server listens, got 0" in health("--port", "0")


@pytest.mark.parametrize("wants_certificates", [False, True])
def test_health_follows_tls(certificate, wants_certificates):
    cert, key = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    options = {"ssl_certfile": cert, "ssl_keyfile": key}
    if wants_certificates:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cert)
        options["ssl_ca_certs"] = cert
    with a_server(context=context) as port:
        check_health(ServerOptions(port=port, **options), 5)
        with pytest.raises(OSError, match=r"has not sent a valid HTTP response|reset"):
            check_health(ServerOptions(port=port), 5)


def test_health_reads_the_options_of_a_process(tmp_path):
    command = tmp_path / "jax-paged"
    command.write_text("import time; print(flush=True); time.sleep(60)")
    with a_server() as port:
        words = ["serve", "pagelet", "--host", "0.0.0.0", "--port", str(port), "--log-format", "json"]
        shell = ["/bin/sh", "-c", '"$@"; true', "--"]  # as an init process in front of it
        for prefix in ([], shell):
            arguments = [*prefix, sys.executable, str(command), *words]
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True)
            try:
                assert process.stdout is not None
                process.stdout.readline()
                assert list(options_of_process(process.pid)) == words
                assert health("--pid", str(process.pid)) == 0
            finally:
                os.killpg(process.pid, 9)
                process.wait()
    assert "jax-paged serve" in health("--pid", str(os.getppid()))
    assert "running process" in health("--pid", "99999999")

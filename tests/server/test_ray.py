"""Replicas of the server under Ray Serve: one is killed while it streams, the others go on."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from jax_paged import EngineArgs
from jax_paged.server.launch.options import ServerOptions

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'jax-paged[ray]'", allow_module_level=True)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NUM_STREAMS = 16
MODEL = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "16")


@dataclasses.dataclass
class Cluster:
    """A running `jax-paged serve --ray 2`."""

    process: subprocess.Popen[str]
    client: httpx.Client
    lines: list[str]

    def replicas(self) -> list[psutil.Process]:
        """Returns the processes of the replicas."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[0].startswith("ray::ServeReplica:jax-paged:Replica"):
                    found.append(process)
        return found

    def num_running(self) -> int:
        answer = self.client.get("/health")
        return answer.json()["replicas"]["running"] if answer.status_code == 200 else 0

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> float:
        """Returns after how many seconds a condition held."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout_s, "waited in vain"
            time.sleep(0.1)
        return time.monotonic() - start

    def stream(self, i: int, begun: queue.Queue[int] | None = None) -> tuple[list[str], str]:
        """Returns the tokens and the text of a stream; the first event of each is told."""
        messages = [{"role": "user", "content": f"What is a block table, and who has number {i}?"}]
        body = {"messages": messages, "temperature": 1.5, "seed": i, "max_tokens": 160, "ignore_eos": True}
        body |= {"logprobs": True, "frequency_penalty": 0.5, "stream": True}
        events = []
        with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in filter(None, answer.iter_lines()):
                if not events and begun is not None:
                    begun.put(i)
                events.append(line.removeprefix("data: "))
        assert events.pop() == "[DONE]", events[-1]
        chunks = [json.loads(event) for event in events]
        assert len({chunk["id"] for chunk in chunks}) == 1
        choices = [chunk["choices"][0] for chunk in chunks]
        tokens = [t["token"] for c in choices if c.get("logprobs") for t in c["logprobs"]["content"]]
        return tokens, "".join(choice["delta"].get("content", "") for choice in choices)


@contextlib.contextmanager
def started(*options: str) -> Iterator[Cluster]:
    """Starts a server, waits until it listens, and ends it."""
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, str(ROOT / "serve.py"), *MODEL, "--port", "0", *options]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
        )
        lines: list[str] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if "Serving the OpenAI API at" in line:
                    break
            else:
                pytest.fail("".join(lines))
            threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True).start()
            url = lines[-1].split(" at ")[1].split("/v1")[0]
            limits = httpx.Limits(max_connections=None)
            with httpx.Client(base_url=url, timeout=120, limits=limits) as client:
                yield Cluster(process, client, lines)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started("--ray", "2") as cluster:
        yield cluster


def test_a_replica_is_killed_under_streams(cluster: Cluster) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        undisturbed = list(pool.map(cluster.stream, range(NUM_STREAMS)))
        begun: queue.Queue[int] = queue.Queue()
        streams = [pool.submit(cluster.stream, i, begun) for i in range(NUM_STREAMS)]
        for _ in streams:
            begun.get(timeout=60)
        victim = cluster.replicas()[0]
        victim.kill()
        killed = time.monotonic()
        body = {"prompt": "def f(", "max_tokens": 1}
        assert cluster.client.post("/v1/completions", json=body).status_code == 200
        other_s = time.monotonic() - killed
        told_s = cluster.wait_until(lambda: cluster.num_running() == 1, 15)
        assert [stream.result() for stream in streams] == undisturbed
    cluster.wait_until(lambda: cluster.num_running() == 2, 30)
    again_s = time.monotonic() - killed
    num_moved = "".join(cluster.lines).count("a replica was lost")
    print(
        f"another answers after {other_s:.2f} s, /health tells {told_s:.2f} s later, two in {again_s:.1f} s"
    )
    print(f"{num_moved} streams were moved")
    assert num_moved, "the replica had streams"
    assert other_s < 2
    assert again_s < 30


def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    body = {"prompt": "def f(", "max_tokens": 480, "ignore_eos": True, "stream": True}
    with cluster.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())

    def num_aborted() -> float:
        lines = cluster.client.get("/metrics").text.splitlines()
        counts = [line for line in lines if line.startswith("vllm:request_success_total")]
        return sum(float(line.split()[-1]) for line in counts if 'finished_reason="abort"' in line)

    cluster.wait_until(lambda: num_aborted() == 1, 5)


def test_a_replica_that_is_stopped_loses_its_requests(cluster: Cluster) -> None:
    victim = cluster.replicas()[0]
    victim.suspend()
    try:
        start = time.monotonic()
        for i in range(6):  # some are at home there
            body = {"prompt": f"{i}: def f(", "max_tokens": 1}
            assert cluster.client.post("/v1/completions", json=body).status_code == 200
        assert "no replica accepted the request within 5 s" in "".join(cluster.lines)
        print(f"six requests, one after the other, took {time.monotonic() - start:.1f} s")
    finally:
        victim.resume()


def test_requests_wait_for_a_replica_where_none_is_left(cluster: Cluster) -> None:
    cluster.wait_until(lambda: cluster.num_running() == 2, 60)
    undisturbed = cluster.stream(3)
    with ThreadPoolExecutor(1) as pool:
        begun: queue.Queue[int] = queue.Queue()
        stream = pool.submit(cluster.stream, 3, begun)
        begun.get(timeout=60)
        start = time.monotonic()
        for replica in cluster.replicas():
            replica.kill()
        cluster.wait_until(lambda: cluster.client.get("/health").status_code == 503, 5)
        # Another may be there in time; else it has to be told.
        answer = cluster.client.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 1})
        assert answer.status_code == 200 or "no replica accepted the request" in answer.text
        print(f"{answer.status_code} after {time.monotonic() - start:.1f} s")
        try:
            assert stream.result() == undisturbed
        except AssertionError as error:
            assert "replicas were lost" in str(error)  # noqa: PT017
    cluster.wait_until(lambda: cluster.num_running() == 2, 60)


def test_an_answer_bears_one_id(cluster: Cluster) -> None:
    answer = cluster.client.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_nothing_is_left_running() -> None:
    with started("--ray", "1") as cluster:
        processes = psutil.Process(cluster.process.pid).children(recursive=True)
        assert processes
    assert cluster.process.returncode == 0
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "0"], "`ray` must be an integer of at least 1, got 0"),
        (
            ["--ray", "1", "--developer-routes"],
            "`developer_routes` must be False with Ray because .* got True",
        ),
        (["--ray", "999"], "`ray` must be at most .*, got 999"),
        (
            ["--ray", "1", "--host", "0.0.0.0"],
            "`host` must be .*got '0.0.0.0', which others can reach",
        ),
    ],
)
def test_bad_options_end_it_with_one_line(options: list[str], message: str) -> None:
    command = [sys.executable, str(ROOT / "serve.py"), "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert re.search(f"jax-paged: {message}", done.stderr)


def test_a_port_that_is_taken_ends_it_before_ray_starts(cluster: Cluster) -> None:
    port = str(cluster.client.base_url.port)
    command = [sys.executable, str(ROOT / "serve.py"), "--ray", "1", "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False)
    assert (done.returncode, "Ray" in done.stderr) == (1, False)
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in done.stderr


def test_build_checks_its_arguments() -> None:
    from jax_paged.ray_serve import build

    bad: list[tuple[dict[str, Any], str]] = [
        (
            {"modle": "pagelet"},
            "each name in `args` must be a field of EngineArgs or ServerOptions, got 'modle'",
        ),
        ({"port": -1}, "`port` must be an integer in .*got -1"),
        ({"model": "pagelet"}, "`api_key_file` must be a file of API keys unless .*, got None"),
        (
            {"allow_runtime_lora_updating": True, "allow_unauthenticated": True},
            "`allow_runtime_lora_updating` must be False with Ray",
        ),
    ]
    for args, message in bad:
        with pytest.raises(ValueError, match=message):
            build(args)
    assert build({"model": "pagelet", "api_key": ["secret"], "allowed_origins": ["*"]}) is not None


def test_the_config_of_the_documentation_is_one_of_serves() -> None:
    import yaml
    from ray.serve.schema import ServeDeploySchema

    text = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")
    config = ServeDeploySchema(**yaml.safe_load(text.split("```yaml")[1].split("```")[0]))
    (application,) = config.applications
    assert {deployment.name for deployment in application.deployments} == {"Replica", "Ingress"}
    known = {field.name for kind in (EngineArgs, ServerOptions) for field in dataclasses.fields(kind)}
    assert application.args.keys() <= known

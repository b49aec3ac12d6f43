"""An engine whose workers are actors of Ray: it draws what one process draws, and leaves nothing behind."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.real_model import drain, greedy_requests, mixed_requests, run, tokens_of
from helpers.waiting import wait_until

from jax_paged import EngineArgs, LLMEngine, SamplingParams
from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.executors import make_executor

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: pip install 'jax-paged[ray]'", allow_module_level=True)

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TINY = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40}
SIZES = {"max_model_len": 400, "max_num_seqs": 16, "max_num_batched_tokens": 128}
LONG = SamplingParams(max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of this machine's, with three cores and no GPU."""
    import ray

    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="r") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("RAY_TMPDIR", folder)
        memory: dict[str, Any] = {"object_store_memory": 100 * 2**20}
        ray.init("local", num_cpus=3, num_gpus=0, include_dashboard=False, log_to_driver=False, **memory)
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    import ray

    wait_until(lambda: not actors(), "all actors have ended")
    wait_until(lambda: ray.available_resources().get("CPU") == 3, "the cores are free")
    states = [group["state"] for group in ray.util.placement_group_table().values()]
    assert set(states) <= {"REMOVED"}


def on_ray(folder: Path, **settings: Any) -> EngineArgs:
    how = {"skip_tokenizer_init": True, "swap_space": 0.01, "max_compile_s": 0, "tensor_parallel_size": 2}
    return EngineArgs(str(folder), **how | {"distributed_executor_backend": "ray"} | settings)


def actors() -> list[psutil.Process]:
    """Returns the processes that are workers, in the order in which they were started."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name().startswith("ray::WorkerActo"):
                found.append(child)
    return found


def test_two_actors_draw_what_one_process_does(checkpoint: Path) -> None:
    requests = greedy_requests(1, 6) + mixed_requests(2, 6, 60, 30)
    sizes = SIZES | {"num_gpu_blocks_override": 2000, "block_size": 4}
    found = []
    for backend in ("ray", "uni"):
        with LLMEngine(on_ray(checkpoint, **sizes, distributed_executor_backend=backend)) as engine:
            found.append(tokens_of(run(engine, requests)))
    assert found[0] == found[1]


@pytest.mark.parametrize("place", [0, 1])
def test_an_actor_that_is_killed(checkpoint: Path, place: int) -> None:
    assert break_while_running(checkpoint, place, signal.SIGKILL, 300) < 2


def test_an_actor_that_stalls(checkpoint: Path) -> None:
    assert 5 <= break_while_running(checkpoint, 1, signal.SIGSTOP, 5) < 7


def break_while_running(folder: Path, place: int, how: signal.Signals, limit_s: float) -> float:
    """Hits an actor amid a request; returns the seconds until the error.

    Args:
        limit_s: Seconds that a step may take from then on.
    """
    args = on_ray(folder, **TINY)
    executor: Any = make_executor(args)
    with LLMEngine(args, executor) as engine:
        engine.add_request("a", {"prompt_token_ids": [1, 2]}, LONG)
        for _ in range(5):
            engine.step()
        executor._limit_s = limit_s
        os.kill(actors()[place].pid, how)
        start = time.monotonic()
        with pytest.raises(
            EngineDeadError, match=r"worker \d has (ended|failed)|the workers have not responded"
        ):
            drain(engine)
        return time.monotonic() - start


def test_an_actor_that_ray_ends_while_nothing_runs(checkpoint: Path) -> None:
    import ray

    executor: Any = make_executor(on_ray(checkpoint, **TINY))
    noted = threading.Event()
    executor.on_failure(lambda reason: noted.set())
    ray.kill(executor._team.workers[1].actor)
    assert noted.wait(30)
    with pytest.raises(EngineDeadError, match="worker 1 has ended"):
        executor.compile_plan()
    executor.close()


def test_bad_input(checkpoint: Path, tmp_path: Path) -> None:
    bad: list[tuple[Path, dict[str, Any], str]] = [
        (
            checkpoint,
            {"tensor_parallel_size": 9},
            "`tensor_parallel_size` must be at most 3, the number of CPUs in the Ray cluster, got 9",
        ),
        (checkpoint, {"tensor_parallel_size": 3}, "`tensor_parallel_size` must be a divisor.*got 3"),
        (checkpoint, {"max_model_len": 4000}, "`max_model_len` must be "),
        (tmp_path, {}, r"config\.json"),
    ]
    for folder, settings, message in bad:
        with pytest.raises(ValueError, match=message):
            LLMEngine(on_ray(folder, **TINY | settings))


def test_a_cluster_that_is_full(checkpoint: Path) -> None:
    import ray

    others = ray.util.placement_group([{"CPU": 2}])
    assert others.wait(30)
    with pytest.raises(
        ValueError,
        match=r"`tensor_parallel_size` must be at most the number of devices that are free in the Ray.*got 2",
    ):
        make_executor(on_ray(checkpoint, **TINY, distributed_timeout_seconds=0.5))
    ray.util.remove_placement_group(others)


def test_every_host_gives_as_many_gpus() -> None:
    from jax_paged.engine.distributed.ray_executor import _bundles

    def of(size: int, *counts: int) -> list[float]:
        nodes = [{"Alive": True, "Resources": {"CPU": 8, "GPU": n} if n else {"CPU": 8}} for n in counts]
        gone = {"Alive": False, "Resources": {"GPU": 8}}
        return [bundle["GPU"] for bundle in _bundles(size, [gone, *nodes])]

    assert of(8, 0, 8) == [8]
    assert of(16, 8, 8, 0) == [8, 8]
    assert of(8, 4, 6) == [4, 4]
    assert of(4, 3, 1) == [1, 1, 1, 1]
    assert of(6, 3, 8) == [6]
    with pytest.raises(
        ValueError, match=r"`tensor_parallel_size` must be at most 12, the number of GPUs of.*got 16"
    ):
        of(16, 8, 4)


def test_an_actor_works_for_nobody_who_does_not_know_the_secret() -> None:
    from jax_paged.engine.distributed.ray_executor import _accepted

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        for said in (b"", b"short", b"GET / HTTP/1.1\r\n\r\n", "gehéimnis".encode()):
            with socket.create_connection(listener.getsockname()) as foreigner:
                foreigner.sendall(said)
                foreigner.shutdown(socket.SHUT_WR)
                assert _accepted(listener, "the secret") is None
        accepting = pool.submit(_accepted, listener, "the secret")
        with socket.create_connection(listener.getsockname()) as ours:
            ours.sendall(b"the ")
            ours.sendall(b"secret")
            connection = accepting.result(30)
            assert connection is not None
            connection.close()


SCRIPT = """
import sys
from jax_paged import LLM, SamplingParams
sizes = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, num_gpu_blocks_override=40)
how = dict(skip_tokenizer_init=True, max_compile_s=0, distributed_executor_backend="ray")
llm = LLM(sys.argv[1], **how, **sizes)
assert "jax" not in sys.modules
print(len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)))
"""


def test_a_script_that_neither_starts_ray_nor_ends_anything(checkpoint: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(checkpoint)]
    environment = os.environ | {"RAY_ADDRESS": "local"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "Traceback" not in done.stderr

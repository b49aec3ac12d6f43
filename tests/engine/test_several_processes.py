"""An engine whose devices are in several processes: it draws what one draws, and ends when one is lost."""

import contextlib
import dataclasses
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.ports import reserved_port
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    Request,
    drain,
    greedy_requests,
    mixed_requests,
    reschedule,
    reset,
    run,
    tokens_of,
)
from helpers.waiting import wait_until

from jax_paged import AsyncLLMEngine, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.config.launch import Launch
from jax_paged.engine.distributed.multiprocess import MultiprocessExecutor
from jax_paged.engine.distributed.worker_team import WorkerTeam, send_task
from jax_paged.engine.errors import EngineDeadError
from jax_paged.outputs import RequestOutput
from jax_paged.worker.distributed import channel
from jax_paged.worker.distributed.channel import Channel

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
SIZES = {"block_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 2000}
TINY = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40}


def two_processes(folder: Path, **settings: Any) -> EngineArgs:
    backend = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"} | settings
    how = {"skip_tokenizer_init": True, "swap_space": 0.01, "max_compile_s": 0}
    return EngineArgs(model=str(folder), max_logprobs=20, **how, **backend)


@pytest.fixture(scope="module")
def session_pair(checkpoint: Path) -> Iterator[LLMEngine]:
    with LLMEngine(two_processes(checkpoint, max_model_len=400, **SIZES)) as engine:
        yield engine


@pytest.fixture(scope="module")
def session_single(checkpoint: Path) -> Iterator[LLMEngine]:
    args = two_processes(checkpoint, max_model_len=400, **SIZES, distributed_executor_backend="uni")
    with LLMEngine(args) as engine:
        yield engine


@pytest.fixture
def single(session_single: LLMEngine) -> LLMEngine:
    """An engine whose two devices are this process's."""
    return reset(session_single)


@pytest.fixture
def pair(session_pair: LLMEngine) -> LLMEngine:
    """An engine of two processes, idle and with nothing cached."""
    return reset(session_pair)


def all_tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in output.outputs] for output in outputs]


@pytest.mark.quick
def test_two_processes_draw_what_one_does(pair: LLMEngine, single: LLMEngine) -> None:
    requests = greedy_requests(1, 12) + mixed_requests(2, 12, 60, 30)
    ours, theirs = run(pair, requests), run(single, requests)
    assert tokens_of(ours) == tokens_of(theirs)
    for a, b in zip(ours, theirs, strict=True):
        logprobs = [o.outputs[0].cumulative_logprob for o in (a, b)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=TOLERANCE * 30)


def test_samples_and_beams(pair: LLMEngine, single: LLMEngine) -> None:
    prompts = [request.prompt for request in greedy_requests(3, 4)]
    samples = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=30)
    requests = [Request(prompts[0], samples), Request(prompts[1], samples)]
    requests += [Request(p, SamplingParams(), BeamSearchParams(3, max_tokens=20)) for p in prompts[2:]]
    assert all_tokens(run(pair, requests)) == all_tokens(run(single, requests))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption(pair: LLMEngine, single: LLMEngine, mode: str) -> None:
    prompt = np.random.default_rng(4).integers(0, VOCAB_SIZE, (6, 40)).tolist()
    params = SamplingParams(n=2, temperature=0.7, seed=3, max_tokens=60, ignore_eos=True)
    requests = [Request(p, params) for p in prompt]
    expected = all_tokens(run(single, requests))
    reschedule(pair, num_blocks=100, preemption_mode=mode)
    outputs = run(pair, requests)
    assert all_tokens(outputs) == expected
    assert any(output.metrics.num_preemptions for output in outputs if output.metrics)


@pytest.mark.quick
def test_cached_prefixes(pair: LLMEngine, single: LLMEngine) -> None:
    requests = greedy_requests(5, 6)
    expected = tokens_of(run(single, requests))
    assert tokens_of(run(pair, requests)) == expected
    again = run(pair, requests)
    assert tokens_of(again) == expected
    assert any(output.num_cached_tokens for output in again)


def test_recorded_and_computed_again(pair: LLMEngine) -> None:
    lines: list[str] = []
    pair.record(lines.append)
    run(pair, greedy_requests(6, 6) + mixed_requests(7, 4, 40, 20))
    pair.record(None)
    assert pair.replay(lines).max_logprob_difference == 0


def test_what_needs_all_of_the_pool_is_refused(pair: LLMEngine) -> None:
    pair.add_request("a", {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=8, ignore_eos=True))
    pair.step()
    refused = [
        pair.state,
        lambda: pair.kv("a", 0),
        lambda: pair.inspect("a"),
        lambda: pair.update_weights({}, running="recompute"),
        lambda: pair.sleep(mode="abort"),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"`distributed_executor_backend` must be 'uni' to .*got 'mp'"):
            call()
    params = SamplingParams(logits_processors=[lambda tokens, logits: logits])
    with pytest.raises(ValueError, match=r"`logits_processors` must be None with .*'mp'"):
        pair.check_request({"prompt_token_ids": [1]}, params)
    assert len(run(pair, greedy_requests(8, 2))) == 2


def test_the_plan_and_the_progress(pair: LLMEngine) -> None:
    pair.executor.wait_until_compiled()
    done, planned = pair.executor.compile_progress
    assert 0 < done == planned
    assert "decode 16" in pair.compile_plan()
    assert {record.state for record in pair.compile_report()} == {"compiled", "skipped"}


EXTERNAL = """
import sys
from jax_paged import EngineArgs, LLMEngine, SamplingParams
args = EngineArgs(
    model=sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2, max_model_len=64, max_num_seqs=2,
    max_num_batched_tokens=16, num_gpu_blocks_override=40, max_compile_s=0, seed=int(sys.argv[2]),
    distributed_executor_backend="external_launcher",
)
with LLMEngine(args) as engine:
    assert "jax" not in sys.modules
    engine.add_request("0", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=20))
    print("runs", flush=True)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    print(outputs[-1].outputs[0].token_ids)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def launched(folder: Path, rank: int, port: int, *, seed: int = 0) -> "subprocess.Popen[str]":
    numbers = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    where = {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}
    command = [sys.executable, "-c", EXTERNAL, str(folder), str(seed)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | where, **pipes)


def test_processes_of_a_launcher(checkpoint: Path, single: LLMEngine, port: int) -> None:
    processes = [launched(checkpoint, rank, port) for rank in (1, 0)]
    (followed, why), (printed, problem) = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], why + problem
    assert "fatal" not in why, "the followers end first"
    params = SamplingParams(temperature=0, max_tokens=20)
    assert printed.splitlines()[1:] == [str(tokens_of(run(single, [Request([5, 6, 7], params)]))[0])]
    assert followed == ""


def test_processes_with_other_arguments(checkpoint: Path, port: int) -> None:
    processes = [launched(checkpoint, rank, port, seed=rank) for rank in (0, 1)]
    for process in processes:
        _, problem = process.communicate(timeout=300)
        assert "ValueError: `seed` of worker 1 must be 0, as in worker 0, got 1" in problem
        assert process.returncode == 1


def test_what_a_worker_can_not_serve_is_an_error_here(checkpoint: Path, tmp_path: Path) -> None:
    others = set(workers())  # of the pair
    with pytest.raises(ValueError, match=r"`max_model_len` must be .*got 4000"):
        LLMEngine(two_processes(checkpoint, **TINY | {"max_model_len": 4000}))
    with pytest.raises(ValueError, match=r"`tensor_parallel_size` must be a divisor.*got 3"):
        LLMEngine(two_processes(checkpoint, **TINY, tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"config\.json"):
        LLMEngine(two_processes(tmp_path, **TINY))
    wait_until(lambda: set(workers()) <= others, "the workers have ended")


def test_without_ray_its_executor_is_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"`distributed_executor_backend` must be .*got 'ray'. Run pip install 'jax-paged\[ray\]'"
    with pytest.raises(ValueError, match=message):
        LLMEngine(two_processes(checkpoint, **TINY, distributed_executor_backend="ray"))


def workers() -> list[psutil.Process]:
    """Returns the processes that this one has started and that run workers."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "worker.process" in " ".join(child.cmdline()):
                found.append(child)
    return found


def break_while_running(folder: Path, rank: int, how: signal.Signals, limit_s: float = 300) -> float:
    """Hits a worker amid a request; returns the seconds until the error, when no worker is left.

    Args:
        limit_s: Seconds that a step may take from then on.
    """
    args = two_processes(folder, **TINY)
    executor = MultiprocessExecutor(args)
    with LLMEngine(args, executor) as engine:
        engine.add_request("a", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(5):
            engine.step()
        executor._limit_s = limit_s
        processes: list[Any] = [worker._process for worker in executor._team.workers]  # pyright: ignore
        os.kill(processes[rank].pid, how)
        start = time.monotonic()
        with pytest.raises(
            EngineDeadError, match=r"worker \d has (ended|failed)|the workers have not responded"
        ):
            drain(engine)
        seconds = time.monotonic() - start
    assert not any(process.poll() is None for process in processes)
    return seconds


@pytest.mark.thorough
@pytest.mark.quick
def test_a_follower_that_is_killed(checkpoint: Path) -> None:
    break_while_running(checkpoint, 1, signal.SIGKILL)


@pytest.mark.slow
def test_a_follower_that_stalls(checkpoint: Path) -> None:
    assert break_while_running(checkpoint, 1, signal.SIGSTOP, 1) >= 1


def test_an_engine_that_is_killed_while_it_starts(checkpoint: Path, port: int) -> None:
    engine = launched(checkpoint, 0, port)
    wait_until(lambda: bool(psutil.Process(engine.pid).children()), "there is a worker")
    workers = psutil.Process(engine.pid).children()
    engine.kill()
    engine.communicate()
    assert psutil.wait_procs(workers, timeout=120)[1] == []


@pytest.mark.slow
def test_an_engine_that_is_killed_while_it_runs(checkpoint: Path, port: int) -> None:
    follower, engine = (launched(checkpoint, rank, port) for rank in (1, 0))
    assert engine.stdout is not None
    assert engine.stdout.readline() == "runs\n"
    workers = [child for process in (engine, follower) for child in psutil.Process(process.pid).children()]
    assert len(workers) == 2
    engine.kill()
    engine.communicate()
    follower.communicate(timeout=300)
    assert psutil.wait_procs(workers, timeout=120)[1] == []


@dataclasses.dataclass
class SilentWorker:
    """A worker that takes its task and then does nothing. It is a StartedWorker."""

    channel: Channel
    ended: bool = False

    def stop(self) -> None:
        self.ended = True

    def close(self, *, until: float) -> None:
        self.ended = True


def test_a_worker_that_stalls_before_it_is_ready(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MIN_SILENCE_S", 0.1)
    monkeypatch.setattr(channel, "_HEARTBEAT_INTERVAL_S", 0)
    ours, _theirs = socket.socketpair()
    worker = SilentWorker(Channel(ours))

    def start(executor: MultiprocessExecutor, args: EngineArgs) -> list[SilentWorker]:
        send_task(worker.channel, args, Launch(0, 2, "127.0.0.1", 0, local_rank=0), None)
        return [worker]

    monkeypatch.setattr(MultiprocessExecutor, "_start", start)
    with pytest.raises(
        EngineDeadError, match="worker 0 does not respond, or its host is unreachable: no message within"
    ):
        MultiprocessExecutor(two_processes(checkpoint, distributed_timeout_seconds=0.1, **TINY))
    assert worker.ended


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_stopped_while_it_starts(checkpoint: Path, rank: int) -> None:
    args = two_processes(checkpoint, distributed_timeout_seconds=60, **TINY)
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(MultiprocessExecutor, args)
        wait_until(lambda: len(workers()) == 2, "both workers are started")
        time.sleep(8)  # they import JAX, meet, and begin to compile
        processes = sorted(workers(), key=lambda process: process.create_time())
        processes[rank].send_signal(signal.SIGSTOP)
        with pytest.raises((EngineDeadError, ValueError)):
            starting.result(timeout=300)
    assert workers() == []


def test_a_worker_that_is_lost_before_anybody_asks() -> None:
    team, noted = WorkerTeam(1), list[str]()
    team.fail("worker 1 has ended")
    team.on_failure(0, noted.append)
    assert noted == ["worker 1 has ended"]


def test_a_worker_that_is_lost_while_nothing_runs(scripted: Any) -> None:
    noted: list[Callable[[str], None]] = []
    args, executor = scripted()
    executor.on_failure = noted.append
    engine = AsyncLLMEngine(args, executor)
    try:
        assert engine.stopped_error is None
        noted[0]("worker 1 has ended")
        assert str(engine.stopped_error) == "worker 1 has ended"
    finally:
        engine.close()


@pytest.mark.slow
def test_a_server_whose_follower_is_killed(checkpoint: Path, port: int) -> None:
    settings = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in TINY.items())
    options = f"--port {port} --stay-on-engine-failure --tensor-parallel-size 2 {settings}"
    options += " --distributed-executor-backend mp"
    command = [
        sys.executable,
        "serve.py",
        "--model",
        str(checkpoint),
        "--max-compile-s",
        "0",
        *options.split(),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as server:
        try:
            assert health(port, 120) == 200
            *_, follower = psutil.Process(server.pid).children()
            follower.kill()
            assert wait_until(lambda: health(port, 1) == 503, "the server tells") < 2
            assert wait_until(lambda: not psutil.Process(server.pid).children(), "no worker is left") < 2
        finally:
            server.terminate()


def health(port: int, limit_s: float) -> int:
    """Returns the status of /health, once the server listens."""
    until = time.monotonic() + limit_s
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


@pytest.mark.slow
def test_faults_again_and_again(checkpoint: Path) -> None:
    for i in range(20):
        rank = 0 if i % 4 == 3 else 1
        assert break_while_running(checkpoint, rank, signal.SIGKILL) < 2
        assert 5 <= break_while_running(checkpoint, rank, signal.SIGSTOP, 5) < 7

"""Stages of a model in processes of their own give the tokens of one process, and end together."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from helpers.ports import reserved_port
from helpers.real_model import assert_no_block_lost, drain
from helpers.waiting import wait_until
from test_data_parallel import KINDS, facts
from test_pipeline_parallel import LIMITS, make_checkpoint, vocab_size_of
from test_tensor_parallel import requests

from jax_paged import LLM, BeamSearchParams, EngineArgs, SamplingParams
from jax_paged.engine.errors import EngineDeadError
from jax_paged.models.loading.stored_tensors import StoredTensor
from jax_paged.models.weights import load_model
from jax_paged.worker.distributed.process_group import OneProcess
from jax_paged.worker.loading.caller_parts import CustomComponents
from jax_paged.worker.pipeline.stage_links import StageLinks
from jax_paged.worker.served_model import ServedModel

pytestmark = pytest.mark.thorough

slow = pytest.mark.slow


def staged(folder: Path, stages: int, backend: str = "mp", **settings: Any) -> LLM:
    sizes: dict[str, Any] = {"pipeline_parallel_size": stages, "num_gpu_blocks_override": 200 * stages}
    where: dict[str, Any] = {"distributed_executor_backend": backend, "max_compile_s": 0}
    return LLM(str(folder), **LIMITS | sizes | where | settings)


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Iterator[LLM]:
    with staged(checkpoint, 1, "uni", seed=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[LLM]:
    with staged(checkpoint, 2, seed=3) as llm:
        yield llm
        for engine in llm._replicas:
            assert_no_block_lost(engine)


@pytest.mark.thorough
@pytest.mark.quick
def test_two_processes_draw_what_one_does(one: LLM, two: LLM) -> None:
    """Seeds, several samples, prompts in chunks and their log-probabilities; then from the prefix cache."""
    prompts = [[i + j for j in range(5 + 3 * i % 40)] for i in range(2 * len(KINDS))]
    params = [KINDS[i % len(KINDS)] for i in range(len(prompts))]
    found: list[Any] = []
    for _ in range(2):
        expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in (one, two))
        assert facts(found) == facts(expected)
        for x, y in zip(found, expected, strict=True):
            assert x.outputs[0].cumulative_logprob == pytest.approx(y.outputs[0].cumulative_logprob, abs=1e-3)
            for a, b in zip(x.prompt_logprobs or [], y.prompt_logprobs or [], strict=True):
                assert list(a or {}) == list(b or {})
    assert any(o.num_cached_tokens for o in found)
    assert [e.config.num_blocks for e in two._replicas] == [200, 200]


@pytest.mark.quick
def test_what_needs_one_process_is_refused(two: LLM) -> None:
    engine = two._replicas[1]
    for call in (engine.state, engine.sleep, lambda: engine.update_weights({})):
        with pytest.raises(ValueError, match=r"`pipeline_parallel_size` must be 1 |must be 'uni' to "):
            call()
    assert "decode 8" in engine.compile_plan()


def outputs_of(folder: Path, stages: int, backend: str, num_blocks: int, **settings: Any) -> list[Any]:
    """Tokens and cumulative log-probability of every output; no engine's pool is large enough."""
    given = requests(vocab_size_of(folder))
    plain, beams = [r for r in given if r.beams is None], [r for r in given if r.beams]
    settings = {"preemption_mode": "swap", "skip_tokenizer_init": True} | settings
    with staged(folder, stages, backend, num_gpu_blocks_override=stages * num_blocks, **settings) as llm:
        outputs = llm.generate([r.prompt for r in plain], [r.params for r in plain], use_tqdm=False)
        num_preempted = sum(o.metrics.num_preemptions for o in outputs if o.metrics)
        assert num_preempted or stages > 2
        params = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
        found = llm.beam_search([r.prompt for r in beams], params, use_tqdm=False)[0].sequences
        for engine in llm._replicas:
            assert_no_block_lost(engine)
    return [
        [(s.token_ids, s.cumulative_logprob) for o in outputs for s in o.outputs],
        [s.tokens for s in found],
    ]


@slow
@pytest.mark.parametrize(
    ("name", "stages", "settings"),
    [
        ("gqa2_tied", 2, {}),
        ("gqa2_tied", 4, {}),
        ("gemma2", 2, {"preemption_mode": "recompute"}),
        ("mistral_window", 3, {}),
        ("gqa2_tied", 2, {"async_scheduling": False, "kv_cache_dtype": "int8"}),
        ("gqa2_tied", 2, {"batch_invariant": True, "attention_backend": "native", "matmul_backend": "auto"}),
    ],
)
def test_every_kind_of_request(tmp_path: Path, name: str, stages: int, settings: dict[str, Any]) -> None:
    """With preemption, several samples, beams, and a pool that is too small."""
    folder = make_checkpoint(tmp_path, name)
    found, beams = outputs_of(folder, stages, "mp", 28, **settings)
    wanted, wanted_beams = outputs_of(folder, 1, "uni", 28, **settings)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert beams == wanted_beams
    np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], atol=1e-3)


@slow
def test_several_devices_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "gqa2_tied")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    found = outputs_of(folder, 2, "mp", 28, tensor_parallel_size=2)
    wanted = outputs_of(folder, 2, "uni", 28, tensor_parallel_size=2)
    assert [[x[0] for x in found[0]], found[1]] == [[x[0] for x in wanted[0]], wanted[1]]


@slow
@pytest.mark.parametrize("kind", ["MEAN", "LAST", "CLS"])
def test_pooling(checkpoint: Path, kind: str) -> None:
    found = []
    for stages, backend in ((1, "uni"), (2, "mp")):
        how: dict[str, Any] = {"runner": "pooling", "pooler_config": {"pooling_type": kind}}
        with staged(checkpoint, stages, backend, **how) as llm:
            outputs = llm.encode(["a text", "another one", "and a third"], use_tqdm=False)
            found.append([np.asarray(output.outputs.data) for output in outputs])
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


class InStage(OneProcess):
    """A process of several that has a stage, without the others."""

    def __init__(self, stage: int) -> None:
        self.links = StageLinks(stage, 2, lambda *_: None, lambda _: None)


def test_each_process_has_the_weights_of_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "gqa2_tied")
    args = EngineArgs(str(folder), **LIMITS, pipeline_parallel_size=2, distributed_executor_backend="mp")
    read, read_one = list[int](), StoredTensor.read

    def counted(tensor: StoredTensor) -> np.ndarray:
        array = read_one(tensor)
        read.append(array.nbytes)
        return array

    monkeypatch.setattr(StoredTensor, "read", counted)
    sizes, totals = list[int](), set[int]()
    for stage in range(2):
        read.clear()
        model = ServedModel(args, CustomComponents(), 0, InStage(stage))
        sizes.append(sum(x.nbytes for x in model.weights))
        assert sum(read) == sizes[-1]
        assert all(isinstance(x, jax.Array) for x in model.weights)
        assert model.config.weight_bytes > sizes[-1]
        assert len(model.stages) == 1
        assert model.stages[0].layout.num_block_arrays == 2
        totals.add(model.config.weight_bytes)
    whole = load_model(folder)
    tied = whole.vocab_size * whole.config.hidden_size * whole.dtype.itemsize
    assert sum(sizes) == whole.weight_bytes + tied
    assert totals == {sum(sizes)}
    assert max(sizes) < 0.55 * sum(sizes)


def workers() -> list[psutil.Process]:
    """Returns the processes that this one has started and that run workers, in the order of their ranks."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "worker.process" in " ".join(child.cmdline()):
                found.append(child)
    return sorted(found, key=lambda process: process.pid)


@slow
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stage_that_is_lost(tmp_path: Path, rank: int, how: signal.Signals) -> None:
    """All engines end, at once or after the time that a step may take, and no worker is left."""
    others = set(workers())
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    with staged(make_checkpoint(tmp_path, "gqa2_tied"), 3, skip_tokenizer_init=True) as llm:
        stages = [process for process in workers() if process not in others]
        assert len(stages) == 3
        for i, engine in enumerate(llm._replicas):
            engine.add_request(str(i), [1, 2, 3], params)
            engine.step()
            engine.executor._limit_s = 1  # pyright: ignore[reportAttributeAccessIssue]
        stages[rank].send_signal(how)
        start = time.monotonic()
        for engine in llm._replicas:
            with pytest.raises(
                EngineDeadError, match=r"worker \d has (ended|failed)|the workers have not responded"
            ):
                drain(engine)
        assert time.monotonic() - start < (2 if how == signal.SIGKILL else 3)
        assert psutil.wait_procs(stages, timeout=1)[1] == []


EXTERNAL = """
import sys
from jax_paged import LLM, SamplingParams
llm = LLM(
    sys.argv[1], skip_tokenizer_init=True, pipeline_parallel_size=2, max_model_len=96, max_num_seqs=8,
    max_num_batched_tokens=32, num_gpu_blocks_override=400, block_size=4, dtype="float32", max_compile_s=0,
    attention_backend="xla", matmul_backend="xla", swap_space=0.01, seed=int(sys.argv[2]),
    distributed_executor_backend="external_launcher",
)
with llm:
    assert "jax" not in sys.modules
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=20)
    outputs = llm.generate([{"prompt_token_ids": [i, 6, 7]} for i in range(6)], params, use_tqdm=False)
    print([list(output.outputs[0].token_ids) for output in outputs])
"""


def launched(folder: Path, rank: int, port: int, *, size: int = 2, seed: int = 0) -> "subprocess.Popen[str]":
    numbers = {"RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    where = {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in numbers.items()}
    command = [sys.executable, "-c", EXTERNAL, str(folder), str(seed)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | where, **pipes)


@slow
def test_processes_of_a_launcher(checkpoint: Path, one: LLM) -> None:
    with reserved_port() as port:
        processes = [launched(checkpoint, rank, port) for rank in (1, 0)]
        (followed, why), (printed, problem) = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], why + problem
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=20)
    outputs = one.generate([[i, 6, 7] for i in range(6)], params, use_tqdm=False)
    assert printed == f"{[list(output.outputs[0].token_ids) for output in outputs]}\n"
    assert followed == ""


@slow
def test_processes_of_a_launcher_that_do_not_fit(checkpoint: Path) -> None:
    with reserved_port() as port:
        _, problem = launched(checkpoint, 0, port, size=1).communicate(timeout=300)
        assert "`pipeline_parallel_size` must be 1, the number of processes (WORLD_SIZE), got 2" in problem
        processes = [launched(checkpoint, rank, port, seed=rank) for rank in (0, 1)]
        for process in processes:
            _, problem = process.communicate(timeout=300)
            assert "ValueError: `seed` of worker 1 must be 0, as in worker 0, got 1" in problem


@slow
def test_what_stages_can_not_serve_is_an_error_here(checkpoint: Path) -> None:
    others = set(workers())
    with pytest.raises(ValueError, match=r"`max_model_len` must be .*got 4000"):
        staged(checkpoint, 2, max_model_len=4000)
    with pytest.raises(
        ValueError, match=r"`pipeline_parallel_size` must be at most 2, the layers of .*got 3"
    ):
        staged(checkpoint, 3)
    with pytest.raises(
        ValueError, match=r"`tensor_parallel_size` must be 1, the number of devices of each stage.*got 2"
    ):
        staged(checkpoint, 2, tensor_parallel_size=2)
    wait_until(lambda: set(workers()) <= others, "the workers have ended")

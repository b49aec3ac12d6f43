"""Several engines side by side give the outputs of one, and end together."""

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from helpers.adapters import write_random
from helpers.real_model import assert_no_block_lost, largest_buckets, tokens_of
from helpers.scripted_engine import LONG, no_block_lost

from jax_paged import LLM, BeamSearchParams, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from jax_paged.engine import list_runner
from jax_paged.engine.interrupt import deferred_interrupt
from jax_paged.engine.list_runner import ListRunner
from jax_paged.lora_request import LoRARequest
from jax_paged.worker.compilation import plan_steps

pytestmark = pytest.mark.thorough

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "xla",
    "matmul_backend": "xla",
    "max_model_len": 200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 200,
    "num_scheduler_steps": 1,
    "seed": 3,
    "enable_lora": True,
    "max_lora_rank": 4,
}
KINDS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=1, max_tokens=12),
    SamplingParams(temperature=1, max_tokens=12, seed=11),
    SamplingParams(temperature=0.8, max_tokens=9, n=3),
    SamplingParams(temperature=1, max_tokens=9, n=2, best_of=3, seed=2),
    SamplingParams(temperature=1, max_tokens=12, top_k=5, presence_penalty=1.5, repetition_penalty=1.2),
    SamplingParams(temperature=1, max_tokens=12, top_p=0.8, min_p=0.02, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1, max_tokens=20, min_tokens=4, stop_token_ids=list(range(40))),
]


@pytest.fixture(scope="module")
def few_shapes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_steps, "plan_buckets", largest_buckets)
        yield


@pytest.fixture(scope="module")
def one(checkpoint: Path, few_shapes: None) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(checkpoint: Path, few_shapes: None) -> Iterator[LLM]:
    with LLM(str(checkpoint), data_parallel_size=2, **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def none_is_lost(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "two" in request.fixturenames:
        for engine in request.getfixturevalue("two")._replicas:
            assert_no_block_lost(engine)


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """Returns what a user sees, without numbers that a sum in another order changes."""

    def own(output: RequestOutput) -> list[Any]:
        return [(x.index, x.text, x.token_ids, x.finish_reason) for x in output.outputs]

    return [(output.request_id, output.prompt_token_ids, own(output)) for output in outputs]


@pytest.mark.quick
def test_two_engines_give_the_outputs_of_one(one: LLM, two: LLM) -> None:
    prompts = [[i + j for j in range(5 + i % 17)] for i in range(3 * len(KINDS))]
    params = [KINDS[i % len(KINDS)] for i in range(len(prompts))]
    for _ in range(2):  # the second time, seeds go on where they were
        expected = one.generate(prompts, params, use_tqdm=False)
        found = two.generate(prompts, params, use_tqdm=False)
        assert facts(found) == facts(expected)
        for x, y in zip(found, expected, strict=True):
            assert x.outputs[0].cumulative_logprob == pytest.approx(y.outputs[0].cumulative_logprob, abs=1e-3)


def test_adapters_come_along_with_their_requests(
    one: LLM, two: LLM, checkpoint: Path, tmp_path: Path
) -> None:
    folders = [write_random(tmp_path / str(i), checkpoint, 4, i) for i in (1, 2)]
    adapters = [LoRARequest(folder.name, int(folder.name), str(folder)) for folder in folders]
    prompts = [[i, 2, 3, 4] for i in range(6)]
    chosen = [None, *adapters, *adapters, None]
    given: Any = {"use_tqdm": False, "lora_request": chosen}
    expected, found = (llm.generate(prompts, KINDS[0], **given) for llm in (one, two))
    assert facts(found) == facts(expected)
    without = two.generate(prompts, KINDS[0], use_tqdm=False)
    same = [x == y for x, y in zip(tokens_of(found), tokens_of(without), strict=True)]
    assert same == [adapter is None for adapter in chosen]


def test_beams_and_texts(one: LLM, two: LLM) -> None:
    prompts = ["a text", "another", "and one that is longer than these"]
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    expected, found = (llm.beam_search(prompts, beams, use_tqdm=False) for llm in (one, two))
    tokens = [[s.tokens for s in output.sequences] for output in expected]
    assert [[s.tokens for s in output.sequences] for output in found] == tokens


@pytest.mark.quick
def test_each_engine_has_devices_of_its_own_and_a_fair_share(two: LLM) -> None:
    devices = []
    for engine in two._replicas:
        pool = jax.tree.leaves(engine.executor.runner.arrays["kv_cache"])  # pyright: ignore
        devices.append({device for array in pool for device in array.devices()})
        weights = jax.tree.leaves(engine.executor.runner.arrays["weights"])  # pyright: ignore
        assert {device for array in weights for device in array.devices()} == devices[-1]
    assert devices == [{jax.devices()[0]}, {jax.devices()[1]}]
    counts = [0, 0]
    for i, engine in enumerate(two._replicas):
        engine.observers.append(
            lambda _, step, i=i: counts.__setitem__(i, counts[i] + len(step.new_sequences))
        )
    two.generate([[i] * 20 for i in range(9)], KINDS[0], use_tqdm=False)
    for engine in two._replicas:
        engine.observers.clear()
    assert sum(counts) == 9
    assert max(counts) == 5


def test_bad_input_is_an_error_before_anything_runs(two: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: .*must be .*got 999999"):
        two.generate([[1, 2], [999_999]], KINDS[0], use_tqdm=False)
    assert two.generate([], use_tqdm=False) == []


def test_what_concerns_one_engine_is_refused(two: LLM, tmp_path: Path) -> None:
    state = two.llm_engine.state()
    for call in (
        two.sleep,
        two.wake_up,
        lambda: two.update_weights(tmp_path),
        lambda: two.pin_prefix([1] * 32),
        two.pool_map,
        lambda: LLM.restore(state),
        lambda: LLM("scripted", executor=two.llm_engine.executor, data_parallel_size=2),
    ):
        with pytest.raises(ValueError, match=r"`data_parallel_size` must be 1 .*got 2"):
            call()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data_parallel_size": 0}, "`data_parallel_size` must be an integer of at least 1, got 0"),
        (
            {"data_parallel_size": 5},
            "`data_parallel_size` must be at most 4 because JAX sees 4 devices and each engine takes 1",
        ),
    ],
)
def test_sizes_that_can_t_be(checkpoint: Path, tmp_path: Path, sizes: dict[str, int], message: str) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "copy")
    (folder / "model.safetensors").write_bytes(b"")  # no weights are read
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **SETTINGS, **sizes)


def test_an_engine_alone_has_no_replicas(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"`data_parallel_size` must be 1 for LLMEngine .LLM .*got 2"):
        LLMEngine(EngineArgs(str(checkpoint), data_parallel_size=2))


Scripted = Callable[..., tuple[EngineArgs, Any]]


@pytest.fixture
def engines(scripted: Scripted) -> Iterator[list[LLMEngine]]:
    engines = [LLMEngine(*scripted()) for _ in range(3)]
    yield engines
    for engine in engines:
        assert "failed" in repr(engine) or no_block_lost(engine)
        engine.close()


def requests_of(engine: LLMEngine, num: int) -> list[Any]:
    return [engine.check_request(f"text number {i}, that is to be written?", LONG) for i in range(num)]


@pytest.mark.quick
def test_engines_step_at_the_same_time(engines: list[LLMEngine]) -> None:
    together = threading.Barrier(3, timeout=120)
    for engine in engines:
        engine.executor.during_step = lambda output: together.wait()  # pyright: ignore
    requests = requests_of(engines[0], 3)
    outputs = ListRunner(engines).run(requests, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [r.prompt[:-1] for r in requests]


def test_ctrl_c_ends_all_engines(engines: list[LLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[threading.Event] = []

    @contextlib.contextmanager
    def watched() -> Iterator[threading.Event]:
        with deferred_interrupt() as interrupted:
            begun.append(interrupted)
            yield interrupted

    def wait_in_third(engine: LLMEngine) -> None:
        if engine.executor.num_steps == 3:  # pyright: ignore
            if engine is engines[1]:
                os.kill(os.getpid(), signal.SIGINT)
            assert begun[0].wait(120)

    monkeypatch.setattr(list_runner, "deferred_interrupt", watched)
    for engine in engines:
        engine.executor.during_step = lambda output, e=engine: wait_in_third(e)  # pyright: ignore
    handler = signal.getsignal(signal.SIGINT)
    runner = ListRunner(engines)
    with pytest.raises(KeyboardInterrupt):
        runner.run(requests_of(engines[0], 9), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is handler
    assert all(engine.executor.num_steps <= 3 for engine in engines)  # pyright: ignore
    for engine in engines:
        engine.executor.during_step = lambda output: None  # pyright: ignore
    assert len(runner.run(requests_of(engines[0], 4), use_tqdm=False)) == 4


@pytest.mark.quick
def test_an_error_of_one_engine_ends_all(engines: list[LLMEngine]) -> None:
    def fail(output: object) -> None:
        raise RuntimeError("device lost")

    engines[2].executor.during_step = fail  # pyright: ignore
    for engine in engines[:2]:
        engine.executor.during_step = lambda output: time.sleep(0.2)  # pyright: ignore
    with pytest.raises(RuntimeError, match="device lost"):
        ListRunner(engines).run(requests_of(engines[0], 9), use_tqdm=False)
    assert all(engine.executor.num_steps < 20 for engine in engines)  # pyright: ignore
    assert not any(thread.name.startswith("replica") for thread in threading.enumerate())


def test_one_progress_bar_shows_all(engines: list[LLMEngine]) -> None:
    bars = []

    class Bar:
        def __init__(self, **settings: Any) -> None:
            self.settings, self.num, self.threads = settings, 0, set()
            bars.append(self)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.threads.add(threading.current_thread())

        def update(self, num: int) -> None:
            self.num += num

    ListRunner(engines).run(requests_of(engines[0], 7), use_tqdm=Bar)  # pyright: ignore
    [bar] = bars
    assert (bar.settings["total"], bar.num) == (7, 7)
    assert bar.threads == {threading.current_thread()}

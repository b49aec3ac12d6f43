"""Engines that stop in the middle, and go on elsewhere: the output is that of one that never stopped."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.real_model import (
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    finished_outputs,
    make_engine,
    mixed_requests,
    nan_embedding,
    reset,
)
from helpers.windowed_model import WINDOWED_VOCAB_SIZE, write_windowed_checkpoint

from jax_paged import LLM, BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.engine.features.snapshot import EngineState
from jax_paged.outputs import RequestOutput
from jax_paged.sampling_params import RequestOutputKind

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(4)
# So small that requests are recomputed and swapped out.
SETTINGS: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 60,
    "swap_space": 0.001,
    "async_scheduling": True,
}


def prompt(length: int) -> list[int]:
    return RNG.integers(8, VOCAB_SIZE, length).tolist()


def all_kinds() -> list[Request]:
    """Long prompts, samples, beams, penalties, log-probabilities, stop strings, the engine's seeds."""
    requests = mixed_requests(8, 5, 60, 30)
    letters = ["ab", "abcabcabc", "zz"]
    for params, beams in (
        (SamplingParams(n=3, max_tokens=30, ignore_eos=True, stop=letters), None),
        (SamplingParams(), BeamSearchParams(beam_width=3, max_tokens=20)),
        (SamplingParams(n=2, best_of=3, max_tokens=20, logprobs=2, prompt_logprobs=1), None),
        (SamplingParams(max_tokens=25, output_kind=RequestOutputKind.DELTA, stop=["é", "12"]), None),
        (SamplingParams(temperature=0, max_tokens=40, bad_words_token_ids=[[30], [31, 32]]), None),
        (SamplingParams(temperature=0, max_tokens=4, repetition_penalty=1.3, min_tokens=3), None),
    ):
        requests.append(Request(prompt(int(RNG.integers(3, 70))), params, beams))
    return requests


def without_times(output: RequestOutput) -> dict[str, Any]:
    outputs = [dataclasses.replace(o, token_ids=list(o.token_ids)) for o in output.outputs]
    logprobs = output.prompt_logprobs
    values = {"outputs": outputs, "prompt_logprobs": logprobs and list(logprobs), "finished": output.finished}
    counts = output.metrics.num_preemptions, output.metrics.num_cached_tokens
    return values | {"prompt": output.prompt_token_ids, "counts": counts}


def steps(engine: LLMEngine, most: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Returns every output of some steps, or of all."""
    seen = []
    while engine.has_unfinished_requests() and (most is None or most > 0):
        seen += [(o.request_id, without_times(o)) for o in engine.step()]
        most = None if most is None else most - 1
    return seen


@pytest.fixture(scope="module")
def session_first(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(checkpoint, few_buckets=True, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def session_second(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(checkpoint, few_buckets=True, **SETTINGS) as engine:
        yield engine


@pytest.fixture
def engines(session_first: LLMEngine, session_second: LLMEngine) -> tuple[LLMEngine, LLMEngine]:
    return reset(session_first), reset(session_second)


def forget(engine: LLMEngine) -> None:
    """Makes an engine idle whose state lives on elsewhere."""
    queues = engine.scheduler.queues
    engine.abort_request([*queues.running, *queues.waiting, *queues.swapped])
    steps(engine)
    reset(engine)


def in_order(seen: list[tuple[str, dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Returns the outputs of each request, in order: which of them a step returns may differ."""
    by_id: dict[str, list[dict[str, Any]]] = {}
    for request_id, output in seen:
        by_id.setdefault(request_id, []).append(output)
    return by_id


def moved_to_and_fro(
    engines: tuple[LLMEngine, LLMEngine], folder: Path
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[dict[str, Any]]], list[EngineState]]:
    """Runs what the first engine has been given there, and then again, stopped and moved every two steps.

    Returns:
        The outputs of either, and the states in between.
    """
    first, second = engines
    start = first.state()
    expected = in_order(steps(first))
    assert sum(outputs[-1]["counts"][0] for outputs in expected.values()) > 2, "nobody was preempted"
    assert_no_block_lost(first)

    seen, here, there, kinds, states = [], second, first, set[str](), []
    here.load_state(start)
    for i in range(1000):
        seen += steps(here, 2)
        queues = here.scheduler.queues
        kinds |= {name for name in ("waiting", "running", "swapped") if getattr(queues, name)}
        if not here.has_unfinished_requests():
            break
        states.append(here.state())
        states[-1].save(folder)
        forget(here)
        here.executor.runner.fill_kv_cache(np.nan)  # pyright: ignore[reportAttributeAccessIssue]
        here, there = there, here
        here.load_state(folder)
        assert len(list(folder.iterdir())) == 2, i
    assert kinds == {"waiting", "running", "swapped"}
    assert_no_block_lost(here)
    return expected, in_order(seen), states


T5 = Path(__file__).parent.parent / "models" / "fixtures" / "t5_tied"
OTHER_FAMILIES: dict[str, dict[str, Any]] = {
    "windows": {"num_gpu_blocks_override": 66},
    "encoder and decoder": {"num_gpu_blocks_override": 54},
}


def prompt_of(family: str, rng: np.random.Generator) -> Any:
    if family == "windows":
        return rng.integers(3, WINDOWED_VOCAB_SIZE, rng.integers(5, 60)).tolist()
    texts = [rng.integers(3, 90, rng.integers(1, n)).tolist() for n in (40, 12)]
    return {
        "encoder_prompt": {"prompt_token_ids": texts[0]},
        "decoder_prompt": {"prompt_token_ids": texts[1]},
    }


@pytest.mark.parametrize("num_scheduler_steps", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_windows_and_encoders_go_on_too(family: str, num_scheduler_steps: int, tmp_path: Path) -> None:
    """Half of Gemma's layers have windows; T5's decoder reads what its encoder wrote, once per request."""
    folder, rng = T5, np.random.default_rng(2)
    if family == "windows":
        folder = tmp_path / "model"
        write_windowed_checkpoint(folder, 9)
    # Where a step is scheduled before the one before it is known, a stop changes who is preempted when.
    others = {"max_model_len": 128, "skip_tokenizer_init": True, "async_scheduling": False}
    settings = SETTINGS | OTHER_FAMILIES[family] | others | {"num_scheduler_steps": num_scheduler_steps}
    with (
        make_engine(folder, few_buckets=True, **settings) as first,
        make_engine(folder, few_buckets=True, **settings) as second,
    ):
        for i, params in enumerate(
            (
                SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2),
                SamplingParams(n=3, seed=4, max_tokens=30, ignore_eos=True, logprobs=0),
                BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True),
                SamplingParams(max_tokens=30, ignore_eos=True, repetition_penalty=1.3),
                SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
                SamplingParams(n=2, seed=5, max_tokens=25, ignore_eos=True),
            )
        ):
            first.add_request(str(i), prompt_of(family, rng), params)
        expected, seen, states = moved_to_and_fro((first, second), tmp_path / "state")
        assert {name: outputs[-1] for name, outputs in seen.items()} == {
            name: outputs[-1] for name, outputs in expected.items()
        }
    tables = [
        table
        for state in states
        for request in state.values["requests"]
        for seq in request["sequences"]
        for table in seq["tables"] or ()
    ]
    assert any(0 in table for table in tables) == (family == "windows"), "blocks have left a window"


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_an_llm_of_another_family_is_restored(family: str, tmp_path: Path) -> None:
    folder, rng = T5, np.random.default_rng(3)
    if family == "windows":
        folder = tmp_path / "model"
        write_windowed_checkpoint(folder, 9)
    settings = AS_USERS | {"num_gpu_blocks_override": 60, "skip_tokenizer_init": True}
    with LLM(str(folder), **settings) as llm:
        engine = llm.llm_engine
        for i in range(4):
            params = SamplingParams(n=1 + i % 2, max_tokens=20, ignore_eos=True, logprobs=1)
            engine.add_request(str(i), prompt_of(family, rng), params)
        for _ in range(4):
            engine.step()
        state = engine.state(weights=True)
        state.save(tmp_path / "state")
        expected = in_order(steps(engine))
    with LLM.restore(tmp_path / "state") as llm:
        resumed = in_order(steps(llm.llm_engine))
    assert {name: outputs[-1] for name, outputs in resumed.items()} == {
        name: outputs[-1] for name, outputs in expected.items()
    }


@pytest.mark.thorough
@pytest.mark.quick
def test_what_goes_on_elsewhere_is_the_same(engines: tuple[LLMEngine, LLMEngine], tmp_path: Path) -> None:
    """Stopped again and again, in every kind of state, and moved to and fro through files."""
    add(engines[0], all_kinds())
    expected, seen, _ = moved_to_and_fro(engines, tmp_path / "state")
    last = {name: outputs[-1] for name, outputs in seen.items()}
    assert last.keys() == expected.keys()
    for name, output in last.items():
        if name != "8":
            assert output == expected[name][-1], name
    deltas, whole = seen["8"], expected["8"]
    for field in ("text", "token_ids"):
        parts, others = ([getattr(o["outputs"][0], field) for o in outputs] for outputs in (deltas, whole))
        assert [x for part in parts for x in part] == [x for part in others for x in part], field


def test_requests_to_come_get_the_same_seeds(engines: tuple[LLMEngine, LLMEngine]) -> None:
    first, second = engines
    params = SamplingParams(max_tokens=6)
    first.add_request("a", {"prompt_token_ids": prompt(5)}, params)
    steps(first, 2)
    state = first.state()
    second.load_state(state)
    later = {"prompt_token_ids": prompt(9)}
    outputs = []
    for engine in engines:
        engine.add_request("b", later, params)
        outputs.append(in_order(steps(engine)))
    assert outputs[0]["b"][-1] == outputs[1]["b"][-1]
    assert outputs[0]["a"][-1] == outputs[1]["a"][-1]


@pytest.mark.quick
def test_cached_and_pinned_prefixes_stay(engines: tuple[LLMEngine, LLMEngine]) -> None:
    first, second = engines
    pinned, cached = prompt(20), prompt(16)
    name = first.pin_prefix(pinned)
    first.add_request("a", cached, SamplingParams(max_tokens=2))
    steps(first)
    second.load_state(first.state())
    for i, prefix in enumerate((pinned, cached)):
        second.add_request(f"r{i}", [*prefix, 9], SamplingParams(max_tokens=2, temperature=0))
        first.add_request(f"r{i}", [*prefix, 9], SamplingParams(max_tokens=2, temperature=0))
    ours, theirs = finished_outputs(second), finished_outputs(first)
    assert [ours[r].num_cached_tokens for r in ("r0", "r1")] == [20, 16]
    assert [without_times(ours[r]) for r in ours] == [without_times(theirs[r]) for r in theirs]
    second.unpin_prefix(name)
    first.unpin_prefix(name)
    assert_no_block_lost(second)
    assert second.pin_prefix(pinned) == first.pin_prefix(pinned) != name
    for engine in engines:
        engine.unpin_prefix("prefix-1")


def test_times_go_on(engines: tuple[LLMEngine, LLMEngine]) -> None:
    first, second = engines
    first.add_request("a", prompt(5), SamplingParams(max_tokens=6))
    (output,) = first.step() or first.step()
    waited = output.metrics.first_token_time - output.metrics.arrival_time
    second.load_state(first.state())
    metrics = finished_outputs(second)["a"].metrics
    assert metrics.first_token_time - metrics.arrival_time == pytest.approx(waited, abs=1e-6)
    assert metrics.finished_time >= metrics.first_token_time


# As users make it, with few programs to compile.
AS_USERS = {
    "num_gpu_blocks_override": 24,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "num_scheduler_steps": 4,
}
CHILD = """
import json, sys
from jax_paged import LLM
with LLM.restore(sys.argv[1]) as llm:
    engine, outputs = llm.llm_engine, {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o.outputs for o in engine.step()}
texts = {name: [[x.text, x.token_ids, x.cumulative_logprob] for x in xs] for name, xs in outputs.items()}
print(json.dumps(texts))
"""


def test_a_state_survives_its_process(tmp_path: Path) -> None:
    with LLM("pagelet", **AS_USERS) as llm:
        engine = llm.llm_engine
        for i, text in enumerate(("What is paged attention?", "def f(", "Once")):
            engine.add_request(
                str(i), text, SamplingParams(n=1 + i, max_tokens=30, stop=["zq"], ignore_eos=True)
            )
        for _ in range(3):
            engine.step()
        state = engine.state()
        state.save(tmp_path)
        assert repr(state).startswith("<state of pagelet: 3 requests, arrays of ")
        outputs = finished_outputs(engine)
    expected = {
        name: [[x.text, list(x.token_ids), x.cumulative_logprob] for x in o.outputs]
        for name, o in outputs.items()
    }
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(expected))


def test_weights_by_value(engines: tuple[LLMEngine, LLMEngine]) -> None:
    first, second = engines
    first.add_request("a", [9, 10, 11], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    steps(first, 2)
    weights: Any = second.executor.runner.arrays["weights"]  # pyright: ignore[reportAttributeAccessIssue]
    kept, changed = list(weights), list(weights)
    changed[0] = weights[0] * 2
    by_reference, by_value = first.state(), first.state(weights=True)
    weights[:] = [jax.device_put(new, old.sharding) for new, old in zip(changed, kept, strict=True)]
    try:
        with pytest.raises(
            ValueError,
            match=r"the fingerprint of the weights in `state` must be \w{16} as in this engine, got",
        ):
            second.load_state(by_reference)
        assert not second.has_unfinished_requests()
        second.load_state(by_value)
        assert in_order(steps(second))["a"][-1] == in_order(steps(first))["a"][-1]
    finally:
        weights[:] = kept


def test_packed_weights_by_value() -> None:
    """Of the engine as users make it, with oneDNN where it is installed."""
    with LLM("pagelet", **AS_USERS) as llm:
        engine = llm.llm_engine
        engine.add_request("a", "Paged", SamplingParams(max_tokens=20, temperature=0))
        engine.step()
        state = engine.state(weights=True)
        expected = finished_outputs(engine)["a"].outputs[0].text
    with LLM.restore(state) as llm:
        assert finished_outputs(llm.llm_engine)["a"].outputs[0].text == expected
    other = dict(state.values["weights"], packing="another processor's")
    with pytest.raises(ValueError, match="packed for another processor"):
        LLM.restore(EngineState(state.values | {"weights": other}, state.arrays))


@pytest.mark.quick
def test_mistakes_are_errors(engines: tuple[LLMEngine, LLMEngine], tmp_path: Path) -> None:
    first, second = engines
    first.add_request("a", prompt(5), SamplingParams(max_tokens=6))
    steps(first, 2)
    first.schedule()
    with pytest.raises(RuntimeError, match=r"the plan of schedule\(\) has not run"):
        first.state()
    first.step()
    state = first.state()
    with pytest.raises(RuntimeError, match="requests are running"):
        first.load_state(state)
    with pytest.raises(ValueError, match=r"state\.json is not a valid engine state"):
        second.load_state(tmp_path)
    with pytest.raises(ValueError, match="the format of `state` must be 2, got 99"):
        second.load_state(EngineState(state.values | {"format": 99}, state.arrays))
    settings = state.values["settings"] | {"num_blocks": 61}
    with pytest.raises(ValueError, match=r"num_blocks in `state` must be 60 as in this engine, got 61"):
        second.load_state(EngineState(state.values | {"settings": settings}, state.arrays))
    settings = state.values["settings"] | {"scheduler": ["Own", "fcfs"]}
    with pytest.raises(
        ValueError, match=r"scheduler in `state` must be .* as in this engine, got \['Own', 'fcfs'\]"
    ):
        second.load_state(EngineState(state.values | {"settings": settings}, state.arrays))
    arrays = {name: array[:-1] for name, array in state.arrays.items()}
    with pytest.raises(ValueError, match=r"array 'pool\.0' of `state` must be float32 \[.*\], got float32"):
        second.load_state(EngineState(state.values, arrays))
    free = {"free": [], "contents": []}
    scheduler = state.values["scheduler"] | {"pool": free}
    with pytest.raises(ValueError, match="the state is inconsistent"):
        second.load_state(EngineState(state.values | {"scheduler": scheduler}, state.arrays))
    with nan_embedding(second, [3]), pytest.raises(ValueError, match="fingerprint"):
        second.load_state(state)
    second.record(lambda line: None)
    with pytest.raises(RuntimeError, match="is being recorded"):
        second.load_state(state)

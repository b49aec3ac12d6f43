"""An engine that sleeps: what it frees, what becomes of its requests, and that it wakes up as it was."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.real_model import (
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    finished_outputs,
    make_engine,
    reschedule,
    reset,
)

from jax_paged import LLM, AsyncLLMEngine, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.engine.errors import EngineAsleepError
from jax_paged.models.weights import load_model
from jax_paged.pallas_kernels.native import products

pytestmark = pytest.mark.thorough

ONEDNN = products.problem(np.dtype("float32")) is None
BACKENDS = [
    pytest.param(("xla", "xla"), marks=pytest.mark.quick),
    pytest.param(("native", "onednn"), marks=pytest.mark.skipif(not ONEDNN, reason="there is no oneDNN")),
]
SETTINGS: dict[str, Any] = {
    "few_buckets": True,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 200,
    "num_scheduler_steps": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(8, 300, 21).tolist()


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def own_engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLMEngine]:
    attention, matmul = request.param
    names = {"attention_backend": attention, "matmul_backend": matmul}
    with make_engine(checkpoint, **SETTINGS, **names) as engine:
        engine.executor.wait_until_compiled()
        yield engine


@pytest.fixture(name="awake")
def awake_engine(own_engine: LLMEngine) -> LLMEngine:
    if own_engine.is_sleeping():
        own_engine.wake_up()
    return reset(own_engine)


@pytest.fixture(scope="module")
def events() -> list[str]:
    """Everything that JAX traces, lowers or compiles from now on; cleared by whoever looks."""
    found: list[str] = []

    def note(event: str, seconds: float, **_: Any) -> None:
        if "/compile/" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return found


def generate(engine: LLMEngine, prompt: list[int] = PROMPT) -> Any:
    engine.add_request("one", prompt, GREEDY)
    return finished_outputs(engine)["one"]


def tokens(engine: LLMEngine) -> list[int]:
    return list(generate(engine).outputs[0].token_ids)


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def bytes_of(engine: LLMEngine) -> int:
    runner: Any = engine.executor
    return sum(array.nbytes for arrays in runner.runner.arrays.values() for array in arrays)


@pytest.mark.parametrize("level", [1, 2])
def test_what_sleeps_is_free_and_wakes_up_as_it_was(awake: LLMEngine, events: list[str], level: int) -> None:
    before = tokens(awake)
    own, live = bytes_of(awake), live_bytes()
    executor: Any = awake.executor
    num_traces = executor.runner.compiled.num_traces
    awake.sleep(level)
    assert awake.is_sleeping()
    assert live - live_bytes() >= 0.95 * own
    events.clear()
    awake.wake_up()
    output = generate(awake)
    # Reading a checkpoint again begins with the shapes of the model, which JAX traces and does not compile.
    assert [event for event in events if level == 1 or "jaxpr_trace" not in event] == []
    assert executor.runner.compiled.num_traces == num_traces
    assert not awake.is_sleeping()
    assert list(output.outputs[0].token_ids) == before
    assert output.num_cached_tokens == 0
    assert live_bytes() <= live
    assert generate(awake).num_cached_tokens > 0
    assert_no_block_lost(awake)


def test_tags_wake_up_one_after_the_other(awake: LLMEngine) -> None:
    before = tokens(awake)
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        for level in (1, 2):
            awake.sleep(level)
            awake.wake_up([first])
            with pytest.raises(EngineAsleepError, match=rf"the engine is asleep \({second}\)"):
                awake.add_request("a", PROMPT, GREEDY)
            with pytest.raises(
                ValueError, match=f"each of `tags` must be a tag that is asleep, .*got '{first}'"
            ):
                awake.wake_up([first])
            awake.wake_up([second])
            assert tokens(awake) == before


def mixed_requests() -> list[Request]:
    """More than the pool holds: greedy, samples with penalties, beams."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, VOCAB_SIZE, n).tolist() for n in (30, 17, 23, 9, 28)]
    samples = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "presence_penalty": 0.5}
    return [
        Request(prompts[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
        Request(prompts[1], SamplingParams(n=3, seed=5, **samples)),
        Request(prompts[2], GREEDY, BeamSearchParams(beam_width=2, max_tokens=10, ignore_eos=True)),
        Request(prompts[3], SamplingParams(seed=9, **samples)),
        Request(prompts[4], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
    ]


def all_tokens(outputs: dict[str, Any]) -> dict[str, list[list[int]]]:
    return {i: [list(x.token_ids) for x in output.outputs] for i, output in sorted(outputs.items())}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_requests_that_are_kept_bring_the_same_tokens(awake: LLMEngine, mode: Any) -> None:
    reschedule(awake, num_blocks=28, num_swap_blocks=40, preemption_mode=mode)
    add(awake, mixed_requests())
    want = finished_outputs(awake)
    assert max(output.metrics.num_preemptions for output in want.values()) > 0
    add(awake, mixed_requests())
    got, num_steps, has_swapped = {}, 0, False
    while awake.has_unfinished_requests():
        got |= {o.request_id: o for o in awake.step() if o.finished}
        num_steps += 1
        if num_steps in (1, 4, 9, 16, 25):
            has_swapped |= bool(awake.scheduler.queues.swapped)
            awake.sleep(1 + num_steps % 2, "keep")
            awake.scheduler.block_manager.check_integrity()
            awake.wake_up()
    assert all_tokens(got) == all_tokens(want)
    assert has_swapped == (mode == "swap")
    assert_no_block_lost(awake)


def test_requests_are_waited_for_or_aborted(awake: LLMEngine) -> None:
    before = tokens(awake)
    awake.add_request("a", PROMPT, GREEDY)
    awake.step()
    awake.sleep(1, "wait")
    (output,) = awake.step()  # what was drawn before it slept
    assert list(output.outputs[0].token_ids) == before
    assert not awake.has_unfinished_requests()
    with pytest.raises(EngineAsleepError):
        awake.step()
    awake.wake_up()
    awake.add_request("a", PROMPT, GREEDY)
    awake.sleep(2, "abort")
    assert not awake.has_unfinished_requests()
    awake.wake_up()
    assert tokens(awake) == before


def test_a_request_may_be_aborted_while_it_is_kept(awake: LLMEngine) -> None:
    before = tokens(awake)
    for name in ("a", "b"):
        awake.add_request(name, PROMPT, GREEDY)
    for _ in range(3):
        awake.step()
    awake.sleep(1, "keep")
    with pytest.raises(EngineAsleepError):
        awake.step()
    assert awake.abort_request("a") is not None
    awake.wake_up()
    outputs = finished_outputs(awake)
    assert all_tokens(outputs) == {"b": [before]}
    assert_no_block_lost(awake)


def test_what_is_wrong_is_said_at_once_and_changes_nothing(awake: LLMEngine) -> None:
    before = tokens(awake)
    with pytest.raises(ValueError, match=r"`level` must be 1 or 2, got 3\n`mode` must be one of 'wait', "):
        awake.sleep(3, "now")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="must be called while the engine is asleep"):
        awake.wake_up()
    with pytest.raises(ValueError, match=r"each of `tags` must be a tag that is asleep, .*got 'weights'"):
        awake.wake_up(["weights"])
    assert tokens(awake) == before
    awake.sleep()
    message = (
        r"`sleep\(\)` must be called while the engine is awake, "
        r"got an engine that is asleep \(weights, kv_cache\)\. Call wake_up"
    )
    with pytest.raises(ValueError, match=message):
        awake.sleep()
    with pytest.raises(
        ValueError, match=r"each of `tags` must be 'weights' or 'kv_cache', got 'pool'\n.*got 7"
    ):
        awake.wake_up(["pool", 7, "weights"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`tags` must be None or at least one tag, got \[\]"):
        awake.wake_up([])
    refused: list[Callable[[], Any]] = [
        lambda: awake.add_request("a", PROMPT, GREEDY),
        lambda: awake.check_request(PROMPT, GREEDY),
        lambda: awake.pin_prefix(PROMPT),
        awake.state,
        awake.schedule,
        lambda: awake.score([PROMPT]),
    ]
    for call in refused:
        with pytest.raises(
            EngineAsleepError, match=r"the engine is asleep \(weights, kv_cache\); call wake_up"
        ):
            call()
    awake.wake_up()
    assert tokens(awake) == before


def test_pinned_prefixes_are_computed_again(awake: LLMEngine) -> None:
    before = tokens(awake)
    name, other = awake.pin_prefix(PROMPT[:16]), awake.pin_prefix(PROMPT[:8])
    awake.add_request("a", PROMPT, GREEDY)
    with pytest.raises(
        RuntimeError, match=f"the prefixes '{name}', '{other}' are pinned and can't be recomputed"
    ):
        awake.sleep(1, "keep")
    finished_outputs(awake)
    awake.add_request("a", PROMPT, GREEDY)
    awake.sleep(2)  # what has ended is not fetched yet
    awake.unpin_prefix(other)
    awake.wake_up()
    assert list(finished_outputs(awake)["a"].outputs[0].token_ids) == before
    assert list(awake.scheduler.block_manager.pinned) == [name]
    output = generate(awake, [*PROMPT[:16], *PROMPT[:5]])
    assert output.num_cached_tokens == 16
    awake.unpin_prefix(name)
    assert_no_block_lost(awake)


def test_requests_that_can_not_be_computed_again_are_not_kept(awake: LLMEngine) -> None:
    awake.add_request("a", PROMPT, GREEDY)
    while (
        not awake.scheduler.queues.running["a"].sequences[0].output_token_ids
        if (awake.scheduler.queues.running)
        else True
    ):
        awake.step()
    awake.drop_kv("a", [0, 3, 4, 5])
    for sleep in (
        lambda: awake.sleep(1, "keep"),
        lambda: awake.update_weights(str(awake.config.model_name), running="recompute"),
    ):
        with pytest.raises(RuntimeError, match="the requests 'a' have dropped blocks"):
            sleep()
    assert len(finished_outputs(awake)["a"].outputs[0].token_ids) == 6


def test_other_weights_come_while_it_sleeps(checkpoint: Path) -> None:
    model: Any = load_model(checkpoint, "float32").model
    other: Any = load_model(checkpoint, "float32").model
    other.norm.scale[...] = other.norm.scale[...][::-1]
    settings = {name: value for name, value in SETTINGS.items() if name != "few_buckets"}
    settings |= {"max_model_len": 64, "matmul_backend": "xla"}
    with LLM.from_module(model, **settings) as llm:
        engine = llm.llm_engine
        old = tokens(engine)
        llm.update_weights(other, weight_version="b")
        new = tokens(engine)
        assert new != old
        llm.update_weights(model, weight_version="a")
        # Arrays of the caller stay, on both levels.
        for level in (1, 2):
            llm.sleep(level)
            assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(model)))
            if level == 2:
                with pytest.raises(ValueError, match=r"has dropped the weights, .*update_weights"):
                    llm.wake_up()
                assert engine.is_sleeping()
                llm.update_weights(model, weight_version="a")
            llm.wake_up()
            assert tokens(engine) == old
        # vLLM's order: weights, then other ones, then the pool. What was kept goes on with these.
        engine.add_request("a", PROMPT, GREEDY)
        for _ in range(3):
            engine.step()
        llm.sleep(2, "keep")
        llm.wake_up(["weights"])
        llm.update_weights(other, weight_version="b")
        with pytest.raises(ValueError, match=r"prompts\[0\]: the engine is asleep \(kv_cache\)"):
            llm.generate(PROMPT, GREEDY)
        llm.wake_up(["kv_cache"])
        output = finished_outputs(engine)["a"]
        assert output.weight_versions == ("a", "b")
        output = generate(engine)
        assert (list(output.outputs[0].token_ids), output.weight_version) == (new, "b")
        # A step of training while it sleeps is noticed.
        llm.sleep(1)
        other.norm.scale[...] = other.norm.scale[...][::-1]
        llm.wake_up()
        with pytest.raises(RuntimeError, match=r"call update_weights\(model\)"):
            llm.generate(PROMPT, GREEDY)
        llm.update_weights(other)
        assert tokens(engine) == old
        llm.sleep(1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(nnx.state(other)))


@pytest.fixture(scope="module")
def async_engine(checkpoint: Path) -> Iterator[AsyncLLMEngine]:
    settings = {name: value for name, value in SETTINGS.items() if name != "few_buckets"}
    engine = AsyncLLMEngine(
        EngineArgs(str(checkpoint), dtype="float32", matmul_backend="xla", max_model_len=128, **settings)
    )
    yield engine
    engine.close()


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


async def whole(engine: AsyncLLMEngine, name: str, params: SamplingParams = LONG) -> Any:
    return [output async for output in engine.generate(PROMPT, params, name)][-1]


async def begun(engine: AsyncLLMEngine, name: str) -> asyncio.Task[Any]:
    """Returns a request that has drawn a few tokens."""
    task = asyncio.create_task(whole(engine, name))
    while not engine.engine.scheduler.queues.running:
        await asyncio.sleep(0.001)
    return task


def test_a_server_engine_sleeps_under_way(async_engine: AsyncLLMEngine) -> None:
    async def check() -> None:
        engine = async_engine
        want = list((await whole(engine, "0")).outputs[0].token_ids)
        task = await begun(engine, "keep")
        await engine.sleep(1, "keep")
        assert await engine.is_sleeping()
        for _ in range(2):
            with pytest.raises(EngineAsleepError, match="the engine is asleep"):
                await whole(engine, "refused")
        with pytest.raises(ValueError, match="must be called while the engine is awake"):
            await engine.sleep()
        assert not task.done()
        await engine.wake_up(["kv_cache"])
        await engine.wake_up()
        assert list((await task).outputs[0].token_ids) == want

        task = await begun(engine, "wait")
        sleep = asyncio.create_task(engine.sleep(2))
        await asyncio.sleep(0)
        while engine.asleep_error is None:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineAsleepError):
            await whole(engine, "refused")
        await sleep
        assert list((await task).outputs[0].token_ids) == want
        await engine.wake_up()

        task = await begun(engine, "abort")
        await engine.sleep(1, "abort")
        assert (await task).outputs[0].finish_reason == "abort"
        with pytest.raises(ValueError, match=r"each of `tags` must be .*got 'x'"):
            await engine.wake_up(["x"])
        await engine.wake_up()
        assert list((await whole(engine, "last")).outputs[0].token_ids) == want

    asyncio.run(check())


def test_what_was_in_flight_reaches_its_client_before_the_sleep(async_engine: AsyncLLMEngine) -> None:
    """Its last token may be drawn by the step in flight; and a client may leave while the engine sleeps."""

    def runs(name: str) -> bool:
        return name in async_engine.engine.scheduler.queues.running

    async def check() -> None:
        engine = async_engine
        for num_tokens in range(1, 13):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            name = f"short {num_tokens}"  # the one before may not have left yet
            task = asyncio.create_task(whole(engine, name, params))
            while not runs(name) and not task.done():
                await asyncio.sleep(0)
            await asyncio.sleep(0.001 * (num_tokens % 4))
            await engine.sleep(1, "keep")
            await asyncio.sleep(0.01)
            if num_tokens % 2:
                task.cancel()
            elif not engine.engine._core.requests:
                assert task.done()  # nobody computes for it any more
            await engine.wake_up()
            done = await asyncio.gather(task, return_exceptions=True)
            assert num_tokens % 2 or len(done[0].outputs[0].token_ids) == num_tokens
        assert len((await whole(engine, "last")).outputs[0].token_ids) == 60

    asyncio.run(check())


def test_who_leaves_while_requests_are_waited_for_leaves_the_engine_awake(
    async_engine: AsyncLLMEngine,
) -> None:
    async def check() -> None:
        engine = async_engine
        task = await begun(engine, "a")
        sleep = asyncio.create_task(engine.sleep())
        while engine.asleep_error is None:
            await asyncio.sleep(0.001)
        with pytest.raises(ValueError, match="is still in progress"):
            await engine.sleep()
        sleep.cancel()
        assert len((await task).outputs[0].token_ids) == 60
        assert len((await whole(engine, "b")).outputs[0].token_ids) == 60
        assert not await engine.is_sleeping()

    asyncio.run(check())


def test_weights_are_exchanged_under_running_requests(async_engine: AsyncLLMEngine, checkpoint: Path) -> None:
    async def check() -> None:
        engine = async_engine
        want = list((await whole(engine, "0")).outputs[0].token_ids)
        task = await begun(engine, "a")
        with pytest.raises(RuntimeError, match="requests are running"):
            await engine.update_weights(checkpoint)
        with pytest.raises(ValueError, match="extra is unexpected"):
            await engine.update_weights([("extra", np.zeros(3))], running="keep")
        for running in ("keep", "recompute"):
            await engine.update_weights(checkpoint, running=running, weight_version=running)
        output = await task
        assert list(output.outputs[0].token_ids) == want
        assert output.weight_version == "recompute"

    asyncio.run(check())


@pytest.mark.quick
def test_a_closed_engine_does_not_sleep(scripted: Callable[..., Any]) -> None:
    engine = AsyncLLMEngine(*scripted())
    engine.close()

    async def check() -> None:
        for call in (engine.sleep, engine.wake_up):
            with pytest.raises(RuntimeError, match="is closed"):
                await asyncio.wait_for(call(), 10)

    asyncio.run(check())


MODELS = Path(__file__).parents[1] / "models"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5_tied", "mistral_window"])
def test_other_families_sleep(family: str) -> None:
    """Encoder outputs are computed again, and blocks behind a window come back."""
    settings = {"skip_tokenizer_init": True, "max_model_len": 64, **SETTINGS}
    with make_engine(MODELS / "fixtures" / family, **settings) as engine:
        prompt = [5, 9, 11, 6, 21, 17, 8, 30, 12, 14]
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        engine.add_request("a", prompt, params)
        want = all_tokens(finished_outputs(engine))
        for level in (1, 2):
            engine.add_request("a", prompt, params)
            for _ in range(12):
                engine.step()
            engine.sleep(level, "keep")
            engine.wake_up()
            assert all_tokens(finished_outputs(engine)) == want
            assert_no_block_lost(engine)


@pytest.mark.quick
def test_a_model_without_a_pool_sleeps() -> None:
    folder = MODELS / "pooling_fixtures" / "bert_embedder"
    with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=32) as llm:
        prompt = {"prompt_token_ids": [5, 9, 11, 6]}
        (want,) = llm.embed(prompt, use_tqdm=False)
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(ValueError, match="the engine is asleep"):
                llm.embed(prompt, use_tqdm=False)
            llm.wake_up()
            (output,) = llm.embed(prompt, use_tqdm=False)
            assert output.outputs.embedding == want.outputs.embedding

"""Engines that nothing refers to any more: they stop compiling, and leave neither threads nor arrays."""

import asyncio
import gc
import json
import logging
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from helpers.adapters import write_random
from helpers.scripted_engine import LONG

from jax_paged import LLM, AsyncLLMEngine, LLMEngine, LoRARequest, SamplingParams
from jax_paged.models.weights import load_model
from jax_paged.sampling_params import StructuredOutputsParams
from jax_paged.worker import model_runner
from jax_paged.worker.executor import LocalExecutor

pytestmark = pytest.mark.thorough

TINY = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 40}
XLA = {"dtype": "float32", "attention_backend": "xla", "matmul_backend": "xla", "skip_tokenizer_init": True}
PROMPT = {"prompt_token_ids": [11, 12, 13, 14, 15]}
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


class Leftovers:
    """Notes what is there before an engine is made, and checks that nothing more is there in the end."""

    def __init__(self) -> None:
        gc.collect()
        self._threads = set(threading.enumerate())
        self._arrays = {id(array) for array in jax.live_arrays()}
        self._objects: list[weakref.ref[Any]] = []

    def watch(self, *objects: Any) -> None:
        """Notes objects that must be gone in the end."""
        self._objects += map(weakref.ref, objects)

    def check(self) -> None:
        """Waits for the program that is compiled, if one is, and for nothing else."""
        gc.collect()
        until = time.monotonic() + 120
        while (threads := self._new_threads()) and time.monotonic() < until:
            threads[0].join(1)
            gc.collect()  # a thread may have used its engine, which is part of a cycle, at the time before
        assert self._new_threads() == []
        assert [array.shape for array in jax.live_arrays() if id(array) not in self._arrays] == []
        assert [seen() for seen in self._objects if seen() is not None] == []

    def _new_threads(self) -> list[threading.Thread]:
        """Returns threads of ours: tqdm's watches over all of its bars."""
        new = set(threading.enumerate()) - self._threads
        return [thread for thread in new if "tqdm" not in thread.name]


@pytest.fixture
def leftovers():
    return Leftovers()


def constructed(llm: LLM) -> None:
    """Nothing has run; programs are compiled in the background."""


def used(llm: LLM) -> None:
    llm.generate(PROMPT, SHORT, use_tqdm=False)


def in_mid_step(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", PROMPT, SHORT)
    engine.step()
    assert engine.has_unfinished_requests()


def planned(llm: LLM) -> None:
    llm.llm_engine.add_request("a", PROMPT, SHORT)
    llm.llm_engine.schedule()


def failed(llm: LLM) -> None:
    """An error in a step; its traceback refers to the frames of `generate`."""

    def fail() -> None:
        raise RuntimeError("device lost")

    llm.llm_engine.executor.result = fail  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match="device lost"):
        llm.generate(PROMPT, SHORT, use_tqdm=False)


def refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompts"):
        llm.generate([[-1]], SHORT, use_tqdm=False)


def asleep(llm: LLM) -> None:
    llm.generate(PROMPT, SHORT, use_tqdm=False)
    llm.sleep(1)


def half_awake(llm: LLM) -> None:
    llm.sleep(1)
    llm.wake_up(["weights"])


def pinned(llm: LLM) -> None:
    llm.pin_prefix({"prompt_token_ids": list(range(20, 40))})


def watched(llm: LLM, leftovers: Leftovers) -> None:
    """Notes what an engine consists of."""
    for engine in llm._replicas:
        executor = engine.executor
        assert isinstance(executor, LocalExecutor)
        leftovers.watch(engine, executor, executor.runner, executor.runner.compiled, executor.runner.context)


STAGES = [constructed, in_mid_step, failed]
MORE_STAGES = [used, planned, refused, asleep, half_awake, pinned]


@pytest.mark.parametrize(
    "do",
    [*STAGES, *(pytest.param(do, marks=pytest.mark.slow) for do in MORE_STAGES)],
    ids=lambda do: do.__name__,
)
def test_an_llm_that_is_dropped_at_some_stage(checkpoint, leftovers, do):
    limit = {} if do is constructed else {"max_compile_s": 0}
    llm = LLM(str(checkpoint), **TINY, **XLA, **limit)
    watched(llm, leftovers)
    do(llm)
    del llm
    leftovers.check()


@pytest.mark.quick
def test_the_memory_is_free_at_once_without_garbage_collection(checkpoint, leftovers):
    """Objects that refer to each other would stay until Python looks for them, which may take for ever."""
    gc.disable()
    try:
        before = sum(array.nbytes for array in jax.live_arrays())
        llm = LLM(str(checkpoint), max_compile_s=0, **TINY, **XLA)
        used(llm)
        threads = llm.llm_engine.executor.runner.compiled._threads  # pyright: ignore
        del llm
        for thread in threads:
            thread.join()
        assert sum(array.nbytes for array in jax.live_arrays() if not array.is_deleted()) <= before
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_cell_that_is_run_again(checkpoint, leftovers):
    for _ in range(3):
        llm = LLM(str(checkpoint), max_compile_s=0, **TINY, **XLA)
        used(llm)
    num_bytes = sum(array.nbytes for array in jax.live_arrays())
    del llm
    leftovers.check()
    kept = num_bytes - sum(array.nbytes for array in jax.live_arrays())
    llm = LLM(str(checkpoint), max_compile_s=0, **TINY, **XLA)
    used(llm)
    assert sum(array.nbytes for array in jax.live_arrays()) <= num_bytes, f"one engine has {kept} bytes"
    llm.close()


def fail_when_compiled(*_: Any, **__: Any) -> None:
    raise RuntimeError("a program was not compiled")


@pytest.mark.parametrize("at", ["pool", "programs", pytest.param("end token", marks=pytest.mark.slow)])
def test_an_llm_that_can_not_be_made(checkpoint, leftovers, monkeypatch, at):
    """The error is kept, as a notebook keeps the last one; its traceback refers to what was made so far."""
    settings: dict[str, Any] = {**TINY, **XLA, "max_compile_s": 0}
    if at == "pool":
        settings |= {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1}
    elif at == "programs":
        monkeypatch.setattr(model_runner.ServedModel, "compiled", fail_when_compiled)
    else:
        monkeypatch.setattr("jax_paged.engine.composition.with_end_token", fail_when_compiled)
    with pytest.raises((ValueError, RuntimeError)) as kept:
        LLM(str(checkpoint), **settings)
    leftovers.check()
    assert kept.value.__traceback__ is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adapters", "draft model", "two engines", "pipeline"])
def test_an_llm_of_several_parts_that_is_dropped(checkpoint, tmp_path, leftovers, kind):
    more: dict[str, Any] = {
        "adapters": {"enable_lora": True},
        "draft model": {"speculative_config": {"method": "draft_model", "model": str(checkpoint)}},
        "two engines": {"data_parallel_size": 2},
        "pipeline": {"pipeline_parallel_size": 2},
    }[kind]
    llm = LLM(str(checkpoint), max_compile_s=0, **TINY, **XLA, **more)
    watched(llm, leftovers)
    adapter = None
    if kind == "adapters":
        adapter = LoRARequest("a", 1, str(write_random(tmp_path / "a", Path(checkpoint), 4, 0)))
    llm.generate([PROMPT] * 2, SHORT, use_tqdm=False, lora_request=adapter)
    del llm, adapter
    leftovers.check()


def async_idle(engine: AsyncLLMEngine) -> None:
    """Nothing has run."""


def async_used(engine: AsyncLLMEngine) -> None:
    async def use() -> None:
        async for _ in engine.generate("abc?", LONG, "a"):
            pass

    asyncio.run(use())


def async_left(engine: AsyncLLMEngine) -> None:
    """A consumer leaves its loop early."""

    async def use() -> None:
        async for _ in engine.generate("abcdefgh?", LONG, "a"):
            break

    asyncio.run(use())


def async_failed(engine: AsyncLLMEngine) -> None:
    def fail(output: Any) -> None:
        raise RuntimeError("device lost")

    engine.engine.executor.during_step = fail  # pyright: ignore[reportAttributeAccessIssue]

    async def use() -> None:
        with pytest.raises(RuntimeError, match="device lost"):
            async for _ in engine.generate("abc?", LONG, "a"):
                pass

    logging.disable(logging.CRITICAL)  # pytest would keep the error that is logged
    try:
        asyncio.run(use())
    finally:
        logging.disable(logging.NOTSET)


def async_asleep(engine: AsyncLLMEngine) -> None:
    asyncio.run(engine.sleep())


def async_stopped(engine: AsyncLLMEngine) -> None:
    engine.shutdown()


@pytest.mark.thorough
@pytest.mark.quick
@pytest.mark.parametrize(
    "do",
    [async_idle, async_used, async_left, async_failed, async_asleep, async_stopped],
    ids=lambda do: do.__name__,
)
def test_an_async_engine_that_is_dropped_without_shutdown(scripted, leftovers, do):
    engine = AsyncLLMEngine(*scripted())
    leftovers.watch(engine, engine.engine, engine.engine.executor)
    do(engine)
    del engine
    leftovers.check()


@pytest.mark.quick
def test_an_async_engine_stays_while_a_stream_of_it_is_read(scripted, leftovers):
    async def use() -> str:
        engine = AsyncLLMEngine(*scripted())
        leftovers.watch(engine)
        stream = await engine.submit("abcdefgh?", LONG, "a")
        del engine
        gc.collect()
        return "".join([output.outputs[0].text async for output in stream])

    assert asyncio.run(use()) == "abcdefgh"
    leftovers.check()


def _sandboxes() -> list[Any]:
    """Returns those of all engines of this process, other tests' too, that have a process."""
    return [x for x in gc.get_objects() if type(x).__name__ == "CompileSandbox" and x._process is not None]


def test_the_process_that_tries_grammars_ends_with_its_engine(scripted, leftovers):
    of_others = weakref.WeakSet(_sandboxes())
    engine = LLMEngine(*scripted())
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    engine.check_request("abc?", params)
    (sandbox,) = (x for x in _sandboxes() if x not in of_others)
    process = sandbox._process
    leftovers.watch(engine, sandbox)
    del engine, sandbox
    leftovers.check()
    assert process.poll() is not None


@pytest.mark.slow
def test_a_model_in_memory_outlives_the_engine_that_is_dropped(checkpoint, leftovers):
    model = load_model(checkpoint, "float32").model
    weights = jax.tree.leaves(nnx.state(model))
    llm = LLM.from_module(model, max_compile_s=0, **TINY, **XLA)
    used(llm)
    del llm
    gc.collect()
    assert not any(array.is_deleted() for array in weights)
    del model, weights
    leftovers.check()

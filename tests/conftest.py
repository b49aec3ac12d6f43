"""Fixtures around one real engine (compiling it is most of what these tests cost) and a scripted one."""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import tokenizers
from helpers.real_model import DenseModel, make_engine, reschedule, reset, write_checkpoint
from helpers.scripted_engine import TEMPLATE, ScriptedExecutor
from tokenizers import decoders, models, pre_tokenizers

from jax_paged import LLM, EngineArgs, LLMEngine
from jax_paged.worker.compilation.persistent_cache import use_persistent_cache

# Before there is a backend: an engine's model may be divided among several devices, which a CPU can be, too.
jax.config.update("jax_num_cpu_devices", 4)
# By default, engines in tests compile only the largest step of each kind. Tests that need all steps pass
# max_compile_s=None.
inspect.unwrap(EngineArgs.__init__).__defaults__ = tuple(
    0 if parameter.name == "max_compile_s" else parameter.default
    for parameter in inspect.signature(EngineArgs).parameters.values()
)
# What one test has compiled, the next one finds, and the next run: before any engine is made, too.
use_persistent_cache()

pytest_plugins = ["helpers.compilation_cache", "helpers.signals", "ptx_emulator.pytest_plugin"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel(checkpoint)


LARGE_ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "num_gpu_blocks_override": 16000}


@pytest.fixture(scope="session")
def session_engine(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(checkpoint, **LARGE_ENGINE) as engine:
        engine.executor.wait_until_compiled()
        yield engine


@pytest.fixture(scope="session")
def session_engine_of_all_buckets(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(checkpoint, max_compile_s=None, **LARGE_ENGINE) as engine:
        engine.executor.wait_until_compiled()
        yield engine


@pytest.fixture(name="engine")
def idle_engine(session_engine: LLMEngine) -> LLMEngine:
    """An engine with a large pool, idle and with nothing cached, whatever the test before did."""
    return reset(session_engine)


@pytest.fixture(scope="session")
def session_shared_engine(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(
        checkpoint,
        few_buckets=True,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        num_gpu_blocks_override=2000,
    ) as engine:
        yield engine


@pytest.fixture
def shared_engine(session_shared_engine: LLMEngine) -> LLMEngine:
    """An engine of block size 4 with room for everything; `reschedule` makes its pool look small."""
    return reset(session_shared_engine)


@pytest.fixture
def small_engine(shared_engine: LLMEngine) -> LLMEngine:
    """The shared engine, with a pool that holds 636 tokens: full after a few requests."""
    reschedule(shared_engine, num_blocks=160, max_num_batched_tokens=32)
    return shared_engine


@pytest.fixture(scope="session")
def session_bursting_engine(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(
        checkpoint,
        few_buckets=True,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=400,
        num_scheduler_steps=4,
        async_scheduling=True,
    ) as engine:
        yield engine


@pytest.fixture
def bursting_engine(session_bursting_engine: LLMEngine) -> LLMEngine:
    """An engine with bursts of four steps, and another step in flight meanwhile."""
    return reset(session_bursting_engine)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A tokenizer of single bytes, and no weights."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<unk>", "<s>", "</s>", *alphabet]
    backend = tokenizers.Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    backend.add_special_tokens(pieces[:3])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "TokenizersBackend", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="session")
def scripted(folder):
    """Makes what an engine of scripted tokens is made from: EngineArgs and a ScriptedExecutor."""

    def make(**settings):
        # One step at a time, so that tests know what each of them has done.
        args = EngineArgs(**{"model": folder, "async_scheduling": False, **settings})
        return args, ScriptedExecutor(args)

    return make


@pytest.fixture
def make_llm(scripted):
    """Makes an LLM of scripted tokens."""

    def make(**settings):
        args, executor = scripted(**settings)
        return LLM(args.model, executor=executor, **settings)

    return make


@pytest.fixture
def llm(make_llm):
    with make_llm() as llm:
        yield llm

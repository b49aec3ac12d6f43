"""Fixtures around one real engine: compiling it is most of what these tests cost, so all files share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_model import DenseModel, make_engine, reset, write_checkpoint

from jax_paged import LLMEngine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def dense(checkpoint: Path) -> DenseModel:
    return DenseModel(checkpoint)


@pytest.fixture(scope="session")
def session_engine(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(
        checkpoint, max_num_seqs=16, max_num_batched_tokens=128, num_gpu_blocks_override=16000
    ) as engine:
        engine.runner.wait_until_compiled()
        yield engine


@pytest.fixture
def engine(session_engine: LLMEngine) -> LLMEngine:
    """An engine with all its buckets, idle and with nothing cached, whatever the test before did."""
    return reset(session_engine)


@pytest.fixture(scope="session")
def session_small_engine(checkpoint: Path) -> Iterator[LLMEngine]:
    with make_engine(
        checkpoint,
        few_buckets=True,
        block_size=4,
        max_num_seqs=16,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=160,
    ) as engine:
        yield engine


@pytest.fixture
def small_engine(session_small_engine: LLMEngine) -> LLMEngine:
    """An engine of block size 4 whose pool holds 636 tokens: full after a few requests."""
    return reset(session_small_engine)

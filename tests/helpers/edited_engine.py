"""Fixtures around engines whose requests are edited while they run: one step at a time, ahead, in bursts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.real_model import assert_no_block_lost, finished_outputs, make_engine

from jax_paged import LLMEngine

SIZES = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 300}
MODES = [pytest.param("one step at a time", marks=pytest.mark.quick), "steps ahead", "bursts"]


@pytest.fixture(scope="module", params=MODES)
def session_engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLMEngine]:
    settings = {"async_scheduling": request.param != "one step at a time"}
    if request.param == "bursts":
        settings["num_scheduler_steps"] = 4
    with make_engine(checkpoint, few_buckets=True, **settings, **SIZES) as engine:
        yield engine


@pytest.fixture(name="engine")
def idle_engine(session_engine: LLMEngine) -> Iterator[LLMEngine]:
    """The engine, whatever a test that failed has left in it; afterwards no block may be lost."""
    yield session_engine
    for output in session_engine.step():
        session_engine.abort_request(output.request_id)
    finished_outputs(session_engine)
    assert_no_block_lost(session_engine)

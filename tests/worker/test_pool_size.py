"""How many blocks the pool gets: from a number of bytes, or from what a GPU has left."""

import dataclasses

import pytest
from helpers.real_model import MAX_MODEL_LEN, VOCAB_SIZE

from jax_paged import EngineArgs
from jax_paged.worker import kv_cache
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.compilation.buckets import Bucket, plan_buckets
from jax_paged.worker.compilation.step_bytes import step_bytes
from jax_paged.worker.kv_cache import DeviceMemory
from jax_paged.worker.model_runner import ModelRunner

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, tokens, head_dim, float32
SIZES = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "max_num_batched_tokens": 16}


def gpu(bytes_limit):
    """A GPU as far as the size of the pool depends on it."""
    stats = None if bytes_limit is None else {"bytes_limit": bytes_limit, "bytes_in_use": 10**6}
    return DeviceMemory("gpu", stats)


@pytest.fixture(autouse=True)
def largest_buckets_alone(monkeypatch):
    """The smaller ones play no part here, and take long to compile."""
    buckets = [Bucket(True, 2, 2), Bucket(False, 16, 2)]
    monkeypatch.setattr(plan_steps, "plan_buckets", lambda *limits, **kind: buckets)


def num_blocks(checkpoint, monkeypatch, memory=None, **settings):
    with monkeypatch.context() as patch:
        if memory is not None:
            patch.setattr(kv_cache, "device_memory", lambda device: memory)
        runner = ModelRunner(EngineArgs(model=str(checkpoint), **SIZES, **settings))
    blocks = runner.config.num_blocks
    assert runner.arrays["kv_cache"][0].shape[0] == blocks
    assert runner.config.kv_cache_bytes == sum(x.nbytes for x in runner.arrays["kv_cache"])
    runner.close()
    return blocks


def test_bytes_and_blocks_given(checkpoint, monkeypatch):
    assert num_blocks(checkpoint, monkeypatch, kv_cache_memory_bytes=10 * BLOCK_BYTES + 1) == 10
    both = {"kv_cache_memory_bytes": 10 * BLOCK_BYTES, "num_gpu_blocks_override": 7}
    assert num_blocks(checkpoint, monkeypatch, **both) == 7
    with pytest.raises(ValueError, match="large enough for two blocks"):
        num_blocks(checkpoint, monkeypatch, kv_cache_memory_bytes=BLOCK_BYTES)
    with pytest.raises(ValueError, match=r"`num_gpu_blocks_override` must be .*got 1000000000"):
        num_blocks(checkpoint, monkeypatch, num_gpu_blocks_override=10**9)


def test_what_a_gpu_has_left(checkpoint, monkeypatch):
    limit = 40 * 10**6
    half = num_blocks(checkpoint, monkeypatch, gpu(limit), gpu_memory_utilization=0.5)
    largest = num_blocks(checkpoint, monkeypatch, gpu(limit), gpu_memory_utilization=0.9)
    assert (largest - half) * BLOCK_BYTES == pytest.approx(0.4 * limit, abs=2 * BLOCK_BYTES)
    # Weights, and what the steps need, are left out.
    assert largest * BLOCK_BYTES < 0.9 * limit - 10**6
    with pytest.raises(ValueError, match=r"`gpu_memory_utilization` must be .*got 0.01: "):
        num_blocks(checkpoint, monkeypatch, gpu(limit), gpu_memory_utilization=0.01)
    with pytest.raises(ValueError, match=r"`kv_cache_memory_bytes` must be .*got None"):
        num_blocks(checkpoint, monkeypatch, gpu(None))


def test_what_the_seats_have_is_left_room_for(checkpoint):
    runner = ModelRunner(EngineArgs(model=str(checkpoint), num_gpu_blocks_override=9, **SIZES))
    few = step_bytes(runner.context, 1, [])
    many = step_bytes(dataclasses.replace(runner.context, max_num_seqs=1000), 1, [])
    row = VOCAB_SIZE * 4 + VOCAB_SIZE // 32 * 4 + runner.context.max_blocks_per_seq * 4
    assert few > 2 * row
    assert many - few >= (1000 - 2) * row
    results = 4 * (5 + 1 + 2 * runner.context.sampling.max_logprobs)  # of a token
    assert step_bytes(runner.context, 8, []) - few == 8 * runner.context.max_num_seqs * results
    runner.close()


def test_a_budget_of_one_token(checkpoint, monkeypatch):
    monkeypatch.setattr(plan_steps, "plan_buckets", plan_buckets)
    settings = {"max_num_batched_tokens": 1, "max_num_seqs": 2, "max_model_len": 32}
    runner = ModelRunner(EngineArgs(model=str(checkpoint), num_gpu_blocks_override=9, **settings))
    assert list(map(str, runner.buckets)) == ["decode 1"]
    runner.close()

"""How many blocks the pool gets: from a number of bytes, or from what a GPU has left."""

import dataclasses

import pytest
from helpers.real_model import MAX_MODEL_LEN

from jax_paged import EngineArgs
from jax_paged.worker.model_runner import ModelRunner

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, tokens, head_dim, float32


@dataclasses.dataclass
class Gpu:
    """A device as far as the size of the pool hangs on it."""

    bytes_limit: int | None
    platform: str = "gpu"

    def memory_stats(self):
        return self.bytes_limit and {"bytes_limit": self.bytes_limit, "bytes_in_use": 10**6}


def num_blocks(checkpoint, monkeypatch, device=None, **settings):
    choose = ModelRunner._num_blocks
    if device is not None:
        monkeypatch.setattr(
            ModelRunner, "_num_blocks", lambda self, args, _, b: choose(self, args, device, b)
        )
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 2, "max_num_batched_tokens": 16}
    runner = ModelRunner(EngineArgs(model=str(checkpoint), **sizes, **settings))
    blocks = runner.config.num_blocks
    assert runner._kv_cache[0].shape[0] == blocks
    runner.close()
    return blocks


def test_bytes_and_blocks_given(checkpoint, monkeypatch):
    assert num_blocks(checkpoint, monkeypatch, kv_cache_memory_bytes=10 * BLOCK_BYTES + 1) == 10
    both = {"kv_cache_memory_bytes": 10 * BLOCK_BYTES, "num_gpu_blocks_override": 7}
    assert num_blocks(checkpoint, monkeypatch, **both) == 7
    with pytest.raises(ValueError, match="at least two blocks"):
        num_blocks(checkpoint, monkeypatch, kv_cache_memory_bytes=BLOCK_BYTES)
    with pytest.raises(ValueError, match="num_gpu_blocks_override is 1000000000; allowed"):
        num_blocks(checkpoint, monkeypatch, num_gpu_blocks_override=10**9)


def test_what_a_gpu_has_left(checkpoint, monkeypatch):
    limit = 40 * 10**6
    half = num_blocks(checkpoint, monkeypatch, Gpu(limit), gpu_memory_utilization=0.5)
    monkeypatch.undo()
    most = num_blocks(checkpoint, monkeypatch, Gpu(limit), gpu_memory_utilization=0.9)
    assert (most - half) * BLOCK_BYTES == pytest.approx(0.4 * limit, abs=2 * BLOCK_BYTES)
    # Weights, and what the steps need, are left out.
    assert most * BLOCK_BYTES < 0.9 * limit - 10**6
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0.01, which leaves no memory"):
        num_blocks(checkpoint, monkeypatch, Gpu(limit), gpu_memory_utilization=0.01)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="kv_cache_memory_bytes is None"):
        num_blocks(checkpoint, monkeypatch, Gpu(None))


def test_a_budget_of_one_token(checkpoint, monkeypatch):
    settings = {"max_num_batched_tokens": 1, "max_num_seqs": 2, "max_model_len": 32}
    runner = ModelRunner(EngineArgs(model=str(checkpoint), num_gpu_blocks_override=9, **settings))
    assert runner.buckets == ("decode 1",)
    runner.close()

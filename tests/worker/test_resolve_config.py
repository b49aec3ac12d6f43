"""EngineArgs, a model and a device make one configuration; what does not fit is named."""

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.worker.loading import resolve_config as resolve_config_module
from jax_paged.worker.loading.resolve_config import (
    CPU_KV_CACHE_BYTES,
    ModelProperties,
    host_memory_bytes,
    resolve_config,
)

FACTS = ModelProperties(
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=500,
    max_model_len=4096,
    weight_bytes=10**9,
    cache_groups=(CacheGroup(), CacheGroup(window=64)),
    block_bytes=1000,
    eos_token_ids=frozenset({3}),
    sampling_defaults={"temperature": 0.6},
)


def resolve(*, platform: str = "cpu", free: int = 10**6, **settings: Any) -> EngineConfig:
    def free_bytes(config: EngineConfig) -> int:
        assert config.num_blocks == config.kv_cache_bytes == 0
        return free

    args = EngineArgs(model="m", **settings)
    return resolve_config(
        args, FACTS, platform=platform, backend="xla", matmul_backend="xla", free_bytes=free_bytes
    )


def test_defaults_depend_on_the_device() -> None:
    cpu, gpu = resolve(), resolve(platform="gpu")
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 512)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 2048)
    assert cpu.num_blocks == CPU_KV_CACHE_BYTES // 1000
    assert gpu.num_blocks == 1000
    for config in (cpu, gpu):
        assert config.kv_cache_bytes == config.num_blocks * 1000
        assert config.max_model_len == 4096
        assert config.max_logprobs == 20
        assert config.cache_groups == FACTS.cache_groups
        assert config.eos_token_ids == {3}
        assert config.sampling_defaults == {"temperature": 0.6}
        # No more than all running sequences can fill: 256 blocks in each of two cache groups.
        assert config.num_swap_blocks == min(4 * 2**30 // 1000, config.max_num_seqs * 256 * 2)


def test_a_step_of_bfloat16_has_more_tokens_where_products_are_packed() -> None:
    for dtype, matmul_backend, budget in (("bfloat16", "onednn", 2048), ("bfloat16", "xla", 512)):
        facts = dataclasses.replace(FACTS, dtype=dtype)
        config = resolve_config(
            EngineArgs(model="m"),
            facts,
            platform="cpu",
            backend="native",
            matmul_backend=matmul_backend,
            free_bytes=lambda _: 0,
        )
        assert config.max_num_batched_tokens == budget


def test_settings_win() -> None:
    settings: dict[str, Any] = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "num_gpu_blocks_override": 9,
        "kv_cache_memory_bytes": 5000,
        "swap_space": 0,
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "preemption_mode": "swap",
        "scheduler_delay_factor": 0.5,
        "seed": 8,
    }
    for platform in ("cpu", "gpu"):
        config = resolve(platform=platform, **settings)
        for name in settings.keys() - {"num_gpu_blocks_override", "kv_cache_memory_bytes", "swap_space"}:
            assert getattr(config, name) == settings[name], name
        assert (config.num_blocks, config.num_swap_blocks) == (9, 0)
    assert resolve(platform="gpu", kv_cache_memory_bytes=5999).num_blocks == 5


@pytest.mark.parametrize(
    ("asked", "expected"), [(0, 0), (20, 20), (499, 499), (500, 500), (501, 500), (-1, 500)]
)
def test_max_logprobs(asked: int, expected: int) -> None:
    assert resolve(max_logprobs=asked).max_logprobs == expected


def test_whole_prompts_fit_a_step() -> None:
    assert resolve(enable_chunked_prefill=False).max_num_batched_tokens == 4096
    assert resolve(enable_chunked_prefill=False, max_model_len=100).max_num_batched_tokens == 512
    with pytest.raises(
        ValueError, match=r"`max_num_batched_tokens` must be .*enable_chunked_prefill=False, got 9"
    ):
        resolve(enable_chunked_prefill=False, max_num_batched_tokens=9)


def test_limits_that_do_not_fit_are_named() -> None:
    for length in (1, 4097):
        with pytest.raises(ValueError, match=rf"max_model_len.*{length}"):
            resolve(max_model_len=length)
    with pytest.raises(ValueError, match="large enough for two blocks of 1000"):
        resolve(kv_cache_memory_bytes=1999)
    with pytest.raises(ValueError, match="large enough for two blocks of 1000"):
        resolve(platform="gpu", free=1999)


def test_it_needs_no_jax() -> None:
    code = (
        "import sys, jax_paged.worker.loading.resolve_config, jax_paged.worker.executor; "
        "import jax_paged.worker.compilation.buckets; "
        "sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SMOLLM = dataclasses.replace(
    FACTS,
    dtype="float32",
    max_model_len=8192,
    cache_groups=(CacheGroup(),),
    block_bytes=16 * 30 * 2 * 3 * 64 * 4,
)


def resolve_pool(
    facts: ModelProperties, platform: str = "cpu", free: int = 0, **settings: Any
) -> EngineConfig:
    kernels = {"backend": "xla", "matmul_backend": "xla"}
    args = EngineArgs(model="m", **settings)
    return resolve_config(args, facts, platform=platform, free_bytes=lambda _: free, **kernels)


def usable_blocks(config: EngineConfig) -> int:
    return config.num_blocks - 1


def test_the_default_pool_holds_a_sequence_of_max_model_len(caplog: pytest.LogCaptureFixture) -> None:
    """256 MiB hold 5,824 tokens of SmolLM2-135M, whose texts have up to 8,192."""
    config = resolve_pool(SMOLLM)
    assert config.max_model_len == 8192
    assert usable_blocks(config) >= 8192 // 16
    windowed = dataclasses.replace(SMOLLM, cache_groups=(CacheGroup(), CacheGroup(window=100)))
    # A step writes max_num_batched_tokens before any block leaves the window.
    assert usable_blocks(resolve_pool(windowed)) >= (8192 + 100 + 512) // 16
    with_states = dataclasses.replace(SMOLLM, state_bytes=10**6)
    assert usable_blocks(resolve_pool(with_states)) >= 8192 // 16
    for size in (2, 3):
        stages = resolve_pool(SMOLLM, pipeline_parallel_size=size)
        assert usable_blocks(stages) >= 8192 // 16
    assert not caplog.records


def test_texts_are_shortened_to_what_a_default_pool_can_hold(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = dataclasses.replace(SMOLLM, max_model_len=10**6)
    monkeypatch.setattr(resolve_config_module, "host_memory_bytes", lambda: 2 * 2**30)
    for settings in ({}, {"platform": "gpu", "free": 2**29}):
        config = resolve_pool(long, **settings)
        assert config.kv_cache_bytes <= 2**29
        assert config.max_model_len == usable_blocks(config) * 16
        (record,) = caplog.records
        caplog.clear()
        message = record.getMessage()
        assert f"from 1000000 to {config.max_model_len}" in message
        assert "max_model_len=" in message
        (needed,) = re.findall(r"kv_cache_memory_bytes=(\d+)", message)
        whole = resolve_pool(long, kv_cache_memory_bytes=int(needed), **settings)
        assert (whole.max_model_len, usable_blocks(whole)) == (10**6, 10**6 // 16)
    # A pool of a given size is a choice: longer texts are refused one by one.
    assert resolve_pool(long, num_gpu_blocks_override=9).max_model_len == 10**6
    assert resolve_pool(long, kv_cache_memory_bytes=2**28).max_model_len == 10**6
    assert not caplog.records


def test_a_small_machine_gets_the_smallest_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve_config_module, "host_memory_bytes", lambda: 2**28)
    config = resolve_pool(SMOLLM)
    assert config.num_blocks == CPU_KV_CACHE_BYTES // SMOLLM.block_bytes
    assert config.max_model_len == usable_blocks(config) * 16


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**26 < host_memory_bytes() < 2**50

"""Resolution of EngineArgs into an EngineConfig that fits the model and the device. Does not need JAX."""

import dataclasses
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.engine_config import EngineConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup, max_blocks_held
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.speculation import Speculation

if TYPE_CHECKING:
    from jax_paged.models.features.pooling import PoolingSpec

_LOGGER = logging.getLogger(__name__)

# Default size of the KV cache on a CPU. If a sequence of max_model_len needs more, the KV cache is larger: at
# most vLLM's default for CPUs, and at most a fraction of the machine's memory.
CPU_KV_CACHE_BYTES = 256 * 2**20
_MAX_CPU_KV_CACHE_BYTES = 4 * 2**30
_CPU_KV_CACHE_SHARE = 1 / 4
# Number of token rows for which matrix products take as long as reading the weights. With oneDNN on two
# cores, the layers of a model with 120 M parameters take 5.2 ms for 1 row, 6.5 ms for 8 rows and 21.4 ms for
# 64 rows. The value for GPUs is calculated from an H100's 990 TFLOP/s in bfloat16 and 3.35 TB/s.
_FREE_ROWS_CPU, _FREE_ROWS_GPU = 16, 256
# Recurrent state slots per sequence: one for its state, and one for the checkpoint of a prefix.
_STATE_SLOTS_PER_SEQ = 2
# Maximum number of token slots in the KV cache. Slot numbers are int32.
MAX_SLOTS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelProperties:
    """Properties of a loaded model that determine the configuration of an engine.

    Args:
        architecture: The name under "architectures" in config.json.
        dtype: Dtype of weights and activations: "float32" or "bfloat16".
        vocab_size: Number of rows of the token embedding.
        max_model_len: Maximum number of tokens that the model supports.
        weight_bytes: Size of all weights (bytes).
        cache_groups: The cache groups of its layers.
        block_bytes: Size of one block in all KV cache arrays together (bytes); in a pipeline, of the stage
            with the largest blocks.
        eos_token_ids: End tokens of the model.
        sampling_defaults: Sampling parameters from generation_config.json, named as in SamplingParams.
        decoder_start_token_id: Start token of an encoder-decoder model; None for a decoder.
        pooling: How the model pools texts; None if it only generates tokens.
        state_bytes: Size of the recurrent states of one sequence in all layers (bytes).
        draft_cost: Cost of a pass of the draft model, as a fraction of the cost of a pass of this model.
    """

    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    weight_bytes: int
    cache_groups: tuple[CacheGroup, ...]
    block_bytes: int
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    decoder_start_token_id: int | None = None
    pooling: "PoolingSpec | None" = None
    state_bytes: int = 0
    draft_cost: float = 0.0


def resolve_config(
    args: EngineArgs,
    model: ModelProperties,
    *,
    platform: str,
    backend: str,
    matmul_backend: str,
    free_bytes: Callable[[EngineConfig], int],
) -> EngineConfig:
    """Returns the configuration of an engine: every setting resolved against the model and the device.

    Args:
        args: The user's arguments.
        model: Properties of the model.
        platform: The platform name in JAX: "cpu", "gpu" or another.
        backend: The attention backend.
        matmul_backend: The backend of matrix products.
        free_bytes: Returns the number of bytes that the device has free for the KV cache, given a
            configuration whose KV cache is empty. It is called only if no setting determines the size of the
            KV cache and the device is not a CPU.

    Raises:
        ValueError: If a limit does not fit the model or the other settings.
    """
    on_cpu = platform == "cpu"
    # With packed weights in bfloat16, a step with 2048 tokens takes about as long as one with 512 tokens in
    # float32.
    is_slow = on_cpu and not (model.dtype == "bfloat16" and matmul_backend == "onednn")
    limits = _token_limits(
        args, model, on_cpu=on_cpu, is_slow=is_slow, multiplies_in_xla=matmul_backend == "xla"
    )
    # These backends can compute each token row separately (AttentionMetadata.is_row_by_row). Cascade
    # attention is used with the same backends.
    supports_row_by_row = on_cpu and backend in ("native", "xla")
    if args.batch_invariant:
        allowed = "False unless attention runs on a CPU with attention_backend 'native' or 'xla'"
        check(supports_row_by_row, "batch_invariant", True, allowed)
    has_full_attention = any(g.window is None and not g.is_cross for g in model.cache_groups)
    can_share = supports_row_by_row and has_full_attention and not args.batch_invariant
    num_swap_blocks, num_swap_slots = _swap_size(args, model, limits)
    max_logprobs = model.vocab_size if args.max_logprobs == -1 else min(args.max_logprobs, model.vocab_size)
    config = EngineConfig(
        model_name=args.model,
        architecture=model.architecture,
        dtype=model.dtype,
        attention_backend=backend,
        matmul_backend=matmul_backend,
        vocab_size=model.vocab_size,
        max_model_len=limits.max_model_len,
        block_size=args.block_size,
        num_blocks=0,
        num_swap_blocks=num_swap_blocks,
        num_swap_state_slots=num_swap_slots,
        cache_groups=model.cache_groups,
        kv_cache_bytes=0,
        weight_bytes=model.weight_bytes,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_logprobs=max_logprobs,
        eos_token_ids=model.eos_token_ids,
        sampling_defaults=model.sampling_defaults,
        decoder_start_token_id=model.decoder_start_token_id,
        pooling=model.pooling,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        scheduling_policy=args.scheduling_policy,
        preemption_mode=args.preemption_mode,
        scheduler_delay_factor=args.scheduler_delay_factor,
        batch_invariant=args.batch_invariant,
        cascade_attention=can_share and not args.disable_cascade_attn,
        async_scheduling=args.async_scheduling,
        num_scheduler_steps=args.num_scheduler_steps,
        seed=args.seed,
        kv_cache_dtype=args.kv_cache_dtype,
        distributed_executor_backend=args.distributed_executor_backend,
        pipeline_parallel_size=args.pipeline_parallel_size,
        speculation=_speculation(args, model, limits.max_num_batched_tokens, on_cpu=on_cpu),
    )
    return _with_kv_cache_size(args, config, model, on_cpu, free_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TokenLimits:
    """The limits of an engine that determine the size of its steps; see EngineConfig."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


def _token_limits(
    args: EngineArgs, model: ModelProperties, *, on_cpu: bool, is_slow: bool, multiplies_in_xla: bool
) -> _TokenLimits:
    """Returns the requested limits, or their defaults.

    Raises:
        ValueError: If a limit does not fit the model or another limit.
    """
    max_model_len = model.max_model_len if args.max_model_len is None else args.max_model_len
    check_int("max_model_len", max_model_len, 2, model.max_model_len)
    max_num_seqs = args.max_num_seqs or (64 if on_cpu else 256)
    max_num_batched_tokens = args.max_num_batched_tokens or (512 if is_slow else 2048)
    if args.batch_invariant and args.max_num_batched_tokens is None and multiplies_in_xla:
        # Decode steps are padded to this number of tokens too (see plan_invariant_buckets). A small number
        # makes decoding fast, but prefill slow.
        max_num_batched_tokens = max_num_seqs
    if not args.enable_chunked_prefill:
        if args.max_num_batched_tokens is None:
            max_num_batched_tokens = max(max_num_batched_tokens, max_model_len)
        condition = "(max_model_len) with enable_chunked_prefill=False"
        check_int("max_num_batched_tokens", max_num_batched_tokens, max_model_len, condition=condition)
    return _TokenLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def _swap_size(args: EngineArgs, model: ModelProperties, limits: _TokenLimits) -> tuple[int, int]:
    """Returns the number of blocks and of recurrent state slots in host memory."""
    # Running sequences cannot hold more blocks than this, so more are never swapped.
    blocks_per_seq = -(-limits.max_model_len // args.block_size) * len(model.cache_groups)
    max_swapped = limits.max_num_seqs * blocks_per_seq
    swap_bytes = int(args.swap_space * 2**30)
    num_slots = _num_state_slots(model, swap_bytes, limits.max_num_seqs)
    swap_bytes -= num_slots * model.state_bytes
    return min(swap_bytes // model.block_bytes // args.pipeline_parallel_size, max_swapped), num_slots


def _with_kv_cache_size(
    args: EngineArgs,
    config: EngineConfig,
    model: ModelProperties,
    on_cpu: bool,
    free_bytes: Callable[[EngineConfig], int],
) -> EngineConfig:
    """Returns the configuration with the size of the KV cache.

    If the size is a default and the KV cache cannot hold a sequence of max_model_len, max_model_len is
    reduced.
    """
    num_blocks, num_slots = _kv_cache_size(args, config, model, on_cpu, free_bytes)
    num_bytes = num_blocks * model.block_bytes + num_slots * model.state_bytes
    config = dataclasses.replace(
        config, num_blocks=num_blocks, kv_cache_bytes=num_bytes, num_state_slots=num_slots
    )
    is_default = args.num_gpu_blocks_override is None and args.kv_cache_memory_bytes is None
    return _reduce_max_model_len(config, model) if is_default else config


def check_recurrent_args(args: EngineArgs) -> None:
    """Raises ValueError if an argument is not supported for models with recurrent states.

    Args:
        args: Arguments of the engine.

    Raises:
        ValueError: If an argument is not supported; the message contains the reason.
    """
    reason = "because the model has recurrent layers"
    given = args.speculative_config
    allowed = f"None {reason}, whose states cannot be restored when draft tokens are rejected"
    check(given is None, "speculative_config", given, allowed)
    allowed = f"False {reason}, whose rounding errors depend on how a prompt is divided into steps"
    check(not args.batch_invariant, "batch_invariant", args.batch_invariant, allowed)
    size = args.pipeline_parallel_size
    check(size == 1, "pipeline_parallel_size", size, f"1 {reason}, which cannot be split into stages")


def _speculation(
    args: EngineArgs, model: ModelProperties, max_num_batched_tokens: int, *, on_cpu: bool
) -> Speculation | None:
    given = args.speculative
    if given is None:
        return None
    check_int("max_num_batched_tokens", max_num_batched_tokens, 2, condition="with speculative_config")
    return Speculation(
        method=given.resolved_method,
        num_tokens=min(given.num_tokens, max_num_batched_tokens - 1),
        min_match=given.prompt_lookup_min,
        max_match=given.prompt_lookup_max,
        num_free_rows=_FREE_ROWS_CPU if on_cpu else _FREE_ROWS_GPU,
        model_cost=model.draft_cost,
        is_adaptive=given.adaptive,
    )


def _num_state_slots(model: ModelProperties, num_bytes: int, max_slots: int) -> int:
    """Returns the number of recurrent state slots, which take at most half of the given memory."""
    return min(max_slots, num_bytes // 2 // model.state_bytes) if model.state_bytes else 0


def host_memory_bytes() -> int:
    """Returns the memory of this machine, or the limit of its container (cgroup) if that is lower (bytes)."""
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    file = Path("/sys/fs/cgroup/memory.max")
    limit = file.read_text().strip() if file.is_file() else "max"
    return min(num_bytes, int(limit)) if limit.isdigit() else num_bytes


def _default_cpu_bytes(args: EngineArgs, config: EngineConfig, model: ModelProperties) -> int:
    """Returns the default size of the KV cache on a CPU (bytes).

    It is large enough for a sequence of max_model_len if that is within the limits.
    """
    num_engines, size = args.pipeline_parallel_size, config.block_size
    # A step writes all of its tokens before blocks that left the window are freed, so a group with a window
    # needs blocks for the tokens of one step in addition.
    step = config.max_num_batched_tokens
    num_blocks = 1 + sum(
        max_blocks_held(group, config.max_model_len, size, step) for group in config.cache_groups
    )
    needed = num_blocks * num_engines * model.block_bytes
    max_slots = 1 + _STATE_SLOTS_PER_SEQ * config.max_num_seqs
    # State slots get at most half of the memory, so with 2 * needed they can take as much as the blocks.
    needed += _num_state_slots(model, max(CPU_KV_CACHE_BYTES, 2 * needed), max_slots) * model.state_bytes
    share = int(host_memory_bytes() * _CPU_KV_CACHE_SHARE) // args.data_parallel_size
    return max(CPU_KV_CACHE_BYTES, min(needed, share, _MAX_CPU_KV_CACHE_BYTES))


def _reduce_max_model_len(config: EngineConfig, model: ModelProperties) -> EngineConfig:
    """Returns a configuration with max_model_len reduced to what the KV cache can hold, if necessary.

    The reduction rejects no prompt that the KV cache could hold.
    """

    def num_blocks(num_tokens: int) -> int:
        # An encoder's text is not limited by max_model_len, so a group with cross-attention counts as one
        # block.
        self_groups = [group for group in config.cache_groups if not group.is_cross]
        num_cross_groups = len(config.cache_groups) - len(self_groups)
        return num_cross_groups + sum(max_blocks_held(g, num_tokens, config.block_size) for g in self_groups)

    usable, requested = config.num_blocks - 1, config.max_model_len
    if num_blocks(requested) <= usable or num_blocks(2) > usable:
        return config
    fits, low, high = 2, 2, requested
    while low <= high:
        middle = (low + high) // 2
        if num_blocks(middle) <= usable:
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    num_engines = config.pipeline_parallel_size
    per_block = config.kv_cache_bytes / config.num_blocks if model.state_bytes else model.block_bytes
    needed = math.ceil((1 + num_blocks(requested)) * per_block) * num_engines
    _LOGGER.warning(
        "max_model_len is reduced from %d to %d tokens because the KV cache (%.2f GiB) cannot hold a longer "
        "sequence. Pass kv_cache_memory_bytes=%d or more to support %d tokens, or max_model_len=%d to avoid "
        "this warning",
        requested,
        fits,
        config.kv_cache_bytes / 2**30,
        needed,
        requested,
        fits,
    )
    return dataclasses.replace(config, max_model_len=fits)


def _kv_cache_size(
    args: EngineArgs,
    config: EngineConfig,
    model: ModelProperties,
    on_cpu: bool,
    free_bytes: Callable[[EngineConfig], int],
) -> tuple[int, int]:
    """Returns the number of blocks and of recurrent state slots, including the null block and slot 0."""
    block_bytes, max_slots = model.block_bytes, 1 + _STATE_SLOTS_PER_SEQ * config.max_num_seqs
    max_blocks, num_engines = MAX_SLOTS // args.block_size, args.pipeline_parallel_size
    if args.num_gpu_blocks_override is not None:
        limits = 2 * num_engines, max_blocks * num_engines
        check_int("num_gpu_blocks_override", args.num_gpu_blocks_override, *limits)
        return args.num_gpu_blocks_override // num_engines, max_slots if model.state_bytes else 0
    num_bytes = args.kv_cache_memory_bytes
    if num_bytes is None:
        num_bytes = _default_cpu_bytes(args, config, model) if on_cpu else free_bytes(config)
    num_slots = _num_state_slots(model, num_bytes, max_slots)
    num_blocks = (num_bytes - num_slots * model.state_bytes) // block_bytes // num_engines
    if model.state_bytes and num_slots < 2:
        allowed = f"at least {4 * model.state_bytes} (four times the recurrent state of a sequence)"
        raise ArgumentError("kv_cache_memory_bytes", num_bytes, allowed)
    if num_blocks < 2:
        each = "" if num_engines == 1 else f" for each of {num_engines} engines of the pipeline"
        allowed = f"large enough for two blocks of {block_bytes} bytes{each}"
        raise ArgumentError("kv_cache_memory_bytes", num_bytes, allowed)
    return min(num_blocks, max_blocks), num_slots

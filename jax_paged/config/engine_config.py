"""Configuration of an engine: its arguments, resolved by the worker against the model and the device."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from jax_paged.config.engine_args import ExecutorBackend, KVCacheDTypeName
from jax_paged.config.multimodal import ImageSettings
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.speculation import Speculation

if TYPE_CHECKING:
    from jax_paged.models.features.pooling import PoolingSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine, resolved against the model and the device.

    The worker creates the configuration when it loads the model. The configuration then never changes. It
    does not need JAX, so requests can be checked, scheduled and simulated in processes without JAX.

    Args:
        model_name: Value of EngineArgs.model.
        architecture: Name under "architectures" in the model's config.json.
        dtype: Data type of weights and activations: "float32" or "bfloat16".
        attention_backend: The attention backend.
        backend_reason: Why this attention backend was selected, for display.
        matmul_backend: The backend for multiplication with weights.
        vocab_size: Number of rows of the embedding table.
        max_model_len: Maximum number of tokens of a prompt and its output together.
        block_size: Number of tokens per block.
        num_blocks: Number of KV cache blocks, including the null block.
        num_swap_blocks: Number of blocks in host memory for swapped-out requests.
        cache_groups: Groups of layers; the layers of a group share one block table per sequence.
        num_state_slots: Number of slots for recurrent states on the device, including the unused slot 0.
        num_swap_state_slots: Number of slots for recurrent states in host memory.
        kv_cache_bytes: Size of the KV cache (bytes).
        weight_bytes: Size of all weights (bytes).
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step.
        max_logprobs: Maximum number of most likely tokens that a request may ask for.
        eos_token_ids: The model's end-of-sequence tokens.
        sampling_defaults: Sampling parameters from generation_config.json, by the names of SamplingParams.
        decoder_start_token_id: Start token of an encoder-decoder model's decoder; None for a decoder-only
            model.
        enable_prefix_caching: Value of EngineArgs.enable_prefix_caching.
        enable_chunked_prefill: Value of EngineArgs.enable_chunked_prefill.
        scheduling_policy: Value of EngineArgs.scheduling_policy.
        preemption_mode: Value of EngineArgs.preemption_mode.
        scheduler_delay_factor: Value of EngineArgs.scheduler_delay_factor.
        batch_invariant: Value of EngineArgs.batch_invariant.
        cascade_attention: Whether cascade attention may be used.
        async_scheduling: Value of EngineArgs.async_scheduling.
        num_scheduler_steps: Value of EngineArgs.num_scheduler_steps.
        seed: Value of EngineArgs.seed.
        kv_cache_dtype: Value of EngineArgs.kv_cache_dtype.
        hooks: Number of arguments of each hook, by name.
        capturing_hooks: Names of the hooks that capture values.
        logits_processors: Number of arguments of each logits processor, by name.
        stateful_processors: Names of the logits processors that keep a state per sequence.
        pooling: How the model pools texts; None if it only generates tokens.
        speculation: Settings of speculative decoding; None if it is off.
        max_loras: Value of EngineArgs.max_loras; 0 if adapters are disabled.
        max_lora_rank: Value of EngineArgs.max_lora_rank.
        max_cpu_loras: Number of adapters to keep in host memory.
        lora_layer_sizes: Input and output size of each linear layer that adapters may change, by its name in
            the checkpoint.
        prompt_embed_size: Size of a prompt's embedding vectors; 0 if prompts can't be embedding vectors.
        images: How prompts contain images; None if the model reads text only.
        distributed_executor_backend: Value of EngineArgs.distributed_executor_backend.
        pipeline_parallel_size: Value of EngineArgs.pipeline_parallel_size. num_blocks is the share of one
            engine.
    """

    model_name: str
    architecture: str
    dtype: str
    attention_backend: str
    matmul_backend: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_swap_blocks: int
    cache_groups: tuple[CacheGroup, ...]
    kv_cache_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    eos_token_ids: frozenset[int]
    sampling_defaults: dict[str, Any]
    decoder_start_token_id: int | None = None
    num_state_slots: int = 0
    num_swap_state_slots: int = 0
    backend_reason: str = ""
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] | None = None
    scheduler_delay_factor: float = 0.0
    batch_invariant: bool = False
    cascade_attention: bool = False
    async_scheduling: bool = True
    num_scheduler_steps: int = 1
    seed: int = 0
    kv_cache_dtype: KVCacheDTypeName = "auto"
    hooks: Mapping[str, int] = dataclasses.field(default_factory=dict)
    capturing_hooks: frozenset[str] = frozenset()
    logits_processors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stateful_processors: frozenset[str] = frozenset()
    pooling: "PoolingSpec | None" = None
    speculation: Speculation | None = None
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    lora_layer_sizes: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    prompt_embed_size: int = 0
    images: ImageSettings | None = None
    distributed_executor_backend: ExecutorBackend = "uni"
    pipeline_parallel_size: int = 1

"""The engine's settings: what a user passes (EngineArgs), checked once, before anything is allocated."""

import dataclasses
import math
import os
from typing import Any, Literal, get_args

from jax_paged.checks import check, check_choice, check_int, check_number
from jax_paged.core.cache_group import CacheGroup

AttentionBackend = Literal["auto", "pallas", "pallas_interpret", "xla"]
DTypeName = Literal["auto", "float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """What an engine is made from; the names are vLLM's.

    Args:
        model: "pagelet" (built in), a local folder in Hugging Face layout, or a hub id.
        tokenizer: Folder or hub id of the tokenizer; None takes the model's own.
        skip_tokenizer_init: True serves token ids only and loads no tokenizer.
        dtype: "auto" takes the checkpoint's dtype; else "float32" or "bfloat16".
        max_model_len: Most tokens of a prompt and its output together; None takes the model's own limit.
            Block tables, and the history that penalties read, are padded to it: a small limit is quicker.
        block_size: Tokens a block.
        gpu_memory_utilization: Share that weights, activations and pool may fill of the GPU memory that JAX
            has set aside (three quarters of the GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION says else).
        kv_cache_memory_bytes: Bytes of the pool; None takes what a GPU has left, and 256 MiB on a CPU.
        num_gpu_blocks_override: Blocks of the pool, null block included; wins over both settings above.
        swap_space: GiB of host memory for swapped-out blocks; taken as it is needed. 0: no swapping.
        max_num_seqs: Most sequences in one step; None takes 64 on a CPU, 256 on a GPU. A request with n
            samples or beams counts as n.
        max_num_batched_tokens: Token budget of one step; None takes 512 on a CPU, 2048 on a GPU, and at
            least max_model_len if prompts are not chunked.
        enable_prefix_caching: Whether requests share the full blocks of equal prefixes.
        enable_chunked_prefill: Whether a prompt may be computed over several steps, beside the tokens of
            running requests. False: whole prompts, in steps of their own that go first.
        scheduling_policy: "fcfs", first come first served; or "priority", lower values of a request's
            priority first, then first come first served.
        preemption_mode: How requests lose their blocks when these run out: "recompute", "swap" (to host
            memory), or None: requests with several sequences are swapped, others recomputed.
        delay_factor: New requests wait until the first of them has waited this many times as long as the
            last step with a prompt took; then more are computed together.
        tensor_parallel_size: Devices that one model is split over; 1.
        seed: Seed of requests that bring none.
        attention_backend: Which kernels attend: "pallas" (GPU), "pallas_interpret" (their CPU
            interpreter), "xla", or "auto".
        max_logprobs: Maximum most likely tokens that a request may ask for; -1 for the whole vocabulary.

    Raises:
        ValueError: If a value is out of range; the message names the argument, the value and the range.
    """

    model: str = "pagelet"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: DTypeName = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space: float = 4
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] | None = None
    delay_factor: float = 0.0
    tensor_parallel_size: int = 1
    seed: int = 0
    attention_backend: AttentionBackend = "auto"
    max_logprobs: int = 20

    def __post_init__(self) -> None:
        check(isinstance(self.model, str) and bool(self.model), "model", self.model, "a non-empty string")
        ok = self.tokenizer is None or (isinstance(self.tokenizer, str) and bool(self.tokenizer))
        check(ok, "tokenizer", self.tokenizer, "None or a non-empty string")
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "enable_chunked_prefill"):
            check_choice(name, getattr(self, name), (False, True))
        check_choice("dtype", self.dtype, get_args(DTypeName))
        check_choice("attention_backend", self.attention_backend, get_args(AttentionBackend))
        check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        check_choice("preemption_mode", self.preemption_mode, (None, "recompute", "swap"))
        check_choice("tensor_parallel_size", self.tensor_parallel_size, (1,))
        check_choice("block_size", self.block_size, (1, 2, 4, 8, 16, 32, 64, 128))
        for name, low in (
            ("max_model_len", 1),
            ("kv_cache_memory_bytes", 1),
            ("num_gpu_blocks_override", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
        ):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low)
        check_int("seed", self.seed, 0, 2**63 - 1)
        check_number("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, low_open=True)
        check_number("swap_space", self.swap_space, 0, math.inf)
        check_number("delay_factor", self.delay_factor, 0, math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine has come to: every setting resolved against the model and the device.

    Made once, by the executor, and never changed. Needs no JAX, so that requests can be checked, scheduled
    and simulated where none is.

    Args:
        model_name: As EngineArgs.model.
        architecture: The name under "architectures" in the model's config.json.
        dtype: Of weights and activations: "float32" or "bfloat16".
        backend: Which kernels attend.
        vocab_size: Rows of the embedding.
        max_model_len: Maximum tokens of a prompt and its output together.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool, null block included.
        num_swap_blocks: Blocks of host memory for requests that are swapped out.
        cache_groups: What the model's layers need of a sequence's past.
        kv_cache_bytes: Of the pool.
        weight_bytes: Of all weights.
        max_num_seqs: Maximum sequences in one step.
        max_num_batched_tokens: Token budget of one step.
        max_logprobs: Maximum most likely tokens that a request may ask for.
        eos_token_ids: The model's end tokens.
        sampling_defaults: What generation_config.json says of sampling, in the words of SamplingParams.
        decoder_start_token_id: Of an encoder-decoder model; None for a decoder.
        enable_prefix_caching: As EngineArgs; the next five as well.
    """

    model_name: str
    architecture: str
    dtype: str
    backend: str
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
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] | None = None
    delay_factor: float = 0.0
    seed: int = 0


def compilation_cache_dir() -> str:
    """Returns the folder that compiled steps are kept in between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, "jax-paged", "compiled")


def checks_inputs() -> bool:
    """Returns whether every kernel's arguments are checked on the host, which JAX_PAGED_CHECKS=1 asks for."""
    return os.environ.get("JAX_PAGED_CHECKS") == "1"

"""The engine's settings: what a user passes (EngineArgs), checked once, before anything is allocated."""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, get_args, get_origin, get_type_hints

from jax_paged.arguments.command_line import add_options, values_of
from jax_paged.arguments.ignored import ignores
from jax_paged.arguments.plain_values import make_plain
from jax_paged.config.ignored_args import IGNORED
from jax_paged.config.multimodal import ImageSettings, note_image_problems
from jax_paged.config.parallel import note_problems
from jax_paged.config.speculative import SpeculativeConfig
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.errors import Problems, check, check_choice, check_int, check_number
from jax_paged.pooling_params import PoolerConfig
from jax_paged.speculation import Speculation

if TYPE_CHECKING:
    from jax_paged.models.features.pooling import PoolingSpec

AttentionBackend = Literal["auto", "native", "pallas", "pallas_interpret", "xla"]
MatmulBackend = Literal["auto", "onednn", "xla"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
DTypeName = Literal["auto", "float32", "bfloat16"]
KVCacheDTypeName = Literal["auto", "fp8_e4m3", "int8"]
Quantization = Literal["awq", "compressed-tensors", "fp8", "gptq", "int8", "mxfp4"]
ExecutorBackend = Literal["uni", "mp", "ray", "external_launcher"]

# Values of kv_cache_dtype with another name than the dtype.
_CACHE_DTYPES = {"float8_e4m3fn": "fp8_e4m3"}

# Arguments for which vLLM's scripts may pass None to get the default.
_NONE_IS_DEFAULT = (
    *("block_size", "distributed_executor_backend", "distributed_timeout_seconds"),
    *("enable_chunked_prefill", "enable_prefix_caching", "seed"),
)


@ignores(IGNORED, none_is_default=_NONE_IS_DEFAULT)
@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """What an engine is made from; the names are vLLM's.

    Arguments of vLLM's that have no meaning here are accepted with one warning, if they would change no
    result (docs/vllm-compatibility.md lists them).

    Args:
        model: "pagelet" (built in), a local folder in Hugging Face layout, or a hub id.
        tokenizer: Folder or hub id of the tokenizer; None takes the model's own.
        skip_tokenizer_init: True serves token ids only and loads no tokenizer.
        dtype: "float32" or "bfloat16", or the dtype itself, such as jnp.bfloat16. "auto" takes the
            checkpoint's dtype, and bfloat16 for a checkpoint in float16 or in several types, with a warning.
        quantization: "int8" or "fp8" makes kernels of floats small as they are loaded (docs/quantization.md);
            of a quantised checkpoint, None or its own method.
        max_model_len: Maximum tokens of a prompt and its output together, at least 2; None takes the model's
            own limit. Block tables are padded to it: a small limit is quicker.
        block_size: Tokens per block.
        gpu_memory_utilization: Share that weights, activations and pool may fill of the GPU memory that JAX
            has set aside (three quarters of the GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise).
        kv_cache_memory_bytes: Bytes of the pool; None takes what a GPU has left, and on a CPU 256 MiB, or
            what a sequence of max_model_len needs if that is more (at most 4 GiB and a quarter of the
            memory). If such a pool holds no sequence of max_model_len, that is reduced, with a warning.
        kv_cache_dtype: What keys and values are kept as: "auto" is the dtype of the activations; "int8" and
            "fp8_e4m3" take a byte per number, and one more per token and kv head for a scale, so that the
            pool holds nearly twice the blocks of bfloat16 (not with the Pallas backends).
        num_gpu_blocks_override: Blocks of the pool, the null block included, whatever was set above.
        swap_space: GiB of host memory for swapped-out blocks, allocated as needed. 0 means no swapping.
        max_num_seqs: Maximum sequences in one step; None takes 64 on a CPU, 256 on a GPU. A request with n
            samples or beams counts as n.
        max_num_batched_tokens: Token budget of one step; None takes 512 on a CPU (2048 by oneDNN in
            bfloat16), 2048 on a GPU, and at least max_model_len if prompts are not chunked.
        max_logprobs: Maximum value of a request's logprobs and prompt_logprobs, and twice the maximum
            beam_width; -1 allows the vocabulary. Steps report that many tokens, so a large limit costs time.
        enable_prefix_caching: Whether requests share the full blocks of equal prefixes.
        enable_chunked_prefill: Whether a prompt may be computed over several steps, alongside the tokens of
            running requests. False computes whole prompts, in steps of their own that go first.
        scheduling_policy: "fcfs", first come first served; or "priority", lower values of a request's
            priority first, then first come first served.
        preemption_mode: How requests lose their blocks when these run out: "recompute", "swap" (to host
            memory), or None: requests with several sequences are swapped, others recomputed.
        scheduler_delay_factor: New requests wait until the first of them has waited this many times as long
            as the last step with a prompt took; then more are computed together.
        tensor_parallel_size: Devices that one model is divided among: each has some of its heads, of the
            columns of its other weights, and of the pool.
        pipeline_parallel_size: Stages that the layers of one model are cut into, each on tensor_parallel_size
            devices of its own. There are as many engines, which take turns on the stages; each has its own
            scheduler, and that share of the blocks (docs/scale.md).
        enable_expert_parallel: With several devices, whether each of them has some experts whole; else each
            has a part of every expert.
        distributed_executor_backend: Whose the devices are: "uni", this process's; "mp", those of processes
            that the engine starts on this machine, one for each, or for each stage; "ray", those of actors
            of Ray, on any machines of its cluster; "external_launcher", those of processes on any machines
            that torchrun, SLURM or Kubernetes has started (docs/several-devices.md).
        distributed_timeout_seconds: Seconds after which several processes count as lost that do not find
            each other, or take longer for a step.
        data_parallel_size: Engines with the same weights, each on devices of its own: LLM spreads lists over
            them, and the server requests (docs/scale.md).
        async_scheduling: Whether the next step begins before the host knows what the last one has drawn, so
            that the device never waits for it. A sequence then ends a step late on the device, which nobody
            sees but its successor.
        num_scheduler_steps: Decode steps that are done in one while no request waits (a burst): the host then
            is not needed in between, but tokens come that many at a time, and a newcomer waits for the end of
            the burst. 1 for none.
        speculative_config: How tokens are drafted, to be verified several in a step: a SpeculativeConfig or
            its fields, such as {"method": "ngram"}. Outputs stay what they are without. None drafts nothing.
        batch_invariant: Whether the tokens and log-probabilities of a request are the same to the bit
            whatever runs beside it, and however it is cut into chunks, preempted or served from the cache
            (on a CPU). Every step is then padded to the largest shape of its kind, and prompts attend token
            by token. The engine checks at its start that this holds: "auto" backends that fail are replaced
            by backends that pass, and it is an error if none do.
        disable_cascade_attn: Whether every sequence attends to all of its tokens by itself. False lets those
            that decode with leading blocks in common (samples, beams, cached prefixes) attend to these
            together where that pays; sums are then added up in another order. On a CPU, and neither with
            batch_invariant nor in layers with a window.
        max_compile_s: Seconds after which steps are padded to shapes that are compiled; None compiles all.
        seed: Determines the seeds of requests that bring none.
        runner: "pooling" has a model that draws tokens pool, too; "generate" has none pool; "auto" goes by
            the checkpoint: its architecture, and modules of sentence-transformers.
        pooler_config: How texts are pooled, a PoolerConfig or its fields; None is as the checkpoint says.
        hf_overrides: Fields in place of those of config.json, and of text_config and vision_config in it.
        logprobs_mode: Of which distribution log-probabilities are: "raw_logprobs", that of the model;
            "processed_logprobs", that which tokens are drawn from (of greedy requests, before temperature,
            min_p, top_k and top_p). Those of prompts are the model's.
        enable_lora: Whether requests may have adapters (docs/lora.md). Steps with adapters are programs of
            their own; those without any are what they are without this.
        max_loras: Adapters that run together: what a step may hold of different ones.
        max_lora_rank: The largest rank of an adapter; all take as much memory on the device.
        max_cpu_loras: Adapters kept in host memory beside those in use; None for 16 or max_loras, if more.
        enable_prompt_embeds: Whether prompts may be vectors in place of tokens, and adapters soft prompts.
        limit_mm_per_prompt: How many images a prompt may have, as {"image": 8}, which None stands for.
        mm_processor_kwargs: How large images are made smaller, such as {"max_pixels": 2**20}; None leaves it
            to preprocessor_config.json (docs/pictures.md).
        allowed_media_domains: A host that images may be fetched from, if a chat has a URL; none by default.
        encoder_cache_gb: GiB of host memory for vectors of images, beside those that running requests read.
        attention_backend: Which kernels attend: "native" (CPU, in C++), "pallas" (GPU), "pallas_interpret"
            (their CPU interpreter), "xla", or "auto": "native" on a CPU if it was built; "pallas" on a GPU if
            a check at the first start finds it right there, and no slower than "xla"; else "xla".
        matmul_backend: What multiplies by weights: "onednn" (CPU; packs them once), "xla", or "auto": oneDNN
            on a CPU where it is installed.

    Raises:
        ValueError: If a value is out of range; the message names the argument, the value and the range, for
            every argument that is wrong.
    """

    model: str = "pagelet"
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: DTypeName = "auto"
    quantization: Quantization | None = None
    max_model_len: int | None = None
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVCacheDTypeName = "auto"
    num_gpu_blocks_override: int | None = None
    swap_space: float = 4
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_logprobs: int = 20
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["recompute", "swap"] | None = None
    scheduler_delay_factor: float = 0.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: ExecutorBackend = "uni"
    distributed_timeout_seconds: float = 300
    data_parallel_size: int = 1
    async_scheduling: bool = True
    num_scheduler_steps: int = 1
    batch_invariant: bool = False
    disable_cascade_attn: bool = False
    max_compile_s: float | None = None
    seed: int = 0
    runner: Literal["auto", "generate", "pooling"] = "auto"
    pooler_config: PoolerConfig | dict[str, Any] | None = None
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None
    logprobs_mode: LogprobsMode = "raw_logprobs"
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    enable_prompt_embeds: bool = False
    limit_mm_per_prompt: dict[str, int] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    allowed_media_domains: tuple[str, ...] = ()
    encoder_cache_gb: float = 1.0
    attention_backend: AttentionBackend = "auto"
    matmul_backend: MatmulBackend = "auto"

    def __post_init__(self) -> None:
        for name, choices in (("dtype", get_args(DTypeName)), ("kv_cache_dtype", get_args(KVCacheDTypeName))):
            object.__setattr__(self, name, _dtype_name(getattr(self, name), choices))
        make_plain(self)
        problems = Problems()
        self._note_choices(problems.note)
        self._note_sizes(problems.note)
        problems.raise_if_any()

    def _note_choices(self, note: Callable[..., Any]) -> None:
        """Checks names, flags, choices and nested settings; `note` keeps what a check raises."""
        note(
            check, isinstance(self.model, str) and bool(self.model), "model", self.model, "a non-empty string"
        )
        ok = self.tokenizer is None or (isinstance(self.tokenizer, str) and bool(self.tokenizer))
        note(check, ok, "tokenizer", self.tokenizer, "None or a non-empty string")
        for name, hint in get_type_hints(type(self)).items():
            choices = _choices_of(hint)
            if choices is not None:
                note(check_choice, name, getattr(self, name), choices)
        note(PoolerConfig.of, self.pooler_config)
        note(SpeculativeConfig.of, self.speculative_config)
        ok = self.speculative_config is None or not self.batch_invariant
        allowed = "None with batch_invariant because tokens with drafts are computed in other shapes"
        note(check, ok, "speculative_config", self.speculative_config, allowed)
        ok = self.hf_overrides is None or isinstance(self.hf_overrides, dict)
        note(check, ok, "hf_overrides", self.hf_overrides, "None or a dict of fields of config.json")

    def _note_sizes(self, note: Callable[..., Any]) -> None:
        """Checks numbers; `note` keeps what a check raises."""
        note(check_choice, "block_size", self.block_size, (1, 2, 4, 8, 16, 32, 64, 128))
        for name, low in (
            ("max_model_len", 2),
            ("kv_cache_memory_bytes", 1),
            ("num_gpu_blocks_override", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
        ):
            if getattr(self, name) is not None:
                note(check_int, name, getattr(self, name), low)
        note(check_int, "max_logprobs", self.max_logprobs, -1)
        note_image_problems(self, note)
        note(check_int, "num_scheduler_steps", self.num_scheduler_steps, 1)
        note(check_int, "max_loras", self.max_loras, 1)
        note_problems(self, note)
        note(check_int, "max_lora_rank", self.max_lora_rank, 1)
        if self.max_cpu_loras is not None:
            low = self.max_loras if isinstance(self.max_loras, int) else 1
            note(check_int, "max_cpu_loras", self.max_cpu_loras, low)
        ok = self.num_scheduler_steps == 1 or not self.batch_invariant
        allowed = "1 with batch_invariant because several decode steps in one are another program"
        note(check, ok, "num_scheduler_steps", self.num_scheduler_steps, allowed)
        if self.max_compile_s is not None:
            note(check_number, "max_compile_s", self.max_compile_s, 0, math.inf)
        note(check_int, "seed", self.seed, 0, 2**63 - 1)
        note(check_number, "gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, low_open=True)
        note(check_number, "swap_space", self.swap_space, 0, math.inf)
        note(check_number, "scheduler_delay_factor", self.scheduler_delay_factor, 0, math.inf)

    @property
    def num_engines(self) -> int:
        """How many engines there are, each with a scheduler of its own."""
        return self.data_parallel_size * self.pipeline_parallel_size

    @property
    def pooler(self) -> PoolerConfig:
        """pooler_config as an object."""
        return PoolerConfig.of(self.pooler_config)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """speculative_config as an object."""
        return SpeculativeConfig.of(self.speculative_config)

    @staticmethod
    def add_cli_args[P: argparse.ArgumentParser](parser: P) -> P:
        """Adds an option per field to a parser, such as --max-model-len; returns the parser."""
        add_options(parser, EngineArgs)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the arguments from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If a value is out of range.
        """
        return cls(**values_of(args, EngineArgs))


def _choices_of(hint: Any) -> tuple[Any, ...] | None:
    """Returns the values that the type of a field allows; None if the type is none of bool,
    a Literal, and a Literal or None."""
    if hint is bool:
        return (False, True)
    if get_origin(hint) is Literal:
        return get_args(hint)
    first, *others = get_args(hint) or (None,)
    is_optional = get_origin(first) is Literal and others == [type(None)]
    return (None, *get_args(first)) if is_optional else None


def _dtype_name(value: Any, choices: tuple[str, ...]) -> Any:
    """Returns the name of a dtype in any form that `jnp.dtype` takes; other values are returned unchanged."""
    if value is None or (isinstance(value, str) and value in choices):
        return value
    import numpy as np  # only now: the help of the command line must not wait for it

    try:
        # NumPy finds the dtype of jnp.bfloat16 and the like by itself, so JAX need not be imported.
        name = np.dtype(value).name
    except (TypeError, ValueError):
        return value
    name = _CACHE_DTYPES.get(name, name)
    # The name of another dtype is for the message; of a string, that is the string itself.
    return name if name in choices or not isinstance(value, str) else value


class AsyncEngineArgs(EngineArgs):
    """EngineArgs as vLLM's scripts call it for AsyncLLMEngine, which has no settings of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of an engine, all resolved against the model and the device.

    Made once, by the executor, and never changed. Needs no JAX, so that requests can be checked, scheduled
    and simulated where none is.

    Args:
        model_name: As EngineArgs.model.
        architecture: The name under "architectures" in the model's config.json.
        dtype: Of weights and activations: "float32" or "bfloat16".
        backend: Which kernels attend.
        backend_reason: Why these.
        matmul_backend: What multiplies by weights.
        vocab_size: Rows of the embedding.
        max_model_len: Maximum tokens of a prompt and its output together.
        block_size: Tokens per block.
        num_blocks: Blocks of the pool, null block included.
        num_swap_blocks: Blocks of host memory for requests that are swapped out.
        cache_groups: What the model's layers need of a sequence's past.
        state_slots: Slots for states that layers keep, one unused included, and those in host memory.
        kv_cache_bytes: Size of the pool.
        weight_bytes: Size of all weights.
        max_num_seqs: Maximum sequences in one step.
        max_num_batched_tokens: Token budget of one step.
        max_logprobs: Maximum number of most likely tokens that a request may ask for.
        eos_token_ids: The model's end tokens.
        sampling_defaults: The sampling settings of generation_config.json, by the names of SamplingParams.
        decoder_start_token_id: Of an encoder-decoder model; None for a decoder.
        enable_prefix_caching: As EngineArgs.enable_prefix_caching; so are the fields that follow.
        scheduler_delay_factor: As EngineArgs.scheduler_delay_factor.
        cascade_attention: Whether sequences attend to leading blocks together where that pays.
        kv_cache_dtype: As EngineArgs.kv_cache_dtype.
        hooks: How many numbers each hook takes, by name.
        capturing: Names of the hooks that capture something.
        logits_processors: How many numbers each logits processor takes, by name.
        stateful: Names of those that keep something from token to token.
        pooling: What the model makes of texts; None if it only draws tokens.
        speculation: How tokens are drafted; None if none are.
        max_loras: As EngineArgs.max_loras; 0 if requests have no adapters.
        max_lora_rank: As EngineArgs.max_lora_rank; so is max_cpu_loras.
        lora_maps: Linear maps that adapters may change, by their names in the checkpoint: their sizes.
        embed_size: Numbers of a vector in place of a token; 0 if prompts have none.
        images: How prompts have images; None if the model reads text alone.
        distributed_executor_backend: As EngineArgs.distributed_executor_backend.
        pipeline_parallel_size: As EngineArgs.pipeline_parallel_size; the pool here is one engine's share.
    """

    model_name: str
    architecture: str
    dtype: str
    backend: str
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
    state_slots: tuple[int, int] = (0, 0)
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
    capturing: frozenset[str] = frozenset()
    logits_processors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    stateful: frozenset[str] = frozenset()
    pooling: "PoolingSpec | None" = None
    speculation: Speculation | None = None
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    lora_maps: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    embed_size: int = 0
    images: ImageSettings | None = None
    distributed_executor_backend: ExecutorBackend = "uni"
    pipeline_parallel_size: int = 1


def cache_dir(name: str) -> str:
    """Returns the folder of that name for what is kept between runs: "compiled" steps, "kernel-checks".

    It lies under XDG_CACHE_HOME, or ~/.cache. A user without a home directory has "/", as in containers.
    """
    home = os.path.expanduser("~")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("/" if home == "~" else home, ".cache")
    return os.path.join(base, "jax-paged", name)


def max_cache_bytes() -> float:
    """Returns the maximum size of the cache of compiled programs: JAX_PAGED_CACHE_GB (GiB), or 2 GiB.

    Raises:
        ValueError: If the variable is not a number, or negative.
    """
    given = os.environ.get("JAX_PAGED_CACHE_GB") or "2"
    try:
        size = float(given)
    except ValueError:
        size = math.nan
    check(size >= 0, "JAX_PAGED_CACHE_GB", given, "a number of GiB of at least 0, or 'inf' for no limit")
    return size * 2**30


def checks_inputs() -> bool:
    """Returns whether every kernel's arguments are checked on the host, which JAX_PAGED_CHECKS=1 asks for."""
    return os.environ.get("JAX_PAGED_CHECKS") == "1"


def api_key_of_environment() -> str | None:
    """Returns the key that clients of a server must send, JAX_PAGED_API_KEY; None if it is not set."""
    return os.environ.get("JAX_PAGED_API_KEY")

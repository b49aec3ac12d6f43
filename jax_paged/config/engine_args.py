"""Arguments of an engine, as passed by the user.

EngineArgs checks its values on construction, before anything is allocated. The functions at the end read
environment variables.
"""

import argparse
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from jax_paged.arguments.command_line import add_options, values_of
from jax_paged.arguments.ignored import ignores
from jax_paged.arguments.plain_values import make_plain
from jax_paged.config.ignored_args import IGNORED
from jax_paged.config.multimodal import check_image_args
from jax_paged.config.parallel import check_parallel_sizes
from jax_paged.config.speculative import SpeculativeConfig
from jax_paged.errors import Problems, check, check_choice, check_int, check_number
from jax_paged.pooling_params import PoolerConfig

AttentionBackend = Literal["auto", "native", "pallas", "pallas_interpret", "xla"]
MatmulBackend = Literal["auto", "onednn", "xla"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
DTypeName = Literal["auto", "float32", "bfloat16"]
KVCacheDTypeName = Literal["auto", "fp8_e4m3", "int8"]
Quantization = Literal["awq", "compressed-tensors", "fp8", "gptq", "int4", "int8", "mxfp4"]
ExecutorBackend = Literal["uni", "mp", "ray", "external_launcher"]

# NumPy names of dtypes that have another name in kv_cache_dtype.
_CACHE_DTYPES = {"float8_e4m3fn": "fp8_e4m3"}

# Arguments for which vLLM scripts may pass None to get the default.
_NONE_IS_DEFAULT = (
    *("block_size", "distributed_executor_backend", "distributed_timeout_seconds"),
    *("enable_chunked_prefill", "enable_prefix_caching", "seed"),
)


@ignores(IGNORED, none_is_default=_NONE_IS_DEFAULT)
@dataclasses.dataclass(frozen=True)
class EngineArgs:
    """Arguments of an engine; the names are vLLM's.

    vLLM arguments without a meaning in this engine are accepted with a warning if they can't change a result
    (docs/vllm-compatibility.md lists them).

    Example:
        >>> args = EngineArgs(model="pagelet", max_model_len=512, max_num_seqs=8)
        >>> engine = LLMEngine.from_engine_args(args)

    Args:
        model: "pagelet" (built in), "smollm2" (a model of 135 million parameters that is downloaded at its
            first use), a local folder in Hugging Face format, a GGUF file, or a model id on the Hugging Face
            Hub.
        tokenizer: Local folder or Hub id of the tokenizer; None uses the model's own.
        skip_tokenizer_init: Whether to load no tokenizer. Prompts are then token ids only, and outputs have
            no text.
        dtype: Data type of weights and activations: "float32", "bfloat16", or a dtype object such as
            jnp.bfloat16. "auto" uses the checkpoint's dtype; for a checkpoint in float16 or in several
            dtypes, it uses bfloat16 and logs a warning.
        quantization: "int4", "int8" or "fp8" quantizes the floating-point weights of linear layers while they
            are loaded; a quantized checkpoint is loaded with None or its own method (docs/quantization.md).
        max_model_len: Maximum number of tokens of a prompt and its output together, at least 2; None uses the
            model's limit. Block tables are padded to this length, so a small limit makes steps faster.
        block_size: Tokens per block: a power of two, at most 128.
        gpu_memory_utilization: Fraction of JAX's GPU memory that weights, activations and KV cache may use
            together. JAX reserves three quarters of the GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION
            is set.
        kv_cache_memory_bytes: Size of the KV cache on each device (bytes); None means the remaining memory of
            a GPU, or on a CPU 256 MiB (more if a sequence of max_model_len needs it, up to 4 GiB and a
            quarter of the memory). If a cache of this default size can't hold a sequence of max_model_len,
            max_model_len is reduced and a warning is logged.
        kv_cache_dtype: Data type of keys and values: "auto" is the dtype of the activations. "int8" and
            "fp8_e4m3" use one byte per number, plus one byte per token and KV head for a scale, so that the
            cache has nearly twice as many blocks as with bfloat16. All attention backends support them. Both
            require that all layers have the same number of KV heads and the same head size.
        num_gpu_blocks_override: Number of KV cache blocks, including the null block; overrides
            gpu_memory_utilization and kv_cache_memory_bytes.
        swap_space: Host memory for swapped-out blocks (GiB), allocated when needed; 0 disables swapping.
        max_num_seqs: Maximum number of sequences in a step; None means 64 on a CPU and 256 on a GPU. A
            request with n samples or n beams counts as n sequences.
        max_num_batched_tokens: Maximum number of tokens in a step (token budget); None means 2048 on a GPU
            and 512 on a CPU (2048 with oneDNN and bfloat16), and at least max_model_len if
            enable_chunked_prefill is False. With batch_invariant and XLA matrix products, None means
            max_num_seqs.
        max_logprobs: Maximum value of a request's logprobs and prompt_logprobs, and of twice its beam_width;
            -1 allows the whole vocabulary. Every step reports this number of most likely tokens, so a large
            limit makes steps slower.
        enable_prefix_caching: Whether requests share the full blocks of common prefixes.
        enable_chunked_prefill: Whether a prompt may be computed in chunks over several steps, together with
            tokens of running requests. If False, whole prompts are computed, in separate steps that run
            first.
        scheduling_policy: "fcfs" runs requests in order of arrival. "priority" runs requests with lower
            priority values first, and requests with equal values in order of arrival.
        preemption_mode: What happens to a request that is preempted because no KV cache block is free:
            "recompute" computes its tokens again later, "swap" moves its blocks to host memory; None swaps
            requests with several sequences and recomputes the others.
        scheduler_delay_factor: Maximum time for which new requests wait while others run, so that more
            prompts are computed together; a multiple of the duration of the last step with a prompt.
        tensor_parallel_size: Number of devices that the model is split across. Each device has a part of the
            attention heads, of the columns of other weights, and of the KV cache.
        pipeline_parallel_size: Number of pipeline stages. Each stage has some of the model's layers and its
            own tensor_parallel_size devices. There are as many engines as stages; they take turns on the
            stages, and each has its own scheduler and an equal share of the KV cache blocks (docs/scale.md).
        enable_expert_parallel: Whether the experts of a mixture-of-experts model are distributed as a whole
            among the devices. If False, each device has a part of every expert.
        distributed_executor_backend: Processes that own the devices. "uni": this process. "mp": processes
            that the engine starts on this machine, one per device or pipeline stage. "ray": Ray actors on any
            machines of the cluster. "external_launcher": processes on any machines that torchrun, SLURM or
            Kubernetes started (docs/several-devices.md).
        distributed_timeout_seconds: Maximum time for several processes to connect to each other, and for each
            of their steps (seconds). A process that takes longer is considered lost.
        data_parallel_size: Number of engines with the same weights, each on its own devices. LLM distributes
            lists of prompts among them, and the server distributes requests (docs/scale.md).
        async_scheduling: Whether to start a step before the host has received the tokens of the previous
            step, so that the device does not wait for the host. Outputs are the same, but a finished sequence
            keeps its batch slot for one more step.
        num_scheduler_steps: Number of decode steps that run on the device without the host while no request
            waits (multi-step decoding); LLM and run-batch use 8 by default. Tokens then arrive in groups of
            this size, and a new request waits for the end of a group. 1 disables multi-step decoding.
        speculative_config: Settings of speculative decoding: a SpeculativeConfig or a dict of its fields,
            such as {"method": "ngram"}. Outputs are the same as without it. None disables it.
        batch_invariant: Whether the tokens and log-probabilities of a request are bitwise the same in any
            batch, and with any chunks, preemptions and cached prefixes (CPU only). Every step is then padded
            to the largest shape of its type, and attention is computed separately for each prompt token. The
            engine checks this property when it starts. It replaces "auto" backends that fail the check, and
            raises an error if no backend passes.
        disable_cascade_attn: Whether to disable cascade attention, in which decoding sequences that start
            with the same blocks (samples, beams, cached prefixes) attend to these blocks together. Sums are
            then added in another order. It is only used if it is faster, on a CPU, without batch_invariant,
            and not in layers with a sliding window.
        max_compile_s: Time after which no further step shapes are compiled (seconds); steps are then padded
            to a compiled shape; None compiles all shapes.
        seed: Seed from which the engine derives seeds for requests without a seed.
        runner: "pooling" lets a model for text generation also compute embeddings; "generate" disables
            pooling. "auto" decides by the checkpoint's architecture and its sentence-transformers modules.
        pooler_config: How to pool the hidden states of a text: a PoolerConfig or a dict of its fields; None
            uses the checkpoint's settings.
        hf_overrides: Fields that replace fields of config.json, and of text_config and vision_config in it.
        logprobs_mode: Distribution of reported log-probabilities: "raw_logprobs" is the model's distribution,
            and "processed_logprobs" the distribution that tokens are sampled from (for greedy requests,
            before temperature, min_p, top_k and top_p). Log-probabilities of prompts are always raw.
        enable_lora: Whether requests may use adapters (docs/lora.md). Steps with adapters are separate
            programs; steps without adapters do not change.
        max_loras: Maximum number of different adapters in a step.
        max_lora_rank: Maximum rank of an adapter. Every adapter uses device memory for this rank.
        max_cpu_loras: Number of adapters to keep in host memory, in addition to adapters that requests are
            using; None means 16, or max_loras if that is larger.
        enable_prompt_embeds: Whether prompts may be embedding vectors instead of tokens, and whether adapters
            may be soft prompts.
        limit_mm_per_prompt: Maximum number of images in a prompt, such as {"image": 4}; None means 8 images.
        mm_processor_kwargs: Limits on the size that images are scaled to, such as {"max_pixels": 1048576};
            None uses preprocessor_config.json (docs/pictures.md).
        allowed_media_domains: Hosts from which images with a URL in a chat may be fetched, none by default;
            the command-line option is repeated for each host.
        encoder_cache_gb: Host memory for the embedding vectors of images (GiB), in addition to the
            vectors of running requests.
        attention_backend: Attention kernels: "native" (C++, on a CPU), "pallas" (on a GPU),
            "pallas_interpret" (the Pallas kernels in an interpreter, on a CPU) or "xla". "auto" selects
            "native" on a CPU if it was built; "pallas" on a GPU if a check at the first start finds it
            correct and not slower than "xla"; else "xla".
        matmul_backend: Backend for multiplication with weights: "onednn" (on a CPU; packs the weights once)
            or "xla". "auto" selects oneDNN on a CPU if it is installed.

    Raises:
        ValueError: If a value is out of range. The message names the argument, the value and the allowed
            range, for every argument that is wrong.
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
        """Checks names, flags, choices and nested settings.

        Args:
            note: Calls a check with arguments and stores its error, as Problems.note does.
        """
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
        allowed = "None with batch_invariant, which does not support speculative decoding"
        note(check, ok, "speculative_config", self.speculative_config, allowed)
        ok = self.hf_overrides is None or isinstance(self.hf_overrides, dict)
        note(check, ok, "hf_overrides", self.hf_overrides, "None or a dict of fields of config.json")

    def _note_sizes(self, note: Callable[..., Any]) -> None:
        """Checks numbers.

        Args:
            note: Calls a check with arguments and stores its error, as Problems.note does.
        """
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
        check_image_args(self, note)
        note(check_int, "num_scheduler_steps", self.num_scheduler_steps, 1)
        note(check_int, "max_loras", self.max_loras, 1)
        check_parallel_sizes(self, note)
        note(check_int, "max_lora_rank", self.max_lora_rank, 1)
        if self.max_cpu_loras is not None:
            low = self.max_loras if isinstance(self.max_loras, int) else 1
            note(check_int, "max_cpu_loras", self.max_cpu_loras, low)
        ok = self.num_scheduler_steps == 1 or not self.batch_invariant
        allowed = "1 with batch_invariant, which does not support multi-step decoding"
        note(check, ok, "num_scheduler_steps", self.num_scheduler_steps, allowed)
        if self.max_compile_s is not None:
            note(check_number, "max_compile_s", self.max_compile_s, 0, math.inf)
        note(check_int, "seed", self.seed, 0, 2**63 - 1)
        note(check_number, "gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, low_open=True)
        note(check_number, "swap_space", self.swap_space, 0, math.inf)
        note(check_number, "scheduler_delay_factor", self.scheduler_delay_factor, 0, math.inf)

    @property
    def num_engines(self) -> int:
        """The number of engines; each has its own scheduler."""
        return self.data_parallel_size * self.pipeline_parallel_size

    @property
    def pooler(self) -> PoolerConfig:
        """The pooling settings as an object."""
        return PoolerConfig.of(self.pooler_config)

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The settings of speculative decoding as an object; None without speculative decoding."""
        return SpeculativeConfig.of(self.speculative_config)

    @staticmethod
    def add_cli_args[P: argparse.ArgumentParser](parser: P) -> P:
        """Adds an option for each field to a parser, such as --max-model-len, and returns the parser.

        Example:
            >>> parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
            >>> args = EngineArgs.from_cli_args(parser.parse_args(["--max-model-len", "512"]))

        Args:
            parser: An ArgumentParser.
        """
        add_options(parser, EngineArgs)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Creates the arguments from parsed command-line options; other attributes of `args` are ignored.

        Args:
            args: The namespace returned by the parser.

        Raises:
            ValueError: If a value is out of range.
        """
        return cls(**values_of(args, EngineArgs))


def _choices_of(hint: Any) -> tuple[Any, ...] | None:
    """Returns the values that the type of a field allows.

    Args:
        hint: The type of the field.

    Returns:
        The values for bool, Literal and Literal | None; None for other types.
    """
    if hint is bool:
        return (False, True)
    if get_origin(hint) is Literal:
        return get_args(hint)
    first, *others = get_args(hint) or (None,)
    is_optional = get_origin(first) is Literal and others == [type(None)]
    return (None, *get_args(first)) if is_optional else None


def _dtype_name(value: Any, choices: tuple[str, ...]) -> Any:
    """Returns the name of a dtype.

    Args:
        value: A name or any object that np.dtype accepts, such as jnp.bfloat16. Other values are returned
            unchanged.
        choices: The allowed names.
    """
    if value is None or (isinstance(value, str) and value in choices):
        return value
    import numpy as np  # imported late because the command-line help does not need it

    try:
        # np.dtype accepts jnp.bfloat16 and similar objects, so JAX need not be imported.
        name = np.dtype(value).name
    except (TypeError, ValueError):
        return value
    name = _CACHE_DTYPES.get(name, name)
    # For a dtype that is not allowed, the error message shows its name; for a string, the string itself.
    return name if name in choices or not isinstance(value, str) else value


class AsyncEngineArgs(EngineArgs):
    """The same arguments as EngineArgs, under the name that vLLM scripts use for AsyncLLMEngine."""


def max_cache_bytes() -> float:
    """Returns the maximum size of the cache of compiled programs (bytes).

    The environment variable JAX_PAGED_CACHE_GB sets it (GiB); the default is 2 GiB.

    Raises:
        ValueError: If the variable is negative or not a number.
    """
    given = os.environ.get("JAX_PAGED_CACHE_GB") or "2"
    try:
        size = float(given)
    except ValueError:
        size = math.nan
    check(size >= 0, "JAX_PAGED_CACHE_GB", given, "a number of GiB of at least 0, or 'inf' for no limit")
    return size * 2**30


def checks_kernel_arguments() -> bool:
    """Returns True if JAX_PAGED_CHECKS=1 is set: the host then checks the arguments of every kernel."""
    return os.environ.get("JAX_PAGED_CHECKS") == "1"


def api_key_of_environment() -> str | None:
    """Returns the API key that clients of a server must send.

    It is the value of JAX_PAGED_API_KEY; None if the variable is not set.
    """
    return os.environ.get("JAX_PAGED_API_KEY")

"""The parts of an engine: its tokenizer, executor, configuration and scheduler; and how it is described."""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_paged.config.engine_args import EngineArgs, EngineConfig
from jax_paged.config.launch import launch_of_environment
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.sequence import SequenceGroup
from jax_paged.engine.distributed.multiprocess import ExternalExecutor, MultiprocessExecutor
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import check
from jax_paged.models.checkpoint import resolve_model_dir

if TYPE_CHECKING:
    from jax_paged.worker.executor import Executor


def make_tokenizer(args: EngineArgs) -> Tokenizer | None:
    """Returns the tokenizer that the arguments ask for; None if they ask for none.

    Raises:
        ValueError: If it can't be loaded.
    """
    return None if args.skip_tokenizer_init else Tokenizer(tokenizer_name(args))


def tokenizer_name(args: EngineArgs) -> str:
    """Returns the tokenizer's folder, or its own hub id, of which transformers loads no weights."""
    name = args.tokenizer
    if name is None or name == "pagelet" or Path(name).expanduser().is_dir():
        return str(resolve_model_dir(name or args.model))
    return name


def make_executor(args: EngineArgs) -> "Executor":
    """Returns the executor that the arguments ask for, of one engine: one of this process imports JAX.

    Raises:
        ValueError: If the model can't be loaded or a limit does not fit it.
        SystemExit: If a launcher has started this process to follow another, and that has ended.
    """
    backend = args.distributed_executor_backend
    if backend == "mp":
        return MultiprocessExecutor(args)
    if backend == "external_launcher":
        return ExternalExecutor(args, launch_of_environment())
    if backend == "ray":
        allowed, remedy = (
            "'uni', 'mp' or 'external_launcher' without Ray",
            ". Run pip install 'jax-paged[ray]'",
        )
        has_ray = importlib.util.find_spec("ray") is not None
        check(has_ray, "distributed_executor_backend", backend, allowed, remedy=remedy)
        from jax_paged.engine.distributed.ray_executor import RayExecutor

        return RayExecutor(args)
    return Executors().make(0, args)


class Executors:
    """Makes the executors of all engines, in the order of the engines.

    Args:
        *parts: The arguments of LocalExecutor after `args` that change steps.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        self._first: Any = None  # of the engines that share devices with the next one

    def make(self, engine: int, args: EngineArgs) -> "Executor":
        """Makes the executor of an engine; may be called again for the last one, with other arguments.

        One of this process imports JAX. The engines of a pipeline have the same devices.

        Args:
            engine: Its index.
            args: Model and limits.

        Raises:
            ValueError: As make_executor.
            SystemExit: As make_executor.
        """
        num_stages = args.pipeline_parallel_size
        if args.distributed_executor_backend == "uni" or self._parts:
            from jax_paged.worker.executor import LocalExecutor

            replica, follower = divmod(engine, num_stages)
            first_device = replica * num_stages * args.tensor_parallel_size
            beside = self._first if follower else None
            executor = LocalExecutor(args, *self._parts, first_device=first_device, beside=beside)
            self._first = beside or executor
            return executor
        if engine == 0:
            self._first = make_executor(args)
            return self._first
        assert isinstance(self._first, MultiprocessExecutor), "other processes have the devices"
        return MultiprocessExecutor(args, engine, self._first)


def check_alone(args: EngineArgs, allowed: str) -> None:
    """Checks that there is one engine.

    Args:
        args: Say how many.
        allowed: The allowed values, for the message.

    Raises:
        ValueError: If there are several.
    """
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        check(getattr(args, name) == 1, name, getattr(args, name), allowed)


def check_kernels(args: EngineArgs) -> tuple[str, bool]:
    """Checks kernels with the shapes of a model on this machine, and keeps the verdict, which `auto` goes by.

    Args:
        args: Name the model and the backend; "auto" stands for "pallas" here.

    Returns:
        What was found, as a table, and whether the kernels have passed.

    Raises:
        ValueError: If there is no such model.
    """
    from jax_paged.worker.loading.kernel_check import check_all, suites_of

    name = "pallas" if args.attention_backend == "auto" else args.attention_backend
    verdict = check_all(suites_of(args), candidate=name, is_anew=True)
    return verdict.table(), verdict.outcome == "passed"


def with_end_token(config: EngineConfig, tokenizer: Tokenizer | None) -> EngineConfig:
    """Adds the tokenizer's end token to the model's; one beyond the vocabulary can never be drawn."""
    token_id = tokenizer and tokenizer.eos_token_id
    if token_id is None or token_id >= config.vocab_size:
        return config
    return dataclasses.replace(config, eos_token_ids=config.eos_token_ids | {token_id})


# Makes the executor of an engine.
MakeExecutor = Callable[[EngineArgs], "Executor"]

# A scheduler of the user's own: a class in place of Scheduler, or the key that its requests are ordered by.
OwnScheduler = type[Scheduler] | Callable[[SequenceGroup], Any]


def make_scheduler(config: EngineConfig, own: OwnScheduler | None = None) -> Scheduler:
    """Returns a scheduler over an empty pool, of the user's own if there is one."""
    make, policy = own if isinstance(own, type) else Scheduler, config.scheduling_policy
    if own is not None and not isinstance(own, type):
        check(policy == "fcfs", "scheduling_policy", policy, "'fcfs' with a scheduler key, which replaces it")
        policy = own
    manager = BlockManager(
        config.num_blocks,
        config.block_size,
        config.enable_prefix_caching,
        groups=config.cache_groups,
        num_swap_blocks=config.num_swap_blocks,
        num_state_slots=config.state_slots[0],
        num_swap_state_slots=config.state_slots[1],
    )
    return make(
        block_manager=manager,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        policy=policy,
        preemption_mode=config.preemption_mode,
        enable_chunked_prefill=config.enable_chunked_prefill,
        delay_factor=config.delay_factor,
        burst_size=config.num_scheduler_steps,
        speculation=config.speculation,
        max_loras=config.max_loras,
    )


def described(config: EngineConfig, buckets: tuple[str, ...]) -> str:
    """Returns what an engine is made of, in one line.

    Args:
        config: Its settings.
        buckets: The names of its buckets, as its executor has them.
    """
    pool = f"{config.num_blocks} blocks of {config.block_size} tokens, {_size(config.kv_cache_bytes)}"
    if config.state_slots[0]:
        pool += f" and {config.state_slots[0] - 1} states"
    if config.kv_cache_dtype != "auto":
        pool += f" in {config.kv_cache_dtype}"
    model = f"{config.model_name} ({config.architecture}, {_size(config.weight_bytes)}), {config.dtype}"
    why = f" ({config.backend_reason})" if config.backend_reason else ""
    backends = f"backend {config.backend}{why}, products {config.matmul_backend}"
    return f"{model}, {backends}, pool {pool}, buckets {_grouped(buckets)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:.1f} GiB"


def _grouped(names: tuple[str, ...]) -> str:
    """Returns "decode 1", "decode 2", "mixed 64x8" as "decode 1 2, mixed 64x8"."""
    groups: dict[str, list[str]] = {}
    for name in names:
        kind, size = name.split(" ")
        groups.setdefault(kind, []).append(size)
    return ", ".join(" ".join([kind, *sizes]) for kind, sizes in groups.items())

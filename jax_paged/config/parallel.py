"""Checks of the numbers of devices, processes and engines in EngineArgs."""

from collections.abc import Callable
from typing import Any

from jax_paged.errors import check, check_int, check_number

# One day. Operating systems limit connection timeouts, in different ways.
MAX_TIMEOUT_S = 86_400

# Arguments that pipeline_parallel_size above 1 does not support: name, the only allowed value, and
# the unsupported feature.
_PIPELINE_RESTRICTIONS: tuple[tuple[str, Any, str], ...] = (
    ("num_scheduler_steps", 1, "multi-step decoding"),
    ("speculative_config", None, "speculative decoding"),
    ("enable_lora", False, "adapters"),
    ("enable_prompt_embeds", False, "prompt embeddings"),
)


def check_parallel_sizes(args: Any, note: Callable[..., Any]) -> None:
    """Checks the sizes of EngineArgs for parallel execution, and their combinations.

    Args:
        args: The EngineArgs.
        note: Calls a check with arguments and stores its error, as Problems.note does.
    """
    seconds = args.distributed_timeout_seconds
    note(check_number, "distributed_timeout_seconds", seconds, 0, MAX_TIMEOUT_S, low_open=True)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        note(check_int, name, getattr(args, name), 1)
    backend, size = args.distributed_executor_backend, args.data_parallel_size
    allowed = f"1 with distributed_executor_backend={backend!r}"
    note(check, size == 1 or backend == "uni", "data_parallel_size", size, allowed)
    is_supported = backend != "ray" or args.pipeline_parallel_size == 1
    allowed = "'uni', 'mp' or 'external_launcher' with pipeline_parallel_size above 1"
    note(check, is_supported, "distributed_executor_backend", backend, allowed)
    for name, only, feature in _PIPELINE_RESTRICTIONS if args.pipeline_parallel_size != 1 else ():
        value = getattr(args, name)
        allowed = f"{only!r} with pipeline_parallel_size above 1, which does not support {feature}"
        note(check, value == only, name, value, allowed)

"""The ranges of a scheduler's settings."""

import math
from typing import Any

from jax_paged.checks import check_choice, check_int, check_number


def check_limits(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    burst_size: int,
    max_loras: int,
    chunks: bool,
) -> None:
    """Checks how much a scheduler may do at a time; the names are those of its arguments.

    Args:
        chunks: Whether a prompt may be computed in parts.

    Raises:
        ValueError: If a value is out of range.
    """
    check_int("max_num_seqs", max_num_seqs, 1)
    check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
    check_int("max_model_len", max_model_len, 1)
    check_int("burst_size", burst_size, 1)
    check_int("max_loras", max_loras, 0)
    if not chunks:
        check_int("max_num_batched_tokens without chunked prefill", max_num_batched_tokens, max_model_len)


def check_order(policy: Any, preemption_mode: Any, watermark: float, delay_factor: float) -> None:
    """Checks who goes first and who gives way; the names are those of a scheduler's arguments.

    Raises:
        ValueError: If a value is out of range.
    """
    check_number("watermark", watermark, 0, 1)
    if not callable(policy):
        check_choice("policy", policy, ("fcfs", "priority"))
    check_choice("preemption_mode", preemption_mode, (None, "recompute", "swap"))
    check_number("delay_factor", delay_factor, 0, math.inf)

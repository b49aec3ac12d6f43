"""What was checked of a request, as the scheduler sees it."""

import copy
import dataclasses
import hashlib
import sys
from array import array
from collections.abc import Callable
from typing import Any

from jax_paged.checks import check
from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup
from jax_paged.engine.input_processor import CheckedRequest


def with_seed(request: CheckedRequest, new_seed: Callable[[], int]) -> CheckedRequest:
    """Returns a request that has a seed: its own, or a new one."""
    if request.params.seed is not None:
        return request
    params = copy.copy(request.params)  # dataclasses.replace would check all values again
    params.seed = new_seed()
    return dataclasses.replace(request, params=params)


def sequence_group(
    request_id: str, request: CheckedRequest, arrival_time: float, new_seed: Callable[[], int]
) -> SequenceGroup:
    """Returns a request as the scheduler sees it.

    Args:
        request_id: Its id.
        request: What was checked.
        arrival_time: In the engine's clock (seconds).
        new_seed: Returns a seed for a request that has none.
    """
    params, cache_salt = with_seed(request, new_seed).params, request.cache_salt
    if request.encoder_token_ids:
        # What the decoder has computed is of use only beside the same encoder output.
        cache_salt += hashlib.sha256(array("q", request.encoder_token_ids).tobytes()).hexdigest()
    if params.hook_args:
        cache_salt += f"\0{sorted(params.hook_args.items())}"  # they change what is computed
    # A soft prompt takes no slot: it is vectors alone.
    adapter = request.adapter.key if request.adapter and request.adapter.pairs else ""
    if adapter:
        cache_salt += f"\0adapter {adapter}"
    if request.embeds:
        cache_salt += f"\0embeds {hashlib.sha256(request.embeds.data).hexdigest()}"
    return SequenceGroup(
        request_id,
        [Sequence(request.prompt_token_ids, seed=params.seed or 0)],
        params,
        RequestMetrics(arrival_time),
        cache_salt,
        request.priority,
        request.beam_params,
        request.encoder_token_ids,
        adapter=adapter,
        prompt_embeds=request.embeds,
    )


def check_arrival_time(value: Any, now: float) -> None:
    """Raises ValueError unless a time is one that has passed, in the clock of time.monotonic()."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    ok = is_number and abs(value) <= sys.float_info.max
    check(ok, "arrival_time", value, "a finite number or None")
    allowed = f"at most {now}, the value of time.monotonic(); values of time.time() are on another clock"
    check(value <= now, "arrival_time", value, allowed)

"""What was checked of a request, as the scheduler sees it, and the state of its outputs."""

import copy
import dataclasses
import hashlib
import sys
import time
from array import array
from collections.abc import Callable
from typing import Any

from jax_paged.arguments.plain_values import plain
from jax_paged.core.request import Request, Sequence, SequenceGroup, SequenceStatus
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.output_processor import RequestState
from jax_paged.engine.replicas.prior_outputs import PriorOutput
from jax_paged.engine.sample_output import OutputSettings
from jax_paged.engine.text.tokenizer import Tokenizer
from jax_paged.errors import check
from jax_paged.outputs import RequestOutput

_ENDED = {"stop": SequenceStatus.FINISHED_STOPPED, "length": SequenceStatus.FINISHED_LENGTH_CAPPED}


def with_seed(request: CheckedRequest, new_seed: Callable[[], int]) -> CheckedRequest:
    """Returns a request that has a seed: its own, or a new one."""
    if request.params.seed is not None:
        return request
    params = copy.copy(request.params)  # dataclasses.replace would check all values again
    params.seed = new_seed()
    return request.with_params(params)


def request_state(
    request_id: str,
    request: CheckedRequest,
    arrival_time: float,
    new_seed: Callable[[], int],
    tokenizer: Tokenizer | None,
) -> RequestState:
    """Returns the state of a request that has not run here; what is given of its outputs is in it.

    Args:
        request_id: Its id.
        request: What was checked.
        arrival_time: In the engine's clock (seconds).
        new_seed: Returns a seed for a request that has none.
        tokenizer: The engine's; None if it has none.
    """
    values = dataclasses.replace(with_seed(request, new_seed).request, request_id=request_id)
    if not values.is_plain:
        values = dataclasses.replace(values, cache_salt=_extended_salt(values))
    group = SequenceGroup.of(values, arrival_time)
    if request.prior_outputs:
        group.sequences = _continued(values, request.prior_outputs)
    params = values.sampling_params
    settings = OutputSettings(tokenizer if params.detokenize else None, request.stop, request.grammar)
    state = RequestState(group, request.prompt, settings, request.encoder_prompt)
    state.adapter = request.adapter
    if request.prior_outputs:
        state.continue_from(request.prior_outputs)
    return state


def _extended_salt(request: Request) -> str:
    """Returns a salt under which a request shares blocks only with requests that compute the same."""
    cache_salt = request.cache_salt
    if request.encoder_token_ids:
        # The decoder's blocks depend on the encoder's output.
        cache_salt += hashlib.sha256(array("q", request.encoder_token_ids).tobytes()).hexdigest()
    if request.sampling_params.hook_args:
        cache_salt += f"\0{sorted(request.sampling_params.hook_args.items())}"
    if request.adapter:
        cache_salt += f"\0adapter {request.adapter}"
    if request.prompt_embeds:
        cache_salt += f"\0embeds {hashlib.sha256(request.prompt_embeds.data).hexdigest()}"
    return cache_salt


def _continued(request: Request, prior_outputs: tuple[PriorOutput, ...]) -> list[Sequence]:
    """Returns the sequences of a request that another engine has begun.

    Prior outputs are computed again as those of a preempted request. Each draw depends on the seed and the
    position alone, and prior tokens count as output, so the sequences continue as they would have there.
    """
    return [
        Sequence(
            request.prompt_token_ids,
            index,
            request.sampling_params.seed_of(index),
            list(prior.token_ids),
            SequenceStatus.WAITING if prior.finish_reason is None else _ENDED[prior.finish_reason],
            stop_reason=prior.stop_reason,
            # Log-probabilities are known only if they were requested; nothing reads these sums.
            cumulative_logprobs=[0.0] * len(prior.token_ids),
            stand_ins=request.stand_ins,
        )
        for index, prior in enumerate(prior_outputs)
    ]


def prior_output(request: CheckedRequest, request_id: str, tokenizer: Tokenizer | None) -> RequestOutput:
    """Returns what there is of a request that another engine has begun, as an engine would have told it."""
    output = request_state(request_id, request, time.monotonic(), lambda: 0, tokenizer).take_delta()
    # The first part has told them, if they were asked for: they are in no later one.
    output.prompt_logprobs = [None] * len(request.prompt_token_ids)
    return output


def check_arrival_time(value: Any, now: float) -> float:
    """Returns a time as a Python number.

    Raises:
        ValueError: If it is not a time of the clock of time.monotonic() that has passed.
    """
    value = plain(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    ok = is_number and abs(value) <= sys.float_info.max
    check(ok, "arrival_time", value, "a finite number or None")
    allowed = f"at most {now}, the value of time.monotonic() (time.time() is another clock)"
    check(value <= now, "arrival_time", value, allowed)
    return value

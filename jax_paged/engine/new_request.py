"""Creation of the engine's state for a request that has been checked."""

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
    """Returns the request with its own seed, or with a new one if it has none."""
    if request.params.seed is not None:
        return request
    params = copy.copy(request.params)  # dataclasses.replace would repeat all checks
    params.seed = new_seed()
    return request.with_params(params)


def request_state(
    request_id: str,
    request: CheckedRequest,
    arrival_time: float,
    new_seed: Callable[[], int],
    tokenizer: Tokenizer | None,
) -> RequestState:
    """Returns the initial state of a request, including prior outputs if another engine has begun it.

    Args:
        request_id: The id of the request.
        request: The checked request.
        arrival_time: Time of arrival, in the engine's clock (seconds).
        new_seed: Returns a seed for a request that has none.
        tokenizer: The engine's tokenizer; None if it has none.
    """
    engine_request = dataclasses.replace(with_seed(request, new_seed).request, request_id=request_id)
    if not engine_request.is_plain:
        engine_request = dataclasses.replace(engine_request, cache_salt=_salt_with_features(engine_request))
    group = SequenceGroup.from_request(engine_request, arrival_time)
    if request.prior_outputs:
        group.sequences = _prior_sequences(engine_request, request.prior_outputs)
    params = engine_request.sampling_params
    settings = OutputSettings(tokenizer if params.detokenize else None, request.stop, request.grammar)
    state = RequestState(group, request.prompt, settings, request.encoder_prompt)
    state.adapter = request.adapter
    if request.prior_outputs:
        state.continue_from(request.prior_outputs)
    return state


def _salt_with_features(request: Request) -> str:
    """Returns the cache salt, extended by inputs other than token ids that change keys and values.

    Only requests with equal inputs, hook arguments and adapter then share KV cache blocks. Images are not
    included because the prefix cache itself distinguishes them.
    """
    cache_salt = request.cache_salt
    if request.encoder_token_ids:
        # The keys and values of the decoder depend on the encoder's input.
        cache_salt += hashlib.sha256(array("q", request.encoder_token_ids).tobytes()).hexdigest()
    if request.sampling_params.hook_args:
        cache_salt += f"\0{sorted(request.sampling_params.hook_args.items())}"
    if request.adapter:
        cache_salt += f"\0adapter {request.adapter}"
    if request.prompt_embeds:
        cache_salt += f"\0embeds {hashlib.sha256(request.prompt_embeds.data).hexdigest()}"
    return cache_salt


def _prior_sequences(request: Request, prior_outputs: tuple[PriorOutput, ...]) -> list[Sequence]:
    """Returns the sequences of a request that another engine has begun.

    The prior output tokens are computed again, as after a preemption. Each random draw depends only on the
    seed and the position, and prior tokens count as output. So the sequences continue as they would have in
    the other engine.
    """
    return [
        Sequence(
            request.prompt_token_ids,
            index,
            request.sampling_params.seed_of(index),
            list(prior.token_ids),
            SequenceStatus.WAITING if prior.finish_reason is None else _ENDED[prior.finish_reason],
            stop_reason=prior.stop_reason,
            # The log-probabilities of prior tokens are not known here. The sums begin at 0, so the
            # cumulative_logprob of the continued output covers only the new tokens.
            cumulative_logprobs=[0.0] * len(prior.token_ids),
            placeholder_data=request.placeholder_data,
        )
        for index, prior in enumerate(prior_outputs)
    ]


def resumed_output(request: CheckedRequest, request_id: str, tokenizer: Tokenizer | None) -> RequestOutput:
    """Returns the prior outputs of a request that another engine has begun, as a RequestOutput."""
    output = request_state(request_id, request, time.monotonic(), lambda: 0, tokenizer).take_delta()
    # The client received prompt log-probabilities with the first event of the stream, if it asked for them.
    # They are not known here, so None takes the place of each of them.
    output.prompt_logprobs = [None] * len(request.prompt_token_ids)
    return output


def check_arrival_time(value: Any, now: float) -> float:
    """Returns an arrival time as a Python number.

    Args:
        value: The arrival time (seconds).
        now: The current value of time.monotonic() (seconds).

    Raises:
        ValueError: If the value is not a finite number, or is later than `now`.
    """
    value = plain(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    ok = is_number and abs(value) <= sys.float_info.max
    check(ok, "arrival_time", value, "a finite number or None")
    allowed = f"at most {now}, the current value of time.monotonic() (not time.time())"
    check(value <= now, "arrival_time", value, allowed)
    return value

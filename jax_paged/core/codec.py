"""Requests as values that JSON can hold, and back."""

import dataclasses
from typing import Any

from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup
from jax_paged.errors import ArgumentError
from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jax_paged.structured_outputs import StructuredOutputsParams


def values_of_request(group: SequenceGroup) -> dict[str, Any]:
    """Returns a request as it was added: its prompt and parameters, and nothing that has happened since."""
    params = dataclasses.asdict(group.sampling_params)
    if params["logits_processors"]:
        allowed = "None because functions can't be written down"
        raise ArgumentError("logits_processors", params["logits_processors"], allowed)
    if group.prompt_embeds is not None:
        raise ArgumentError("prompt", "prompt_embeds", "tokens because embeddings are not written down")
    if group.sequences[0].stand_ins:
        raise ArgumentError("prompt", "images", "text alone because images are not written down")
    bias = params["logit_bias"]
    params["logit_bias"] = None if bias is None else list(bias.items())  # JSON's keys are strings
    params["output_kind"] = params["output_kind"].name
    return {
        "request_id": group.request_id,
        "prompt_token_ids": group.sequences[0].prompt_token_ids,
        "sampling_params": params,
        "beam_params": group.beam_params and dataclasses.asdict(group.beam_params),
        "arrival_time": group.metrics.arrival_time,
        "cache_salt": group.cache_salt,
        "priority": group.priority,
        "encoder_token_ids": group.encoder_token_ids,
        "adapter": group.adapter,
    }


def request_of_values(values: dict[str, Any]) -> SequenceGroup:
    """Returns a new request of what values_of_request returned, perhaps by way of JSON."""
    given, beams = values["sampling_params"], values["beam_params"]
    bias, form = given["logit_bias"], given.get("structured_outputs")
    changes = {
        "logit_bias": None if bias is None else dict(bias),
        "output_kind": RequestOutputKind[given["output_kind"]],
        "structured_outputs": form and StructuredOutputsParams(**form),
    }
    params = SamplingParams(**(given | changes))
    return SequenceGroup(
        values["request_id"],
        [Sequence(values["prompt_token_ids"], seed=params.seed or 0)],
        params,
        RequestMetrics(values["arrival_time"]),
        values["cache_salt"],
        values["priority"],
        beams and BeamSearchParams(**beams),
        values["encoder_token_ids"],
        adapter=values.get("adapter", ""),
    )

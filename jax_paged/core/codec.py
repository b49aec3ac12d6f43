"""Conversion of requests to JSON-compatible values and back, for snapshots and recordings.

Messages to workers are pickled instead, because they may contain functions, embeddings and images.
"""

import dataclasses
from typing import Any

from jax_paged.core.request import Request, RequestFeatures
from jax_paged.errors import ArgumentError
from jax_paged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from jax_paged.structured_outputs import StructuredOutputsParams

# Version of the format. It changes with the structure of the values. Other versions cannot be read.
FORMAT = 2


def check_format(name: str, found: Any) -> None:
    """Checks the format number of a snapshot or a recording.

    Args:
        name: The argument that contains the snapshot or recording, for the error message.
        found: The format number.

    Raises:
        ValueError: If this version cannot read the format.
    """
    if found != FORMAT:
        remedy = ". Create it again with this version, or read it with the version that created it"
        raise ArgumentError(name, found, repr(FORMAT), aspect="the format of", remedy=remedy)


def request_to_json(request: Request) -> dict[str, Any]:
    """Converts a request to JSON-compatible values.

    Raises:
        ValueError: If the request contains functions, embeddings or images, which cannot be converted.
    """
    params, features = dataclasses.asdict(request.sampling_params), request.features
    if params["logits_processors"]:
        allowed = "None because functions cannot be saved"
        raise ArgumentError("logits_processors", params["logits_processors"], allowed)
    if features is not None and features.prompt_embeds is not None:
        raise ArgumentError("prompt", "prompt_embeds", "text or tokens because embeddings cannot be saved")
    if features is not None and features.placeholder_data:
        raise ArgumentError("prompt", "images", "text or tokens because images cannot be saved")
    saved = features and dataclasses.asdict(features)
    if saved is not None:
        saved["stand_ins"] = saved.pop("placeholder_data")  # the name of the field in this format
    bias = params["logit_bias"]
    params["logit_bias"] = None if bias is None else list(bias.items())  # keys of JSON objects are strings
    params["output_kind"] = params["output_kind"].name
    return {
        **{field.name: getattr(request, field.name) for field in dataclasses.fields(request)},
        "sampling_params": params,
        "features": saved,
    }


def request_from_json(values: dict[str, Any]) -> Request:
    """Converts the values of `request_to_json` back to a request. They may have been stored as JSON."""
    given, features = values["sampling_params"], values["features"]
    bias, grammar = given["logit_bias"], given["structured_outputs"]
    changes = {
        "logit_bias": None if bias is None else dict(bias),
        "output_kind": RequestOutputKind[given["output_kind"]],
        "structured_outputs": grammar and StructuredOutputsParams(**grammar),
    }
    if features is not None:
        beams = features["beam_params"]
        fields = features | {"beam_params": beams and BeamSearchParams(**beams)}
        fields.pop("stand_ins", None)  # always empty
        features = RequestFeatures(**fields)
    params = SamplingParams(**(given | changes))
    return Request(**(values | {"sampling_params": params, "features": features}))

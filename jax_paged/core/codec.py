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
        remedy = (
            f". Make it again with this version, which writes format {FORMAT}, or read it with the old one"
        )
        raise ArgumentError(name, found, repr(FORMAT), aspect="the format of", remedy=remedy)


def values_of_request(request: Request) -> dict[str, Any]:
    """Converts a request to JSON-compatible values.

    Raises:
        ValueError: If the request contains functions, embeddings or images, which cannot be converted.
    """
    params, features = dataclasses.asdict(request.sampling_params), request.features
    if params["logits_processors"]:
        allowed = "None because functions can't be written down"
        raise ArgumentError("logits_processors", params["logits_processors"], allowed)
    if features is not None and features.prompt_embeds is not None:
        raise ArgumentError("prompt", "prompt_embeds", "tokens because embeddings are not written down")
    if features is not None and features.stand_ins:
        raise ArgumentError("prompt", "images", "text alone because images are not written down")
    bias = params["logit_bias"]
    params["logit_bias"] = None if bias is None else list(bias.items())  # keys of JSON objects are strings
    params["output_kind"] = params["output_kind"].name
    return {
        **{field.name: getattr(request, field.name) for field in dataclasses.fields(request)},
        "sampling_params": params,
        "features": features and dataclasses.asdict(features),
    }


def request_of_values(values: dict[str, Any]) -> Request:
    """Converts the values of `values_of_request` back to a request. They may have been stored as JSON."""
    given, features = values["sampling_params"], values["features"]
    bias, grammar = given["logit_bias"], given["structured_outputs"]
    changes = {
        "logit_bias": None if bias is None else dict(bias),
        "output_kind": RequestOutputKind[given["output_kind"]],
        "structured_outputs": grammar and StructuredOutputsParams(**grammar),
    }
    if features is not None:
        beams = features["beam_params"]
        changed = {"beam_params": beams and BeamSearchParams(**beams), "stand_ins": ()}
        features = RequestFeatures(**(features | changed))
    params = SamplingParams(**(given | changes))
    return Request(**(values | {"sampling_params": params, "features": features}))

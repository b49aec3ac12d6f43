"""Structured output in the engine's steps: token masks before a step, and forced tokens after it."""

import dataclasses
from collections.abc import Iterator, Mapping

from jax_paged.core.request import Sequence, SequenceGroup
from jax_paged.core.result_updater import NewTokens
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.engine.features.structured_output.grammars import Matcher, token_masks
from jax_paged.engine.output_processor import RequestState


def with_token_masks(
    output: SchedulerOutput, scheduler: Scheduler, requests: Mapping[str, RequestState]
) -> SchedulerOutput:
    """Returns a step with the token masks of its requests that use structured output.

    Args:
        output: The step.
        scheduler: The scheduler that scheduled the step.
        requests: The engine's requests, by id.
    """
    matchers: dict[int, tuple[Matcher, list[int]]] = {}
    for i, sample in enumerate(output.samples):
        found = scheduler.find(sample.seq_id)
        if found is not None and found[0].sampling_params.structured_outputs is not None:
            group, seq = found
            matchers[i] = _matcher_of(group, seq, requests), seq.output_token_ids
    return dataclasses.replace(output, token_masks=token_masks(output, matchers)) if matchers else output


def forced_tokens(
    new_tokens: list[NewTokens], requests: Mapping[str, RequestState]
) -> Iterator[tuple[str, int, list[int]]]:
    """Yields the next tokens of running sequences whose grammar allows only one continuation.

    Args:
        new_tokens: The new tokens of a step.
        requests: The engine's requests, by id.

    Yields:
        The request id, the index of the sequence in its request, and the token ids.
    """
    for group, seq, _, _ in new_tokens:
        if group.sampling_params.structured_outputs is None or seq.status.is_finished:
            continue
        matcher = _matcher_of(group, seq, requests)
        matcher.follow(seq.output_token_ids)
        if token_ids := matcher.forced():
            yield group.request_id, group.sequences.index(seq), token_ids


def _matcher_of(group: SequenceGroup, seq: Sequence, requests: Mapping[str, RequestState]) -> Matcher:
    """Returns the matcher of a sequence."""
    matcher = requests[group.request_id].matcher_of(seq)
    assert matcher is not None, f"request {group.request_id} has no grammar matcher"
    return matcher

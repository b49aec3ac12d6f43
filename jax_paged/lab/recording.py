"""Writes down what a scheduler was told and what it decided; checks that it decides the same again."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from jax_paged.checks import check
from jax_paged.core.block_manager import BlockManager, CacheGroup
from jax_paged.core.runner_output import TokenLogprobs
from jax_paged.core.scheduler import Items, Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

Note = Callable[..., None]


class RecordedScheduler(Scheduler):
    """A scheduler that writes down all it is told, and each step, as lines of JSON.

    Args:
        like: Gives the settings, its own and its block manager's; the pool begins empty.
        sink: Takes each line, such as a file's `write` or a list's `append`.
    """

    def __init__(self, like: Scheduler, sink: Callable[[str], object]) -> None:
        def note(event: str, **values: Any) -> None:
            sink(json.dumps({"event": event, **values}) + "\n")

        settings = _settings(like)
        note("start", **settings)
        super().__init__(**_arguments(settings, lambda **kwargs: _RecordedBlockManager(note, **kwargs)))
        self._note = note

    def add(self, group: SequenceGroup) -> None:
        params = dataclasses.asdict(group.sampling_params)
        for name in ("logit_bias", "output_kind"):  # JSON can't hold them, and the scheduler reads neither
            del params[name]
        self._note(
            "add",
            request_id=group.request_id,
            prompt_token_ids=group.sequences[0].prompt_token_ids,
            sampling_params=params,
            beam_params=group.beam_params and dataclasses.asdict(group.beam_params),
            arrival_time=group.metrics.arrival_time,
            cache_salt=group.cache_salt,
            priority=group.priority,
            encoder_token_ids=group.encoder_token_ids,
        )
        super().add(group)

    def abort(self, request_id: str) -> SequenceGroup | None:
        self._note("abort", request_id=request_id)
        return super().abort(request_id)

    def finish(
        self,
        group: SequenceGroup,
        seq: Sequence,
        status: SequenceStatus,
        now: float,
        stop_reason: int | str | None = None,
    ) -> None:
        place = group.sequences.index(seq)
        values = {"status": status.name, "now": now, "stop_reason": stop_reason}
        self._note("finish", request_id=group.request_id, seq=place, **values)
        super().finish(group, seq, status, now, stop_reason)

    def schedule(self, now: float) -> SchedulerOutput:
        output = super().schedule(now)
        self._note("schedule", now=now, **decisions(output))
        return output

    def update(
        self, output: SchedulerOutput, token_ids: list[int], now: float, logprobs: Items[TokenLogprobs] = ()
    ) -> list[SequenceGroup]:
        of_beams = [row.group.beam_params for row in output.scheduled for _ in row.sampling]
        top = [
            [i, logprobs[i].top_token_ids, logprobs[i].top_logprobs]
            for i, beams in enumerate(of_beams)
            if beams
        ]
        self._note("update", token_ids=token_ids, now=now, top=top)
        return super().update(output, token_ids, now, logprobs)


class _RecordedBlockManager(BlockManager):
    def __init__(self, note: Note, **settings: Any) -> None:
        super().__init__(**settings)
        self._note = note

    def pin(self, name: str, token_ids: list[int], salt: str) -> int:
        self._note("pin", name=name, token_ids=token_ids, salt=salt)
        return super().pin(name, token_ids, salt)

    def unpin(self, name: str) -> None:
        self._note("unpin", name=name)
        super().unpin(name)


def decisions(output: SchedulerOutput) -> dict[str, list[Any]]:
    """Returns a step as plain values.

    Returns:
        The fields of SchedulerOutput. Requests are given by their ids, sequences by their place in the
        request, at the time of the step.
    """
    place = [row.group.sequences.index for row in output.scheduled]
    return {
        "scheduled": [
            [
                row.group.request_id,
                at(row.seq),
                row.start,
                row.num_tokens,
                row.block_tables,
                [*map(at, row.sampling)],
            ]
            for row, at in zip(output.scheduled, place, strict=True)
        ],
        "blocks_to_swap_out": [[*pair] for pair in output.blocks_to_swap_out],
        "blocks_to_swap_in": [[*pair] for pair in output.blocks_to_swap_in],
        "blocks_to_copy": [[*pair] for pair in output.blocks_to_copy],
        "to_encode": [[group.request_id, tables] for group, tables in output.to_encode],
        "preempted": [*output.preempted],
        "ended": [group.request_id for group in output.ended],
    }


def replay(lines: Iterable[str]) -> int:
    """Tells a fresh scheduler all that a recorded one was told, and checks that it decides the same.

    Args:
        lines: A recording from its start, such as an open file or a list.

    Returns:
        The number of steps.

    Raises:
        ValueError: If a decision differs; the message names the first step that does, and what differs. Or
            if the first line begins no recording.
    """
    scheduler, output, num_steps = None, None, 0
    groups: dict[str, SequenceGroup] = {}
    for event in map(json.loads, lines):
        kind = event.pop("event")
        if kind == "start":
            scheduler = Scheduler(**_arguments(event, BlockManager))
            continue
        check(scheduler is not None, "the first event", kind, "'start'")
        assert scheduler is not None, "just checked"
        if kind == "add":
            group = groups[event["request_id"]] = _group(event)
            scheduler.add(group)
        elif kind == "abort":
            scheduler.abort(**event)
        elif kind == "finish":
            group = groups[event.pop("request_id")]
            seq, status = group.sequences[event.pop("seq")], SequenceStatus[event.pop("status")]
            scheduler.finish(group, seq, status, **event)
        elif kind == "schedule":
            output = scheduler.schedule(event.pop("now"))
            _check_equal(f"step {num_steps}", decisions(output), event)
            num_steps += 1
        elif kind == "update":
            assert output is not None, "an update follows a step"
            logprobs = [TokenLogprobs(0.0, 0, [], [])] * len(event["token_ids"])
            for i, *top in event.pop("top"):
                logprobs[i] = TokenLogprobs(0.0, 0, *top)
            scheduler.update(output, **event, logprobs=logprobs)
        else:
            manager = scheduler.block_manager
            (manager.pin if kind == "pin" else manager.unpin)(**event)
    return num_steps


def _check_equal(step: str, decided: dict[str, list[Any]], recorded: dict[str, list[Any]]) -> None:
    for name, values in decided.items():
        for i, (value, other) in enumerate(itertools.zip_longest(values, recorded[name])):
            if value != other:
                raise ValueError(f"{step}: {name}[{i}] is {value}; recorded: {other}")


def _settings(scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    manager = scheduler.block_manager
    return {
        "block_manager": {
            "num_blocks": manager.pool.num_blocks,
            "block_size": manager.block_size,
            "enable_prefix_caching": manager.enable_prefix_caching,
            "groups": [dataclasses.asdict(group) for group in manager.groups],
            "num_swap_blocks": manager.swap_pool.num_usable,
        },
        "scheduler": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": scheduler.max_model_len,
            "eos_token_ids": sorted(scheduler.eos_token_ids),
            "watermark": scheduler.watermark,
            "policy": scheduler.policy,
            "preemption_mode": scheduler.preemption_mode,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "delay_factor": scheduler.delay_factor,
        },
    }


def _arguments(settings: dict[str, Any], make_manager: Callable[..., BlockManager]) -> dict[str, Any]:
    manager, arguments = settings["block_manager"], settings["scheduler"]
    groups = tuple(CacheGroup(**group) for group in manager["groups"])
    eos_token_ids = frozenset(arguments["eos_token_ids"])
    return arguments | {
        "block_manager": make_manager(**(manager | {"groups": groups})),
        "eos_token_ids": eos_token_ids,
    }


def _group(event: dict[str, Any]) -> SequenceGroup:
    params, beams = SamplingParams(**event["sampling_params"]), event["beam_params"]
    sequence = Sequence(event["prompt_token_ids"], seed=params.seed or 0)
    return SequenceGroup(
        event["request_id"],
        [sequence],
        params,
        RequestMetrics(event["arrival_time"]),
        event["cache_salt"],
        event["priority"],
        beams and BeamSearchParams(**beams),
        event["encoder_token_ids"],
    )

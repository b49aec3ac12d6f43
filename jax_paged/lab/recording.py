"""Writes down what a scheduler was told and what it decided; checks that it decides the same again."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from jax_paged.checks import check
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.cache_group import CacheGroup
from jax_paged.core.runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.core.sequence import RequestMetrics, Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.sequence_updater import StepUpdate
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

Note = Callable[..., None]


class RecordedScheduler(Scheduler):
    """A scheduler that writes down everything it is told, and every step it decides, as lines of JSON.

    Args:
        like: The scheduler whose settings are taken, and those of its block manager; the pool begins empty.
        sink: Called with each line, such as a file's `write` or a list's `append`.
    """

    def __init__(self, like: Scheduler, sink: Callable[[str], object]) -> None:
        ok = type(like) in (Scheduler, RecordedScheduler) and not callable(like.policy)
        check(ok, "scheduler", like, "the engine's own, as nobody else's decisions could be replayed")

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
        *,
        num_output_tokens: int | None = None,
    ) -> None:
        place = group.sequences.index(seq)
        values = {"now": now, "stop_reason": stop_reason, "num_output_tokens": num_output_tokens}
        self._note("finish", request_id=group.request_id, seq=place, status=status.name, **values)
        super().finish(group, seq, status, now, stop_reason, num_output_tokens=num_output_tokens)

    def schedule(self, now: float) -> SchedulerOutput:
        output = super().schedule(now)
        self._note("schedule", now=now, **decisions(output))
        return output

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        top = [
            [i, entry.top_token_ids, entry.top_logprobs]
            for i, entries in enumerate(result.logprobs)
            for entry in entries[:1]
            if entry.top_token_ids
        ]
        self._note(
            "update",
            step_id=output.step_id,
            now=now,
            token_ids=result.token_ids,
            logprobs=[[entry.logprob for entry in entries] for entries in result.logprobs],
            top=top,
            not_finite=[i for i, is_finite in enumerate(result.is_finite) if not is_finite],
        )
        return super().update(output, result, now)


class _RecordedBlockManager(BlockManager):
    def __init__(self, note: Note, **settings: Any) -> None:
        super().__init__(**settings)
        self._note = note

    def pin(self, name: str, token_ids: list[int], salt: str) -> int:
        num_tokens = super().pin(name, token_ids, salt)  # what fails is not to be replayed
        self._note("pin", name=name, token_ids=token_ids, salt=salt)
        return num_tokens

    def unpin(self, name: str) -> None:
        super().unpin(name)
        self._note("unpin", name=name)


def decisions(output: SchedulerOutput) -> dict[str, Any]:
    """Returns a step as values that JSON can hold.

    Returns:
        The fields of SchedulerOutput, with named tuples as lists. A new sequence is reduced to its ids, seed,
        output tokens and blocks: the rest was recorded when its request was added.
    """
    new = [[s.seq_id, s.request_id, s.seed, s.output_token_ids, s.block_tables] for s in output.new_sequences]
    fields = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return json.loads(json.dumps(fields | {"new_sequences": new}))


def replay(lines: Iterable[str]) -> int:
    """Tells a fresh scheduler everything that a recorded one was told, and checks that it decides the same.

    Args:
        lines: A recording from its start, such as an open file or a list.

    Returns:
        The number of steps.

    Raises:
        ValueError: If a decision differs; the message names the first such step, and what differs. Also if
            the first line is not the start of a recording.
    """
    scheduler, num_steps = None, 0
    outputs: dict[int, SchedulerOutput] = {}  # whose results have not been handed back yet
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
            output = outputs[event["step_id"]] = scheduler.schedule(event.pop("now"))
            _check_equal(f"step {num_steps}", decisions(output), event)
            num_steps += 1
        elif kind == "update":
            output = outputs.pop(event["step_id"])
            scheduler.update(output, _result(output, event), event["now"])
        else:
            manager = scheduler.block_manager
            (manager.pin if kind == "pin" else manager.unpin)(**event)
    return num_steps


def _result(output: SchedulerOutput, event: dict[str, Any]) -> ModelRunnerOutput:
    """Returns the recorded result of a step, as far as it affects the scheduler."""
    logprobs = [[TokenLogprobs(x, 0, [], []) for x in entries] for entries in event["logprobs"]]
    for i, top_token_ids, top_logprobs in event["top"]:
        logprobs[i][0] = dataclasses.replace(
            logprobs[i][0], top_token_ids=top_token_ids, top_logprobs=top_logprobs
        )
    is_finite = [i not in event["not_finite"] for i in range(len(output.scheduled))]
    return ModelRunnerOutput(
        output.step_id, event["token_ids"], logprobs, is_finite, [[]] * len(output.scheduled)
    )


def _check_equal(step: str, decided: dict[str, Any], recorded: dict[str, Any]) -> None:
    for name, value in decided.items():
        other = recorded[name]
        if value == other:
            continue
        if isinstance(value, list):
            pairs = enumerate(itertools.zip_longest(value, other))
            i, (value, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
            name = f"{name}[{i}]"
        raise ValueError(f"{step}: {name} is {value}; recorded: {other}")


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
            "burst_size": scheduler.burst_size,
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

"""Simulation of a recording's requests with another scheduler or other settings."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jax_paged.arguments.shown_values import one_of
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.codec import request_from_json
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import ArgumentError, check, check_int
from jax_paged.speculation import Speculation

REPLAYED_STEP_DTYPE = np.dtype(
    [
        ("time_s", np.float64),  # time at which it was scheduled
        ("num_tokens", np.int32),  # in multi-step decoding, for all decode steps
        ("num_prefill_tokens", np.int32),  # tokens of sequences that compute several tokens
        ("num_seqs", np.int32),
        ("num_decode_steps", np.int32),  # 1 without multi-step decoding
        ("num_running", np.int32),  # requests
        ("num_waiting", np.int32),
        ("num_swapped", np.int32),
        ("num_preemptions", np.int32),
        ("num_blocks_swapped", np.int32),  # swapped out or in
        ("num_blocks_used", np.int32),
        ("step_s", np.float64),
    ]
)
# Events for manual changes of steps, requests and weights. They have no meaning if the steps are different.
_MANUAL_EVENTS = ("edit_step", "edit_request", "draft", "forget_prefixes")
_NO_LOGPROBS = TokenLogprobs(0.0, 0, [], [])


@dataclasses.dataclass(frozen=True)
class Replay:
    """Result of a replay: steps and requests.

    Args:
        steps: One row per step, with the fields of REPLAYED_STEP_DTYPE.
        outputs: The scheduled steps.
        requests: The requests with their tokens and metrics, in order of arrival.
        max_logprob_difference: Maximum difference between recorded log-probabilities and log-probabilities
            that a device computed in the replay; None without a device.
    """

    steps: np.ndarray
    outputs: list[SchedulerOutput]
    requests: list[SequenceGroup]
    max_logprob_difference: float | None = None

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return len(self.steps)

    @property
    def num_output_tokens(self) -> np.ndarray:
        """The number of tokens in the longest output of each request."""
        return np.array([max(len(s.output_token_ids) for s in group.sequences) for group in self.requests])

    def times_s(self, event: str) -> np.ndarray:
        """Returns the time from arrival to an event for each request (seconds); NaN if it never happened.

        Args:
            event: A time of RequestMetrics, such as "first_token_time".
        """
        metrics = [group.metrics for group in self.requests]
        happened = np.array([getattr(m, event) for m in metrics], np.float64)
        return happened - np.array([m.arrival_time for m in metrics])

    def summary(self) -> dict[str, float]:
        """Returns key figures for comparing replays.

        Returns:
            Number of steps, mean number of tokens per step, number of preemptions, number of swapped blocks,
            sum of the step durations (busy_s), and mean times from arrival to the first token and to the end.
            The times are in seconds, and each mean is over the requests that reached the event.
        """
        steps = self.steps

        def mean(values: np.ndarray) -> float:
            return float(np.mean(values[~np.isnan(values)])) if not np.isnan(values).all() else float("nan")

        return {
            "steps": len(steps),
            "tokens_per_step": mean(steps["num_tokens"].astype(np.float64)),
            "preemptions": int(steps["num_preemptions"].sum()),
            "blocks_swapped": int(steps["num_blocks_swapped"].sum()),
            "busy_s": float(steps["step_s"].sum()),
            "to_first_token_s": mean(self.times_s("first_token_time")),
            "to_end_s": mean(self.times_s("finished_time")),
        }


@dataclasses.dataclass
class ReplayedRun:
    """Requests and steps of a run, collected while a recording is replayed or simulated.

    Args:
        groups: The requests, in order of arrival.
        steps: Rows of REPLAYED_STEP_DTYPE.
        outputs: The scheduled steps.
        tops: For beam searches, the most likely next tokens and their log-probabilities. The key is the index
            of the request in `groups` and the output tokens of a beam.
        max_logprob_difference: Maximum difference between recorded and recomputed log-probabilities; None
            without a device.
    """

    groups: list[SequenceGroup] = dataclasses.field(default_factory=list)
    steps: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    outputs: list[SchedulerOutput] = dataclasses.field(default_factory=list)
    tops: dict[tuple[int, tuple[int, ...]], TokenLogprobs] = dataclasses.field(default_factory=dict)
    max_logprob_difference: float | None = None

    def replay(self) -> Replay:
        """Returns the run as a Replay."""
        steps = np.array(self.steps, REPLAYED_STEP_DTYPE)
        return Replay(steps, self.outputs, self.groups, self.max_logprob_difference)


def step_row(output: SchedulerOutput, scheduler: Scheduler, now: float) -> tuple[Any, ...]:
    """Returns the row of REPLAYED_STEP_DTYPE for a step that was just scheduled, with a duration of 0."""
    queues, pool = scheduler.queues, scheduler.block_manager.pool
    return (
        now,
        sum(output.num_multi_step_tokens) or output.num_batched_tokens,
        sum(row.num_tokens for row in output.scheduled if row.num_tokens > 1),
        len(output.scheduled),
        max(output.num_multi_step_tokens, default=1),
        len(queues.running),
        len(queues.waiting),
        len(queues.swapped),
        len(output.preempted),
        len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in),
        pool.num_usable - pool.num_free,
        0.0,
    )


def scheduler_arguments(
    settings: dict[str, Any], make_manager: Callable[..., BlockManager] = BlockManager
) -> dict[str, Any]:
    """Returns the arguments for creating a Scheduler with recorded settings.

    Args:
        settings: The values of a "start" event.
        make_manager: Creates the block manager.
    """
    manager, arguments = settings["block_manager"], settings["scheduler"]
    groups = tuple(CacheGroup(**group) for group in manager["groups"])
    drafts = arguments.get("speculation")
    return arguments | {
        "block_manager": make_manager(**(manager | {"groups": groups})),
        "eos_token_ids": frozenset(arguments["eos_token_ids"]),
        "speculation": drafts and Speculation(**drafts),
    }


def what_if(
    events: list[dict[str, Any]],
    recorded: ReplayedRun,
    make: Callable[..., Scheduler],
    settings: dict[str, Any],
) -> Replay:
    """Runs the requests of a recording with another scheduler.

    Args:
        events: The recording.
        recorded: The run of the recorded scheduler.
        make: Creates the scheduler.
        settings: Settings of the scheduler or its block manager that replace the recorded values.

    Raises:
        ValueError: If a setting does not exist, a request does not fit the settings, or the recording
            contains manual edits of steps or requests, or weight updates.
    """
    new, clock = ReplayedRun(), 0.0
    time_model = _fit_step_times(np.array(recorded.steps, REPLAYED_STEP_DTYPE))
    for part in _split_recording(events):
        scheduler = make(**scheduler_arguments(_with_settings(part[0], settings)))
        clock = _WhatIf(recorded, new, scheduler, time_model).serve(part[1:], clock)
    return new.replay()


class _WhatIf:
    """New run of the requests in one part of a recording; the part starts with an empty scheduler.

    Args:
        recorded: The run of the recorded scheduler.
        new: Receives the new requests and steps.
        scheduler: The scheduler to use.
        time_model: Time per decode step, time per token, and minimum duration of a step (seconds).
    """

    def __init__(
        self,
        recorded: ReplayedRun,
        new: ReplayedRun,
        scheduler: Scheduler,
        time_model: tuple[float, float, float],
    ) -> None:
        self.recorded, self.new, self.scheduler, self.time_model = recorded, new, scheduler, time_model
        self.request_indices: dict[SequenceGroup, int] = {}
        self.current: dict[str, str] = {}  # recorded request id -> id of its latest request here
        # Recorded "finish" events, by index of the request and of the sequence. Stop strings end these
        # sequences.
        self.finishes: dict[tuple[int, int], dict[str, Any]] = {}

    def serve(self, events: list[dict[str, Any]], clock: float) -> float:
        """Runs all requests and returns the time at the end (seconds).

        Args:
            events: The events of this part after "start".
            clock: The time at the start (seconds).
        """
        scheduler, pending = self.scheduler, self._external_events(events)
        while pending or scheduler.has_unfinished:
            if not scheduler.has_unfinished:
                clock = max(clock, pending[0][0])
            # Prefixes are only pinned when no request is running, because the request that computes the
            # prefix has to finish first.
            while pending and pending[0][0] <= clock:
                if pending[0][1]["event"] == "pin" and scheduler.has_unfinished:
                    break
                self._apply(pending.popleft()[1])
            if scheduler.has_unfinished:
                clock = self._step(clock)
        return clock

    def _external_events(self, events: list[dict[str, Any]]) -> deque[tuple[float, dict[str, Any]]]:
        """Returns the events caused by users, each with the earliest time at which it may be applied."""
        pending: deque[tuple[float, dict[str, Any]]] = deque()
        clock, last, index, indices = 0.0, 0.0, len(self.new.groups), dict[str, int]()
        for event in events:
            kind = event["event"]
            if kind in _MANUAL_EVENTS:
                allowed = "a recording without manual edits or weight updates"
                raise ArgumentError("lines", kind, allowed)
            if kind in ("schedule", "update"):
                clock = event["now"]
            elif kind == "expect":
                continue  # refers to tokens at recorded steps, which may not exist here
            elif kind == "finish":
                self.finishes[indices[event["request_id"]], event["seq"]] = event
            else:
                if kind == "add":
                    indices[event["request_id"]] = index
                    index += 1
                last = max(last, event["arrival_time"] if kind == "add" else clock)
                pending.append((last, event))
        return pending

    def _apply(self, event: dict[str, Any]) -> None:
        values = {name: value for name, value in event.items() if name != "event"}
        scheduler, kind = self.scheduler, event["event"]
        if kind == "add":
            request_id = values["request_id"]
            if scheduler.queues.find(request_id) is not None:  # an earlier request with this id runs
                values["request_id"] = f"{request_id} ({len(self.new.groups)})"
            self.current[request_id] = values["request_id"]
            arrival_time, policy = values.pop("arrival_time"), scheduler.scheduling_policy
            group = SequenceGroup.from_request(request_from_json(values), arrival_time)
            name, length = f"requests[{request_id!r}]", len(group.sequences[0])
            most, aspect = scheduler.max_model_len - 1, "the number of prompt tokens of"
            check_int(name, length, 1, most, condition="(max_model_len - 1)", aspect=aspect)
            most, aspect = scheduler.max_num_seqs, "the number of sequences of"
            check_int(name, group.max_num_seqs, 1, most, condition="(max_num_seqs)", aspect=aspect)
            ok = policy != "fcfs" or not group.priority
            check(ok, f"{name}.priority", group.priority, "0 with scheduling_policy 'fcfs'")
            self.request_indices[group] = len(self.new.groups)
            self.new.groups.append(group)
            scheduler.add(group)
        elif kind == "abort":
            scheduler.abort(self.current[values["request_id"]])
        else:
            manager = scheduler.block_manager
            (manager.pin if kind == "pin" else manager.unpin)(**values)

    def _step(self, clock: float) -> float:
        scheduler, new = self.scheduler, self.new
        output = scheduler.schedule(clock)
        row = step_row(output, scheduler, clock)
        step_s = 0.0
        if output.scheduled:
            per_decode, per_token, least = self.time_model
            num_decode_steps = max(output.num_multi_step_tokens, default=1)
            step_s = max(per_decode * num_decode_steps + per_token * row[1], least)
        new.steps.append((*row[:-1], step_s))
        new.outputs.append(output)
        update = scheduler.update(output, self._result(output), clock + step_s)
        for group in update.changed:
            self._end(group, clock + step_s)
        return clock + step_s

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Returns the result of a step, with the tokens that the recorded sequences generated."""
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        for i, sample in enumerate(output.samples):
            found = self.scheduler.find(sample.seq_id)
            assert found is not None, f"sequence {sample.seq_id} of a scheduled step has no batch slot"
            group, seq = found
            counts, request_index = output.num_multi_step_tokens, self.request_indices[group]
            num_tokens = counts[i] if counts else 1
            if group.beam_params is not None:
                tokens.append([0])
                key = request_index, tuple(seq.output_token_ids)
                logprobs.append([self.recorded.tops.get(key, _NO_LOGPROBS)])
                continue
            drawn, first = self._recorded(request_index, seq.index), len(seq.output_token_ids)
            tokens.append(drawn[first : first + num_tokens] or [0])  # 0 past the recorded tokens; see _end
            logprobs.append([_NO_LOGPROBS] * len(tokens[-1]))
        num_rows = len(output.scheduled)
        return ModelRunnerOutput(output.step_id, tokens, logprobs, [True] * num_rows, [[]] * num_rows)

    def _recorded(self, request_index: int, index: int) -> list[int]:
        """Returns the output tokens of a sequence in the recording; empty if it has no such sequence."""
        seqs = self.recorded.groups[request_index].sequences
        return seqs[index].output_token_ids if index < len(seqs) else []

    def _end(self, group: SequenceGroup, now: float) -> None:
        """Ends sequences at recorded stop strings, and requests whose further tokens were not recorded."""
        request_index = self.request_indices[group]
        if group.beam_params is not None:
            return
        for seq in group.sequences:
            if seq.status.is_finished and len(seq.output_token_ids) > (
                n := len(self._recorded(request_index, seq.index))
            ):
                seq.truncate(n)  # remove the dummy token from `_result`
                seq.status = SequenceStatus.FINISHED_ABORTED
        for seq in group.unfinished:
            finish = self.finishes.get((request_index, seq.index))
            num_tokens = None if finish is None else finish["num_output_tokens"]
            if finish is not None and num_tokens is not None and len(seq.output_token_ids) >= num_tokens:
                status = SequenceStatus[finish["status"]]
                stop = finish["stop_reason"]
                self.scheduler.finish(group, seq, status, now, stop, num_output_tokens=num_tokens)
            elif len(seq.output_token_ids) >= (num_known := len(self._recorded(request_index, seq.index))):
                seq.truncate(num_known)
                self.scheduler.abort(group.request_id)
                group.metrics.finished_time = now
                return


def _split_recording(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the parts of a recording; each part begins with a "start" event."""
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    for start, stop in zip(starts, [*starts[1:], len(events)], strict=True):
        yield events[start:stop]


def _with_settings(start: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a "start" event with some of the settings replaced."""
    changed = {owner: dict(start[owner]) for owner in ("block_manager", "scheduler")}
    # The drafts that another scheduler would have verified are unknown, so speculative decoding is disabled.
    changed["scheduler"]["speculation"] = None
    fixed = ("groups", "speculation")
    changeable = {name: owner for owner, values in changed.items() for name in values if name not in fixed}
    for name, value in settings.items():
        if name not in changeable:
            raise ArgumentError("settings", name, one_of(sorted(changeable)), aspect="each name in")
        changed[changeable[name]][name] = value
    return changed


def _fit_step_times(steps: np.ndarray) -> tuple[float, float, float]:
    """Fits the model of step durations to recorded steps.

    The sum of absolute errors is minimized, so that a few steps with a pause of the machine have little
    influence.

    Args:
        steps: Recorded steps, with the fields of REPLAYED_STEP_DTYPE.

    Returns:
        Time per decode step, time per token, and duration of the shortest step (seconds).

    Source: iteratively reweighted least squares; Schlossmacher, JASA 68(344), 1973.
    """
    steps = steps[(steps["num_tokens"] > 0) & (steps["step_s"] > 0)]
    if not len(steps):
        return 0.0, 0.0, 0.0
    columns = np.stack([steps["num_decode_steps"], steps["num_tokens"]], axis=1).astype(np.float64)
    seconds, weights = steps["step_s"], np.ones(len(steps))
    fit = np.zeros(2)
    for _ in range(50):
        fit = np.linalg.lstsq(columns * weights[:, None], seconds * weights, rcond=None)[0]
        weights = np.maximum(abs(columns @ fit - seconds), 1e-3 * seconds.min()) ** -0.5
    return float(fit[0]), float(fit[1]), float(seconds.min())

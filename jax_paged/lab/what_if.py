"""What another scheduler would have decided for the requests of a recording."""

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

STEP = np.dtype(
    [
        ("time_s", np.float64),  # when it was scheduled
        ("num_tokens", np.int32),  # of a burst, in all of its decode steps
        ("num_prefill_tokens", np.int32),  # of sequences that compute more than one
        ("num_seqs", np.int32),
        ("num_decodes", np.int32),  # decode steps in one, of a burst
        ("num_running", np.int32),  # requests
        ("num_waiting", np.int32),
        ("num_swapped", np.int32),
        ("num_preemptions", np.int32),
        ("num_blocks_swapped", np.int32),  # out and in
        ("num_blocks_used", np.int32),
        ("step_s", np.float64),
    ]
)
# What a user did to steps, requests and weights, which would be another thing in other steps.
_BY_HAND = ("edit_step", "edit_request", "draft", "forget_prefixes")
_NO_LOGPROBS = TokenLogprobs(0.0, 0, [], [])


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a scheduler has decided, and when requests were served.

    Args:
        steps: One row per step, with the fields of STEP.
        outputs: The steps as they were decided.
        requests: In the order in which they came, with their tokens and metrics.
        max_logprob_difference: Between the log-probabilities of tokens that a device has computed again and
            the recorded ones; None if none has.
    """

    steps: np.ndarray
    outputs: list[SchedulerOutput]
    requests: list[SequenceGroup]
    max_logprob_difference: float | None = None

    @property
    def num_steps(self) -> int:
        """How many steps there were."""
        return len(self.steps)

    @property
    def num_output_tokens(self) -> np.ndarray:
        """Tokens of the longest output of each request."""
        return np.array([max(len(s.output_token_ids) for s in group.sequences) for group in self.requests])

    def times_s(self, event: str) -> np.ndarray:
        """Returns the seconds from each arrival to an event, such as "first_token_time"; NaN for never."""
        metrics = [group.metrics for group in self.requests]
        happened = np.array([getattr(m, event) for m in metrics], np.float64)
        return happened - np.array([m.arrival_time for m in metrics])

    def summary(self) -> dict[str, float]:
        """Returns what replays are compared by; times are means over the requests that got so far."""
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
    """Requests and steps of a recording that has been replayed.

    Args:
        groups: Its requests, in the order in which they came.
        steps: Rows of STEP.
        outputs: The steps.
        tops: Of beam searches, the likeliest next tokens and their log-probabilities, by the place of the
            request in `groups` and the output tokens of a beam.
        max_logprob_difference: Between a device's log-probabilities of tokens and the recorded ones.
    """

    groups: list[SequenceGroup] = dataclasses.field(default_factory=list)
    steps: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    outputs: list[SchedulerOutput] = dataclasses.field(default_factory=list)
    tops: dict[tuple[int, tuple[int, ...]], TokenLogprobs] = dataclasses.field(default_factory=dict)
    max_logprob_difference: float | None = None

    def replay(self) -> Replay:
        """Returns it as the result of a replay."""
        return Replay(np.array(self.steps, STEP), self.outputs, self.groups, self.max_logprob_difference)


def step_row(output: SchedulerOutput, scheduler: Scheduler, now: float) -> tuple[Any, ...]:
    """Returns the row of STEP for a step that was just scheduled; how long it takes is not known yet."""
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


def arguments_of(
    settings: dict[str, Any], make_manager: Callable[..., BlockManager] = BlockManager
) -> dict[str, Any]:
    """Returns the arguments of a Scheduler, from the values of a recording's start."""
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
    """Serves the requests of a recording with another scheduler.

    Args:
        events: The recording.
        recorded: The run of the recorded scheduler.
        make: Makes the scheduler.
        settings: Of the scheduler or its block manager, in place of the recorded ones.

    Raises:
        ValueError: If a setting does not exist, a request does not fit it, or a step was edited by hand.
    """
    new, clock = ReplayedRun(), 0.0
    seconds = _fitted(np.array(recorded.steps, STEP))
    for part in _parts(events):
        scheduler = make(**arguments_of(_changed(part[0], settings)))
        clock = _WhatIf(recorded, new, scheduler, seconds).serve(part[1:], clock)
    return new.replay()


class _WhatIf:
    """Serves the requests of one part of a recording, which begins with an empty scheduler.

    Args:
        recorded: The run of the recorded scheduler.
        new: Takes what happens now.
        scheduler: Decides.
        seconds: Per decode step, per token, and of the quickest step.
    """

    def __init__(
        self,
        recorded: ReplayedRun,
        new: ReplayedRun,
        scheduler: Scheduler,
        seconds: tuple[float, float, float],
    ) -> None:
        self.recorded, self.new, self.scheduler, self.seconds = recorded, new, scheduler, seconds
        self.places: dict[SequenceGroup, int] = {}
        self.current: dict[str, str] = {}  # the id here of the last request of a recorded id
        # Of sequences that a stop string has ended: by request and index, the event.
        self.finishes: dict[tuple[int, int], dict[str, Any]] = {}

    def serve(self, events: list[dict[str, Any]], clock: float) -> float:
        """Serves all requests; returns the time of the end."""
        scheduler, coming = self.scheduler, self._coming(events)
        while coming or scheduler.has_unfinished:
            if not scheduler.has_unfinished:
                clock = max(clock, coming[0][0])
            # A prefix is pinned while nothing runs, as its own request has to be done.
            while coming and coming[0][0] <= clock:
                if coming[0][1]["event"] == "pin" and scheduler.has_unfinished:
                    break
                self._apply(coming.popleft()[1])
            if scheduler.has_unfinished:
                clock = self._step(clock)
        return clock

    def _coming(self, events: list[dict[str, Any]]) -> deque[tuple[float, dict[str, Any]]]:
        """Returns what happens from outside, each event with the time from which on it may happen."""
        coming: deque[tuple[float, dict[str, Any]]] = deque()
        clock, last, place, places = 0.0, 0.0, len(self.new.groups), dict[str, int]()
        for event in events:
            kind = event["event"]
            if kind in _BY_HAND:
                allowed = "one that no user has caused by hand"
                raise ArgumentError("lines", kind, allowed, aspect="each event of")
            if kind in ("schedule", "update"):
                clock = event["now"]
            elif kind == "expect":
                continue  # what follows the tokens at steps that may not come
            elif kind == "finish":
                self.finishes[places[event["request_id"]], event["seq"]] = event
            else:
                if kind == "add":
                    places[event["request_id"]] = place
                    place += 1
                last = max(last, event["arrival_time"] if kind == "add" else clock)
                coming.append((last, event))
        return coming

    def _apply(self, event: dict[str, Any]) -> None:
        values = {name: value for name, value in event.items() if name != "event"}
        scheduler, kind = self.scheduler, event["event"]
        if kind == "add":
            request_id = values["request_id"]
            if scheduler.queues.find(request_id) is not None:  # an earlier one of this id still runs
                values["request_id"] = f"{request_id} ({len(self.new.groups)})"
            self.current[request_id] = values["request_id"]
            arrival_time, policy = values.pop("arrival_time"), scheduler.scheduling_policy
            group = SequenceGroup.from_request(request_from_json(values), arrival_time)
            name, length = f"requests[{request_id!r}]", len(group.sequences[0])
            check_int(name, length, 1, scheduler.max_model_len - 1, aspect="the length of")
            aspect = "the number of sequences of"
            check_int(name, group.max_num_seqs, 1, scheduler.max_num_seqs, aspect=aspect)
            is_fair = policy != "fcfs" or not group.priority
            check(is_fair, f"{name}.priority", group.priority, "0 with scheduling_policy 'fcfs'")
            self.places[group] = len(self.new.groups)
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
            per_decode, per_token, least = self.seconds
            step_s = max(
                per_decode * max(output.num_multi_step_tokens, default=1) + per_token * row[1], least
            )
        new.steps.append((*row[:-1], step_s))
        new.outputs.append(output)
        update = scheduler.update(output, self._result(output), clock + step_s)
        for group in update.changed:
            self._end(group, clock + step_s)
        return clock + step_s

    def _result(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Returns the tokens that the recorded sequences have drawn."""
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs]] = []
        for i, sample in enumerate(output.samples):
            found = self.scheduler.find(sample.seq_id)
            assert found is not None, "a step that was just scheduled names sequences with batch slots"
            group, seq = found
            place, num_tokens = (
                self.places[group],
                output.num_multi_step_tokens[i] if output.num_multi_step_tokens else 1,
            )
            if group.beam_params is not None:
                tokens.append([0])
                logprobs.append([self.recorded.tops.get((place, tuple(seq.output_token_ids)), _NO_LOGPROBS)])
                continue
            drawn, first = self._drawn(place, seq.index), len(seq.output_token_ids)
            tokens.append(drawn[first : first + num_tokens] or [0])  # past the end of what is known: see _end
            logprobs.append([_NO_LOGPROBS] * len(tokens[-1]))
        num_rows = len(output.scheduled)
        return ModelRunnerOutput(output.step_id, tokens, logprobs, [True] * num_rows, [[]] * num_rows)

    def _drawn(self, place: int, index: int) -> list[int]:
        seqs = self.recorded.groups[place].sequences
        return seqs[index].output_token_ids if index < len(seqs) else []

    def _end(self, group: SequenceGroup, now: float) -> None:
        """Ends sequences where stop strings did, and a request whose further tokens are not recorded."""
        place = self.places[group]
        if group.beam_params is not None:
            return
        for seq in group.sequences:
            if seq.status.is_finished and len(seq.output_token_ids) > (
                n := len(self._drawn(place, seq.index))
            ):
                seq.truncate(n)  # it had ended with a token that nobody has drawn
                seq.status = SequenceStatus.FINISHED_ABORTED
        for seq in group.unfinished:
            finish = self.finishes.get((place, seq.index))
            num_tokens = None if finish is None else finish["num_output_tokens"]
            if finish is not None and num_tokens is not None and len(seq.output_token_ids) >= num_tokens:
                status = SequenceStatus[finish["status"]]
                stop = finish["stop_reason"]
                self.scheduler.finish(group, seq, status, now, stop, num_output_tokens=num_tokens)
            elif len(seq.output_token_ids) >= (num_known := len(self._drawn(place, seq.index))):
                seq.truncate(num_known)
                self.scheduler.abort(group.request_id)
                group.metrics.finished_time = now
                return


def _parts(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yields the parts of a recording, each from a start to the next."""
    starts = [i for i, event in enumerate(events) if event["event"] == "start"]
    for start, stop in zip(starts, [*starts[1:], len(events)], strict=True):
        yield events[start:stop]


def _changed(start: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a recording's start with some of them replaced."""
    changed = {owner: dict(start[owner]) for owner in ("block_manager", "scheduler")}
    # Nobody knows what drafts another scheduler would have verified: it serves without.
    changed["scheduler"]["speculation"] = None
    fixed = ("groups", "speculation")
    changeable = {name: owner for owner, values in changed.items() for name in values if name not in fixed}
    for name, value in settings.items():
        if name not in changeable:
            raise ArgumentError("settings", name, one_of(sorted(changeable)), aspect="each name in")
        changed[changeable[name]][name] = value
    return changed


def _fitted(steps: np.ndarray) -> tuple[float, float, float]:
    """Returns seconds per decode step and per token, and those of the quickest step.

    Their absolute errors are least, so that a step in which the machine paused counts little.

    Source: iteratively reweighted least squares; Schlossmacher, JASA 68(344), 1973.
    """
    steps = steps[(steps["num_tokens"] > 0) & (steps["step_s"] > 0)]
    if not len(steps):
        return 0.0, 0.0, 0.0
    columns = np.stack([steps["num_decodes"], steps["num_tokens"]], axis=1).astype(np.float64)
    seconds, weights = steps["step_s"], np.ones(len(steps))
    fit = np.zeros(2)
    for _ in range(50):
        fit = np.linalg.lstsq(columns * weights[:, None], seconds * weights, rcond=None)[0]
        weights = np.maximum(abs(columns @ fit - seconds), 1e-3 * seconds.min()) ** -0.5
    return float(fit[0]), float(fit[1]), float(seconds.min())

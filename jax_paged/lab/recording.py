"""Recording of a scheduler's calls and decisions, and replay of recordings.

A recording is a list of JSON lines, one per event. The first event, "start", contains the settings of the
scheduler. The others are calls of the scheduler ("add", "abort", "schedule", "update", ...) with their
arguments and, for scheduled steps, the decisions. A replay makes the same calls to a new scheduler and checks
that its decisions are equal.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from jax_paged.arguments.shown_values import shown
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.codec import FORMAT, check_format, request_from_json, request_to_json
from jax_paged.core.features.interactive.request_edits import DropBlocks, Fork, RequestEdit, Rollback
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.result_updater import StepUpdate
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import ArgumentError, check
from jax_paged.lab.what_if import Replay, ReplayedRun, scheduler_arguments, step_row, what_if

Note = Callable[..., None]
_EDITS: dict[str, Callable[..., RequestEdit]] = {e.__name__: e for e in (Fork, Rollback, DropBlocks)}

# Events whose arguments are passed unchanged to a method of the scheduler, with the name of the method; and
# events that have the name of a method of its block manager.
_CALLS = {"abort": "abort", "expect": "propose_forced", "forget_prefixes": "forget_prefixes"}
_PREFIX_CALLS = ("pin", "unpin")

# Keys of steps in recordings that differ from the field names of SchedulerOutput.
_STEP_KEYS = {"num_multi_step_tokens": "burst", "encoder_inputs": "to_encode"}


class RecordedScheduler(Scheduler):
    """A scheduler that records its calls and decisions.

    The overridden methods write an event and do what the methods of Scheduler do.

    Args:
        scheduler: A scheduler whose settings are copied, including the settings of its block manager. The
            pool starts empty.
        sink: Function that receives each line of JSON, such as the `write` method of a file or the `append`
            method of a list.

    Raises:
        ValueError: If `scheduler` is a custom scheduler or has a custom scheduling policy, which can't be
            replayed.
    """

    def __init__(self, scheduler: Scheduler, sink: Callable[[str], object]) -> None:
        ok = type(scheduler) in (Scheduler, RecordedScheduler) and not callable(scheduler.scheduling_policy)
        check(
            ok,
            "scheduler",
            scheduler,
            "a Scheduler with a built-in scheduling policy because a recording contains no code",
        )

        def note(event: str, **values: Any) -> None:
            sink(json.dumps({"event": event, **values}) + "\n")

        settings = _settings(scheduler)
        note("start", format=FORMAT, **settings)
        arguments = scheduler_arguments(settings, functools.partial(_RecordedBlockManager, note))
        super().__init__(**arguments)
        self._note = note

    def add(self, group: SequenceGroup) -> None:
        """Records and adds a request."""
        self._note("add", arrival_time=group.metrics.arrival_time, **request_to_json(group.request))
        super().add(group)

    def abort(self, request_id: str) -> SequenceGroup | None:
        """Records the abort of a request and aborts it."""
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
        """Records the end of a sequence and ends it."""
        seq_index = group.sequences.index(seq)
        values = {"now": now, "stop_reason": stop_reason, "num_output_tokens": num_output_tokens}
        self._note("finish", request_id=group.request_id, seq=seq_index, status=status.name, **values)
        super().finish(group, seq, status, now, stop_reason, num_output_tokens=num_output_tokens)

    def edit_request(self, edit: RequestEdit) -> SequenceGroup:
        """Records and applies a user's edit of a request."""
        self._note("edit_request", kind=type(edit).__name__, **dataclasses.asdict(edit))
        return super().edit_request(edit)

    def schedule_draft(self, request_id: str, token_ids: list[int]) -> SchedulerOutput | None:
        """Schedules a step that verifies a user's draft tokens, and records it."""
        output = super().schedule_draft(request_id, token_ids)
        decided = None if output is None else decisions(output)
        self._note("draft", request_id=request_id, token_ids=token_ids, decided=decided)
        return output

    def propose_forced(self, request_id: str, index: int, token_ids: list[int]) -> None:
        """Records and proposes the tokens that a grammar forces next, as draft tokens."""
        self._note("expect", request_id=request_id, index=index, token_ids=token_ids)
        super().propose_forced(request_id, index, token_ids)

    def forget_prefixes(self, kept_salt: str | None) -> None:
        """Records the removal of cached prefixes and removes them."""
        self._note("forget_prefixes", kept_salt=kept_salt)
        super().forget_prefixes(kept_salt)

    def schedule(self, now: float) -> SchedulerOutput:
        """Schedules a step and records its decisions."""
        output = super().schedule(now)
        self._note("schedule", now=now, **decisions(output))
        return output

    def edit(self, output: SchedulerOutput, rows: list[int]) -> SchedulerOutput:
        """Records and applies a user's edit of a scheduled step."""
        self._note("edit_step", step_id=output.step_id, rows=rows)
        return super().edit(output, rows)

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Records the result of a step and updates the requests with it."""
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
            drafts=result.drafts,
            errors=list(result.errors.items()),
        )
        return super().update(output, result, now)


class _RecordedBlockManager(BlockManager):
    """A block manager that records which prefixes are pinned and unpinned."""

    def __init__(self, note: Note, **settings: Any) -> None:
        super().__init__(**settings)
        self._note = note

    def pin(self, name: str, token_ids: list[int], salt: str) -> int:
        num_tokens = super().pin(name, token_ids, salt)  # called first because a failed call is not recorded
        self._note("pin", name=name, token_ids=token_ids, salt=salt)
        return num_tokens

    def unpin(self, name: str) -> None:
        super().unpin(name)
        self._note("unpin", name=name)


def decisions(output: SchedulerOutput) -> dict[str, Any]:
    """Returns a scheduled step as values that JSON can represent.

    Returns:
        The fields of SchedulerOutput, with named tuples as lists. A new sequence is reduced to its ids, seed,
        output tokens and blocks, because its request was recorded when it was added.
    """
    new = [
        [s.seq_id, s.request.request_id, s.seed, s.output_token_ids, s.block_tables]
        for s in output.new_sequences
    ]
    names = (field.name for field in dataclasses.fields(output))
    fields = {_STEP_KEYS.get(name, name): getattr(output, name) for name in names}
    return json.loads(json.dumps(fields | {"new_sequences": new}))


class Device(Protocol):
    """Object that computes steps, such as the executor of an engine."""

    def dispatch(self, output: SchedulerOutput, /) -> None:
        """Starts the computation of a step."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Returns the result of the oldest step without a result."""
        ...


def replay(
    lines: Iterable[str],
    scheduler: type[Scheduler] | Callable[[SequenceGroup], Any] | None = None,
    **settings: Any,
) -> Replay:
    """Replays a recording, or runs its requests with another scheduler or other settings.

    Without `scheduler` and `settings`, the recorded scheduler is replayed, and each of its decisions is
    checked.

    With them, the function computes what another scheduler would have decided. The requests arrive at the
    recorded times and generate the recorded tokens, because outputs do not depend on how steps are batched.
    The duration of a step is estimated by a model (time per decode step and per token) that is fitted to the
    recorded steps. One step is in flight at a time. A request that was aborted or did not finish gets the
    tokens that it has in the recording.

    Example:
        >>> lines = []
        >>> llm.llm_engine.record(lines.append)
        >>> outputs = llm.generate("A block table is")
        >>> replay(lines).summary()
        >>> replay(lines, num_blocks=64).summary()

    Args:
        lines: A complete recording, such as an open file or a list.
        scheduler: A subclass of Scheduler, or a function that returns the scheduling key of a request, as in
            LLMEngine.
        **settings: Arguments of Scheduler or BlockManager that replace the recorded values, such as
            num_blocks or max_num_batched_tokens.

    Raises:
        ValueError: If a decision differs from the recording (the message names the first such step and the
            difference), if the first line is not the start of a recording, if a setting does not exist, or if
            a request does not fit the settings.
    """
    lines = list(lines)
    run = replay_events(lines)
    if scheduler is None and not settings:
        return run.replay()
    make = scheduler if isinstance(scheduler, type) else Scheduler
    if scheduler is not None and not isinstance(scheduler, type):
        settings["scheduling_policy"] = scheduler
    return what_if([json.loads(line) for line in lines], run, make, settings)


def replay_events(
    lines: Iterable[str],
    device: Device | None = None,
    observe: Callable[[Scheduler, SchedulerOutput], None] | None = None,
) -> ReplayedRun:
    """Replays a recording with a new scheduler, and checks that its decisions are equal to the recorded ones.

    Args:
        lines: A complete recording, such as an open file or a list.
        device: Computes the steps again, if given. Its tokens are compared with the recorded tokens.
        observe: Called after each step with the scheduler and the step.

    Raises:
        ValueError: If a decision or a token differs (the message names the first such step and the
            difference), if the first line is not the start of a recording, or if the recording has an older
            format.
    """
    replayer = _Replayer(device, observe)
    for line in lines:
        replayer.handle(**json.loads(line))
    return replayer.run


@dataclasses.dataclass
class _PendingStep:
    """A replayed step that has no result yet.

    Args:
        index: Index of the step in the run.
        now: Time at which it was scheduled (seconds).
        output: The step.
    """

    index: int
    now: float
    output: SchedulerOutput


class _Replayer:
    """Replay of the events of a recording; each event calls the method of the same name.

    Args:
        device: Computes the steps again, if given.
        observe: Called after each step with the scheduler and the step.
    """

    def __init__(
        self, device: Device | None, observe: Callable[[Scheduler, SchedulerOutput], None] | None
    ) -> None:
        self.run = ReplayedRun()
        self._device = device
        self._observe = observe
        self._scheduler: Scheduler | None = None
        self._clock = 0.0  # time at which the last step finished (seconds)
        self._pending: dict[int, _PendingStep] = {}
        self._groups: dict[str, int] = {}  # request id -> index in run.groups

    def handle(self, event: str, **values: Any) -> None:
        """Replays one event.

        Args:
            event: Name of the event.
            **values: Its arguments.
        """
        if event == "start":
            check_format("lines", values.get("format", 1))
            self._scheduler = Scheduler(**scheduler_arguments(values))
            self._pending, self._clock = {}, 0.0
            return
        scheduler: Any = self._scheduler
        check(scheduler is not None, "lines", event, "'start'", aspect="the first event of")
        if event in _CALLS:
            getattr(scheduler, _CALLS[event])(**values)
        elif event in _PREFIX_CALLS:
            getattr(scheduler.block_manager, event)(**values)
        else:
            getattr(self, f"_{event}")(scheduler, **values)

    def _add(self, scheduler: Scheduler, arrival_time: float, **request: Any) -> None:
        group = SequenceGroup.from_request(request_from_json(request), arrival_time)
        self._add_group(group)
        scheduler.add(group)

    def _add_group(self, group: SequenceGroup) -> None:
        self._groups[group.request_id] = len(self.run.groups)
        self.run.groups.append(group)

    def _edit_request(self, scheduler: Scheduler, kind: str, **edit: Any) -> None:
        group = scheduler.edit_request(_EDITS[kind](**edit))
        if group.request_id not in self._groups:
            self._add_group(group)

    def _schedule(self, scheduler: Scheduler, now: float, **decided: Any) -> None:
        self._add_step(scheduler, scheduler.schedule(now), now, decided)

    def _draft(
        self, scheduler: Scheduler, request_id: str, token_ids: list[int], decided: dict[str, Any] | None
    ) -> None:
        output = scheduler.schedule_draft(request_id, token_ids)
        is_same = (output is None) == (decided is None)
        assert is_same, f"a draft of request {request_id!r} was scheduled in only one of recording and replay"
        if output is not None and decided is not None:
            self._add_step(scheduler, output, self._clock, decided)

    def _add_step(
        self, scheduler: Scheduler, output: SchedulerOutput, now: float, decided: dict[str, Any]
    ) -> None:
        index = len(self.run.steps)
        _check_equal(f"step {index}", decisions(output), decided)
        self._pending[output.step_id] = _PendingStep(index, now, output)
        self.run.steps.append(step_row(output, scheduler, now))
        self.run.outputs.append(output)

    def _edit_step(self, scheduler: Scheduler, step_id: int, rows: list[int]) -> None:
        step = self._pending[step_id]
        step.output = self.run.outputs[step.index] = scheduler.edit(step.output, rows)
        self.run.steps[step.index] = step_row(step.output, scheduler, step.now)

    def _update(self, scheduler: Scheduler, step_id: int, now: float, **recorded: Any) -> None:
        step, run = self._pending.pop(step_id), self.run
        result = _result(step.output, recorded)
        if self._device is not None:
            self._device.dispatch(step.output)
            _compare(f"step {step.index}", run, self._device.result(), result)
        for sample, entries in zip(step.output.samples, result.logprobs, strict=True):
            found = scheduler.find(sample.seq_id)
            if found is not None and found[0].beam_params is not None:
                group, seq = found
                run.tops[self._groups[group.request_id], tuple(seq.output_token_ids)] = entries[0]
        scheduler.update(step.output, result, now)
        # A step starts when the previous step has finished, or when it is scheduled if that is later.
        run.steps[step.index] = (*run.steps[step.index][:-1], now - max(step.now, self._clock))
        self._clock = now
        if self._observe is not None:
            self._observe(scheduler, step.output)

    def _finish(self, scheduler: Scheduler, request_id: str, seq: int, status: str, **values: Any) -> None:
        group = self.run.groups[self._groups[request_id]]
        scheduler.finish(group, group.sequences[seq], SequenceStatus[status], **values)


def _compare(step: str, run: ReplayedRun, result: ModelRunnerOutput, recorded: ModelRunnerOutput) -> None:
    ours = {"token_ids": result.token_ids, "is_finite": result.is_finite}
    _check_equal(step, ours, {"token_ids": recorded.token_ids, "is_finite": recorded.is_finite})
    most = run.max_logprob_difference or 0.0
    for entries, others in zip(result.logprobs, recorded.logprobs, strict=True):
        for entry, other in zip(entries, others, strict=True):
            if entry.logprob != other.logprob:  # equal values may be infinite, with an undefined difference
                most = max(most, abs(entry.logprob - other.logprob))
    run.max_logprob_difference = most


def _result(output: SchedulerOutput, event: dict[str, Any]) -> ModelRunnerOutput:
    """Returns the recorded result of a step, with the values that affect the scheduler."""
    logprobs = [[TokenLogprobs(x, 0, [], []) for x in entries] for entries in event["logprobs"]]
    for i, top_token_ids, top_logprobs in event["top"]:
        logprobs[i][0] = dataclasses.replace(
            logprobs[i][0], top_token_ids=top_token_ids, top_logprobs=top_logprobs
        )
    is_finite = [i not in event["not_finite"] for i in range(len(output.scheduled))]
    return ModelRunnerOutput(
        output.step_id,
        event["token_ids"],
        logprobs,
        is_finite,
        [[]] * len(output.scheduled),
        drafts=event.get("drafts", []),
        errors=dict(event.get("errors", [])),
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
        raise ArgumentError(name, value, f"{shown(other)} in {step}, as recorded")


def _settings(scheduler: Scheduler) -> dict[str, dict[str, Any]]:
    manager, speculation = scheduler.block_manager, scheduler.speculation
    return {
        "block_manager": {
            "num_blocks": manager.pool.num_blocks,
            "block_size": manager.block_size,
            "enable_prefix_caching": manager.enable_prefix_caching,
            "groups": [dataclasses.asdict(group) for group in manager.groups],
            "num_swap_blocks": manager.swap_pool.num_usable,
            "num_state_slots": manager.states.has_states * manager.states.pool.num_blocks,
            "num_swap_state_slots": manager.states.swap_pool.num_usable,
        },
        "scheduler": {
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_model_len": scheduler.max_model_len,
            "eos_token_ids": sorted(scheduler.eos_token_ids),
            "watermark": scheduler.watermark,
            "scheduling_policy": scheduler.scheduling_policy,
            "preemption_mode": scheduler.preemption_mode,
            "enable_chunked_prefill": scheduler.enable_chunked_prefill,
            "scheduler_delay_factor": scheduler.scheduler_delay_factor,
            "num_scheduler_steps": scheduler.num_scheduler_steps,
            "speculation": speculation and dataclasses.asdict(speculation),
            "max_loras": scheduler.max_loras,
        },
    }

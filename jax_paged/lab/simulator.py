"""Runs the scheduler and the block manager on a trace of requests; a model of step times is the device."""

import dataclasses
import functools
import itertools
import math
import operator
import random
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from jax_paged.arguments.plain_values import make_plain
from jax_paged.arguments.suggestions import suggests_fields
from jax_paged.core import request as core
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import RequestMetrics, Sequence, SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import check, check_int, check_number
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

STEP = np.dtype(
    [
        ("time_s", np.float64),  # when it starts
        ("step_s", np.float64),
        ("num_requests", np.int32),  # that compute a token in it
        ("num_running", np.int32),  # that hold blocks on the device
        ("num_waiting", np.int32),
        ("num_swapped", np.int32),
        ("num_seqs", np.int32),  # that compute a token in it
        ("num_tokens", np.int32),
        ("num_prefill_tokens", np.int32),  # of sequences that compute more than one
        ("num_context_tokens", np.int64),  # read from the pool, by each sequence for itself
        ("num_blocks_used", np.int32),
        ("num_blocks_saved", np.int32),  # that would be used in addition if nothing were shared
        ("num_slots_wasted", np.int32),  # of used blocks, without a token when the step ends
        ("num_preemptions", np.int32),
        ("num_blocks_swapped", np.int32),  # out and in
        ("num_blocks_copied", np.int32),
    ]
)
_NO_LOGPROBS = TokenLogprobs(0.0, 0, [], [])
# Fields of RequestMetrics; a time is NaN if the event never happened.
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")
COUNTS = ("num_cached_tokens", "num_preemptions")
_NUMBERS = (*COUNTS, "num_output_tokens")  # per output, if it has ended
REQUEST = np.dtype([*((name, np.float64) for name in TIMES), *((name, np.int32) for name in _NUMBERS)])


@suggests_fields
@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace; it ends after output_len tokens.

    Args:
        arrival_s: When it arrives, in seconds of the simulated clock.
        prompt: Its token ids, which other requests may begin with too and share the blocks of; or only the
            number of tokens.
        output_len: Tokens per output.
        n: Number of samples.
        beam_width: Number of beams of a beam search; None draws samples instead.
        priority: Lower values are served earlier, if the scheduler's policy is "priority".

    Raises:
        ValueError: If a value is out of range; the message names the argument, the value and the range.
    """

    arrival_s: float
    prompt: int | list[int]
    output_len: int
    n: int = 1
    beam_width: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        check_number("arrival_s", self.arrival_s, 0, math.inf)
        check_int("prompt_len", self.prompt_len, 1)
        check_int("output_len", self.output_len, 1)
        check_int("n", self.n, 1)
        if self.beam_width is not None:
            check_int("beam_width", self.beam_width, 1)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt) if isinstance(self.prompt, list) else self.prompt


class StepTime(Protocol):
    """Says how long a step takes."""

    def step_s(
        self,
        num_prefill_tokens: int,
        num_decode_seqs: int,
        num_context_tokens: int,
        num_blocks_swapped: int,
        num_blocks_copied: int,
    ) -> float:
        """Returns how many seconds a step takes that does this much work (see STEP)."""
        ...


@suggests_fields
@dataclasses.dataclass(frozen=True)
class StepTimeModel:
    """How long a step takes: a sum of costs, each in seconds.

    Args:
        base_s: Cost of any step: reading the weights, launching kernels.
        s_per_prefill_token: Cost per token of the sequences that compute several tokens in the step.
        s_per_decode_seq: Cost per sequence that computes a single token.
        s_per_context_token: Cost per token whose keys and values are read from the pool.
        s_per_swapped_block: Cost per block that is moved from or to host memory.
        s_per_copied_block: Cost per block that is copied on the device.
    """

    base_s: float
    s_per_prefill_token: float = 0.0
    s_per_decode_seq: float = 0.0
    s_per_context_token: float = 0.0
    s_per_swapped_block: float = 0.0
    s_per_copied_block: float = 0.0

    def __post_init__(self) -> None:
        make_plain(self)
        for name, value in dataclasses.asdict(self).items():
            check_number(name, value, 0, math.inf)

    def step_s(
        self,
        num_prefill_tokens: int,
        num_decode_seqs: int,
        num_context_tokens: int,
        num_blocks_swapped: int,
        num_blocks_copied: int,
    ) -> float:
        """Returns how many seconds a step takes that does this much work."""
        return (
            self.base_s
            + self.s_per_prefill_token * num_prefill_tokens
            + self.s_per_decode_seq * num_decode_seqs
            + self.s_per_context_token * num_context_tokens
            + self.s_per_swapped_block * num_blocks_swapped
            + self.s_per_copied_block * num_blocks_copied
        )


@dataclasses.dataclass(frozen=True)
class SimulationResult:
    """What happened in a simulation.

    Args:
        steps: One row per step, with the fields of STEP.
        requests: One row per request of the trace, in its order, with the fields of REQUEST (RequestMetrics).
        block_size: Tokens per block.
    """

    steps: np.ndarray
    requests: np.ndarray
    block_size: int

    def window(self, start_s: float = 0.0, stop_s: float = math.inf) -> "SimulationResult":
        """Returns the steps that start in a window of time, and the requests that arrive in it."""
        steps = (self.steps["time_s"] >= start_s) & (self.steps["time_s"] < stop_s)
        requests = (self.requests["arrival_time"] >= start_s) & (self.requests["arrival_time"] < stop_s)
        return dataclasses.replace(self, steps=self.steps[steps], requests=self.requests[requests])

    @property
    def num_output_tokens(self) -> np.ndarray:
        """Tokens per output of each request that has ended."""
        return self.requests["num_output_tokens"]

    def times_s(self, event: str) -> np.ndarray:
        """Returns the seconds from each arrival to an event, such as "first_token_time"; NaN for never."""
        return self.requests[event] - self.requests["arrival_time"]

    def mean(self, field: str) -> float:
        """Returns the mean of a field of the steps over their time; idle time doesn't count."""
        return float(np.average(self.steps[field], weights=self.steps["step_s"]))

    @property
    def share_of_slots_filled(self) -> float:
        """Share of the slots of used blocks that hold a token, over time."""
        return 1 - self.mean("num_slots_wasted") / (self.mean("num_blocks_used") * self.block_size)

    @property
    def share_of_blocks_saved(self) -> float:
        """Share of the blocks saved by sharing, of those that would be used without it, over time."""
        saved = self.mean("num_blocks_saved")
        return saved / (saved + self.mean("num_blocks_used"))


def simulate(
    requests: Iterable[Request], scheduler: Scheduler, step_time: StepTime, *, stop_s: float = math.inf
) -> SimulationResult:
    """Serves a trace of requests to its end, in simulated time.

    The scheduler and its block manager decide as they do in an engine. The tokens are dummies: requests share
    prefixes only if the trace gives them prompts that begin alike. The log-probabilities of beams are random,
    and the same in every run.

    Args:
        requests: The trace, in the order of arrival.
        scheduler: It has no requests. Its block manager has one cache group, of layers that attend to all of
            a sequence's past.
        step_time: How long each step takes.
        stop_s: No step starts at this time or later; requests that have not ended then never do.

    Raises:
        ValueError: If requests are out of order, or one can't run: too long, too many sequences, or a
            priority under another policy.
    """
    manager = scheduler.block_manager
    aspect = "the number of requests of"
    check(not scheduler.has_unfinished, "scheduler", len(scheduler.queues), "0", aspect=aspect)
    check(
        len(manager.groups) == 1,
        "scheduler",
        len(manager.groups),
        "1",
        aspect="the number of cache groups of",
    )
    trace = enumerate(requests)
    rng = random.Random(0)
    clock, last_s, has_beams = 0.0, 0.0, False
    metrics: list[RequestMetrics] = []
    output_lens: list[int] = []
    steps: list[np.ndarray] = []
    rows: list[tuple[Any, ...]] = []
    coming = next(trace, None)
    while coming is not None or scheduler.has_unfinished:
        if coming is not None and not scheduler.has_unfinished:
            clock = max(clock, coming[1].arrival_s)
        if clock >= stop_s:
            break
        while coming is not None and coming[1].arrival_s <= clock:
            index, request = coming
            arrival_s = request.arrival_s
            allowed = f"at least {last_s}, that of the request before"
            check(arrival_s >= last_s, f"requests[{index}].arrival_s", arrival_s, allowed)
            last_s = arrival_s
            has_beams = has_beams or request.beam_width is not None
            group = _group(index, request, scheduler)
            metrics.append(group.metrics)
            output_lens.append(request.output_len)
            scheduler.add(group)
            coming = next(trace, None)
        output = scheduler.schedule(clock)
        if not output.scheduled:
            assert output.ended, "a scheduler with requests advances"
            scheduler.update(output, ModelRunnerOutput(output.step_id, [], [], [], []), clock)
            continue
        row = _step_row(clock, output, scheduler, step_time)
        rows.append(row)
        if len(rows) == 4096:  # a row of an array takes a tenth of the memory
            steps.append(np.array(rows, STEP))
            rows.clear()
        clock += row[1]
        scheduler.update(output, _result(output, scheduler, rng if has_beams else None), clock)
    served = map(operator.attrgetter(*TIMES, *COUNTS), metrics)
    all_steps = np.concatenate([*steps, np.array(rows, STEP)])
    ends = [(*times, n) for times, n in zip(served, output_lens, strict=True)]
    return SimulationResult(all_steps, np.array(ends, REQUEST), manager.block_size)


def _group(index: int, request: Request, scheduler: Scheduler) -> SequenceGroup:
    num_tokens, limit = request.prompt_len + request.output_len, scheduler.max_model_len
    name = f"requests[{index}]"
    check(num_tokens <= limit, name, num_tokens, f"at most {limit}", aspect="the length of")
    num_seqs, limit = request.beam_width or request.n, scheduler.max_num_seqs
    check(num_seqs <= limit, name, num_seqs, f"at most {limit}", aspect="the number of sequences of")
    ok = scheduler.scheduling_policy == "priority" or not request.priority
    check(ok, f"{name}.priority", request.priority, "0 with scheduling_policy 'fcfs'")
    # A prompt that is given by its length has tokens that no other request has.
    prompt = request.prompt if isinstance(request.prompt, list) else [-1 - index] * request.prompt
    params, beams = _params(request.n, request.beam_width, request.output_len)
    features = None if beams is None else core.RequestFeatures(beams)
    values = core.Request(str(index), prompt, params, priority=request.priority, features=features)
    return SequenceGroup.from_request(values, request.arrival_s)


@functools.lru_cache(maxsize=1 << 14)  # checking parameters takes longer than everything else about a request
def _params(n: int, width: int | None, length: int) -> tuple[SamplingParams, BeamSearchParams | None]:
    beams = None if width is None else BeamSearchParams(width, max_tokens=length, ignore_eos=True)
    num_logprobs = None if width is None else 2 * width
    return SamplingParams(n=n, max_tokens=length, ignore_eos=True, seed=0, logprobs=num_logprobs), beams


def _step_row(
    clock: float, output: SchedulerOutput, scheduler: Scheduler, step_time: StepTime
) -> tuple[Any, ...]:
    """Returns the row of STEP for a step that was scheduled and whose result is still out."""
    queues, pool, rows = scheduler.queues, scheduler.block_manager.pool, output.scheduled
    num_tokens = _num_tokens(output)
    num_prefill_tokens, num_decode_seqs = 0, len(rows)
    for row in reversed(rows):
        if row.num_tokens == 1:
            break
        num_prefill_tokens += row.num_tokens
        num_decode_seqs -= 1
    num_context_tokens = sum([row.start for row in rows])
    num_blocks_swapped = len(output.blocks_to_swap_out) + len(output.blocks_to_swap_in)
    num_blocks_used = pool.num_usable - pool.num_free
    num_blocks_saved, num_slots_wasted = _sharing(output, scheduler, num_blocks_used)
    step_s = step_time.step_s(
        num_prefill_tokens,
        num_decode_seqs,
        num_context_tokens,
        num_blocks_swapped,
        len(output.blocks_to_copy),
    )
    for i in range(
        1, max(output.num_multi_step_tokens, default=0)
    ):  # the decode steps of a burst after the first
        starts = [row.start + i for row, n in zip(rows, num_tokens, strict=True) if n > i]
        step_s += step_time.step_s(0, len(starts), sum(starts), 0, 0)
    return (
        clock,
        step_s,
        len({_found(scheduler, row.seq_id)[0] for row in rows}),
        len(queues.running),
        len(queues.waiting),
        len(queues.swapped),
        len(rows),
        sum(num_tokens),
        num_prefill_tokens,
        num_context_tokens,
        num_blocks_used,
        num_blocks_saved,
        num_slots_wasted,
        len(output.preempted),
        num_blocks_swapped,
        len(output.blocks_to_copy),
    )


def _sharing(output: SchedulerOutput, scheduler: Scheduler, num_blocks_used: int) -> tuple[int, int]:
    """Returns how many blocks sharing saves, and how many slots of used blocks the step leaves empty."""
    manager = scheduler.block_manager
    size, tables = manager.block_size, manager.block_tables
    num_blocks = sum([len(table) for (table,) in tables.values()])
    if num_blocks == num_blocks_used:
        num_tokens = sum([seq.num_computed_tokens for seq in tables]) + sum(_num_tokens(output))
        return 0, num_blocks * size - num_tokens
    lens = {seq: seq.num_computed_tokens for seq in tables}
    stops = [row.start + n for row, n in zip(output.scheduled, _num_tokens(output), strict=True)]
    for row, stop in zip(output.scheduled, stops, strict=True):
        lens[_found(scheduler, row.seq_id)[1]] = stop
    for sample in output.samples:
        lens[_found(scheduler, sample.seq_id)[1]] = stops[sample.scheduled_index]
    filled: dict[int, int] = {}  # of the blocks that are not full
    for seq, (table,) in tables.items():
        first = lens[seq] // size
        for i in range(first, len(table)):
            filled[table[i]] = max(filled.get(table[i], 0), lens[seq] - i * size, 0)
    return num_blocks - num_blocks_used, len(filled) * size - sum(filled.values())


def _num_tokens(output: SchedulerOutput) -> list[int]:
    """Returns how many tokens each row computes; of a burst, in all of its steps."""
    return list(output.num_multi_step_tokens) or [row.num_tokens for row in output.scheduled]


def _found(scheduler: Scheduler, seq_id: int) -> tuple[SequenceGroup, Sequence]:
    found = scheduler.find(seq_id)
    assert found is not None, "a step that was just scheduled names sequences with batch slots"
    return found


def _result(output: SchedulerOutput, scheduler: Scheduler, rng: random.Random | None) -> ModelRunnerOutput:
    """Returns what a device would: dummy tokens.

    Args:
        output: The step.
        scheduler: Holds the requests of the step.
        rng: Draws the log-probabilities of beams: each candidate is less likely than the one before. None
            if there are no beams.
    """
    num_drawn = output.num_multi_step_tokens or [1] * len(output.samples)
    logprobs = [[_NO_LOGPROBS] * n for n in num_drawn]
    if rng is not None:
        for i, sample in enumerate(output.samples):
            beams = _found(scheduler, sample.seq_id)[0].beam_params
            if beams:
                num_top = 2 * beams.beam_width
                top = list(itertools.accumulate(-rng.expovariate(1.0) for _ in range(num_top)))
                logprobs[i] = [TokenLogprobs(0.0, 0, list(range(num_top)), top)]
    num_rows = len(output.scheduled)
    return ModelRunnerOutput(
        output.step_id, [[0] * n for n in num_drawn], logprobs, [True] * num_rows, [[]] * num_rows
    )

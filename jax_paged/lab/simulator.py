"""Simulation of the scheduler and block manager on a trace of requests, with modeled step times."""

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
from jax_paged.core.model_runner_output import ModelRunnerOutput, TokenLogprobs
from jax_paged.core.request import Request as EngineRequest
from jax_paged.core.request import RequestFeatures, RequestMetrics, Sequence, SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.errors import check, check_int, check_number
from jax_paged.sampling_params import BeamSearchParams, SamplingParams

SIMULATED_STEP_DTYPE = np.dtype(
    [
        ("time_s", np.float64),  # start of the step
        ("step_s", np.float64),
        ("num_requests", np.int32),  # requests that compute a token
        ("num_running", np.int32),  # requests that hold blocks on the device
        ("num_waiting", np.int32),
        ("num_swapped", np.int32),
        ("num_seqs", np.int32),  # sequences that compute a token
        ("num_tokens", np.int32),
        ("num_prefill_tokens", np.int32),  # tokens of sequences that compute several tokens
        ("num_context_tokens", np.int64),  # read from the KV cache, summed over sequences
        ("num_blocks_used", np.int32),
        ("num_blocks_saved", np.int32),  # additional blocks that would be used without sharing
        ("num_slots_wasted", np.int32),  # empty slots in used blocks after the step
        ("num_preemptions", np.int32),
        ("num_blocks_swapped", np.int32),  # swapped out or in
        ("num_blocks_copied", np.int32),
    ]
)
_NO_LOGPROBS = TokenLogprobs(0.0, 0, [], [])
# Fields of RequestMetrics. A time is NaN if the event never happened.
TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")
COUNTS = ("num_cached_tokens", "num_preemptions")
# num_output_tokens is Request.output_len, even if the request has not finished.
_NUMBERS = (*COUNTS, "num_output_tokens")
REQUEST_DTYPE = np.dtype([*((name, np.float64) for name in TIMES), *((name, np.int32) for name in _NUMBERS)])


@suggests_fields
@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace; it ends after output_len tokens.

    Example:
        >>> Request(arrival_s=0.5, prompt=200, output_len=50, n=2)

    Args:
        arrival_s: Arrival time on the simulated clock (seconds).
        prompt: Number of tokens, or the token ids. Requests whose token ids start alike share cached
            prefixes; a prompt given as a number shares none.
        output_len: Number of tokens per output.
        n: Number of samples.
        beam_width: Number of beams of a beam search; None generates samples instead.
        priority: Lower values run earlier, if the scheduler's policy is "priority".

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
        """The number of tokens of the prompt."""
        return len(self.prompt) if isinstance(self.prompt, list) else self.prompt


class StepTime(Protocol):
    """Model of the duration of steps."""

    def step_s(
        self,
        num_prefill_tokens: int,
        num_decode_seqs: int,
        num_context_tokens: int,
        num_blocks_swapped: int,
        num_blocks_copied: int,
    ) -> float:
        """Returns the duration of a step (seconds).

        Args:
            num_prefill_tokens: Tokens of sequences that compute several tokens in the step.
            num_decode_seqs: Sequences that compute a single token.
            num_context_tokens: Tokens whose keys and values are read from the KV cache.
            num_blocks_swapped: Blocks swapped out or in.
            num_blocks_copied: Blocks copied on the device.
        """
        ...


@suggests_fields
@dataclasses.dataclass(frozen=True)
class StepTimeModel:
    """Linear model of the duration of steps: a sum of costs, each in seconds.

    Args:
        base_s: Cost of every step, for reading the weights and launching kernels.
        s_per_prefill_token: Cost per token of sequences that compute several tokens in the step.
        s_per_decode_seq: Cost per sequence that computes a single token.
        s_per_context_token: Cost per token whose keys and values are read from the KV cache.
        s_per_swapped_block: Cost per block swapped out or in.
        s_per_copied_block: Cost per block copied on the device.

    Raises:
        ValueError: If a cost is negative or not finite.
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
        """Returns the duration of a step (seconds); see StepTime."""
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
    """Result of a simulation.

    Args:
        steps: One row per step, with the fields of SIMULATED_STEP_DTYPE.
        requests: One row per request, in the order of the trace, with the fields of REQUEST_DTYPE.
        block_size: Number of tokens per block.
    """

    steps: np.ndarray
    requests: np.ndarray
    block_size: int

    def window(self, start_s: float = 0.0, stop_s: float = math.inf) -> "SimulationResult":
        """Returns the steps that start in a time window, and the requests that arrive in it.

        Args:
            start_s: Start of the window (seconds).
            stop_s: End of the window (seconds), not included.
        """
        steps = (self.steps["time_s"] >= start_s) & (self.steps["time_s"] < stop_s)
        requests = (self.requests["arrival_time"] >= start_s) & (self.requests["arrival_time"] < stop_s)
        return dataclasses.replace(self, steps=self.steps[steps], requests=self.requests[requests])

    @property
    def num_output_tokens(self) -> np.ndarray:
        """The output_len of each request: the number of tokens per output of finished requests."""
        return self.requests["num_output_tokens"]

    def times_s(self, event: str) -> np.ndarray:
        """Returns the time from arrival to an event for each request (seconds); NaN if it never happened.

        Args:
            event: One of TIMES, such as "first_token_time".
        """
        return self.requests[event] - self.requests["arrival_time"]

    def mean(self, field: str) -> float:
        """Returns the mean of a field of the steps, weighted by their duration; idle time is not included.

        Args:
            field: One of the fields of SIMULATED_STEP_DTYPE.
        """
        return float(np.average(self.steps[field], weights=self.steps["step_s"]))

    @property
    def share_of_slots_filled(self) -> float:
        """The mean fraction of slots of used blocks that hold a token, over time."""
        return 1 - self.mean("num_slots_wasted") / (self.mean("num_blocks_used") * self.block_size)

    @property
    def share_of_blocks_saved(self) -> float:
        """The mean fraction of blocks saved by sharing, relative to no sharing, over time."""
        saved = self.mean("num_blocks_saved")
        return saved / (saved + self.mean("num_blocks_used"))


def simulate(
    requests: Iterable[Request], scheduler: Scheduler, step_time: StepTime, *, stop_s: float = math.inf
) -> SimulationResult:
    """Runs a trace of requests to its end in simulated time.

    The scheduler and its block manager make the same decisions as in an engine. Sampled tokens are dummies.
    Log-probabilities for beam search are random numbers from a fixed seed, so every run gives the same
    result.

    Example:
        >>> manager = BlockManager(num_blocks=1000, block_size=16, enable_prefix_caching=True)
        >>> scheduler = Scheduler(block_manager=manager, max_num_seqs=64, max_num_batched_tokens=512,
        ...     max_model_len=2048, eos_token_ids=frozenset())
        >>> trace = [Request(arrival_s=0.1 * i, prompt=200, output_len=50) for i in range(100)]
        >>> result = simulate(trace, scheduler, StepTimeModel(base_s=0.02, s_per_prefill_token=1e-4))
        >>> result.times_s("first_token_time").mean()

    Args:
        requests: The trace, in order of arrival.
        scheduler: A scheduler without requests, whose block manager has a single cache group of layers with
            full attention.
        step_time: Model of the duration of steps.
        stop_s: Time at which the simulation ends (seconds). No step starts at this time or later, and
            requests that have not finished stay unfinished.

    Raises:
        ValueError: If the requests are not in order of arrival; if a request is too long or has too many
            sequences; or if a request has a priority and the policy is not "priority".
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
    next_request = next(trace, None)
    while next_request is not None or scheduler.has_unfinished:
        if next_request is not None and not scheduler.has_unfinished:
            clock = max(clock, next_request[1].arrival_s)
        if clock >= stop_s:
            break
        while next_request is not None and next_request[1].arrival_s <= clock:
            index, request = next_request
            arrival_s = request.arrival_s
            allowed = f"at least {last_s}, when the previous request arrived"
            check(arrival_s >= last_s, f"requests[{index}].arrival_s", arrival_s, allowed)
            last_s = arrival_s
            has_beams = has_beams or request.beam_width is not None
            group = _group(index, request, scheduler)
            metrics.append(group.metrics)
            output_lens.append(request.output_len)
            scheduler.add(group)
            next_request = next(trace, None)
        output = scheduler.schedule(clock)
        if not output.scheduled:
            assert output.ended, "the scheduler has unfinished requests, but it scheduled and ended none"
            scheduler.update(output, ModelRunnerOutput(output.step_id, [], [], [], []), clock)
            continue
        row = _step_row(clock, output, scheduler, step_time)
        rows.append(row)
        if len(rows) == 4096:  # a row of an array needs a tenth of the memory of a tuple
            steps.append(np.array(rows, SIMULATED_STEP_DTYPE))
            rows.clear()
        clock += row[1]
        scheduler.update(output, _result(output, scheduler, rng if has_beams else None), clock)
    served = map(operator.attrgetter(*TIMES, *COUNTS), metrics)
    all_steps = np.concatenate([*steps, np.array(rows, SIMULATED_STEP_DTYPE)])
    request_rows = [(*times, n) for times, n in zip(served, output_lens, strict=True)]
    return SimulationResult(all_steps, np.array(request_rows, REQUEST_DTYPE), manager.block_size)


def _group(index: int, request: Request, scheduler: Scheduler) -> SequenceGroup:
    num_tokens, limit = request.prompt_len + request.output_len, scheduler.max_model_len
    name = f"requests[{index}]"
    allowed, aspect = f"at most {limit} (max_model_len)", "the number of tokens of"
    check(num_tokens <= limit, name, num_tokens, allowed, aspect=aspect)
    num_seqs, limit = request.beam_width or request.n, scheduler.max_num_seqs
    allowed, aspect = f"at most {limit} (max_num_seqs)", "the number of sequences of"
    check(num_seqs <= limit, name, num_seqs, allowed, aspect=aspect)
    ok = scheduler.scheduling_policy == "priority" or not request.priority
    check(ok, f"{name}.priority", request.priority, "0 with scheduling_policy 'fcfs'")
    # A prompt given as a number consists of a token id that no other request has.
    prompt = request.prompt if isinstance(request.prompt, list) else [-1 - index] * request.prompt
    params, beams = _params(request.n, request.beam_width, request.output_len)
    features = None if beams is None else RequestFeatures(beams)
    values = EngineRequest(str(index), prompt, params, priority=request.priority, features=features)
    return SequenceGroup.from_request(values, request.arrival_s)


@functools.lru_cache(maxsize=1 << 14)  # cached because constructing and checking parameters is slow
def _params(n: int, width: int | None, length: int) -> tuple[SamplingParams, BeamSearchParams | None]:
    beams = None if width is None else BeamSearchParams(width, max_tokens=length, ignore_eos=True)
    num_logprobs = None if width is None else 2 * width
    return SamplingParams(n=n, max_tokens=length, ignore_eos=True, seed=0, logprobs=num_logprobs), beams


def _step_row(
    clock: float, output: SchedulerOutput, scheduler: Scheduler, step_time: StepTime
) -> tuple[Any, ...]:
    """Returns the row of SIMULATED_STEP_DTYPE for a step that is scheduled but has no result yet."""
    queues, pool, rows = scheduler.queues, scheduler.block_manager.pool, output.scheduled
    num_tokens = _num_tokens(output)
    # In a step, sequences with one token come first, then sequences with several tokens.
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
    # Decode steps after the first, in multi-step decoding.
    for i in range(1, max(output.num_multi_step_tokens, default=0)):
        starts = [row.start + i for row, n in zip(rows, num_tokens, strict=True) if n > i]
        step_s += step_time.step_s(0, len(starts), sum(starts), 0, 0)
    return (
        clock,
        step_s,
        len({_find(scheduler, row.seq_id)[0] for row in rows}),
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
    """Returns the number of blocks that sharing saves, and the number of empty slots in used blocks."""
    manager = scheduler.block_manager
    size, tables = manager.block_size, manager.block_tables
    num_blocks = sum([len(table) for (table,) in tables.values()])
    if num_blocks == num_blocks_used:  # no block is shared, so no token is counted twice
        num_tokens = sum([seq.num_computed_tokens for seq in tables]) + sum(_num_tokens(output))
        return 0, num_blocks * size - num_tokens
    lens = {seq: seq.num_computed_tokens for seq in tables}
    stops = [row.start + n for row, n in zip(output.scheduled, _num_tokens(output), strict=True)]
    for row, stop in zip(output.scheduled, stops, strict=True):
        lens[_find(scheduler, row.seq_id)[1]] = stop
    for sample in output.samples:
        lens[_find(scheduler, sample.seq_id)[1]] = stops[sample.scheduled_index]
    filled: dict[int, int] = {}  # number of tokens in each block that is not full
    for seq, (table,) in tables.items():
        first = lens[seq] // size
        for i in range(first, len(table)):
            filled[table[i]] = max(filled.get(table[i], 0), lens[seq] - i * size, 0)
    return num_blocks - num_blocks_used, len(filled) * size - sum(filled.values())


def _num_tokens(output: SchedulerOutput) -> list[int]:
    """Returns the number of tokens of each row; in multi-step decoding, for all decode steps together."""
    return list(output.num_multi_step_tokens) or [row.num_tokens for row in output.scheduled]


def _find(scheduler: Scheduler, seq_id: int) -> tuple[SequenceGroup, Sequence]:
    found = scheduler.find(seq_id)
    assert found is not None, f"sequence {seq_id} of a scheduled step has no batch slot"
    return found


def _result(output: SchedulerOutput, scheduler: Scheduler, rng: random.Random | None) -> ModelRunnerOutput:
    """Returns the result of a step, with dummy tokens.

    Args:
        output: The step.
        scheduler: Owner of the requests of the step.
        rng: Random numbers for the log-probabilities of beams. Each candidate is less likely than the one
            before it. None if there are no beams.
    """
    num_drawn = output.num_multi_step_tokens or [1] * len(output.samples)
    logprobs = [[_NO_LOGPROBS] * n for n in num_drawn]
    if rng is not None:
        for i, sample in enumerate(output.samples):
            beams = _find(scheduler, sample.seq_id)[0].beam_params
            if beams:
                num_top = 2 * beams.beam_width
                top = list(itertools.accumulate(-rng.expovariate(1.0) for _ in range(num_top)))
                logprobs[i] = [TokenLogprobs(0.0, 0, list(range(num_top)), top)]
    num_rows = len(output.scheduled)
    return ModelRunnerOutput(
        output.step_id, [[0] * n for n in num_drawn], logprobs, [True] * num_rows, [[]] * num_rows
    )

"""Mixed requests at four times the pool, under every way to lose blocks: exact, fair, and no block lost."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    TOLERANCE,
    VOCAB_SIZE,
    DenseModel,
    Request,
    Steps,
    add,
    assert_no_block_lost,
    ends_rightly,
    make_engine,
    margin,
    reschedule,
    run,
    run_alone,
    steps_of,
    tokens_of,
)

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.outputs import RequestOutput

# A request is never larger than the pool alone: 12 blocks of prompt, and 4 sequences of 7 blocks more.
NUM_USABLE, BLOCK_SIZE, MAX_PROMPT, MAX_OUTPUT = 44, 4, 48, 24


def draw_requests(seed: int, count: int) -> list[Request]:
    """Greedy, sampled, n = 2 to 4, beams; shared prefixes, salts, prompt_logprobs, min_tokens; priorities."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, VOCAB_SIZE, (4, 30)).tolist()
    requests = []
    for _ in range(count):
        kind = rng.choice(["greedy", "sampled", "samples", "beams"], p=[0.3, 0.25, 0.25, 0.2])
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, MAX_PROMPT + 1)).tolist()
        if rng.random() < 0.5:
            prefix = prefixes[rng.integers(4)][: len(prompt)]
            prompt[: len(prefix)] = prefix
        beams = None
        max_tokens = int(rng.integers(1, MAX_OUTPUT + 1))
        params: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens}
        if kind == "beams":
            beams = BeamSearchParams(
                int(rng.choice([2, 4])), max_tokens, length_penalty=rng.choice([0.5, 1.0, 2.0])
            )
        elif kind != "greedy":
            params |= {"temperature": float(rng.uniform(0.5, 1.5)), "seed": int(rng.integers(2**62))}
            params["min_tokens"] = min(int(rng.choice([0, 3])), max_tokens)
            params["presence_penalty"] = float(rng.choice([0.0, 0.5]))
            params["n"] = int(rng.integers(2, 5)) if kind == "samples" else 1
        if kind != "beams" and rng.random() < 0.15:
            params["prompt_logprobs"] = 2
        salt = str(rng.choice(["", "", "", "a", "b"]))
        requests.append(Request(prompt, SamplingParams(**params), beams, salt, int(rng.integers(0, 3))))
    return requests


def most_blocks(request: Request) -> int:
    """Blocks that a request has at its end, at most."""
    width = request.beams.beam_width if request.beams else request.params.n
    max_tokens = request.params.max_tokens or 0
    num_own = -(-max_tokens // BLOCK_SIZE) + (width > 1)
    return len(request.prompt) // BLOCK_SIZE + 1 + width * num_own


@dataclasses.dataclass
class Workload:
    """Requests and their outputs when each runs alone in a large pool, without prefix caching."""

    requests: list[Request]
    alone: list[RequestOutput]


def make_workload(engine: LLMEngine, dense: DenseModel, seed: int, count: int) -> Workload:
    reschedule(engine, enable_prefix_caching=False, scheduling_policy="priority")
    requests = draw_requests(seed, count)
    assert max(map(most_blocks, requests)) <= NUM_USABLE
    alone = run_alone(engine, requests)
    greedy = [i for i, r in enumerate(requests) if not r.params.temperature and not r.beams]
    assert len(greedy) > 0.2 * count
    outputs = [alone[i] for i in greedy]
    for i, output, logits in zip(greedy, outputs, dense.output_logits(outputs), strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert logits.argmax(-1).tolist() == tokens
        assert margin(logits) > TOLERANCE
        assert ends_rightly(requests[i], tokens)
    return Workload(requests, alone)


@pytest.fixture(scope="module")
def workload(session_shared_engine: LLMEngine, dense: DenseModel) -> Workload:
    return make_workload(session_shared_engine, dense, seed=1, count=60)


@pytest.fixture(scope="module")
def large_workload(session_shared_engine: LLMEngine, dense: DenseModel) -> Workload:
    return make_workload(session_shared_engine, dense, seed=1, count=300)


def run_at_four_times_the_pool(engine: LLMEngine, requests: list[Request]) -> list[RequestOutput]:
    """Keeps as many requests unfinished as need four times the pool."""
    coming = iter(enumerate(requests))
    demands: dict[str, int] = {}
    outputs = {}

    def arrivals() -> Iterator[tuple[int, Request]]:
        while sum(demands.values()) < 4 * NUM_USABLE and (pair := next(coming, None)):
            yield pair

    while True:
        for i, request in arrivals():
            demands[str(i)] = most_blocks(request)
            add(engine, [request], prefix=f"{i} ")  # ids "0 0", "1 0", ...
        if not demands:
            break
        for output in engine.step():
            if output.finished:
                request_id = output.request_id.split()[0]
                outputs[int(request_id)] = output
                del demands[request_id]
    assert_no_block_lost(engine)
    return [outputs[i] for i in range(len(requests))]


def assert_equal(output: RequestOutput, alone: RequestOutput, request: Request) -> None:
    assert [(o.token_ids, o.text, o.finish_reason) for o in output.outputs] == [
        (o.token_ids, o.text, o.finish_reason) for o in alone.outputs
    ], request
    for ours, theirs in zip(output.outputs, alone.outputs, strict=True):
        assert abs(ours.cumulative_logprob - theirs.cumulative_logprob) < TOLERANCE * MAX_OUTPUT
    if request.params.prompt_logprobs is not None:
        assert output.prompt_logprobs is not None
        assert alone.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(request.prompt)
        for ours, theirs in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
            assert ours is not None
            assert theirs is not None
            assert list(ours) == list(theirs)
            assert all(abs(ours[i].logprob - theirs[i].logprob) < TOLERANCE for i in ours)


def assert_first_come_first_served(outputs: list[RequestOutput], requests: list[Request], by: str) -> None:
    """Of requests of one priority that were never preempted, no later one has its first token earlier."""
    for priority in {r.priority for r in requests} if by == "priority" else {None}:
        times = [
            o.metrics.first_token_time or 0.0
            for o, r in zip(outputs, requests, strict=True)
            if priority in (None, r.priority) and not o.metrics.num_preemptions
        ]
        assert len(times) > 1
        assert times == sorted(times)


@dataclasses.dataclass(frozen=True)
class Mode:
    """Settings of the scheduler, and which ways of losing blocks they must have used."""

    settings: dict[str, Any]
    recomputes: bool = True
    swaps: bool = True


MODES = {
    "recompute": Mode({"preemption_mode": "recompute"}, swaps=False),
    "swap": Mode({"preemption_mode": "swap"}, recomputes=False),
    "the paper's rule": Mode({}),
    "no swap space": Mode({"num_swap_blocks": 0}, swaps=False),
    "swap without space": Mode({"preemption_mode": "swap", "num_swap_blocks": 0}, swaps=False),
    "few swap blocks": Mode({"preemption_mode": "swap", "num_swap_blocks": 12}),
    "prompts first": Mode({"enable_chunked_prefill": False, "max_model_len": 100}),
    "prompts first, recompute": Mode(
        {"enable_chunked_prefill": False, "max_model_len": 100, "preemption_mode": "recompute"}, swaps=False
    ),
    "priority": Mode({"scheduling_policy": "priority"}),
    "priority, swap": Mode({"scheduling_policy": "priority", "preemption_mode": "swap"}, recomputes=False),
    "no prefix caching": Mode({"enable_prefix_caching": False}),
    "delay": Mode({"scheduler_delay_factor": 0.5}),
    "small budget": Mode({"max_num_batched_tokens": 32}),
}


def num_recomputed(steps: Steps) -> int:
    """Times that a sequence's tokens were computed once more."""
    furthest: dict[Any, int] = {}
    count = 0
    for step in steps:
        for row in step.scheduled:
            _, seq = steps.named[row.seq_id]
            count += row.start < furthest.get(seq, 0)
            furthest[seq] = row.start + row.num_tokens
    return count


def longest_run(values: Iterable[bool]) -> int:
    return max((len(list(run)) for value, run in itertools.groupby(values) if value), default=0)


def check_mode(engine: LLMEngine, workload: Workload, mode: Mode, patch: pytest.MonkeyPatch) -> None:
    requests = workload.requests
    by = mode.settings.get("scheduling_policy", "fcfs")
    if by == "fcfs":
        requests = [dataclasses.replace(r, priority=0) for r in requests]
    reschedule(engine, num_blocks=NUM_USABLE + 1, **mode.settings)
    steps = steps_of(engine, patch)
    outputs = run_at_four_times_the_pool(engine, requests)
    for output, alone, request in zip(outputs, workload.alone, requests, strict=True):
        assert_equal(output, alone, request)

    preempted = [output.metrics.num_preemptions for output in outputs]
    num_swapped = sum(len(step.blocks_to_swap_out) for step in steps)
    recomputed = num_recomputed(steps)
    print(
        f"{len(requests)} requests, {len(steps)} steps: {sum(preempted)} preemptions, at most "
        f"{max(preempted)} of a request; {num_swapped} blocks swapped out, {recomputed} rows recomputed"
    )
    assert sum(preempted) == sum(len(step.preempted) for step in steps)
    assert sum(preempted) > len(requests) / 6
    assert max(preempted) <= 10
    assert (num_swapped > 0) == mode.swaps
    assert (recomputed > 0) == mode.recomputes
    # A step of prompts alone may hold what a request with several sequences recomputes, over two steps.
    num_tokenless = 1 if engine.scheduler.enable_chunked_prefill else 2
    assert longest_run(not step.samples for step in steps) <= num_tokenless
    assert_first_come_first_served(outputs, requests, by)


@pytest.mark.thorough
@pytest.mark.parametrize("mode", MODES)
def test_exact_under_pressure(
    shared_engine: LLMEngine, workload: Workload, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mode(shared_engine, workload, MODES[mode], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_300_requests_exact_under_pressure(
    shared_engine: LLMEngine, large_workload: Workload, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mode(shared_engine, large_workload, MODES[mode], monkeypatch)


def test_every_kind_in_one_step(shared_engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    prefix = rng.integers(0, VOCAB_SIZE, 9).tolist()

    def prompt(is_hit: bool) -> list[int]:
        return [*(prefix if is_hit else []), *rng.integers(0, VOCAB_SIZE, 6).tolist()]

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sampled = dataclasses.replace(greedy, temperature=1, seed=3)
    requests = [Request(prompt(is_hit), params) for is_hit in (True, False) for params in (greedy, sampled)]
    requests += [
        Request(prompt(is_hit), dataclasses.replace(sampled, n=n)) for is_hit, n in ((False, 4), (True, 2))
    ]
    requests += [
        Request(prompt(is_hit), greedy, BeamSearchParams(w, 8)) for is_hit, w in ((False, 4), (True, 2))
    ]
    alone = run_alone(shared_engine, requests)
    reschedule(shared_engine)
    run(shared_engine, [Request(prefix, greedy)])
    steps = steps_of(shared_engine, monkeypatch)
    outputs = run(shared_engine, requests)
    assert [o.num_cached_tokens for o in outputs] == [8, 8, 0, 0, 0, 8, 0, 8]
    for output, single in zip(outputs, alone, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in single.outputs]
    kinds = {(r.params.temperature > 0, r.params.n, r.beams and r.beams.beam_width) for r in requests}
    for step, num_rows in ((steps[0], 8), (steps[1], 16)):
        assert len(step.scheduled) == num_rows
        groups = {group.request_id: group for group, _ in (steps.named[row.seq_id] for row in step.scheduled)}
        assert len(groups) == 8
        together = {
            (
                g.sampling_params.temperature > 0,
                g.sampling_params.n,
                g.beam_params and g.beam_params.beam_width,
            )
            for g in groups.values()
        }
        assert together == kinds
        assert len(kinds) == 6


@pytest.mark.parametrize("preemption_mode", [None, "recompute", "swap"])
def test_aborts_at_any_moment(
    shared_engine: LLMEngine, workload: Workload, preemption_mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests that wait, run or are swapped out; the others are exact."""
    reschedule(
        shared_engine,
        num_blocks=NUM_USABLE + 1,
        scheduling_policy="priority",
        preemption_mode=preemption_mode,
    )
    rng = np.random.default_rng(0)
    queues, aborted, outputs = shared_engine.scheduler.queues, {}, {}
    add(shared_engine, workload.requests)
    while shared_engine.has_unfinished_requests():
        outputs |= {int(o.request_id): o for o in shared_engine.step() if o.finished}
        unfinished = [
            (q, request_id) for q in ("waiting", "running", "swapped") for request_id in getattr(queues, q)
        ]
        if unfinished and rng.random() < 0.2:
            # Of the few that are swapped out, every second time.
            swapped = [pair for pair in unfinished if pair[0] == "swapped"]
            choice = swapped if swapped and rng.random() < 0.5 else unfinished
            queue, request_id = choice[rng.integers(len(choice))]
            state = shared_engine.abort_request(request_id)
            assert state is not None
            assert state.output().finished
            aborted[int(request_id)] = queue
            shared_engine.scheduler.block_manager.check_integrity()
    assert_no_block_lost(shared_engine)
    assert outputs.keys() | aborted.keys() == set(range(len(workload.requests)))
    kinds = {"waiting", "running"} | ({"swapped"} if preemption_mode != "recompute" else set())
    assert set(aborted.values()) == kinds
    for i, output in outputs.items():
        assert_equal(output, workload.alone[i], workload.requests[i])


def test_swap_space_is_what_the_user_says(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From EngineArgs to host memory: eight blocks and a half."""
    block_bytes = 2 * 2 * 2 * BLOCK_SIZE * 16 * 4  # layers, keys and values, heads, tokens, head_dim, float32
    settings = {"block_size": BLOCK_SIZE, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    with make_engine(
        checkpoint,
        few_buckets=True,
        num_gpu_blocks_override=24,
        swap_space=8.5 * block_bytes / 2**30,
        preemption_mode="swap",
        **settings,
    ) as engine:
        assert engine.config.num_swap_blocks == 8
        assert engine.scheduler.block_manager.swap_pool.num_usable == 8
        steps = steps_of(engine, monkeypatch)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        requests = [Request([i, *range(10 + i % 3)], params) for i in range(8)]
        outputs = run(engine, requests)
        assert sum(len(step.blocks_to_swap_in) for step in steps) > 0
        assert num_recomputed(steps) > 0, "what doesn't fit there is recomputed"
        assert tokens_of(outputs) == tokens_of(run_alone(engine, requests))

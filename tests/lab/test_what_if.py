"""Recordings under other schedulers and settings, and computed again on the device."""

import dataclasses
import json
import random

import numpy as np
import pytest
from helpers.real_model import EOS, VOCAB_SIZE, nan_embedding, reschedule, reset
from helpers.scheduling import make_scheduler

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.core.scheduler import Scheduler
from jax_paged.lab.recording import RecordedScheduler, replay
from jax_paged.lab.simulator import Request, StepTimeModel, simulate


def tokens_of(result) -> list[list[list[int]]]:
    return [[list(seq.output_token_ids) for seq in group.sequences] for group in result.requests]


@pytest.fixture
def own(bursting_engine: LLMEngine) -> LLMEngine:
    """An engine that is short of blocks and seats."""
    reschedule(bursting_engine, num_blocks=70, max_num_seqs=12)
    return bursting_engine


def serve(engine: LLMEngine, *, aborts: bool = False) -> list[str]:
    """Records requests of every kind that come one after the other."""
    lines: list[str] = []
    engine.record(lines.append)
    rng = random.Random(1)
    prefix = [rng.randrange(8, VOCAB_SIZE) for _ in range(12)]
    for i in range(24):
        prompt = prefix[: rng.choice([0, 4, 12])] + [
            rng.randrange(8, VOCAB_SIZE) for _ in range(rng.randint(1, 30))
        ]
        params: SamplingParams | BeamSearchParams = SamplingParams(
            n=rng.choice([1, 1, 3]),
            max_tokens=rng.randint(1, 24),
            stop=rng.choice([None, ["a", "1"]]),
            logit_bias=rng.choice([None, {10: 2.0}]),
            presence_penalty=rng.choice([0.0, 1.0]),
            logprobs=rng.choice([None, 2]),
            seed=i,
        )
        if rng.random() < 0.25:
            params = BeamSearchParams(rng.choice([2, 3]), rng.randint(1, 12))
        engine.add_request(f"r{i}", prompt, params)
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if aborts and i % 5 == 4:
            engine.abort_request(f"r{i - 1}")
    while engine.has_unfinished_requests():
        engine.step()
    return lines


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 40},
        {"num_blocks": 1000, "num_scheduler_steps": 1},
        {"max_num_batched_tokens": 13},
        {"num_blocks": 40, "preemption_mode": "swap"},
        {"num_blocks": 40, "preemption_mode": "recompute", "enable_prefix_caching": False},
    ],
    ids=str,
)
def test_other_settings_give_the_same_tokens_in_other_steps(own: LLMEngine, settings) -> None:
    lines = serve(own)
    recorded, other = replay(lines), replay(lines, **settings)
    assert tokens_of(other) == tokens_of(recorded)
    assert [dataclasses.asdict(o) for o in other.outputs] != [dataclasses.asdict(o) for o in recorded.outputs]
    times = [g.metrics.arrival_time for g in recorded.requests]
    assert [g.metrics.arrival_time for g in other.requests] == times
    assert not np.isnan(other.times_s("finished_time")).any()
    assert (other.times_s("first_token_time") >= 0).all()
    assert other.summary().keys() == recorded.summary().keys()


def test_a_smaller_pool_preempts_more(own: LLMEngine) -> None:
    lines = serve(own)
    summaries = [replay(lines, num_blocks=n).summary() for n in (30, 1000)]
    assert summaries[0]["preemptions"] > 10 > summaries[1]["preemptions"] == 0
    assert summaries[0]["steps"] > summaries[1]["steps"]
    assert summaries[0]["to_end_s"] > summaries[1]["to_end_s"]


def test_requests_that_were_aborted_get_what_they_had_got(own: LLMEngine) -> None:
    lines = serve(own, aborts=True)
    recorded = replay(lines)
    for settings in ({"num_blocks": 40}, {"num_scheduler_steps": 1, "max_num_seqs": 4}):
        other = replay(lines, **settings)
        assert other.num_steps != recorded.num_steps
        for group, same in zip(other.requests, recorded.requests, strict=True):
            assert group.is_finished
            pairs = zip(group.sequences, same.sequences, strict=False)
            assert all(a.output_token_ids == b.output_token_ids[: len(a.output_token_ids)] for a, b in pairs)
            if not any(seq.status.finish_reason == "abort" for seq in same.sequences):
                assert [s.output_token_ids for s in group.sequences] == [
                    s.output_token_ids for s in same.sequences
                ]


def test_another_scheduler(own: LLMEngine) -> None:
    class OneAtATime(Scheduler):
        """Runs one request at a time."""

        def __init__(self, **arguments):
            super().__init__(**(arguments | {"max_num_seqs": 3, "num_scheduler_steps": 1}))

    lines = serve(own)
    other = replay(lines, OneAtATime)
    assert tokens_of(other) == tokens_of(replay(lines))
    assert other.steps["num_seqs"].max() == 3
    by_key = replay(lines, lambda group: -len(group.sequences[0]))
    assert tokens_of(by_key) == tokens_of(other)
    # The number of steps may be the same: how many requests wait depends on how busy the machine is.
    finished = by_key.times_s("finished_time"), replay(lines).times_s("finished_time")
    assert not np.array_equal(*finished)


def test_a_step_takes_what_the_recorded_ones_took() -> None:
    """A simulation has exact times: the same scheduler again, as a what-if, gives the same times."""
    lines: list[str] = []
    times = StepTimeModel(base_s=0.5, s_per_prefill_token=0.01, s_per_decode_seq=0.01)
    trace = [Request(0.37 * i, 10 + i, 20) for i in range(30)]
    simulate(trace, RecordedScheduler(make_scheduler(64, 4), lines.append), times)
    events = list(map(json.loads, lines))
    last = max(i for i, event in enumerate(events) if event["event"] == "update")
    events[last]["now"] += 100  # the machine paused
    slow = replay(map(json.dumps, events), watermark=0.0)
    expected = replay(lines).steps["step_s"]
    np.testing.assert_allclose(slow.steps["step_s"][:-1], expected[:-1], rtol=1e-3)
    recorded, again = replay(lines), replay(lines, watermark=0.0)
    np.testing.assert_allclose(again.steps["step_s"], recorded.steps["step_s"], rtol=1e-9)
    np.testing.assert_allclose(again.times_s("finished_time"), recorded.times_s("finished_time"), rtol=1e-9)


def test_mistakes_are_errors(own: LLMEngine) -> None:
    lines = serve(own)
    with pytest.raises(
        ValueError,
        match=r"each name in `settings` must be one of 'block_size', .*'num_scheduler_steps', .*got 'blocks'",
    ):
        replay(lines, blocks=3)
    with pytest.raises(ValueError, match=r"the number of prompt tokens of `requests\['r\d+'\]` must be "):
        replay(lines, max_model_len=5)


def test_a_recording_is_computed_again(own: LLMEngine) -> None:
    """With two steps in flight, bursts, swaps and copies; bit for bit."""
    lines = serve(own, aborts=True)
    reset(own)
    result = own.replay(lines)
    assert result.max_logprob_difference == 0.0
    assert tokens_of(result) == tokens_of(replay(lines))
    assert result.num_steps == sum('"event": "schedule"' in line for line in lines)
    # The engine goes on, with nothing cached.
    own.add_request("next", [10, 11, 12], SamplingParams(max_tokens=3, temperature=0))
    while own.has_unfinished_requests():
        own.step()


def test_another_model_is_noticed(own: LLMEngine) -> None:
    lines = serve(own)
    reset(own)
    with (
        nan_embedding(own, list(range(8, 60))),
        pytest.raises(ValueError, match=r" in step \d+, as recorded, got"),
    ):
        own.replay(lines)
    own.replay(lines)
    own.record(lines.append)
    with pytest.raises(RuntimeError, match=r"call record\(None\) first"):
        own.replay(lines)
    own.record(None)
    own.replay(lines[:-1])


def test_what_does_not_fit_is_refused(own: LLMEngine) -> None:
    lines = serve(own)
    reset(own)
    start = json.loads(lines[0])
    start["block_manager"]["num_blocks"] = 401
    with pytest.raises(ValueError, match=r"num_blocks in `lines` must be .* \[0, 400\], got 401"):
        own.replay([json.dumps(start), *lines[1:]])
    own.add_request("r", [10, EOS], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="requests are running"):
        own.replay(lines)

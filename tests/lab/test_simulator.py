"""The simulator on traces small enough to work out by hand, its invariants, and recordings of real runs."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import EOS, VOCAB_SIZE
from helpers.scheduling import found

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.core.block_manager import BlockManager
from jax_paged.core.scheduler import Scheduler
from jax_paged.lab.recording import RecordedScheduler, replay
from jax_paged.lab.simulator import Request, StepTimeModel, simulate

STEP_TIME = StepTimeModel(0.02, 1e-4, 1e-5, 1e-6, 1e-3)


def make_scheduler(
    num_blocks: int, block_size: int = 4, *, num_swap_blocks: int = 0, **settings: Any
) -> Scheduler:
    caching = settings.pop("enable_prefix_caching", False)
    args = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "eos_token_ids": frozenset({EOS}),
    }
    manager = BlockManager(num_blocks, block_size, caching, num_swap_blocks=num_swap_blocks)
    return Scheduler(block_manager=manager, **(args | settings))


def random_trace(seed: int, count: int) -> list[Request]:
    """Draws requests of up to 40 tokens: single ones, samples and beams."""
    rng = random.Random(seed)
    trace, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(20)
        kind = rng.random()
        n, width = (rng.randint(2, 5), None) if kind < 0.2 else (1, rng.randint(2, 4) if kind < 0.4 else None)
        trace.append(Request(now, rng.randint(1, 20), rng.randint(1, 20), n, width))
    return trace


def test_a_trace_worked_out_by_hand() -> None:
    """Two requests in a pool of 5 blocks of 4 tokens, at 10 ms per step and 1 ms per prefilled token."""
    scheduler = make_scheduler(6, watermark=0)
    result = simulate([Request(1.0, 6, 4), Request(1.005, 3, 2)], scheduler, StepTimeModel(0.01, 0.001))
    fields = ["num_requests", "num_tokens", "num_prefill_tokens", "num_context_tokens"]
    fields += ["num_blocks_used", "num_blocks_saved", "num_slots_wasted"]
    assert result.steps[fields].tolist() == [
        (1, 6, 6, 0, 2, 0, 2),  # the first alone
        (2, 4, 3, 6, 3, 0, 2),  # its second token; the prompt of the other
        (2, 2, 0, 10, 3, 0, 0),  # tokens 8 and 4 fill their blocks
        (1, 1, 0, 8, 3, 0, 3),  # the other has ended
    ]
    np.testing.assert_allclose(result.steps["step_s"], [0.016, 0.013, 0.01, 0.01])
    np.testing.assert_allclose(result.steps["time_s"], [1.0, 1.016, 1.029, 1.039])
    np.testing.assert_allclose(result.requests["first_token_time"], [1.016, 1.029])
    np.testing.assert_allclose(result.requests["finished_time"], [1.049, 1.039])
    # 2 * 16 + 2 * 13 + 0 + 3 * 10 of 8 * 16 + 12 * 13 + 12 * 10 + 12 * 10 slot-milliseconds.
    assert result.share_of_slots_filled == pytest.approx(1 - 88 / 524)
    assert result.mean("num_requests") == pytest.approx((16 + 26 + 20 + 10) / 49)
    assert result.window(1.02, 1.035).steps["num_context_tokens"].tolist() == [10]
    assert len(result.window(1.001).requests) == 1


def test_samples_share_their_prompt() -> None:
    """Figure 8 of the paper: three samples of one prompt, whose last block is copied for two of them."""
    result = simulate([Request(0.0, 6, 3, n=3)], make_scheduler(20, watermark=0), STEP_TIME)
    fields = ["num_seqs", "num_blocks_used", "num_blocks_saved", "num_slots_wasted", "num_blocks_copied"]
    assert result.steps[fields].tolist() == [
        (1, 2, 4, 2, 0),  # 2 blocks of 3 sequences; the first full, the second half full
        (3, 4, 2, 3, 2),  # 1 shared, 3 own ones with 3 of 4 tokens
        (3, 4, 2, 0, 0),
    ]


def test_equal_prompts_share_blocks_only_if_these_are_cached() -> None:
    trace = [Request(0.0, list(range(10)), 2), Request(1.0, list(range(10)), 2), Request(2.0, 10, 2)]
    for caching, cached in ((False, [0, 0, 0]), (True, [0, 8, 0])):
        result = simulate(trace, make_scheduler(20, enable_prefix_caching=caching), STEP_TIME)
        assert result.requests["num_cached_tokens"].tolist() == cached


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("num_swap_blocks", [0, 30])
def test_every_request_ends_and_no_block_is_lost(chunked: bool, num_swap_blocks: int) -> None:
    trace = random_trace(0, 200)
    results = []
    for _ in range(2):
        scheduler = make_scheduler(
            41, num_swap_blocks=num_swap_blocks, enable_chunked_prefill=chunked, max_model_len=48
        )
        results.append(simulate(iter(trace), scheduler, STEP_TIME))
        scheduler.block_manager.check_integrity()
        assert scheduler.block_manager.num_free_blocks == 40
    result = results[0]
    for mine, other in zip(
        (result.steps, result.requests), (results[1].steps, results[1].requests), strict=True
    ):
        np.testing.assert_array_equal(mine, other)
    steps, requests = result.steps, result.requests
    assert (steps["num_blocks_used"] <= 40).all()
    assert (steps["num_slots_wasted"] >= 0).all()
    assert (steps["num_slots_wasted"] < steps["num_blocks_used"] * 4).all()
    assert (steps["time_s"][1:] >= steps["time_s"][:-1] + steps["step_s"][:-1] - 1e-9).all()
    assert (requests["finished_time"] >= requests["first_token_time"]).all()
    assert (requests["first_token_time"] > requests["arrival_time"]).all()
    assert requests["num_preemptions"].sum() == steps["num_preemptions"].sum() > 0
    assert (steps["num_blocks_swapped"].sum() > 0) == (num_swap_blocks > 0)
    assert steps["num_blocks_saved"].max() > 5


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_counted_as_block_by_block(seed: int) -> None:
    """The counts of a step against a walk over all block tables."""

    class Checked(Scheduler):
        def schedule(self, now: float) -> Any:
            self.output = super().schedule(now)
            return self.output

        def update(self, output: Any, *args: Any) -> Any:
            computed = {seq: seq.num_computed_tokens for seq in self.block_manager.block_tables}
            named = [(row, row.seq_id) for row in output.scheduled]
            named += [(output.scheduled[sample.scheduled_index], sample.seq_id) for sample in output.samples]
            for row, seq_id in named:
                computed[found(self, seq_id)[1]] = row.start + row.num_tokens
            slots = {
                (block, slot): i * 4 + slot < computed[seq]
                for seq, (table,) in self.block_manager.block_tables.items()
                for i, block in enumerate(table)
                for slot in range(4)
            }
            for seq, (table,) in self.block_manager.block_tables.items():
                for token in range(computed[seq]):
                    slots[table[token // 4], token % 4] = True
            counts.append((len(slots) // 4, len(slots) - sum(slots.values())))
            return super().update(output, *args)

    counts: list[tuple[int, int]] = []
    scheduler = make_scheduler(61, num_swap_blocks=10 * seed, max_num_batched_tokens=24, max_num_seqs=10)
    scheduler.__class__ = Checked
    result = simulate(random_trace(seed, 60), scheduler, STEP_TIME)
    assert result.steps[["num_blocks_used", "num_slots_wasted"]].tolist() == counts


def test_what_cannot_run_is_refused() -> None:
    for trace, message in (
        (
            [Request(1.0, 4, 4), Request(0.5, 4, 4)],
            r"`requests\[1\].arrival_s` must be at least 1.0, when the previous request arrived, got 0.5",
        ),
        (
            [Request(0.0, 60, 5)],
            r"the number of tokens of `requests\[0\]` must be at most 64 \(max_model_len\), got 65",
        ),
        (
            [Request(0.0, 4, 4, n=17)],
            r"the number of sequences of `requests\[0\]` must be at most 16 \(max_num_seqs\), got 17",
        ),
        (
            [Request(0.0, 4, 4, beam_width=17)],
            r"the number of sequences of `requests\[0\]` must be at most 16 \(max_num_seqs\), got 17",
        ),
        (
            [Request(0.0, 4, 4, priority=1)],
            r"`requests\[0\].priority` must be 0 with scheduling_policy 'fcfs', got 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            simulate(trace, make_scheduler(20), STEP_TIME)
    too_large = simulate([Request(0.0, 60, 2), Request(0.0, 4, 2)], make_scheduler(10), STEP_TIME)
    assert np.isnan(too_large.requests["first_token_time"]).tolist() == [True, False]
    for values, message in (
        ((-1.0, 4, 4), r"`arrival_s` must be a finite number in \[0, inf\], got -1.0"),
        ((0.0, 0, 4), "`prompt_len` must be an integer of at least 1, got 0"),
        ((0.0, [], 4), "`prompt_len` must be an integer of at least 1, got 0"),
        ((0.0, 4, 0), "`output_len` must be an integer of at least 1, got 0"),
        ((0.0, 4, 4, 0), "`n` must be an integer of at least 1, got 0"),
        ((0.0, 4, 4, 1, 0), "`beam_width` must be an integer of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Request(*values)
    with pytest.raises(ValueError, match=r"`base_s` must be .*got -1"):
        StepTimeModel(-1)


@pytest.mark.parametrize("seed", range(8))
def test_recorded_simulations_replay(seed: int) -> None:
    rng = random.Random(seed)
    lines: list[str] = []
    like = make_scheduler(
        rng.choice([41, 61]),
        num_swap_blocks=rng.choice([0, 20]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        preemption_mode=rng.choice([None, "swap", "recompute"]),
        enable_chunked_prefill=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.5,
        scheduler_delay_factor=rng.choice([0.0, 0.5]),
        watermark=rng.choice([0.0, 0.1]),
    )
    result = simulate(random_trace(seed, 60), RecordedScheduler(like, lines.append), STEP_TIME)
    assert replay(lines).num_steps >= len(result.steps)


@pytest.fixture
def engine(small_engine: LLMEngine) -> LLMEngine:
    """Has a pool that is full after a few requests, and little room to swap."""
    like = small_engine.scheduler
    small_engine._core.scheduler = Scheduler(
        block_manager=BlockManager(61, 4, True, num_swap_blocks=40),
        max_num_seqs=like.max_num_seqs,
        max_num_batched_tokens=like.max_num_batched_tokens,
        max_model_len=like.max_model_len,
        eos_token_ids=like.eos_token_ids,
    )
    return small_engine


def serve(engine: LLMEngine, seed: int) -> None:
    """Sends requests of every kind, aborts some, and runs the rest to their end."""
    rng = random.Random(seed)
    prefix = [rng.randrange(8, VOCAB_SIZE) for _ in range(12)]
    for i in range(40):
        prompt = prefix[: rng.choice([0, 4, 9, 12])] + [
            rng.randrange(8, VOCAB_SIZE) for _ in range(rng.randint(1, 20))
        ]
        params: SamplingParams | BeamSearchParams = SamplingParams(
            n=rng.choice([1, 1, 3]),
            best_of=rng.choice([None, 3]),
            max_tokens=rng.randint(1, 24),
            stop=rng.choice([None, ["a", "é", "1"]]),
            stop_token_ids=rng.choice([None, [8, 9]]),
            logit_bias=rng.choice([None, {10: 2.0}]),
            seed=i,
        )
        if rng.random() < 0.3:
            params = BeamSearchParams(rng.choice([2, 4]), rng.randint(1, 16))
        engine.add_request(f"r{i}", prompt, params, cache_salt=rng.choice(["", "", "\ud800"]))
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if rng.random() < 0.2:
            engine.abort_request(f"r{rng.randint(0, i)}")
    while engine.has_unfinished_requests():
        engine.step()


def test_a_real_run_replays_and_what_differs_is_named(engine: LLMEngine, tmp_path: Path) -> None:
    recorded: list[str] = []
    engine.record(recorded.append)
    name = engine.pin_prefix(list(range(10, 30)))
    serve(engine, 0)
    engine.unpin_prefix(name)
    engine.record(recorded.append)  # once more, into the same file
    serve(engine, 1)
    path = tmp_path / "run.jsonl"
    path.write_text("".join(recorded))
    with path.open() as lines:
        num_steps = replay(lines).num_steps
    events = list(map(json.loads, recorded))
    steps = [event for event in events if event["event"] == "schedule"]
    assert num_steps == len(steps) > 40
    kinds = {event["event"] for event in events}
    assert kinds == {"start", "add", "abort", "finish", "schedule", "update", "pin", "unpin"}
    for field in ("blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy", "preempted"):
        assert any(step[field] for step in steps), f"no {field}"

    place, i = next(
        (place, i)
        for place, event in enumerate(steps[20:], 20)
        for i, row in enumerate(event["scheduled"])
        if row[3][0]  # new blocks
    )
    steps[place]["scheduled"][i][3][0][-1] += 1  # another block
    with pytest.raises(ValueError, match=rf"`scheduled\[{i}\]` must be .* in step {place}, as recorded, got"):
        replay(map(json.dumps, events))
    with pytest.raises(ValueError, match="the first event of `lines` must be 'start', got 'add'"):
        replay(line for line in recorded if '"add"' in line)
    older = [line.replace('"format": 2, ', "") for line in recorded]
    with pytest.raises(ValueError, match=r"the format of `lines` must be 2, got 1\. Create it again"):
        replay(older)


def test_recording_begins_with_an_idle_engine(engine: LLMEngine) -> None:
    engine.add_request("r", [10, 11], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="requests are running"):
        engine.record(print)
    engine.abort_request("r")
    name = engine.pin_prefix(list(range(10, 30)))
    with pytest.raises(RuntimeError, match="prefixes are pinned"):
        engine.record(print)
    engine.unpin_prefix(name)


def test_the_simulated_schedule_is_the_engines(engine: LLMEngine) -> None:
    """The same requests, all there from the start: every row, block and preemption is the same."""
    rng = random.Random(3)
    trace = [
        Request(
            0.0,
            [rng.randrange(8, VOCAB_SIZE) for _ in range(rng.randint(1, 24))],
            rng.randint(1, 24),
            rng.choice([1, 1, 3]),
        )
        for _ in range(30)
    ]
    # What is shared by chance, or computed again, depends on the tokens.
    engine.scheduler.block_manager.enable_prefix_caching = False
    real: list[str] = []
    engine.record(real.append)
    for i, request in enumerate(trace):
        assert isinstance(request.prompt, list)
        params = SamplingParams(n=request.n, max_tokens=request.output_len, ignore_eos=True, seed=0)
        engine.add_request(str(i), request.prompt, params)
    while engine.has_unfinished_requests():
        engine.step()

    simulated: list[str] = []
    simulate(trace, RecordedScheduler(engine.scheduler, simulated.append), STEP_TIME)
    assert steps_of(simulated) == steps_of(real)


def steps_of(lines: list[str]) -> list[dict[str, Any]]:
    """Returns the decisions without their time, and without the tokens, of which only the number counts."""
    steps = [event for event in map(json.loads, lines) if event["event"] == "schedule"]
    for step in steps:
        del step["now"]
        step["scheduled"] = [[i, start, len(tokens), *rest] for i, start, tokens, *rest in step["scheduled"]]
        step["new_sequences"] = [[*ids, seed, len(out), t] for *ids, seed, out, t in step["new_sequences"]]
    return steps


def test_bursts_take_as_long_as_their_steps() -> None:
    trace = [Request(0.0, 5 + i, 3 + 5 * i, n=1 + i % 2) for i in range(6)]
    alone, bursts = (
        simulate(trace, make_scheduler(200, num_scheduler_steps=size), STEP_TIME) for size in (1, 8)
    )
    assert len(bursts.steps) < len(alone.steps) / 3
    for field in ("step_s", "num_tokens", "num_prefill_tokens"):
        assert bursts.steps[field].sum() == pytest.approx(alone.steps[field].sum())
    ends = [result.requests["finished_time"].max() for result in (alone, bursts)]
    assert ends[1] == pytest.approx(ends[0])
    assert bursts.steps["num_slots_wasted"].max() < 9 * 4  # at most 3 slots of each sequence's last block

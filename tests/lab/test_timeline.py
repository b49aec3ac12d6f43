"""Timelines of recordings, what-ifs and simulations: the drawing says what the steps hold."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE, reschedule
from helpers.scheduling import make_scheduler

from jax_paged import LLMEngine, SamplingParams
from jax_paged.lab.pool_map import short_name
from jax_paged.lab.recording import replay
from jax_paged.lab.simulator import Request, StepTimeModel, simulate
from jax_paged.lab.timeline import Timeline, timeline_of

NAMES = ["a", "<b>&'\"", "a request of a long name, which does not fit", "\ud800"]


@pytest.fixture
def lines(bursting_engine: LLMEngine) -> list[str]:
    """A recording of samples and long prompts, in a pool so small that they are preempted."""
    engine, rng, lines = bursting_engine, random.Random(2), list[str]()
    reschedule(engine, num_blocks=40, num_scheduler_steps=1)
    engine.record(lines.append)
    for i, name in enumerate(NAMES):
        params = SamplingParams(n=1 + i % 2, max_tokens=24, ignore_eos=True, seed=i)
        engine.add_request(name, [rng.randrange(8, VOCAB_SIZE) for _ in range(10 + 20 * i)], params)
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    engine.record(None)
    return lines


def drawn(picture: Timeline) -> Any:
    """Returns the figure, which a notebook can show."""
    png = picture._repr_png_()
    assert png is not None
    assert png.startswith(b"\x89PNG")
    return picture.figure()


def lanes(figure: Any) -> list[str]:
    return [label.get_text() for label in figure.axes[2].get_yticklabels()] if figure.axes[2:] else []


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_recording_is_drawn_step_by_step(lines: list[str]) -> None:
    picture, result = timeline_of(lines), replay(lines)
    steps = result.steps
    assert (picture.steps == steps).all()
    of_prompts = [sum(r.num_tokens for r in o.scheduled if r.num_tokens > 1) for o in result.outputs]
    assert steps["num_prefill_tokens"].tolist() == of_prompts
    figure = drawn(picture)
    tokens, queues, requests = figure.axes
    preempted = Counter(name for output in result.outputs for name in output.preempted)
    assert sum(preempted.values()) > 0
    (mark,) = tokens.lines
    assert (mark.get_xdata() - 0.5).tolist() == np.flatnonzero(steps["num_preemptions"]).tolist()
    every, of_one = tokens.patches
    assert (every.get_data().values == steps["num_tokens"]).all()
    assert (of_one.get_data().values == steps["num_tokens"] - steps["num_prefill_tokens"]).all()
    assert (queues.patches[0].get_data().values == steps["num_seqs"]).all()
    names = {s.seq_id: s.request.request_id for o in result.outputs for s in o.new_sequences}
    assert lanes(figure) == list(map(short_name, NAMES))
    for y, name in enumerate(NAMES):
        _, one, several = requests.collections[3 * y : 3 * y + 3]
        computing = sum(any(names[row.seq_id] == name for row in o.scheduled) for o in result.outputs)
        assert (
            sum(path.get_extents().width for bars in (one, several) for path in bars.get_paths()) == computing
        )
        assert len(requests.lines[y].get_xdata()) == preempted[name]
    assert figure.get_suptitle() == repr(picture)[1:-1]
    assert {"one token per sequence (decode)", "preemption", "waiting requests"} <= {*legend(figure)}


def test_simulations_have_no_lanes() -> None:
    trace = [Request(i * 0.5, 20 + i % 30, 60) for i in range(60)]
    scheduler = make_scheduler(num_blocks=100, block_size=16, max_num_seqs=64, budget=256)
    figure = drawn(Timeline(simulate(trace, scheduler, StepTimeModel(0.05)).steps))
    assert lanes(figure) == []
    time_of = figure.axes[-1].xaxis.get_major_formatter()
    assert (time_of(0), time_of(10), time_of(10**6)) == ("0\n0 s", "10\n500 ms", "")


def test_more_requests_than_lanes(bursting_engine: LLMEngine) -> None:
    lines: list[str] = []
    bursting_engine.record(lines.append)
    for i in range(30):
        bursting_engine.add_request(f"r{i}", [10 + i], SamplingParams(max_tokens=2, ignore_eos=True))
    while bursting_engine.has_unfinished_requests():
        bursting_engine.step()
    bursting_engine.record(None)
    figure = drawn(timeline_of(lines))
    assert len(lanes(figure)) == 24
    assert figure.axes[-1].get_xlabel() == "and 6 more requests"


def test_no_steps() -> None:
    picture = Timeline(replay([]).steps)
    assert picture._repr_png_() is None
    assert repr(picture) == "<timeline: 0 steps, 0 tokens, 0 preemptions>"

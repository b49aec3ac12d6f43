"""Timelines of recordings, what-ifs and simulations: the drawing says what the steps hold."""

import random
import re
import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest
from helpers.real_model import VOCAB_SIZE, reschedule
from helpers.scheduling import make_scheduler

from jax_paged import LLMEngine, SamplingParams
from jax_paged.lab.recording import replay
from jax_paged.lab.simulator import Request, StepTimeModel, simulate
from jax_paged.lab.timeline import Timeline, timeline_of

NAMES = ["a", "<b>&'\"", "a request of a long name, which does not fit", "\ud800"]


@pytest.fixture
def lines(bursting_engine: LLMEngine) -> list[str]:
    """A recording of samples and long prompts, in a pool so small that they are preempted."""
    engine, rng, lines = bursting_engine, random.Random(2), list[str]()
    reschedule(engine, num_blocks=40, burst_size=1)
    engine.record(lines.append)
    for i, name in enumerate(NAMES):
        params = SamplingParams(n=1 + i % 2, max_tokens=24, ignore_eos=True, seed=i)
        engine.add_request(name, [rng.randrange(8, VOCAB_SIZE) for _ in range(10 + 20 * i)], params)
        engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    engine.record(None)
    return lines


def drawn(picture: Timeline) -> ET.Element:
    """Returns the drawing, which loads nothing and runs nothing."""
    text = picture._repr_html_()
    for word in ("<script", "http", "url(", "href"):
        assert word not in text
    root = ET.fromstring(text)
    svg = root.find("svg")
    assert svg is not None
    assert svg.get("role") == "img"
    assert (svg.findtext("title"), svg.findtext("desc")) == ("Timeline", repr(picture)[11:-1])
    return root


def lanes(root: ET.Element) -> list[str]:
    return [lane.findtext("title") or "" for lane in root.iterfind("svg/g")]


def test_a_recording_is_drawn_step_by_step(lines: list[str]) -> None:
    picture, result = timeline_of(lines), replay(lines)
    steps = result.steps
    assert (picture.steps == steps).all()
    of_prompts = [sum(r.num_tokens for r in o.scheduled if r.num_tokens > 1) for o in result.outputs]
    assert steps["num_prefill_tokens"].tolist() == of_prompts
    root = drawn(picture)
    preempted = Counter(name for output in result.outputs for name in output.preempted)
    assert sum(preempted.values()) > 0
    marks = [p for p in root.iterfind("svg/path") if (p.get("d") or "").endswith("l-4.5 -8h9z")]
    assert len(marks) == sum(steps["num_preemptions"] > 0)
    found = dict(zip(NAMES, lanes(root), strict=True))
    for name, lane in found.items():
        names = {s.seq_id: s.request.request_id for o in result.outputs for s in o.new_sequences}
        computing = sum(any(names[row.seq_id] == name for row in o.scheduled) for o in result.outputs)
        assert lane.endswith(f": computes in {computing} columns; {preempted[name]} preemptions")
    text = "".join(root.itertext())
    for word in ("tokens per step", "rows of one token", "preemption", "requests that wait"):
        assert word in text


def test_the_areas_are_as_high_as_the_steps(lines: list[str]) -> None:
    picture = timeline_of(lines)
    svg = drawn(picture).find("svg")
    assert svg is not None
    areas = [p for p in svg.iterfind("path") if (p.get("fill") or "none").startswith("hsl")]
    several, one = (path_heights(p.get("d") or "") for p in areas)
    steps = picture.steps
    rows_of_one = steps["num_tokens"] - steps["num_prefill_tokens"]
    scale = several.max() / steps["num_tokens"].max()
    assert several == pytest.approx(steps["num_tokens"] * scale, abs=0.11)
    assert one == pytest.approx(rows_of_one * scale, abs=0.11)


def path_heights(path: str) -> np.ndarray:
    """Returns how high an area is above its base, column by column."""
    first, base = re.findall(r"^M\S+ (\S+?)H", path)[0], re.findall(r"V([^HVz]+)H[^H]+z$", path)[0]
    tops = [first, *re.findall(r"V([^HVz]+)H", path)[:-1]]
    return float(base) - np.array(tops, float)


def test_long_ones_are_folded_and_only_some_requests_have_lanes() -> None:
    trace = [Request(i * 0.5, 20 + i % 30, 60) for i in range(60)]
    scheduler = make_scheduler(num_blocks=100, block_size=16, max_num_seqs=64, budget=256)
    steps = simulate(trace, scheduler, StepTimeModel(0.05)).steps
    assert len(steps) > 400
    picture = Timeline(steps)
    root = drawn(picture)
    assert lanes(root) == []
    per_column = -(-len(steps) // 336)
    areas = [
        p.get("d") or "" for p in root.iterfind("svg/path") if (p.get("fill") or "none").startswith("hsl")
    ]
    heights = path_heights(areas[0])
    means = [steps["num_tokens"][i : i + per_column].mean() for i in range(0, len(steps), per_column)]
    assert heights == pytest.approx(np.array(means) * heights.max() / max(means), abs=0.11)
    assert f"steps per column: {per_column}" in "".join(root.itertext())


def test_more_requests_than_lanes(bursting_engine: LLMEngine) -> None:
    lines: list[str] = []
    bursting_engine.record(lines.append)
    for i in range(30):
        bursting_engine.add_request(f"r{i}", [10 + i], SamplingParams(max_tokens=2, ignore_eos=True))
    while bursting_engine.has_unfinished_requests():
        bursting_engine.step()
    bursting_engine.record(None)
    root = drawn(timeline_of(lines))
    assert len(lanes(root)) == 24
    assert "and 6 more" in "".join(root.itertext())


def test_no_steps() -> None:
    picture = Timeline(replay([]).steps)
    assert picture._repr_html_() == "<p>no steps yet</p>"
    assert repr(picture) == "<timeline: 0 steps, 0 tokens, 0 preemptions>"

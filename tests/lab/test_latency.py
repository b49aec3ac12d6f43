"""Latencies of simulations and replays, against sums by hand; the drawing says the same."""

import sys

import numpy as np
import pytest
from helpers.real_model import reschedule
from helpers.scheduling import make_scheduler

from jax_paged import LLMEngine, SamplingParams
from jax_paged.lab.latency import FIRST, PER_TOKEN, QUEUE, Latencies, latencies
from jax_paged.lab.recording import replay
from jax_paged.lab.simulator import Request, SimulationResult, StepTimeModel, simulate


def simulated(max_num_seqs: int, num_requests: int = 6) -> SimulationResult:
    """Requests of ten tokens that come at once, while each step takes a second."""
    scheduler = make_scheduler(num_blocks=100, block_size=16, max_num_seqs=max_num_seqs, budget=256)
    return simulate([Request(0.0, 5, 10)] * num_requests, scheduler, StepTimeModel(1.0))


def labels(picture: Latencies) -> list[str]:
    """Returns the entries of the legend, of a drawing that a notebook can show."""
    assert picture._repr_png_().startswith(b"\x89PNG")
    return [text.get_text() for text in picture.figure().legends[0].get_texts()]


def test_latencies_are_those_of_the_clock() -> None:
    """Two at a time: a pair has its first tokens after a second, and its last nine seconds later."""
    found = latencies({"two": simulated(2), "all": simulated(6)})
    assert found.seconds["two"][QUEUE].tolist() == [0, 0, 10, 10, 20, 20]
    assert found.seconds["two"][FIRST].tolist() == [1, 1, 11, 11, 21, 21]
    assert found.seconds["all"][FIRST].tolist() == [1] * 6
    for run in ("two", "all"):
        assert found.seconds[run][PER_TOKEN].tolist() == [1] * 6
    assert [found.percentile("two", FIRST, percent) for percent in (50, 66, 67, 99)] == [11, 11, 21, 21]
    two = "queue time 10 s and 20 s, time to first token 11 s and 21 s, time per output token 1 s and 1 s"
    assert repr(found).startswith(
        f"<latencies, median and 99th percentile: two: {two} (6 requests); all: queue"
    )


def test_the_drawing_says_so() -> None:
    picture = latencies({"two <&>$x$": simulated(2), "all": simulated(6)})
    marks, (two, every) = labels(picture)[:2], labels(picture)[2:]
    assert marks == ["median", "99th percentile"]
    assert two.startswith("two <&>$x$: queue time 10 s and 20 s, time to first token 11 s and 21 s, time per")
    assert every.startswith("all: queue time 0 s and 0 s")
    panels = picture.figure().axes
    assert [axes.get_title() for axes in panels] == [QUEUE, FIRST, PER_TOKEN]
    ours, median, most, theirs, *_ = panels[1].lines
    assert set(ours.get_xdata()) == {1, 11, 21}
    assert ours.get_ydata().max() == 1
    assert (median.get_xydata().tolist(), most.get_xydata().tolist()) == ([[11, 0.5]], [[21, 0.99]])
    assert ours.get_linestyle() != theirs.get_linestyle(), "lines differ by more than their colour"
    assert panels[1].xaxis.get_major_formatter()(0.002) == "2 ms"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-paged\[plot\]'"):
        latencies({}).figure()


def test_a_replay_has_them_too(bursting_engine: LLMEngine) -> None:
    lines: list[str] = []
    reschedule(bursting_engine, num_blocks=40)
    bursting_engine.record(lines.append)
    lengths = (1, 5, 20)
    for i, length in enumerate(lengths):
        bursting_engine.add_request(f"r{i}", [10 + i] * 9, SamplingParams(max_tokens=length, ignore_eos=True))
    while bursting_engine.has_unfinished_requests():
        bursting_engine.step()
    bursting_engine.record(None)
    result = replay(lines)
    assert result.num_output_tokens.tolist() == list(lengths)
    found = latencies({"recorded": result}).seconds["recorded"]
    metrics = [request.metrics for request in result.requests]
    first = sorted(m.first_token_time - m.arrival_time for m in metrics)
    assert found[FIRST].tolist() == pytest.approx(first)
    per_token = [
        (m.finished_time - m.first_token_time) / (n - 1)
        for m, n in zip(metrics, lengths, strict=True)
        if n > 1
    ]
    assert found[PER_TOKEN].tolist() == pytest.approx(sorted(per_token))
    assert len(labels(latencies({"recorded": result}))) == 3


def test_requests_that_never_get_so_far() -> None:
    scheduler = make_scheduler(num_blocks=100, block_size=16, max_num_seqs=1, budget=256)
    result = simulate([Request(0.0, 5, 10)] * 2, scheduler, StepTimeModel(1.0), stop_s=4.0)
    found = latencies({"stopped": result, "none": simulated(1, 0)})
    assert [len(found.seconds["stopped"][name]) for name in (QUEUE, FIRST, PER_TOKEN)] == [1, 1, 0]
    assert np.isnan(found.percentile("none", FIRST, 50))
    text = "".join(labels(found))
    for word in (
        "stopped: queue time 0 s and 0 s, time to first token 1 s and 1 s, time per output token n/a",
        "none: queue time n/a and n/a",
    ):
        assert word in text
    assert len(labels(latencies({}))) == 2

"""The comparison of engines runs from end to end, and its metrics are what they are called."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import picture, report
from serving.compare import Run
from serving.engines import KINDS, parse_engine
from serving.metrics import Metrics, metrics_of
from serving.process import Startup
from serving.runner import Answer, drive
from serving.workloads import GROUPS, SCENARIOS, Request

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent
TINY = "ours:max_num_seqs=1:max_num_batched_tokens=16"


def compare(engine: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "serving",
        "--model",
        str(ROOT / "models" / "pagelet"),
        "--engines",
        engine,
    ]
    command += ["--scenarios", "batch-1", "--dtypes", "float32", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{ROOT}"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_smallest_scenario_from_end_to_end(tmp_path: Path) -> None:
    done = compare(TINY, tmp_path / "found")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    (run,) = found["runs"]
    (metrics,) = run["rounds"]
    assert run["engine"] == TINY
    assert metrics["output_tokens_per_s"] > 0
    assert metrics["all_tokens_per_s"] == pytest.approx(1.5 * metrics["output_tokens_per_s"])
    assert metrics["peak_mib"] > 100
    assert metrics["cores"] > 0
    assert "1 alone, 64 in, 128 out" in (tmp_path / "found.md").read_text()
    start = Startup(**found["startups"]["float32"][TINY])
    assert 0 < start.answer_s <= start.ready_s
    assert 100 < start.resident_mib <= start.peak_mib
    assert f"| float32 | {TINY} | {start.answer_s:.1f} |" in (tmp_path / "found.md").read_text()


def test_figures_of_answers_at_known_times() -> None:
    requests = [Request([5] * 10, 3), Request([5] * 20, 2, arrival_s=1.0)]
    answers = [Answer([1, 2, 3], 3, [0.5, 0.75, 1.5]), Answer([1, 2], 2, [3.0, 4.0])]
    metrics = metrics_of(requests, answers, cores=1.5, other_cores=0.1, peak_mib=7.0)
    assert metrics.output_tokens_per_s == pytest.approx(5 / 4)
    assert metrics.all_tokens_per_s == pytest.approx(35 / 4)
    assert metrics.first_token_p50_s == pytest.approx((0.5 + 2.0) / 2)
    assert metrics.first_token_p99_s == pytest.approx(2.0), "from the arrival, not from the start"
    assert metrics.per_token_p50_ms == pytest.approx((500 + 1000) / 2)
    assert metrics.gap_p99_ms == pytest.approx(1000)
    short = [answers[0], Answer([1], 1, [3.0])]
    with pytest.raises(ValueError, match="request 1 got 1 tokens of 2"):
        metrics_of(requests, short, cores=0, other_cores=0, peak_mib=0)


def test_requests_are_added_when_they_arrive() -> None:
    requests = [Request([5], 2, arrival_s=0.05), Request([6], 1)]
    events: list[str] = []

    def step() -> list[tuple[int, list[int]]]:
        running = [event[1:] for event in events if event[0] == "+" and f"-{event[1:]}" not in events]
        events.extend(f"-{i}" for i in running)
        return [(int(i), [7] * requests[int(i)].max_tokens) for i in running]

    answers = drive(requests, lambda i, _: events.append(f"+{i}"), step)
    assert events == ["+1", "-1", "+0", "-0"]
    assert [answer.output for answer in answers] == [[7, 7], [7]]
    assert answers[0].times[0] >= 0.05


def metrics_at(speed: float) -> Metrics:
    return Metrics(speed, 2 * speed, 0.1, 0.2, 1000 / speed, 1000 / speed, 9.0, 1.9, 0.0, 500.0)


@pytest.mark.parametrize("scenario", ["crowd", "bursts"])
def test_ratios_are_of_the_first_engine_round_by_round(scenario: str) -> None:
    ours = Run("ours", scenario, "float32", [metrics_at(100), metrics_at(300)], 64, 64)
    peer = Run("vllm", scenario, "float32", [metrics_at(200), metrics_at(200)], 63, 64)
    assert report.ratios(peer, ours) == pytest.approx([0.5, 1.5])
    table = report.markdown([ours, peer])
    assert "1.00 (0.50-1.50)" in table
    assert "63 of 64" in table
    assert "others" not in table
    disturbed = dataclasses.replace(metrics_at(200), other_cores=0.9)
    assert "1.90 (others 0.90)" in report.markdown([Run("ours", scenario, "float32", [disturbed])])


def test_pairs_are_the_speeds_of_every_engine_of_a_tree_relative_to_every_peer() -> None:
    def run(engine: str, *speeds: float, commit: str = "") -> Run:
        return Run(engine, "crowd", "float32", [metrics_at(speed) for speed in speeds], commit=commit)

    ours = [run("ours", 100, 300, commit="abc"), run("ours:quantization=int4", 400, 400, commit="abc")]
    peers = [run("openvino", 200, 200), run("llama.cpp", 400)]
    table = report.pairs([*ours, *peers])
    assert "| 64 at once | ours | 1.00 (0.50-1.50) | 0.25 |" in table
    assert "| 64 at once | ours:quantization=int4 | 2.00 (2.00-2.00) | 1.00 |" in table
    assert report.pairs(ours) == report.pairs([ours[0], *peers]) == ""


def test_the_picture_shows_every_engine(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        Run(engine, scenario, "float32", [metrics_at(speed), metrics_at(1.1 * speed)])
        for scenario in ("crowd", "bursts")
        for engine, speed in (("ours", 100), ("openvino", 200))
    ]
    runs.append(Run("vllm", "bursts", "float32"))  # did not come up
    picture.draw(runs, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    for name in ("ours", "openvino", "64 at once"):
        assert f"<!-- {name} -->" in text


def test_engines_are_named_with_trees_and_arguments() -> None:
    spec = parse_engine(f"ours@{ROOT}:max_num_batched_tokens=256:enable_prefix_caching=False")
    assert spec.tree == ROOT
    assert spec.arguments == {"max_num_batched_tokens": 256, "enable_prefix_caching": False}
    assert [parse_engine(kind).kind for kind in KINDS] == list(KINDS)
    assert not spec.is_quantized
    assert parse_engine("ours:quantization=int8").is_quantized
    spec = parse_engine("ours:weights=gguf")
    assert spec.needs_gguf
    assert spec.is_quantized
    assert spec.arguments == {}
    assert not parse_engine("openvino:weights=fp16").is_quantized
    for wrong, message in (
        ("theirs", "the engine must be one of .*, got 'theirs'"),
        ("vllm@/tmp", "the tree of vllm must be unset, .*, got '/tmp'"),
        ("ours@/nowhere", "the tree must be a folder that holds jax_paged, got '/nowhere'"),
        ("ours:weights=int4", "weights of ours must be gguf, got 'int4'"),
        ("openvino:weights=gguf", "weights of openvino must be fp32 or .*, got 'gguf'"),
        ("vllm:weights=int4", "weights of vllm must be unset, got 'int4'"),
        ("ours:block_size", "an argument of ours must be NAME=VALUE, got 'block_size'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_engine(wrong)


def test_scenarios_repeat_but_for_prefixes() -> None:
    for name, scenario in SCENARIOS.items():
        requests = scenario.make(2048, 1)
        assert requests == scenario.make(2048, 1)
        assert (requests == scenario.make(2048, 2)) is (not scenario.shares_prefixes)
        assert max(len(r.prompt) + r.max_tokens for r in requests) <= 2048, name
    assert {name for group in GROUPS.values() for name in group} == set(SCENARIOS)
    assert sum(r.max_tokens for r in SCENARIOS["crowd"].make(8192, 1)) == 4546


def test_an_engine_that_does_not_come_up_is_reported(tmp_path: Path) -> None:
    done = compare("ours:block_size=3", tmp_path / "found")
    assert done.returncode == 1
    assert re.search("`block_size` must be .*got 3", done.stderr)
    (failure,) = json.loads((tmp_path / "found.json").read_text())["failures"]
    assert failure.startswith("float32 ours:block_size=3: ")

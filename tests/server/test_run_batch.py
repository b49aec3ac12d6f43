"""jax-paged run-batch: what its output holds, and that it goes on where it was interrupted."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tqdm import tqdm

from jax_paged import AsyncLLMEngine
from jax_paged.engine.errors import EngineDeadError
from jax_paged.server import run_batch
from jax_paged.server.launch.cli import main
from jax_paged.server.launch.options import BatchOptions
from jax_paged.server.run_batch import Batch, FinishedLines, Summary

ROOT = Path(__file__).parents[2]


def line(custom_id, prompt="abc?", url="/v1/completions", **body):
    content = {"messages": [{"role": "user", "content": prompt}]} if "chat" in url else {"prompt": prompt}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**content, **body}}


@pytest.fixture
def run(tmp_path, scripted):
    """Returns a function that runs lines into the file `out`, and returns the summary and what it holds."""

    def run(lines, **engine):
        (tmp_path / "in").write_text(
            "".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines)
        )
        made = AsyncLLMEngine(*scripted(**engine))
        summary, done = Summary(), FinishedLines.read(tmp_path / "out")
        with (tmp_path / "out").open("ab") as output, tqdm(disable=True) as bar:
            batch = Batch(made, "scripted", done, summary, output, bar)
            try:
                asyncio.run(batch.run(tmp_path / "in"))
            finally:
                made.close()
        return summary, [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]

    return run


@pytest.fixture
def command(tmp_path, scripted, monkeypatch):
    """Returns a function that runs the command in this process, and returns what it exits with."""
    handler, logger = signal.getsignal(signal.SIGTERM), logging.getLogger("jax_paged")
    kept = logger.handlers, logger.level, logger.propagate

    def command(*args, load=lambda _: AsyncLLMEngine(*scripted())):
        monkeypatch.setattr(run_batch, "serving_engine", load)
        files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
        with pytest.raises(SystemExit) as end:
            main(["run-batch", *files, "--served-model-name", "scripted", *args])
        return end.value.code

    yield command
    signal.signal(signal.SIGTERM, handler)
    logger.handlers, logger.propagate = kept[0], kept[2]
    logger.setLevel(kept[1])


def never(_):
    raise AssertionError("the model is loaded")


def test_every_line_has_its_answer(run):
    lines = [line(f"c{i}", f"{'abcdefgh'[: i + 1]}?", max_tokens=20) for i in range(8)]
    lines.append(line("chat", "hi?", url="/v1/chat/completions", max_tokens=300))
    summary, entries = run(["\n", *lines, "   \n"])
    assert (summary.num_answered, summary.num_failed, summary.num_skipped) == (9, 0, 0)
    by_id = {entry["custom_id"]: entry for entry in entries}
    assert by_id.keys() == {x["custom_id"] for x in lines}
    for i in range(8):
        entry = by_id[f"c{i}"]
        assert entry["error"] is None
        assert entry["id"].startswith("batch_req_")
        assert entry["response"]["status_code"] == 200
        assert entry["response"]["body"]["choices"][0]["text"] == "abcdefgh"[: i + 1]
    assert by_id["chat"]["response"]["body"]["object"] == "chat.completion"
    assert summary.num_tokens == sum(x["response"]["body"]["usage"]["completion_tokens"] for x in entries)


def test_bad_lines_are_reported_and_do_not_stop_the_others(run, capsys):
    bad = [
        ("{nonsense\n", "not JSON"),
        ("[1]\n", "not a JSON object"),
        ({**line("a"), "custom_id": 7}, "`custom_id` must be a string, got 7"),
        ({**line("b"), "method": "GET"}, "`method` must be 'POST', got 'GET'"),
        ({**line("c"), "url": "/v1/models"}, "`url` must be"),
        ({**line("d"), "body": "x"}, "`body` must be an object, got 'x'"),
        (line("e", stream=True), "`stream` must be False, got True"),
        (line("good"), "`custom_id` must be unique in the file, got 'good'"),
    ]
    refused = line("refused", max_tokens=-1)
    summary, entries = run([line("good"), refused, *(entry for entry, _ in bad)])
    assert (summary.num_answered, summary.num_failed) == (1, len(bad) + 1)
    errors = [entry["error"] for entry in entries if entry["error"]]
    reported = capsys.readouterr().err
    assert sorted(error["line"] for error in errors) == list(range(3, 3 + len(bad)))
    for number, (_, message) in enumerate(bad, 3):
        (error,) = [error for error in errors if error["line"] == number]
        assert error["message"].startswith(f"line {number}: ")
        assert message in error["message"]
        assert error["message"] in reported
    (entry,) = [entry for entry in entries if entry["custom_id"] == "refused"]
    assert entry["response"]["status_code"] == 400
    message = "`max_tokens` must be an integer of at least 1, got -1"
    assert message in entry["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("depth", [200, 252, 253, 254, 300, 1000, 1100])
def test_a_body_nested_deeply_ends_no_other_line(run, depth):
    deep = json.dumps(line("deep", x=0)).replace("0", "[" * depth + "]" * depth) + "\n"
    summary, entries = run([deep, line("good")])
    assert (summary.num_answered + summary.num_failed, len(entries)) == (2, 2)
    (other,) = [entry for entry in entries if entry["custom_id"] != "good"]
    if depth > 253:  # in an object: orjson writes 254 levels, and reads 1,024
        assert other["error"]["line"] == 1
        assert other["custom_id"] == ("deep" if depth <= 1000 else None)
    else:
        assert other["response"]["status_code"] in (200, 400)
    summary, _ = run([deep, line("good")])
    assert summary.num_skipped == 2


def test_a_custom_id_used_again_hides_no_request(run, tmp_path):
    lines = [line("a"), line("a", "abc?"), line("b")]
    _, entries = run(lines)
    (error,) = [entry for entry in entries if entry["error"]]
    assert (error["custom_id"], error["error"]["line"]) == (None, 2)
    # As after Ctrl-C while the first line still runs.
    (tmp_path / "out").write_text(json.dumps(error) + "\n")
    summary, entries = run(lines)
    assert (summary.num_answered, summary.num_failed, summary.num_skipped) == (2, 0, 1)
    assert [e["custom_id"] for e in entries if e["response"]] in (["a", "b"], ["b", "a"])
    # As after Ctrl-C before the second line was read: it is told then.
    (tmp_path / "out").write_text("".join(json.dumps(e) + "\n" for e in entries if e["custom_id"] == "a"))
    summary, entries = run(lines)
    assert (summary.num_answered, summary.num_failed, summary.num_skipped) == (1, 1, 1)
    assert [e["error"]["line"] for e in entries if e["error"]] == [2]
    # A line that was mended is run.
    summary, _ = run([line("a"), line("c"), line("b")])
    assert (summary.num_answered, summary.num_failed, summary.num_skipped) == (1, 0, 2)


@pytest.mark.parametrize(
    ("failing", "is_refused"),
    [("nonsense", False), (json.dumps(line("f", max_tokens=-1)), True), (json.dumps(line("a")), False)],
)
def test_the_status_counts_lines_that_failed_in_an_earlier_run(
    command, tmp_path, capsys, failing, is_refused
):
    (tmp_path / "in").write_text(json.dumps(line("a")) + "\n" + failing + "\n")
    assert command() == 1
    entries = [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]
    assert any(e["response"] and e["response"]["status_code"] == 400 for e in entries) == is_refused
    assert command() == 1
    assert "0 succeeded, 0 failed, 2 skipped (1 of them failed)" in capsys.readouterr().err
    (tmp_path / "in").write_text(json.dumps(line("a")) + "\n")
    assert command() == 0
    assert "0 succeeded, 0 failed, 1 skipped; 0 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_is_an_interruption(command, tmp_path, end):
    (tmp_path / "in").write_text(json.dumps(line("a")) + "\n")
    assert command(load=lambda _: signal.raise_signal(end)) == 130


def test_an_input_that_can_be_read_only_once_is_refused(command, tmp_path):
    reading, writing = os.pipe()
    os.write(writing, json.dumps(line("a")).encode() + b"\n")
    os.close(writing)
    for path in (f"/dev/fd/{reading}", str(tmp_path)):
        message = command("-i", path, load=never)
        assert (
            message
            == f"jax-paged: `input_file` must be a regular file because it is read twice, got {path!r}"
        )
    os.close(reading)
    assert not (tmp_path / "out").exists()
    assert "No such file" in command("-i", str(tmp_path / "missing"), load=never)


def test_an_output_that_cannot_be_written_is_told_before_the_model_loads(command, tmp_path):
    (tmp_path / "in").write_text(json.dumps(line("a")) + "\n")
    os.mkfifo(tmp_path / "pipe")
    for path, text in [
        (tmp_path / "missing" / "x", "No such file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
    ]:
        message = command("-o", str(path), load=never)
        assert message.startswith("jax-paged: ")
        assert "\n" not in message
        assert text in message


@pytest.mark.parametrize(
    "changes",
    [
        {"custom_id": None},
        {"custom_id": None, "response": None},
        {"custom_id": None, "response": None, "error": "text"},
        {"custom_id": None, "response": None, "error": {"code": "x"}},
        {"custom_id": None, "response": None, "error": {"line": [1]}},
        {"custom_id": ["a"]},
        {"response": None},
        {"response": []},
    ],
)
def test_a_broken_line_of_the_output_is_told(tmp_path, changes):
    good = {"id": "x", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}
    text = json.dumps(good) + "\n" + json.dumps({**good, **changes}) + "\n"
    (tmp_path / "out").write_text(text)
    with pytest.raises(ValueError, match="whose line 2 is not a result of run-batch"):
        FinishedLines.read(tmp_path / "out")
    assert (tmp_path / "out").read_text() == text


def test_what_is_done_is_not_run_again_and_half_a_line_is_mended(run, tmp_path):
    lines = [line("a"), "no json\n", line("b"), line("c"), line("d", max_tokens=-1)]
    _, first = run(lines)
    kept = [e for e in first if e["custom_id"] in ("a", None)]
    text = "".join(json.dumps(entry) + "\n" for entry in kept)
    (tmp_path / "out").write_text(text + '{"id": "batch_req_1", "custom_id": "b", "resp')
    summary, entries = run(lines)
    assert (summary.num_skipped, summary.num_answered, summary.num_failed) == (2, 2, 1)
    assert [e["custom_id"] for e in entries[:2]] == [e["custom_id"] for e in kept]
    assert sorted(str(e["custom_id"]) for e in entries) == ["None", "a", "b", "c", "d"]
    summary, again = run(lines)
    assert again == entries
    assert summary.num_skipped == 5


def test_a_file_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "out").write_text('{"my": "data"}\n{"custom_id": "half')
    with pytest.raises(ValueError, match="whose line 1 is not a result of run-batch"):
        FinishedLines.read(tmp_path / "out")
    assert (tmp_path / "out").read_text() == '{"my": "data"}\n{"custom_id": "half'


def test_many_more_lines_than_seats(run):
    summary, entries = run([line(f"c{i}", max_tokens=2) for i in range(200)], max_num_seqs=2)
    assert (summary.num_answered, len(entries)) == (200, 200)


def test_an_engine_that_fails_ends_the_run_and_writes_no_errors(tmp_path, scripted):
    args, executor = scripted()
    made = AsyncLLMEngine(args, executor)

    def fail(output):
        if executor.num_steps > 5:
            raise RuntimeError("a step fails")

    executor.during_step = fail
    (tmp_path / "in").write_text("".join(json.dumps(line(f"c{i}")) + "\n" for i in range(50)))
    summary = Summary()
    with (tmp_path / "out").open("ab") as output, tqdm(disable=True) as bar:
        batch = Batch(made, "scripted", FinishedLines.read(tmp_path / "out"), summary, output, bar)
        with pytest.raises(EngineDeadError, match="a step fails"):
            asyncio.run(batch.run(tmp_path / "in"))
    made.close()
    entries = [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]
    assert len(entries) < 50
    assert all(entry["response"]["status_code"] == 200 for entry in entries)


def test_the_files_must_differ(tmp_path):
    with pytest.raises(ValueError, match="must be a different file from input_file"):
        BatchOptions(tmp_path / "a", tmp_path / "x" / ".." / "a")


@pytest.mark.thorough
def test_the_command_is_interrupted_and_goes_on(tmp_path):
    lines = [line(f"c{i}", "def f(", max_tokens=100, ignore_eos=True, seed=i) for i in range(30)]
    (tmp_path / "in").write_text("".join(json.dumps(x) + "\n" for x in [*lines, "nonsense"]))
    small = "--max-num-seqs 4 --max-num-batched-tokens 16 --max-model-len 256 --num-gpu-blocks-override 80"
    command = [
        sys.executable,
        "serve.py",
        "run-batch",
        "-i",
        str(tmp_path / "in"),
        "-o",
        str(tmp_path / "out"),
    ]
    command += small.split()
    environment = {**os.environ, "COLUMNS": "100"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    out = tmp_path / "out"
    while not out.exists() or out.stat().st_size < 1500:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 130, text
    assert "interrupted: run the same command again to continue" in text
    assert "Traceback" not in text
    before = [json.loads(x) for x in out.read_text().splitlines()]  # all lines are whole
    assert 0 < len(before) < 31
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    summary = done.stderr.splitlines()[-1]
    counts = [int(x) for x in re.findall(r"(\d+) (?:succeeded|failed|skipped)", summary)]
    assert sum(counts) == 31
    assert counts[2] == len(before)
    entries = [json.loads(x) for x in out.read_text().splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == 31
    assert "request" in done.stderr
    assert "tokens/s" in done.stderr

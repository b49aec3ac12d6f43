"""jax-paged run-batch: what its output holds, and that it goes on where it was interrupted."""

import asyncio
import json
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
from jax_paged.server.options import BatchOptions
from jax_paged.server.run_batch import Batch, Done, Summary

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
        summary, done = Summary(), Done.read(tmp_path / "out")
        with (tmp_path / "out").open("ab") as output, tqdm(disable=True) as bar:
            batch = Batch(made, "scripted", done, summary, output, bar)
            try:
                asyncio.run(batch.run(tmp_path / "in"))
            finally:
                made.close()
        return summary, [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]

    return run


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
        ({**line("a"), "custom_id": 7}, "custom_id is 7"),
        ({**line("b"), "method": "GET"}, "method is 'GET'"),
        ({**line("c"), "url": "/v1/embeddings"}, "url is '/v1/embeddings'"),
        ({**line("d"), "body": "x"}, "body is 'x'"),
        (line("e", stream=True), "stream is true"),
        (line("good"), "custom_id is 'good', as in an earlier line"),
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
    assert "max_tokens is -1" in entry["response"]["body"]["error"]["message"]


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
    with pytest.raises(ValueError, match="whose line 1 is no answer of a batch"):
        Done.read(tmp_path / "out")
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
        batch = Batch(made, "scripted", Done.read(tmp_path / "out"), summary, output, bar)
        with pytest.raises(EngineDeadError, match="a step fails"):
            asyncio.run(batch.run(tmp_path / "in"))
    made.close()
    entries = [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]
    assert len(entries) < 50
    assert all(entry["response"]["status_code"] == 200 for entry in entries)


def test_the_files_must_differ(tmp_path):
    with pytest.raises(ValueError, match="allowed: another file than input_file"):
        BatchOptions(tmp_path / "a", tmp_path / "x" / ".." / "a")


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
    assert "interrupted: run it again to go on" in text
    assert "Traceback" not in text
    before = [json.loads(x) for x in out.read_text().splitlines()]  # all lines are whole
    assert 0 < len(before) < 31
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    summary = done.stderr.splitlines()[-1]
    counts = [int(x) for x in re.findall(r"(\d+) (?:answered|failed|done before)", summary)]
    assert sum(counts) == 31
    assert counts[2] == len(before)
    entries = [json.loads(x) for x in out.read_text().splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == 31
    assert "request" in done.stderr
    assert "tokens/s" in done.stderr

import dataclasses
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jax_paged import EngineArgs
from jax_paged.server import launch
from jax_paged.server.cli import engine_args, main, make_parser

ROOT = Path(__file__).parents[2]
SMALL = (
    "--max-num-seqs 2 --max-num-batched-tokens 16 --max-model-len 64 --num-gpu-blocks-override 8 --port 0 "
    "--scheduling-policy priority --preemption-mode swap"
)


def test_arguments_are_the_fields_of_engine_args():
    parser = make_parser()
    assert engine_args(parser.parse_args([])) == EngineArgs()
    line = (
        "--model m --max-num-seqs 3 --swap-space 1.5 --no-enable-prefix-caching --attention-backend xla "
        "--preemption-mode swap --scheduling-policy priority --delay-factor 0.5 --no-enable-chunked-prefill"
    )
    expected = EngineArgs(
        model="m",
        max_num_seqs=3,
        swap_space=1.5,
        enable_prefix_caching=False,
        attention_backend="xla",
        preemption_mode="swap",
        scheduling_policy="priority",
        delay_factor=0.5,
        enable_chunked_prefill=False,
    )
    assert engine_args(parser.parse_args(line.split())) == expected
    text = re.sub(r"\s+", " ", parser.format_help())
    for field in dataclasses.fields(EngineArgs):
        assert f"--{field.name.replace('_', '-')}" in text
    assert "Tokens a block. (default: 16)" in text


@pytest.fixture
def kept_signals():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.usefixtures("kept_signals")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--block-size x", "invalid int value"),
        ("--dtype int8", "invalid choice"),
        ("--preemption-mode none", "invalid choice: 'none' (choose from"),
        ("--scheduling-policy lifo", "invalid choice"),
        ("--delay-factor -1", "delay_factor is -1.0; allowed: a finite number in [0, inf]"),
        ("--max-seqs 3", "unrecognized arguments"),
        ("--block-size 3", "block_size is 3; allowed: 1 or 2"),
        ("--model /nowhere/at/all", "model is '/nowhere/at/all'"),
    ],
)
def test_bad_arguments_end_with_one_line(line, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--port", "0", *line.split()])
    assert end.value.code
    assert message in f"{end.value.code} {capsys.readouterr().err}"


@pytest.mark.usefixtures("kept_signals")
def test_ctrl_c_while_the_model_loads_ends_quietly(monkeypatch, capsys):
    def load(_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(launch, "AsyncLLMEngine", load)
    with pytest.raises(SystemExit) as end:
        main(["--port", "0"])
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(end):
    process = subprocess.Popen(
        [sys.executable, "serve.py", *SMALL.split(), "--served-model-name", "mine"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        while "curl" not in (line := process.stdout.readline()):
            assert line, process.stderr.read()
            lines.append(line)
        url = re.search(r"http://127\.0\.0\.1:\d+", line).group()
        answer = httpx.get(f"{url}/v1/models").json()
        assert answer["data"][0]["id"] == "mine"
        body = re.search(r"-d '(.*)'", process.stdout.readline()).group(1)
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{url}/v1/chat/completions", content=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True, "priority": -3, "n": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 80
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True},
        ) as stream:
            next(stream.iter_lines())
            process.send_signal(end)
        assert process.wait(timeout=60) == 0
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()

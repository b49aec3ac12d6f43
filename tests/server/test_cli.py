import dataclasses
import gc
import importlib
import logging
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from jax_paged import EngineArgs
from jax_paged.server.launch import server
from jax_paged.server.launch.cli import main, make_parser, parse_args
from jax_paged.server.launch.options import ServerOptions
from jax_paged.server.ray_serve import launch

ROOT = Path(__file__).parents[2]
SMALL = (
    "--max-num-seqs 2 --max-num-batched-tokens 16 --max-model-len 64 --num-gpu-blocks-override 8 --port 0 "
    "--scheduling-policy priority --preemption-mode swap"
)


def test_arguments_are_the_fields_of_engine_args():
    assert EngineArgs.from_cli_args(parse_args([])) == EngineArgs()
    line = (
        "--model m --max-num-seqs 3 --swap-space 1.5 --no-enable-prefix-caching --attention-backend xla "
        "--preemption-mode swap --scheduling-policy priority "
        "--scheduler-delay-factor 0.5 --no-enable-chunked-prefill"
    )
    expected = EngineArgs(
        model="m",
        max_num_seqs=3,
        swap_space=1.5,
        enable_prefix_caching=False,
        attention_backend="xla",
        preemption_mode="swap",
        scheduling_policy="priority",
        scheduler_delay_factor=0.5,
        enable_chunked_prefill=False,
    )
    assert EngineArgs.from_cli_args(parse_args(line.split())) == expected
    text = re.sub(r"\s+", " ", make_parser().format_help())
    for field in (*dataclasses.fields(EngineArgs), *dataclasses.fields(ServerOptions)):
        assert f"--{field.name.replace('_', '-')}" in text
    assert re.search(r"--block-size BLOCK_SIZE Tokens per block: [^.]*\. \(default: 16\)", text)


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("", "pagelet"),
        ("--model m", "m"),
        ("serve", "pagelet"),
        ("serve m", "m"),
        ("serve --model m", "m"),
        ("serve m --model m", "m"),
        ("serve --model pagelet pagelet", "pagelet"),
        ("serve m --port 1 --no-enable-prefix-caching", "m"),
        ("serve --port 1 --no-enable-prefix-caching m", "m"),
        ("serve serve", "serve"),
    ],
)
def test_forms_of_naming_the_model(line, model):
    args = parse_args(line.split())
    assert EngineArgs.from_cli_args(args).model == model
    port = 1 if "--port" in line else 8000
    assert ServerOptions.from_cli_args(args) == ServerOptions(port=port)


def test_help_imports_neither_jax_nor_the_http_server():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['serve.py', '--help']\n"
        "try:\n"
        "    runpy.run_path('serve.py', run_name='__main__')\n"
        "finally:\n"
        "    heavy = {'jax', 'numpy', 'transformers', 'tokenizers', 'uvicorn', 'fastapi', 'pydantic'}\n"
        "    print('imported:', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--served-model-name" in done.stdout
    assert done.stdout.splitlines()[-1] == "imported: []"


@pytest.fixture
def kept_process():
    """Keeps the signal handlers and loggers of this process, which the command sets up."""
    handler = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in ("jax_paged", "uvicorn")]
    kept = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    signal.signal(signal.SIGTERM, handler)
    for logger, handlers, level, propagate in kept:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.mark.usefixtures("kept_process")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--block-size x", "invalid int value"),
        ("--dtype int8", "invalid choice"),
        ("--preemption-mode none", "invalid choice: 'none' (choose from"),
        ("--scheduling-policy lifo", "invalid choice"),
        (
            "--scheduler-delay-factor -1",
            "`scheduler_delay_factor` must be a finite number in [0, inf], got -1.0",
        ),
        ("--max-seqs 3", "unrecognized arguments: --max-seqs"),
        (
            "serve m --model n",
            "jax-paged: error: MODEL must be omitted or equal to --model ('n'), got 'm'",
        ),
        (
            "serve m --model pagelet",
            "jax-paged: error: MODEL must be omitted or equal to --model ('pagelet'), got 'm'",
        ),
        ("serve m n", "unrecognized arguments: n"),
        ("bench m", "unrecognized arguments: m"),
        ("--block-size 16 serve", "serve must be the first argument"),
        ("--block-size 16 serve m", "serve must be the first argument"),
        ("m", "the first argument must be serve, run-batch, check-kernels or health, got 'm'"),
        ("--block-size 3", "jax-paged: `block_size` must be one of 1, 2, 4, 8, 16, 32, 64, 128, got 3"),
        ("--port 65536", "`port` must be an integer in [0, 65535], got 65536"),
        ("--host 300.1.1.1 --port 0", "cannot listen on 300.1.1.1, port 0"),
        (
            "--model {empty} --port 0",
            "the folder contains no tokenizer files. A model folder contains config.json",
        ),
        ("--ray 0", "`ray` must be an integer of at least 1, got 0"),
        ("--ray 2 --port {taken}", "--port a free port"),
        ("--port {taken}", "--port a free port"),
        (
            "--model /nowhere/at/all --port 0",
            "jax-paged: `model` must be 'pagelet' (built in), 'smollm2' (downloaded at first use), a local",
        ),
    ],
)
def test_bad_arguments_end_with_one_line(line, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as end, socket.create_server(("127.0.0.1", 0)) as other:
        main(line.format(empty=tmp_path, taken=other.getsockname()[1]).split())
    assert end.value.code
    assert message in f"{end.value.code} {capsys.readouterr().err}"
    if isinstance(end.value.code, str):
        assert "\n" not in end.value.code


@pytest.mark.usefixtures("kept_process")
def test_without_ray_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("jax_paged.ray_serve", "jax_paged.server.ray_serve.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SystemExit, match=r"^jax-paged: .*: pip install 'jax-paged\[ray\]'$"):
        main(["--ray", "2", "--port", "0"])
    with pytest.raises(ImportError, match=r"pip install 'jax-paged\[ray\]'"):
        importlib.import_module("jax_paged.ray_serve")


@pytest.mark.usefixtures("kept_process")
def test_ctrl_c_while_the_model_loads_ends_quietly(monkeypatch, capsys):
    def load(_):
        assert not gc.isenabled()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(server, "serving_engine", load)
    with pytest.raises(SystemExit) as end:
        main(["--port", "0"])
    assert end.value.code == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("INFO loading model pagelet\n")
    assert err.count("\n") == 1
    assert gc.isenabled()


@pytest.fixture(scope="module")
def processes():
    """A server for each signal that ends one; both start at the same time.

    SIGTERM ends a server, too, that a background job of a shell has started, which ignores SIGINT.
    """
    lines = {signal.SIGINT: f"serve pagelet {SMALL}", signal.SIGTERM: SMALL}
    prefix = {signal.SIGINT: (), signal.SIGTERM: ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")}
    processes = {
        end: subprocess.Popen(
            [*prefix[end], sys.executable, "serve.py", *line.split(), "--served-model-name", "mine"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for end, line in lines.items()
    }
    yield processes
    for process in processes.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_serves_until_a_signal(processes, end):
    process = processes[end]
    while "curl" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
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
    body = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())
        process.send_signal(end)
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in process.stderr.read()


def test_replicas_get_the_gpus_of_their_engines():
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    args, options = EngineArgs(**sizes), ServerOptions(ray=2)
    assert launch._check_room(args, options, {"GPU": 8.0, "CPU": 1.0}) == 4
    assert launch._check_room(EngineArgs(), options, {"CPU": 2.0}) == 0
    with pytest.raises(
        ValueError, match="`ray` must be at most 1 because there are 7 GPUs and each replica needs 4, got 2"
    ):
        launch._check_room(args, options, {"GPU": 7.0, "CPU": 16.0})

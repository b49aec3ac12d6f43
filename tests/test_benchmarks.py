"""The GPU check runs at toy sizes: a machine with a GPU is no place to find out that it does not."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.thorough

PROGRAM = pathlib.Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "section",
    [
        "device",
        "self-check",
        *(
            pytest.param(name, marks=slow)
            for name in ("llama-1b", "exactness", "agreement", "kernel-tests", "kernel-speed")
        ),
    ],
)
def test_a_section_of_the_gpu_check(section):
    command = [sys.executable, str(PROGRAM), "--allow-cpu", "--tiny", "--section", section]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert found
    assert not any("error" in result for result in found)


@slow
def test_a_part_of_the_gpu_check(tmp_path):
    command = [sys.executable, str(PROGRAM), "--allow-cpu", "--tiny", "--part", "kernel-tests"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "found.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all sections passed" in done.stdout
    assert "test_work_list_covers_every_live_block_once" in done.stderr, "who watches sees each test"
    assert json.loads((tmp_path / "found.json").read_text())["kernel-tests"]["passed"] > 20


@slow
def test_starts_of_a_script_and_of_the_server(tmp_path):
    program = PROGRAM.with_name("startup.py")
    command = [sys.executable, str(program), "--rounds", "1", "--only", "warm", "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if "| here |" in line]
    assert rows == ["generate, warm", "chat, warm", "server, warm"]


def test_the_idle_share_of_a_device():
    program = PROGRAM.with_name("device_idle.py")
    sizes = ["--num-seqs", "4", "--step-ms", "0.1", "--steps", "4", "--rounds", "1", "--burst", "2"]
    done = subprocess.run([sys.executable, str(program), *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("async_scheduling=True") == 2

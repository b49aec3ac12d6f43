"""Signals where SIGINT was ignored when the process started, as in background jobs of shells."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jax_paged.engine.interrupt import deferred_interrupt

TESTS = Path(__file__).parent
IGNORING_SIGINT = ("/bin/sh", "-c", "trap '' INT; exec \"$@\"", "sh")
CODE = """
import signal, subprocess, sys
import pytest

def test_ctrl_c():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

@pytest.fixture(scope="module")
def process():
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

def test_ctrl_c_in_a_process_of_a_fixture(process):
    assert process.stdout == "True\\n"
"""


def test_tests_that_send_signals_pass_in_a_background_job(tmp_path):
    (tmp_path / "test_it.py").write_text(CODE)
    plugins = [option for name in plugins_of_conftest() if "signal" in name for option in ("-p", name)]
    done = subprocess.run(
        [
            *IGNORING_SIGINT,
            sys.executable,
            "-m",
            "pytest",
            "--noconftest",
            "-q",
            *plugins,
            "-p",
            "no:cacheprovider",
            "test_it.py",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def plugins_of_conftest():
    values: dict[str, list[str]] = {}
    (line,) = [x for x in (TESTS / "conftest.py").read_text().splitlines() if x.startswith("pytest_plugins")]
    exec(line, values)
    return values["pytest_plugins"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_without_a_handler_of_pythons_nothing_is_deferred(handler):
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with deferred_interrupt() as pressed:
            assert signal.getsignal(signal.SIGINT) is handler
            if handler is signal.SIG_IGN:
                signal.raise_signal(signal.SIGINT)
        assert not pressed.is_set()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_handler_that_python_did_not_install_is_left_alone(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with deferred_interrupt() as pressed:
        pass
    assert not pressed.is_set()

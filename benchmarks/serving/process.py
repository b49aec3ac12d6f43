"""An engine's process: started once, asked for scenarios, and stopped while others are measured."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving.runner import Answer, Settings
from serving.workloads import Request

_IDLE_SHARE = 0.1
_IDLE_WINDOW_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


class EngineProcess:
    """A runner and whatever it starts: one session of processes, which are stopped and continued together.

    Args:
        command: What runs it, but for the settings.
        settings: What the engine is made from.
        environment: Of the process.
        log: Takes what it prints.

    Attributes:
        version: Of the engine, as it says.
        startup_s: Seconds until it was ready.

    Raises:
        RuntimeError: If it does not come up.
    """

    def __init__(
        self, command: list[str], settings: Settings, environment: Mapping[str, str], log: Path
    ) -> None:
        self._log = log
        start = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(settings))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env={**os.environ, **environment},
                text=True,
                start_new_session=True,
                cwd=Path(__file__).resolve().parent.parent,  # not the caller's: it may hold another jax_paged
            )
        try:
            self.version: str = self._read()["version"]
            self.startup_s = time.monotonic() - start
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise

    def ask(self, requests: list[Request], *, prefix_caching: bool) -> list[Answer]:
        """Runs requests; the process must not be stopped."""
        message = {"requests": [asdict(r) for r in requests], "prefix_caching": prefix_caching}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return [Answer(**answer) for answer in self._read()]

    def stop(self) -> None:
        """Keeps it from using the processor until it goes on."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Ends a stop."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Ends the process and those that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def cpu_s(self) -> float:
        """Returns the processor time of the session's processes so far, in seconds."""
        fields = (_stat(pid) for pid in self._pids())
        return sum(int(f[11]) + int(f[12]) for f in fields if f) / _TICKS

    def forget_peak(self) -> None:
        """Lets peak_mib start anew."""
        for pid in self._pids():
            (Path("/proc") / str(pid) / "clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Returns the most resident memory since `forget_peak`, summed over the processes, in MiB."""
        total = 0
        for pid in self._pids():
            status = (Path("/proc") / str(pid) / "status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return total / 1024

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the engine's process ended; the last it printed ({self._log}):\n{tail}")
        return json.loads(line)

    def _wait_until_idle(self) -> None:
        """Returns when nothing is compiled or loaded any more, which a stop would only put off."""
        used = self.cpu_s()
        while True:
            time.sleep(_IDLE_WINDOW_S)
            before, used = used, self.cpu_s()
            if used - before < _IDLE_SHARE * _IDLE_WINDOW_S:
                return

    def _pids(self) -> list[int]:
        session = str(self._process.pid)
        pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if (fields := _stat(pid)) and fields[3] == session]


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/PID/stat from the state on; None if the process has ended."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


class Turn:
    """Keeps the machine quiet for as long as a turn lasts.

    Args:
        command: Runs the command after it, and keeps others from the processor until that ends; such as
            ["flock", "FILE"]. Empty: nobody else is there.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._holder: subprocess.Popen[str] | None = None
        self._since = 0.0

    def begin(self) -> None:
        """Begins a turn, unless one has begun less than 30 seconds ago: then that goes on."""
        if not self._command or (self._holder and time.monotonic() - self._since < 30):
            return
        self.end()
        self._holder = subprocess.Popen(
            [*self._command, "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._since = time.monotonic()

    def end(self) -> None:
        """Ends the turn, if one has begun."""
        if self._holder:
            self._holder.communicate()
            self._holder = None

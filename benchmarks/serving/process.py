"""Process of an engine, which is started once and stopped while other engines are measured."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving.runner import Answer, Settings
from serving.workloads import Request

_IDLE_SHARE = 0.1
_IDLE_WINDOW_S = 2.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Startup:
    """Times and memory of an engine's start.

    Args:
        answer_s: Time until the engine had answered a request of 8 tokens with 4 (seconds).
        ready_s: Time until the engine had its full speed (seconds).
        peak_mib: Peak resident memory until then (MiB).
        resident_mib: Resident memory then (MiB).
    """

    answer_s: float
    ready_s: float
    peak_mib: float
    resident_mib: float


class EngineProcess:
    """A runner process and its children: one session of processes that are stopped and continued together.

    Args:
        command: Command of the runner, without the settings.
        settings: Settings of the engine.
        environment: Additional environment variables.
        log: File for the output of the processes.

    Attributes:
        version: Version that the engine reports.
        startup: Times and memory of the start.

    Raises:
        RuntimeError: If the process ends before the engine is ready.
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
                cwd=Path(__file__).resolve().parent.parent,  # the caller's folder may have another jax_paged
            )
        try:
            self._read()
            answer_s = time.monotonic() - start
            self.version: str = self._read()["version"]
            ready_s = time.monotonic() - start
            self._wait_until_idle()
            peak_mib, resident_mib = self.peak_mib(), self.resident_mib()
            self.startup = Startup(answer_s, ready_s, peak_mib, resident_mib)
        except BaseException:
            self.close()
            raise

    def ask(self, requests: list[Request], *, prefix_caching: bool) -> list[Answer]:
        """Runs requests and returns their answers. The process must not be stopped.

        Args:
            requests: The requests.
            prefix_caching: Whether the engine caches prefixes that the requests have in common.
        """
        message = {"requests": [asdict(r) for r in requests], "prefix_caching": prefix_caching}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        return [Answer(**answer) for answer in self._read()]

    def stop(self) -> None:
        """Stops the processes, so that they do not use the processor."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the stopped processes run again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kills the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def cpu_s(self) -> float:
        """Returns the processor time that the processes have used so far (seconds)."""
        fields = (_stat(pid) for pid in self._pids())
        return sum(int(f[11]) + int(f[12]) for f in fields if f) / _TICKS

    def reset_peak(self) -> None:
        """Resets the peak memory of the processes."""
        for pid in self._pids():
            (Path("/proc") / str(pid) / "clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Returns the peak resident memory since `reset_peak`, summed over the processes (MiB)."""
        return self._memory_mib("VmHWM")

    def resident_mib(self) -> float:
        """Returns the resident memory, summed over the processes (MiB)."""
        return self._memory_mib("VmRSS")

    def _memory_mib(self, name: str) -> float:
        total = 0
        for pid in self._pids():
            status = (Path("/proc") / str(pid) / "status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))
        return total / 1024

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"the engine's process ended; the end of its output ({self._log}):\n{tail}")
        return json.loads(line)

    def _wait_until_idle(self) -> None:
        """Waits until the engine has compiled and loaded everything.

        If it were stopped earlier, the rest of this work would run during a measurement.
        """
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
    """Returns the fields of /proc/PID/stat, beginning with the state; None if the process has ended."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None


class MachineLock:
    """Lock that keeps other work off the machine during measurements.

    Args:
        command: Command that holds the lock while the command in its arguments runs, such as
            ["flock", "FILE"]. Empty if no lock is needed.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._holder: subprocess.Popen[str] | None = None
        self._since = 0.0

    def acquire(self) -> None:
        """Acquires the lock, unless it is already held.

        If it has been held for 30 seconds, it is released and acquired again, so that others can get it.
        """
        if not self._command or (self._holder and time.monotonic() - self._since < 30):
            return
        self.release()
        self._holder = subprocess.Popen(
            [*self._command, "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self._since = time.monotonic()

    def release(self) -> None:
        """Releases the lock, if it is held."""
        if self._holder:
            self._holder.communicate()
            self._holder = None

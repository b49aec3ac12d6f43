"""Runs the scenarios on the engines in turn, round by round, and keeps what each run came to."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.engines import OF_A_TREE, EngineSpec, Launcher, commit_of
from serving.figures import QUIET_CORES, Figures, figures_of
from serving.process import EngineProcess, Turn
from serving.runner import Answer
from serving.workloads import Request, Scenario

_MAX_TRIES = 3


@dataclass
class Run:
    """One engine's rounds of one scenario in one dtype.

    Args:
        engine: Its label.
        scenario: Its name.
        dtype: Of weights and cache.
        rounds: One per round that counts.
        num_equal: How many outputs are as expected, in the worst round; None if nothing is expected.
        num_requests: Of the scenario.
        commit: Of the source tree when the process was started; "" of peers.
    """

    engine: str
    scenario: str
    dtype: str
    rounds: list[Figures] = field(default_factory=list)
    num_equal: int | None = None
    num_requests: int = 0
    commit: str = ""


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Args:
        engines: The first is the one that ratios are of.
        scenarios: In the order in which they run.
        dtypes: Each gets processes of its own.
        num_rounds: Rounds that count; one before them does not, as it touches memory for the first time.
        vocab_size: Of the model.
        reference: The expected outputs of the scenario "crowd" in float32, if they are known. Where there is
            none, those of the last engine are expected of the others; in bfloat16 rounding tells them apart.
    """

    engines: Sequence[EngineSpec]
    scenarios: Sequence[Scenario]
    dtypes: Sequence[str]
    num_rounds: int
    vocab_size: int
    reference: list[list[int]] | None


class Comparison:
    """Takes the engines through a plan.

    Args:
        plan: What is compared.
        launcher: Starts the processes.
        turn: Keeps the machine quiet during measurements.
        say: Takes one line per measurement.

    Attributes:
        runs: What was found so far.
        versions: Of each engine, as it says itself.
        startup_s: Seconds until an engine's process was ready, by dtype and label. They are not measured in
            turn, so other processes may have slowed them down.
        failures: What did not come up or ended early, and why; the others go on without it.
    """

    def __init__(self, plan: Plan, launcher: Launcher, turn: Turn, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._launcher = launcher
        self._turn = turn
        self._say = say
        self.runs: list[Run] = []
        self.versions: dict[str, str] = {}
        self.startup_s: dict[str, dict[str, float]] = {}
        self.failures: list[str] = []
        self._commits: dict[str, str] = {}

    def run(self, save: Callable[[], None]) -> None:
        """Runs everything.

        Args:
            save: Called after every scenario.
        """
        for dtype in self._plan.dtypes:
            for over_http in (False, True):
                scenarios = [s for s in self._plan.scenarios if s.over_http is over_http]
                if scenarios:
                    self._run_group(dtype, scenarios, over_http, save)

    def _run_group(
        self, dtype: str, scenarios: Sequence[Scenario], over_http: bool, save: Callable[[], None]
    ) -> None:
        specs = [spec for spec in self._plan.engines if spec.has_server or not over_http]
        processes: dict[str, EngineProcess] = {}
        try:
            for spec in specs:
                self._say(f"{dtype}: starting {spec.label}{' as a server' if over_http else ''}")
                self._commits[spec.label] = commit_of(spec.tree) if spec.kind in OF_A_TREE else ""
                try:
                    process = self._launcher.start(spec, dtype, server=over_http)
                except RuntimeError as error:
                    self._fail(f"{dtype} {spec.label}: {error}")
                    continue
                processes[spec.label] = process
                process.stop()
                if not over_http:
                    self.versions[spec.label] = process.version
                    self.startup_s.setdefault(dtype, {})[spec.label] = round(process.startup_s, 1)
            for scenario in scenarios:
                self._run_scenario(dtype, scenario, processes)
                save()
        finally:
            self._turn.end()
            for process in processes.values():
                process.close()

    def _run_scenario(self, dtype: str, scenario: Scenario, processes: dict[str, EngineProcess]) -> None:
        runs = {label: Run(label, scenario.name, dtype, commit=self._commits[label]) for label in processes}
        self.runs += runs.values()
        for i in range(self._plan.num_rounds + 1):
            found = self._run_round(scenario, i, processes)
            expected = self._expected(dtype, scenario, [answers for answers, _ in found.values()])
            for label, (answers, figures) in found.items():
                run = runs[label]
                run.num_requests = len(answers)
                if expected is not None:
                    num_equal = sum(a.output == b for a, b in zip(answers, expected, strict=True))
                    run.num_equal = num_equal if run.num_equal is None else min(run.num_equal, num_equal)
                if i > 0:
                    run.rounds.append(figures)
                    self._say(
                        f"{dtype} {scenario.name}, round {i} of {self._plan.num_rounds}, {label}: {figures}"
                    )

    def _run_round(
        self, scenario: Scenario, round_: int, processes: dict[str, EngineProcess]
    ) -> dict[str, tuple[list[Answer], Figures]]:
        """Measures every engine once, and again if it was disturbed.

        With shared prefixes the whole round is repeated, as a second try of one engine must not find those of
        the first, and all engines must be asked the same.
        """
        found: dict[str, tuple[list[Answer], Figures]] = {}
        labels = list(processes)
        for attempt in range(_MAX_TRIES):
            requests = scenario.make(self._plan.vocab_size, round_ * _MAX_TRIES + attempt)
            for label in labels:
                self._turn.begin()
                try:
                    found[label] = measure(processes[label], requests, scenario)
                except (OSError, RuntimeError, ValueError) as error:
                    found.pop(label, None)
                    processes.pop(label).close()
                    self._fail(f"{scenario.name} {label}: {error}")
            disturbed = [label for label, (_, f) in found.items() if f.other_cores > QUIET_CORES]
            labels = list(processes) if scenario.shares_prefixes else disturbed
            if not disturbed:
                break
        return found

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        self._say(text)

    def _expected(
        self, dtype: str, scenario: Scenario, answers: list[list[Answer]]
    ) -> Sequence[list[int] | str] | None:
        if self._plan.reference is not None and scenario.name == "crowd" and dtype == "float32":
            return self._plan.reference
        return [answer.output for answer in answers[-1]] if len(answers) > 1 else None


def measure(
    process: EngineProcess, requests: Sequence[Request], scenario: Scenario
) -> tuple[list[Answer], Figures]:
    process.go_on()
    try:
        process.forget_peak()
        own, everything, start = process.cpu_s(), _machine_cpu_s(), time.perf_counter()
        answers = process.ask(list(requests), prefix_caching=scenario.shares_prefixes)
        elapsed = time.perf_counter() - start
        own, everything = process.cpu_s() - own, _machine_cpu_s() - everything
        peak_mib = process.peak_mib()
    finally:
        process.stop()
    cores, other_cores = own / elapsed, max(0.0, everything - own) / elapsed
    return answers, figures_of(requests, answers, cores=cores, other_cores=other_cores, peak_mib=peak_mib)


def _machine_cpu_s() -> float:
    """Returns the processor time of the whole machine so far, idle time left out, in seconds."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

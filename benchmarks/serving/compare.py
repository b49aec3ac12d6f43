"""Runs of the scenarios on all engines, which alternate round by round."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving.engines import TREE_KINDS, EngineSpec, Launcher, commit_of
from serving.metrics import QUIET_CORES, Metrics, metrics_of
from serving.process import EngineProcess, MachineLock, Startup
from serving.runner import Answer
from serving.workloads import Request, Scenario

_MAX_TRIES = 3


@dataclass
class Run:
    """All rounds of one engine in one scenario and dtype.

    Args:
        engine: Label of the engine.
        scenario: Name of the scenario.
        dtype: Dtype of weights and KV cache.
        rounds: Metrics of each round that counts.
        num_equal: Number of outputs that equal the expected ones, in the worst round; None if no outputs are
            expected.
        num_requests: Number of requests in a round.
        commit: Commit of the source tree when the process was started; empty for peers.
    """

    engine: str
    scenario: str
    dtype: str
    rounds: list[Metrics] = field(default_factory=list)
    num_equal: int | None = None
    num_requests: int = 0
    commit: str = ""


@dataclass(frozen=True)
class Plan:
    """Settings of a comparison.

    Args:
        engines: The engines. Ratios are relative to the first one.
        scenarios: The scenarios, in the order in which they run.
        dtypes: The dtypes. Each of them has its own processes.
        num_rounds: Number of rounds that count. One more round before them does not count, because memory is
            touched for the first time in it.
        vocab_size: Vocabulary size of the model.
        reference: Expected outputs of the scenario "crowd" in float32, if they are known. Otherwise, the
            outputs of the last engine are expected, unless the weights of some engines are quantized. In
            bfloat16, rounding makes some outputs differ.
    """

    engines: Sequence[EngineSpec]
    scenarios: Sequence[Scenario]
    dtypes: Sequence[str]
    num_rounds: int
    vocab_size: int
    reference: list[list[int]] | None


class Comparison:
    """A comparison and its results.

    Args:
        plan: Settings of the comparison.
        launcher: Starts the processes.
        lock: Lock that is held during measurements.
        say: Receives a line of text when an engine starts, fails or finishes a round.

    Attributes:
        runs: The results so far.
        versions: The version that each engine reports, by label.
        startups: Times and memory of each engine's start, by dtype and label. Other work on the machine may
            have increased the times, because the lock is not held then.
        failures: Messages about engines that did not start or that ended early. The comparison continues
            without them.
    """

    def __init__(self, plan: Plan, launcher: Launcher, lock: MachineLock, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._launcher = launcher
        self._lock = lock
        self._say = say
        self.runs: list[Run] = []
        self.versions: dict[str, str] = {}
        self.startups: dict[str, dict[str, Startup]] = {}
        self.failures: list[str] = []
        self._commits: dict[str, str] = {}

    def run(self, save: Callable[[], None]) -> None:
        """Runs all scenarios.

        Args:
            save: Called after each scenario.
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
                self._commits[spec.label] = commit_of(spec.tree) if spec.kind in TREE_KINDS else ""
                try:
                    process = self._launcher.start(spec, dtype, server=over_http)
                except RuntimeError as error:
                    self._fail(f"{dtype} {spec.label}: {error}")
                    continue
                processes[spec.label] = process
                process.stop()
                if not over_http:
                    self.versions[spec.label] = process.version
                    self.startups.setdefault(dtype, {})[spec.label] = process.startup
            for scenario in scenarios:
                self._run_scenario(dtype, scenario, processes)
                save()
        finally:
            self._lock.release()
            for process in processes.values():
                process.close()

    def _run_scenario(self, dtype: str, scenario: Scenario, processes: dict[str, EngineProcess]) -> None:
        runs = {label: Run(label, scenario.name, dtype, commit=self._commits[label]) for label in processes}
        self.runs += runs.values()
        for i in range(self._plan.num_rounds + 1):
            found = self._run_round(scenario, i, processes)
            expected = self._expected(dtype, scenario, [answers for answers, _ in found.values()])
            for label, (answers, metrics) in found.items():
                run = runs[label]
                run.num_requests = len(answers)
                if expected is not None:
                    num_equal = sum(a.output == b for a, b in zip(answers, expected, strict=True))
                    run.num_equal = num_equal if run.num_equal is None else min(run.num_equal, num_equal)
                if i > 0:
                    run.rounds.append(metrics)
                    self._say(
                        f"{dtype} {scenario.name}, round {i} of {self._plan.num_rounds}, {label}: {metrics}"
                    )

    def _run_round(
        self, scenario: Scenario, round_: int, processes: dict[str, EngineProcess]
    ) -> dict[str, tuple[list[Answer], Metrics]]:
        """Measures every engine once, and repeats measurements that other processes disturbed.

        If the requests share prefixes, the whole round is repeated. The second attempt needs new prefixes,
        because the first ones are cached, and all engines must receive the same requests.
        """
        found: dict[str, tuple[list[Answer], Metrics]] = {}
        labels = list(processes)
        for attempt in range(_MAX_TRIES):
            requests = scenario.make(self._plan.vocab_size, round_ * _MAX_TRIES + attempt)
            for label in labels:
                self._lock.acquire()
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
        if len(answers) < 2 or any(spec.is_quantized for spec in self._plan.engines):
            return None
        return [answer.output for answer in answers[-1]]


def measure(
    process: EngineProcess, requests: Sequence[Request], scenario: Scenario
) -> tuple[list[Answer], Metrics]:
    """Runs requests on a stopped process, stops it again, and returns the answers and the metrics."""
    process.resume()
    try:
        process.reset_peak()
        own, everything, start = process.cpu_s(), _machine_cpu_s(), time.perf_counter()
        answers = process.ask(list(requests), prefix_caching=scenario.shares_prefixes)
        elapsed = time.perf_counter() - start
        own, everything = process.cpu_s() - own, _machine_cpu_s() - everything
        peak_mib = process.peak_mib()
    finally:
        process.stop()
    cores, other_cores = own / elapsed, max(0.0, everything - own) / elapsed
    return answers, metrics_of(requests, answers, cores=cores, other_cores=other_cores, peak_mib=peak_mib)


def _machine_cpu_s() -> float:
    """Returns the processor time of the whole machine so far, without idle time (seconds)."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

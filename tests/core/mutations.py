"""Plants bugs in the scheduling core, one at a time, and counts those that the tests kill. Not run by pytest.

    python tests/core/mutations.py [words that a bug's description holds]

The bugs are listed in planted_bugs. Exits with 1 if fewer than 19 of 20 are killed, and stops if the piece of
source that a bug takes the place of isn't found once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planted_bugs import MUTATIONS, REQUEST_EDITS, Mutation

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 120
CORE = tuple(
    f"core/test_{name}"
    for name in (
        "block_manager",
        "sequence_groups",
        "scheduler",
        "fairness",
        "steps_as_values",
        "scheduler_simulation",
        "state_slots",
        "state_machine",
        "scheduler_machine",
        "running_ahead",
    )
)
TESTS = {
    "core/features/interactive/step_edits.py": ("core/test_running_ahead",),
    "core/features/lora.py": ("core/test_adapter_slots", "core/test_scheduler_machine"),
    "worker/batch_builder.py": ("worker/test_batch",),
    "worker/features/multi_step.py": ("worker/test_batch",),
    "worker/input_batch.py": ("worker/test_input_batch",),
    "worker/block_mover.py": ("worker/test_block_mover",),
}
# Of the bugs in what a user does to requests, wherever they are: hardly any but engines do that.
OF_REQUEST_EDITS = ("core/test_dropped_blocks", "engine/test_request_edits", "engine/test_kv_access")
WITH_ENGINES = {"worker/test_block_mover", *OF_REQUEST_EDITS[1:]}  # which conftest.py makes


def tests_of(m: Mutation) -> tuple[str, ...]:
    """Returns the tests that have to notice a bug."""
    return OF_REQUEST_EDITS if m in REQUEST_EDITS else TESTS.get(m.file, CORE)


def lay_out(folder: Path) -> Path:
    """Copies package and tests; returns where the package is."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "jax_paged", folder / "jax_paged", ignore=ignore)  # links are followed
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "jax_paged"


def is_killed(folder: Path, tests: tuple[str, ...]) -> bool:
    """Whether any of the tests fails, or they take too long."""
    names = [f"tests/{name}.py" for name in tests]
    options = ["-x", "-q", "--timeout=60", "-p", "no:cacheprovider"]
    options += [] if WITH_ENGINES.intersection(tests) else ["--noconftest"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", *options, *names]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    assert done.returncode in (0, 1, 2), done.stdout.decode() + done.stderr.decode()
    return done.returncode != 0


def main(words: list[str]) -> int:
    for m in MUTATIONS:
        count = (ROOT / "jax_paged" / m.file).read_text(encoding="utf-8").count(m.old)
        assert count == 1, f"{m.file} ({m.why}): found {count} times, once is allowed: {m.old!r}"
    chosen = [m for m in MUTATIONS if all(word in f"{m.file} {m.why}" for word in words)]
    num_killed = 0
    with tempfile.TemporaryDirectory() as name:
        package = lay_out(Path(name))
        for tests in sorted({tests_of(m) for m in chosen}):
            assert not is_killed(Path(name), tests), f"the tests fail without any planted bug: {tests}"
        for m in chosen:
            path = package / m.file
            source = path.read_text(encoding="utf-8")
            path.write_text(source.replace(m.old, m.new), encoding="utf-8")
            start = time.monotonic()
            killed = is_killed(Path(name), tests_of(m))
            path.write_text(source, encoding="utf-8")
            num_killed += killed
            word = "killed" if killed else "SURVIVED"
            print(f"{word:8}  {time.monotonic() - start:5.1f} s  {m.file:20}  {m.why}", flush=True)
    print(f"{num_killed} of {len(chosen)} killed")
    return int(num_killed < 0.95 * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

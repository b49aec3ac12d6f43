"""Plants bugs in the scheduling core, one at a time, and counts those that the tests kill. Not run by pytest.

    python tests/engine/mutations.py [words that a bug's description holds]

Each bug is a piece of source that occurs once, what takes its place, and what that means. Exits with 1 if
fewer than 19 of 20 are killed, and stops if a piece isn't found once.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TIME_LIMIT_S = 120
CORE = ("block_manager", "sequence_groups", "scheduler", "scheduler_simulation", "state_machine")
TESTS = {"batch.py": ("batch",), "block_mover.py": ("block_mover",)}


class Mutation(NamedTuple):
    """A planted bug."""

    file: str
    old: str
    new: str
    why: str


MUTATIONS = [
    Mutation(
        "block_pool.py",
        "fromkeys(range(1, num_blocks))",
        "fromkeys(range(num_blocks))",
        "null block handed out",
    ),
    Mutation(
        "block_pool.py", "self.ref_counts[block] += 1", "self.ref_counts[block] = 1", "reference not counted"
    ),
    Mutation(
        "block_pool.py", "self.ref_counts[block] -= 1", "self.ref_counts[block] = 0", "freed while referenced"
    ),
    Mutation(
        "block_pool.py", "            del self._free[block]\n", "            pass\n", "a hit stays free"
    ),
    Mutation("block_pool.py", "parent + array(", "array(", "hash without the parent"),
    Mutation("block_pool.py", " + salt.encode(", ' + "".encode(', "hash without the salt"),
    Mutation("block_pool.py", "and self.contents[block] == content", "", "a hash is trusted"),
    Mutation(
        "block_pool.py", "del self._cached[content.hash, content.group]", "pass", "an evicted block is found"
    ),
    Mutation(
        "block_pool.py", "move_to_end(block, last=False)", "move_to_end(block)", "cached blocks evicted first"
    ),
    Mutation(
        "block_manager.py",
        "                copies.append((block, table[i]))\n",
        "",
        "a copy is left out",
    ),
    Mutation(
        "block_manager.py",
        "                pool.release(block)\n                copies",
        "                copies",
        "a copied block keeps its reference",
    ),
    Mutation(
        "block_manager.py",
        "            if pool.ref_counts[block] > 1:\n",
        "            if True:\n",
        "the last writer copies too",
    ),
    Mutation(
        "block_manager.py",
        "                pool.forget(block)\n",
        "                pass\n",
        "a cached block is written",
    ),
    Mutation(
        "block_manager.py",
        "n - (pool.ref_counts[block] == n)",
        "n - 1",
        "one copy too few is counted",
    ),
    Mutation(
        "block_manager.py", "+ num_copies > pool.num_free", "> pool.num_free", "room for copies not counted"
    ),
    Mutation(
        "block_manager.py",
        "list(table) if group.is_cross else table[:num_blocks]\n            for",
        "list(table)\n            for",
        "a fork without truncation",
    ),
    Mutation(
        "block_manager.py",
        "        for table in self.block_tables[child]:\n            for block in table:\n"
        "                self.pool.share(block)\n",
        "",
        "a fork takes no references",
    ),
    Mutation(
        "block_manager.py",
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window + 2) // self.block_size",
        "the window a token too short",
    ),
    Mutation(
        "block_manager.py",
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window - self.block_size) // self.block_size",
        "blocks kept after they fell out of the window",
    ),
    Mutation(
        "block_manager.py",
        "        for block in shared:  # before any new block is taken, which could evict them\n"
        "            self.pool.share(block)\n"
        "        for table, n in zip(tables, num_new, strict=True):\n"
        "            table.extend(self.pool.take() for _ in range(n))\n",
        "        for table, n in zip(tables, num_new, strict=True):\n"
        "            table.extend(self.pool.take() for _ in range(n))\n"
        "        for block in shared:\n"
        "            self.pool.share(block)\n",
        "hits claimed after new blocks are taken",
    ),
    Mutation(
        "block_manager.py",
        "parent = hashes[i - 1] if i else NO_PARENT",
        "parent = NO_PARENT",
        "blocks found without what is before them",
    ),
    Mutation(
        "block_manager.py",
        "range((len(seq) - 1) // self.block_size):",
        "range(len(seq) // self.block_size):",
        "the last token is a hit",
    ),
    Mutation(
        "block_manager.py",
        "range(start // self.block_size, stop // self.block_size):",
        "range(start // self.block_size, -(-stop // self.block_size)):",
        "half full blocks cached",
    ),
    Mutation("block_manager.py", "content._replace(group=g))\n\n", "content)\n\n", "cache groups mixed up"),
    Mutation(
        "block_manager.py",
        "                    target.share(block)\n",
        "                    pass\n",
        "what moves keeps no references",
    ),
    Mutation(
        "block_manager.py",
        "return [(block, moved[block]) for block in blocks]",
        "return [(moved[block], block) for block in blocks]",
        "pairs of a swap the wrong way round",
    ),
    Mutation(
        "block_manager.py",
        "        _release(self.pool, self.pinned.pop(name))",
        "        self.pinned.pop(name)",
        "unpin without letting go",
    ),
    Mutation(
        "scheduler.py",
        "self.block_manager.fork(seq, sample, len(seq))",
        "self.block_manager.fork(seq, sample, len(seq) - 1)",
        "samples forked a token too early",
    ),
    Mutation(
        "scheduler.py",
        "group.sampling_params.seed_of(index))",
        "group.sampling_params.seed_of(0))",
        "samples of one seed",
    ),
    Mutation(
        "scheduler.py",
        "self._within(n - is_behind, budget)",
        "self._within(n, budget)",
        "beams go on before all are back",
    ),
    Mutation(
        "scheduler.py",
        "        if parent.num_computed_tokens < shared:\n            return\n",
        "",
        "forked from what is not computed yet",
    ),
    Mutation("scheduler.py", "            step.swap_out += copies\n", "", "a swap out is left out"),
    Mutation(
        "scheduler.py",
        "seq.status, seq.num_computed_tokens = SequenceStatus.WAITING, 0",
        "seq.status = SequenceStatus.WAITING",
        "a preempted sequence keeps its progress",
    ),
    Mutation(
        "scheduler.py",
        "self.queues.num_seats_taken + group.max_num_seqs > self.max_num_seqs",
        "self.queues.num_seats_taken + 1 > self.max_num_seqs",
        "seats of samples not counted",
    ),
    Mutation(
        "scheduler.py",
        "self._holds_back_new or is_behind",
        "self._holds_back_new",
        "new requests overtake swapped ones",
    ),
    Mutation(
        "scheduler.py",
        'or ("swap" if len(seqs) > 1 else "recompute")',
        'or ("swap" if len(seqs) > 2 else "recompute")',
        "not the paper's rule",
    ),
    Mutation(
        "scheduler.py",
        "use_cache=group.sampling_params.reads_prefix_cache",
        "use_cache=True",
        "prompt_logprobs lost",
    ),
    Mutation(
        "request_queues.py",
        "next(reversed(self.running.values()), None)",
        "next(iter(self.running.values()), None)",
        "the first is preempted",
    ),
    Mutation(
        "sequence_updater.py",
        "                self.block_manager.fork(parent, seq, parent.num_computed_tokens)\n",
        "                self.block_manager.fork(parent, seq, parent.num_computed_tokens - 1)\n",
        "a beam forked a token short",
    ),
    Mutation(
        "sequence_updater.py",
        "            if seq not in parents:\n                self.block_manager.free(seq)\n",
        "",
        "blocks of dropped beams kept",
    ),
    Mutation(
        "sequence_updater.py",
        "                sample.num_computed_tokens = stop\n",
        "",
        "progress of samples not kept",
    ),
    Mutation(
        "sequence_updater.py",
        "num_output_tokens >= params.min_tokens",
        "num_output_tokens > params.min_tokens",
        "min_tokens a token late",
    ),
    Mutation("beam_search.py", "seq.cum_logprob + logprob)", "logprob)", "log-probabilities do not add up"),
    Mutation("beam_search.py", "(len(seq) - ends)", "len(seq)", "the end token counts in the length"),
    Mutation(
        "beam_search.py", "for n in (len(b), max_len)]", "for n in (len(b),)]", "a search ends too early"
    ),
    Mutation(
        "batch.py",
        "slots[:total] = blocks * self.block_size + positions % self.block_size",
        "slots[:total] = blocks * self.block_size + (positions + 1) % self.block_size",
        "slots shifted",
    ),
    Mutation("batch.py", "end_loc[row_of_sample] - 1", "end_loc[row_of_sample]", "logits of the next row"),
    Mutation(
        "batch.py",
        "lens[: len(rows)] = start + num_tokens",
        "lens[: len(rows)] = start",
        "own tokens not attended to",
    ),
    Mutation(
        "batch.py",
        "(group.beam_params.temperature if group.beam_params else 0) or 1.0",
        "1.0",
        "temperature of beams forgotten",
    ),
    Mutation("batch.py", "            slots[:] = out_of_range\n", "", "padding is written to block 0"),
    Mutation("block_mover.py", "pairs = pairs[size:]", "pairs = ()", "copies beyond the first call left out"),
    Mutation(
        "block_mover.py",
        "            to = [host for _, host in chunk]\n",
        "            to = [device for device, _ in chunk]\n",
        "swapped out to the wrong block",
    ),
]


def lay_out(folder: Path) -> Path:
    """Copies package and tests as they are installed; returns where the package is."""
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
    package = folder / "site" / "jax_paged"
    shutil.copytree(ROOT / "jax_paged", package, ignore=ignore)
    for name in ("models", "pallas_kernels"):
        shutil.copytree(ROOT / name, package / name, ignore=ignore)
    shutil.copytree(ROOT / "tests" / "engine", folder / "tests" / "engine", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return package


def is_killed(folder: Path, tests: tuple[str, ...]) -> bool:
    """Whether any of the tests fails, or they take too long."""
    names = [f"tests/engine/test_{name}.py" for name in tests]
    options = ["-x", "-q", "--timeout=60", "-p", "no:cacheprovider"]
    options += [] if "block_mover" in tests else ["--noconftest"]
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1"}
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
        for tests in sorted({TESTS.get(m.file, CORE) for m in chosen}):
            assert not is_killed(Path(name), tests), f"the tests fail without any planted bug: {tests}"
        for m in chosen:
            path = package / m.file
            source = path.read_text(encoding="utf-8")
            path.write_text(source.replace(m.old, m.new), encoding="utf-8")
            start = time.monotonic()
            killed = is_killed(Path(name), TESTS.get(m.file, CORE))
            path.write_text(source, encoding="utf-8")
            num_killed += killed
            word = "killed" if killed else "SURVIVED"
            print(f"{word:8}  {time.monotonic() - start:5.1f} s  {m.file:20}  {m.why}", flush=True)
    print(f"{num_killed} of {len(chosen)} killed")
    return int(num_killed < 0.95 * len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

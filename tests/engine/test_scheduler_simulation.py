"""Random requests through the scheduler with a toy device that shows every wrong block; and planted bugs."""

import random
import sys
import types
from pathlib import Path

import pytest

from jax_paged import block_manager, scheduler
from jax_paged.block_manager import BlockManager
from jax_paged.sampling_params import SamplingParams
from jax_paged.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from jax_paged.sequence import RequestMetrics, Sequence, SequenceGroup, SequenceStatus

EOS = 2
MAX_MODEL_LEN = 60


def root(group: SequenceGroup) -> int:
    """What stands before the first token; salted requests must not share, so theirs is another."""
    return int(group.cache_salt == "")


def cell_after(cell: int, token_id: int) -> int:
    """What a token's keys and values depend on: everything before it, and the token."""
    return hash((cell, token_id))


def next_token(cell: int) -> int:
    """The toy model: one of 15 tokens, EOS among them, that depends on the whole prefix."""
    return cell // 7 % 15


def reference_output(group: SequenceGroup, max_len: int) -> list[int]:
    """The output of a request that is alone in the world."""
    params, prompt = group.sampling_params, group.sequences[0].prompt_token_ids
    cell, output = root(group), []
    for token_id in prompt:
        cell = cell_after(cell, token_id)
    while True:
        output.append(next_token(cell))
        cell = cell_after(cell, output[-1])
        stops = output[-1] == EOS and len(output) >= params.min_tokens
        if stops or len(output) == params.max_tokens or len(prompt) + len(output) >= max_len:
            return output


class Simulation:
    """Random requests through a scheduler, with a pool of cells in the place of the device.

    A step writes, for each token, what its keys and values depend on into the cell that the block table
    names, then reads the whole sequence back. So a wrong block table, a block handed out too early or
    shared wrongly shows as a wrong cell. Every rule of the scheduler is checked on the way.
    """

    def __init__(self, seed: int, *, caching=True, classes=(BlockManager, Scheduler)):
        self.rng = random.Random(seed)
        self.size = self.rng.choice([1, 2, 4])
        self.manager = classes[0](1 + self.rng.choice([24, 40, 80]) // self.size, self.size, caching)
        self.sched = classes[1](
            block_manager=self.manager,
            max_num_seqs=self.rng.choice([2, 5, 9]),
            max_num_batched_tokens=self.rng.choice([1, 7, 16, 64]),
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            watermark=self.rng.choice([0.0, 0.01, 0.2]),
        )
        self.cells: dict[tuple[int, int], int] = {}
        self.groups: list[SequenceGroup] = []
        self.num_preemptions = self.num_chunks = self.num_cached = self.num_ended_early = 0

    def add(self) -> None:
        rng, index = self.rng, len(self.groups)
        shared = [i % 5 for i in range(rng.choice([0, 0, 4, 8, 13]))]
        prompt = shared + [rng.randrange(2) for _ in range(rng.choice([1, 2, 5, 12, 25]))]
        params = SamplingParams(
            max_tokens=rng.choice([4, 9, 30, None]),
            min_tokens=rng.choice([0, 0, 4]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
        )
        salt = rng.choice(["", "", "", "salt"])
        metrics = RequestMetrics(float(index))
        self.groups.append(SequenceGroup(f"r{index}", [Sequence(index, prompt)], params, metrics, salt))
        self.sched.add(self.groups[-1])

    def step(self) -> None:
        waited = list(self.sched.waiting)
        output = self.sched.schedule(0.0)
        self.manager.check_integrity()
        self.check_output(output, waited)
        token_ids = self.compute(output)
        self.end_early()
        self.sched.update(output, token_ids, 0.0)
        self.manager.check_integrity()
        self.num_preemptions += len(output.preempted)
        self.num_chunks += token_ids.count(None)

    def check_output(self, output: SchedulerOutput, waited: list[str]) -> None:
        running, waiting = self.sched.running, self.sched.waiting
        assert output.scheduled or not self.sched.has_unfinished, "no progress"
        num_tokens = [row.num_tokens for row in output.scheduled]
        assert min(num_tokens, default=1) > 0
        assert sum(num_tokens) == output.num_batched_tokens <= self.sched.max_num_batched_tokens
        assert len(num_tokens) <= self.sched.max_num_seqs
        order = [(row.num_tokens > 1, row.seq.seq_id) for row in output.scheduled]
        assert order == sorted(set(order)), "order of rows"
        assert {row.group.request_id for row in output.scheduled} == set(running), (
            "a request does not advance"
        )
        arrivals = [int(request_id[1:]) for request_id in (*running, *waiting)]
        assert arrivals == sorted(set(arrivals)), "order of arrival"
        for group in waiting.values():
            (seq,) = group.sequences
            assert seq.status is SequenceStatus.WAITING
            assert seq.num_computed_tokens == 0
            assert seq.seq_id not in self.manager.block_tables
        if output.preempted:
            assert list(waiting) == [*reversed(output.preempted), *waited], "admission after preemption"
        for group in output.ignored:
            assert len(group.sequences[0]) > self.manager.num_usable_blocks * self.size

    def cell(self, row: ScheduledSequence, position: int) -> tuple[int, int]:
        return row.block_table[position // self.size], position % self.size

    def compute(self, output: SchedulerOutput) -> list[int | None]:
        for row in output.scheduled:
            assert row.seq.status is SequenceStatus.RUNNING
            end = row.start + row.num_tokens
            assert len(row.block_table) == -(-end // self.size)
            for position, token_id in enumerate(row.seq.tokens(row.start, end), row.start):
                block = row.block_table[position // self.size]
                assert block > 0, "null block written"
                assert self.manager.ref_counts[block] == 1, "shared block written"
                assert self.manager._contents[block] is None, "cached block written"
                before = self.cells[self.cell(row, position - 1)] if position else root(row.group)
                self.cells[self.cell(row, position)] = cell_after(before, token_id)
        token_ids: list[int | None] = []
        for row in output.scheduled:
            expected, end = root(row.group), row.start + row.num_tokens
            for position, token_id in enumerate(row.seq.tokens(0, end)):
                expected = cell_after(expected, token_id)
                assert self.cells[self.cell(row, position)] == expected, "a cell of something else"
            assert row.samples == (end == len(row.seq))
            token_ids.append(next_token(expected) if row.samples else None)
        return token_ids

    def end_early(self) -> None:
        """Sometimes ends a request, in whatever state, between schedule() and update()."""
        unfinished = [group for group in self.groups if not group.is_finished]
        if unfinished and self.rng.random() < 0.03:
            group = self.rng.choice(unfinished)
            if self.rng.random() < 0.5:
                assert self.sched.abort(group.request_id) is group
            else:
                self.sched.finish(group.sequences[0], SequenceStatus.FINISHED_ABORTED, 0.0)
            self.num_ended_early += 1
            self.manager.check_integrity()

    def run(self, num_requests: int = 40) -> "Simulation":
        num_steps = 0
        while len(self.groups) < num_requests or self.sched.has_unfinished:
            while len(self.groups) < num_requests and self.rng.random() < 0.4:
                self.add()
            self.step()
            num_steps += 1
            assert num_steps < 200 * num_requests, "does not come to an end"
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        for group in self.groups:
            self.check_group(group)
            self.num_cached += group.metrics.num_cached_tokens
        return self

    def check_group(self, group: SequenceGroup) -> None:
        (seq,), params = group.sequences, group.sampling_params
        expected = reference_output(group, min(MAX_MODEL_LEN, self.manager.num_usable_blocks * self.size + 1))
        if seq.status is SequenceStatus.FINISHED_IGNORED:
            expected = []
        elif seq.status is SequenceStatus.FINISHED_ABORTED:
            expected = expected[: len(seq.output_token_ids)]
        else:
            stops = expected[-1] == EOS and len(expected) >= params.min_tokens
            assert seq.status.name == ("FINISHED_STOPPED" if stops else "FINISHED_LENGTH_CAPPED")
        assert seq.output_token_ids == expected
        assert params.prompt_logprobs is None or group.metrics.num_cached_tokens == 0


@pytest.mark.parametrize("caching", [True, False])
def test_random_requests_in_a_tiny_pool(caching):
    runs = [Simulation(seed, caching=caching).run() for seed in range(100)]
    assert sum(run.num_preemptions for run in runs) > 300
    assert sum(run.num_chunks for run in runs) > 1000
    assert sum(run.num_ended_early for run in runs) > 50
    assert (sum(run.num_cached for run in runs) > 1000) == caching


def test_random_requests_when_every_hash_collides(monkeypatch):
    monkeypatch.setattr(block_manager, "block_hash", lambda parent, tokens, salt: b"h" * 32)
    for seed in range(10):
        Simulation(seed).run()


TAKE_NEW = "        new = [self._take() for _ in range(num_needed - len(shared))]\n"
MUTANTS = {
    "none": {},
    "null block handed out": {"range(1, num_blocks))": "range(num_blocks))"},
    "block tables round down": {"-(-num_tokens // self.block_size)": "max(1, num_tokens // self.block_size)"},
    "reference not counted": {"self.ref_counts[block] += 1": "self.ref_counts[block] = 1"},
    "reference counted twice": {"self.ref_counts[block] += 1": "self.ref_counts[block] += 2"},
    "hit stays in the free list": {"del self._free[block]": "pass"},
    "freed while referenced": {"self.ref_counts[block] -= 1": "self.ref_counts[block] = 0"},
    "hits claimed too late": {
        TAKE_NEW: "",
        "        for block in shared:": TAKE_NEW + "        for block in shared:",
    },
    "free hits not counted": {
        "if num_needed - sum(self.ref_counts[b] > 0 for b in shared)": "if num_needed - len(shared)"
    },
    "hash without the parent": {"parent = hashes[i - 1] if i else NO_PARENT": "parent = NO_PARENT"},
    "no salt": {"        hashes = seq.block_hashes\n": "        hashes, salt = seq.block_hashes, ''\n"},
    "the last token is hit": {"range((len(seq) - 1) // self": "range(len(seq) // self"},
    "evicted block stays cached": {"del self._cached[content.hash]": "pass"},
    "half full block cached": {"stop // self.block_size):": "-(-stop // self.block_size)):"},
    "cached before computed": {
        "seq.status = SequenceStatus.RUNNING\n": "seq.status = SequenceStatus.RUNNING; "
        "self.block_manager.cache_full_blocks(seq, group.cache_salt, 0, len(seq))\n"
    },
    "preempted keeps its blocks": {
        "            self.block_manager.free(seq)\n            seq.status": "            seq.status"
    },
    "preempted keeps its progress": {"seq.num_computed_tokens = 0": "pass"},
    "preempted waits last": {"self.waiting.move_to_end(group.request_id, last=False)": "pass"},
    "earliest preempted": {"self.running.popitem()": "self.running.popitem(last=False)"},
    "admission after preemption": {"budget and not preempted and": "budget and"},
    "budget not spent": {
        "self.max_num_batched_tokens - budget,": "sum(row.num_tokens for row in rows),",
        "budget -= rows[-1].num_tokens\n\n        while": "pass\n\n        while",
    },
    "budget not kept": {"if num_tokens > budget:": "if False:"},
    "one sequence too many": {
        "len(self.running) < self.max_num_seqs": "len(self.running) <= self.max_num_seqs"
    },
    "ended sequences updated": {
        "if seq.status is not SequenceStatus.RUNNING:\n                continue": "pass"
    },
    "progress not kept": {"seq.num_computed_tokens = stop": "pass"},
    "blocks of ended requests kept": {"self.block_manager.free(seq)\n            del": "del"},
    "pool not in the limit": {
        "min(max_model_len, num_usable * block_manager.block_size + 1)": "max_model_len"
    },
    "limit a token late": {"len(seq) >= self._max_len": "len(seq) > self._max_len"},
    "min_tokens a token late": {"num_output_tokens >= params.min": "num_output_tokens > params.min"},
    "hits despite prompt_logprobs": {"group.sampling_params.prompt_logprobs is None": "True"},
    "never taken for later": {"return AllocStatus.NEVER": "return AllocStatus.LATER"},
    "watermark without end": {
        "self._num_watermark_blocks if self.running else 0": "self._num_watermark_blocks"
    },
}


def mutated(replacements: dict[str, str]) -> tuple[type, type]:
    """Returns BlockManager and Scheduler of copies of their modules with pieces of source replaced."""
    found: list[str] = []

    def copy_of(module: types.ModuleType) -> types.ModuleType:
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        for old, new in replacements.items():
            found.extend([old] * source.count(old))
            source = source.replace(old, new)
        copy = types.ModuleType(module.__name__)
        exec(compile(source, f"a mutant of {module.__file__}", "exec"), copy.__dict__)
        return copy

    manager = copy_of(block_manager)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, block_manager.__name__, manager)
        mutant = manager.BlockManager, copy_of(scheduler).Scheduler
    assert sorted(found) == sorted(replacements), "each piece must be in the source once"
    return mutant


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_finds_planted_bugs(name):
    classes = mutated(MUTANTS[name])
    found = None
    for seed in range(20):
        try:
            Simulation(seed, classes=classes).run()
        except Exception as error:
            found = error
            break
    assert (found is None) == (name == "none"), f"{name}: {found!r}"

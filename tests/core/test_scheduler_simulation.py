"""Random requests of every kind through the scheduler, with a toy device that shows every wrong block."""

import dataclasses
import random
from typing import Any, Self

import pytest
from helpers.scheduling import found, result_of, samples_per_row
from helpers.toy_device import (
    EOS,
    ToyDevice,
    next_token,
    reference_beams,
    reference_sample,
    root,
    top_logprobs,
)

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache import block_pool, prefix_cache
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.model_runner_output import TokenLogprobs
from jax_paged.core.request import Request, RequestFeatures, Sequence, SequenceGroup, SequenceStatus
from jax_paged.core.scheduler import Scheduler
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.speculation import Speculation

MAX_MODEL_LEN = 60
FULL, WINDOW, CROSS = CacheGroup(), CacheGroup(window=5), CacheGroup(is_cross=True)


@dataclasses.dataclass(frozen=True)
class Setup:
    """One scheduler and the requests for it."""

    size: int = 2
    groups: tuple[CacheGroup, ...] = (FULL,)
    num_blocks: int = 20
    num_swap_blocks: int = 0
    caching: bool = True
    scheduling_policy: Any = "fcfs"
    preemption_mode: Any = None
    chunked: bool = True
    scheduler_delay_factor: float = 0.0
    watermark: float = 0.01
    max_num_seqs: int = 8
    budget: int = 16
    kinds: tuple[str, ...] = ("one", "one", "samples", "beams")
    num_requests: int = 30
    early_ends: float = 0.03
    edits: float = 0.0  # share of steps from which requests are dropped by hand, before they are computed
    num_scheduler_steps: int = 1
    speculation: Speculation | None = None
    num_state_slots: int = 0

    @classmethod
    def draw(cls, rng: random.Random, **fixed: Any) -> "Setup":
        size = rng.choice([1, 2, 4])
        groups = fixed.get("groups") or rng.choice(
            [(FULL,), (FULL,), (FULL, WINDOW), (WINDOW,), (CacheGroup(window=1), FULL), (FULL, CROSS)]
        )
        chunked = fixed.get("chunked", rng.random() < 0.7)
        drawn = cls(
            size=size,
            groups=groups,
            num_blocks=len(groups) * rng.choice([24, 40, 80]) // size,
            num_swap_blocks=rng.choice([0, 3, 300]),
            caching=rng.random() < 0.7,
            scheduling_policy=rng.choice(["fcfs", "priority"]),
            preemption_mode=rng.choice([None, None, "recompute", "swap"]),
            chunked=chunked,
            scheduler_delay_factor=rng.choice([0.0, 0.0, 2.0]),
            watermark=rng.choice([0.0, 0.01, 0.2]),
            max_num_seqs=rng.choice([4, 6, 9]),
            budget=rng.choice([1, 7, 16, 64]) if chunked else 64,
        )
        return dataclasses.replace(drawn, **fixed)


class Simulation:
    """Random requests through a scheduler on a toy device; every rule is checked on the way.

    The toy device reads each sequence's past back in every step: a wrong block table, a block handed out too
    early or shared wrongly, a copy or a swap left out shows as a wrong cell. The outputs are compared with
    those of requests that are alone in the world.
    """

    def __init__(self, seed: int, **fixed: Any) -> None:
        self.rng = random.Random(seed)
        self.setup = setup = Setup.draw(self.rng, **fixed)
        self.manager = BlockManager(
            1 + setup.num_blocks,
            setup.size,
            setup.caching,
            groups=setup.groups,
            num_swap_blocks=setup.num_swap_blocks,
            num_state_slots=setup.num_state_slots,
            num_swap_state_slots=setup.num_swap_blocks // 8,
        )
        self.device = ToyDevice(self.manager)
        self.sched = Scheduler(
            block_manager=self.manager,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.budget,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=frozenset({EOS}),
            watermark=setup.watermark,
            scheduling_policy=setup.scheduling_policy,
            preemption_mode=setup.preemption_mode,
            enable_chunked_prefill=setup.chunked,
            scheduler_delay_factor=setup.scheduler_delay_factor,
            num_scheduler_steps=setup.num_scheduler_steps,
            speculation=setup.speculation,
        )
        self.now = 0.0
        self.groups: list[SequenceGroup] = []
        self.ended: set[str] = set()
        self.counts: dict[str, int] = dict.fromkeys(
            ("preemptions", "swaps", "chunks", "cached", "early", "copies", "ended", "steps", "tokens"), 0
        )

    def add(self, **fixed: Any) -> SequenceGroup:
        rng, index, setup = self.rng, len(self.groups), self.setup
        shared = [i % 5 for i in range(rng.choice([0, 0, 4, 8, 13]))]
        prompt = shared + [rng.randrange(2) for _ in range(rng.choice([1, 2, 5, 12, 25]))]
        most = min(self.sched.max_num_seqs, 4)
        kind = rng.choice(setup.kinds)
        n = rng.randint(1, most) if kind == "samples" else 1
        params = SamplingParams(
            n=n,
            best_of=rng.randint(n, most) if kind == "samples" and rng.random() < 0.3 else None,
            max_tokens=rng.choice([4, 9, 30, None]),
            min_tokens=rng.choice([0, 0, 4]),
            prompt_logprobs=rng.choice([None] * 9 + [1]),
            seed=rng.randrange(1000),
        )
        beams = None
        if kind == "beams":
            beams = BeamSearchParams(
                beam_width=rng.randint(1, most),
                max_tokens=rng.choice([4, 9, 30]),
                ignore_eos=rng.random() < 0.3,
                length_penalty=rng.choice([1.0, 0.0, 2.0]),
            )
            params = SamplingParams(max_tokens=beams.max_tokens, ignore_eos=beams.ignore_eos, seed=0)
        encoder = [rng.randrange(3) for _ in range(rng.choice([1, 4, 9]))] if CROSS in setup.groups else []
        if beams is not None:  # as the engine does it
            params.logprobs = 2 * beams.beam_width
        request = Request(
            f"r{index}",
            prompt,
            params,
            # Of an encoder-decoder model, the decoder's keys and values depend on the encoder's text.
            rng.choice(["", "", "", "salt"]) + "".join(map(str, encoder)),
            rng.choice([0, 0, 1, 2]) if setup.scheduling_policy == "priority" else 0,
            RequestFeatures(beams, encoder) if beams or encoder else None,
        )
        group = SequenceGroup.from_request(request, self.now)
        self.groups.append(group)
        self.sched.add(group)
        return group

    def step(self) -> SchedulerOutput:
        self.now += 1.0
        queues = self.sched.queues
        before: dict[str, Any] = {n: dict(getattr(queues, n)) for n in ("running", "waiting", "swapped")}
        before["lens"] = {g: [len(seq) for seq in g.unfinished] for g in self.groups}
        is_new = {g.request_id for g in self.groups if g.metrics.first_scheduled_time is None}
        output = self.sched.schedule(self.now)
        self.manager.check_integrity()
        self.check_output(output, before, is_new)
        self.device.execute(output, self.sched)
        token_ids, logprobs = self.sample(output)
        self.end_early()
        had_first_token = {g for g in self.groups if g.metrics.first_token_time is not None}
        self.sched.update(output, result_of(output, token_ids, logprobs), self.now)
        self.manager.check_integrity()
        self.device.wipe()
        self.check_first_tokens(had_first_token)
        self.check_walk()
        counts = self.counts
        counts["steps"] += 1
        counts["tokens"] += len(token_ids)
        counts["preemptions"] += len(output.preempted)
        counts["swaps"] += bool(output.blocks_to_swap_out)
        counts["chunks"] += samples_per_row(output).count(0)
        counts["copies"] += len(output.blocks_to_copy)
        counts["ended"] += len(output.ended)
        return output

    def sample(self, output: SchedulerOutput) -> tuple[list[int], list[TokenLogprobs]]:
        token_ids, logprobs = [], []
        for row, num_samples in zip(output.scheduled, samples_per_row(output), strict=True):
            stop, (_, seq) = row.start + row.num_tokens, found(self.sched, row.seq_id)
            assert bool(num_samples) == (stop == len(seq))
        for sample in output.samples:
            row = output.scheduled[sample.scheduled_index]
            stop, (group, computed) = row.start + row.num_tokens, found(self.sched, row.seq_id)
            _, seq = found(self.sched, sample.seq_id)
            assert seq in group.sequences
            assert seq.status is SequenceStatus.RUNNING
            chain = self.device.chain(root_of(group), computed, stop - 1)
            token_ids.append(next_token(chain, seq.seed))
            beams = group.beam_params
            tops = top_logprobs(chain, 2 * beams.beam_width) if beams else ([], [])
            logprobs.append(TokenLogprobs(0.0, 0, *tops))
        return token_ids, logprobs

    def check_output(self, output: SchedulerOutput, before: dict[str, Any], is_new: set[str]) -> None:
        sched, manager, rows = self.sched, self.manager, output.scheduled
        pairs = [found(sched, row.seq_id) for row in rows]
        queues = sched.queues
        assert rows or output.ended or not sched.has_unfinished, "no progress"
        assert all(row.num_tokens > 0 for row in rows)
        assert sum(row.num_tokens for row in rows) == output.num_batched_tokens <= self.setup.budget
        assert (
            output.num_logits_rows == sum(n or 1 for n in samples_per_row(output)) <= self.setup.max_num_seqs
        )
        assert sum(len(g.unfinished) for g in queues.running.values()) <= self.setup.max_num_seqs, "seats"
        assert len({seq for _, seq in pairs}) == len(rows), "a sequence has two rows"
        is_long = [row.num_tokens > 1 for row in rows]
        assert is_long == sorted(is_long), "rows of one token come first"
        for row, (group, seq) in zip(rows, pairs, strict=True):
            assert group.request_id in queues.running, "a row of a request that does not run"
            assert row.start == seq.num_computed_tokens
        self.check_queues()
        self.check_beams(output)

        # Whole groups are preempted, the last in order first.
        preempted = [g for g in self.groups if g.request_id in output.preempted]
        stayed = [
            g for i, g in before["running"].items() if i in queues.running and i not in output.preempted
        ]
        for group in preempted:
            assert all(group.order > other.order for other in stayed), "not the last one was preempted"
        # While a request is swapped out, none that never ran is admitted, unless it goes first.
        admitted = [g for i, g in queues.running.items() if i in is_new]
        stays_out = [g for i, g in queues.swapped.items() if i in before["swapped"]]
        assert not any(a.order > b.order for a in admitted for b in stays_out), "a new one goes first"
        # No one is admitted before a waiting request that goes first, unless that may not be admitted yet.
        if not queues.swapped and not self.setup.scheduler_delay_factor and self.setup.chunked:
            first = min((g.order for g in queues.waiting.values()), default=None)
            entered = [g for i, g in queues.running.items() if i in before["waiting"]]
            assert first is None or all(g.order < first for g in entered), "not in the order of requests"
        # Whoever runs advances, as far as the budget goes.
        left = self.setup.budget - output.num_batched_tokens
        for group in queues.running.values() if self.setup.chunked else ():
            # One that is admitted here may lack blocks to copy to; it waits a step. Beams go together. One
            # that gets the blocks of its sequences back may wait for those of the last.
            is_held_up = group.request_id not in before["running"] or left < len(group.unfinished)
            is_held_up |= any(seq not in manager.block_tables for seq in group.unfinished)
            assert is_held_up or any(g is group for g, _ in pairs), "a running request does not advance"

        for group in (g for g in self.groups if g.request_id in output.ended):
            self.ended.add(group.request_id)
            demand = sum(
                manager.num_blocks_of(len(group.request.encoder_token_ids) if g.is_cross else num_tokens)
                for num_tokens in before["lens"][group]
                for g in self.setup.groups
            )
            slots = manager.states
            lacks_slots = slots.has_states and len(before["lens"][group]) > slots.pool.num_usable
            assert demand > manager.num_usable_blocks or lacks_slots, "a request ended that would have fitted"

    def check_queues(self) -> None:
        queues, manager = self.sched.queues, self.manager
        for name in ("running", "swapped"):
            orders = [g.order for g in getattr(queues, name).values()]
            assert orders == sorted(orders), f"{name} are not in order"
        assert queues.num_reserved_slots == sum(g.num_reserved_slots for g in queues.running.values())
        assert queues.num_reserved_slots <= self.sched.max_num_seqs
        ids = [*queues.running, *queues.waiting, *queues.swapped]
        assert len(set(ids)) == len(ids)
        assert set(ids) == {g.request_id for g in self.groups if not g.is_finished}
        status = {"running": "RUNNING", "waiting": "WAITING", "swapped": "SWAPPED"}
        on_device, on_host = set[Sequence](), set[Sequence]()
        for name in status:
            for group in getattr(queues, name).values():
                seqs = group.unfinished
                assert {seq.status.name for seq in seqs} == {status[name]}
                on_device |= set(seqs) if name == "running" else set()
                on_host |= set(seqs) if name == "swapped" else set()
                if name == "waiting":
                    assert not any(seq.num_computed_tokens for seq in seqs)
        assert manager.block_tables.keys() <= on_device
        assert manager.swapped_tables.keys() <= on_host

    def check_beams(self, output: SchedulerOutput) -> None:
        """Beams sample together."""
        computing = {found(self.sched, row.seq_id)[0] for row in output.scheduled}
        samples = [found(self.sched, sample.seq_id) for sample in output.samples]
        for group in (group for group in computing if group.beam_params):
            sampling = {seq for g, seq in samples if g is group}
            assert not sampling or sampling == set(group.unfinished), "a beam is left behind"

    def check_walk(self) -> None:
        """The walk along a prefix that is kept finds what a new one does."""
        prefixes = self.manager.prefixes
        walk = prefixes._lookup
        if walk is not None:
            found, prefixes._lookup = prefixes.longest(walk.seq, walk.salt), None
            assert prefixes.longest(walk.seq, walk.salt) == found, "a walk is out of date"
            prefixes._lookup = walk

    def check_first_tokens(self, had: set[SequenceGroup]) -> None:
        """First come, first served: no first token before that of an earlier request of the same class."""
        for group in self.groups if not self.setup.edits else ():
            if group.metrics.first_token_time is not None and group not in had:
                for other in self.groups[: group.arrival]:
                    if other.priority == group.priority and not other.is_finished:
                        assert other.metrics.first_token_time is not None, "overtaken"

    def end_early(self) -> None:
        """Sometimes ends a request or a sample, in whatever state, between schedule() and update()."""
        unfinished = [group for group in self.groups if not group.is_finished]
        if unfinished and self.rng.random() < self.setup.early_ends:
            group = self.rng.choice(unfinished)
            if len(group.sequences) > 1 or group.beam_params or self.rng.random() < 0.5:
                assert self.sched.abort(group.request_id) is group
                assert group.is_finished
            else:
                self.sched.finish(group, group.sequences[0], SequenceStatus.FINISHED_ABORTED, 0.0)
            self.counts["early"] += 1
            self.manager.check_integrity()

    @property
    def is_busy(self) -> bool:
        return self.sched.has_unfinished

    def run(self, arrival: float = 0.4) -> Self:
        num = self.setup.num_requests
        while len(self.groups) < num or self.is_busy:
            while len(self.groups) < num and self.rng.random() < arrival:
                self.add()
            self.step()
            assert self.counts["steps"] < 300 * num, "does not come to an end"
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.swap_pool.num_free == self.manager.swap_pool.num_usable
        for group in self.groups:
            self.check_group(group)
            self.counts["cached"] += group.metrics.num_cached_tokens
        return self

    def check_group(self, group: SequenceGroup) -> None:
        params = group.sampling_params
        assert params.prompt_logprobs is None or group.metrics.num_cached_tokens == 0
        statuses = {seq.status for seq in group.sequences}
        prompt = group.sequences[0].prompt_token_ids
        if SequenceStatus.FINISHED_IGNORED in statuses:
            assert statuses == {SequenceStatus.FINISHED_IGNORED}
            assert not any(seq.output_token_ids for seq in group.sequences)
            assert group.request_id in self.ended
            return
        was_cut = SequenceStatus.FINISHED_ABORTED in statuses or group.request_id in self.ended
        if group.beam_params:
            expected = reference_beams(root_of(group), prompt, group.beam_params, MAX_MODEL_LEN)
            if not was_cut:
                assert [(s.output_token_ids, s.cumulative_logprob) for s in group.sequences] == expected
            return
        if not was_cut:
            assert len(group.sequences) == (params.best_of or params.n)
        assert [seq.index for seq in group.sequences] == list(range(len(group.sequences)))
        for seq in group.sequences:
            expected = reference_sample(
                root_of(group),
                prompt,
                params.seed_of(seq.index),
                params.max_tokens,
                params.min_tokens,
                MAX_MODEL_LEN,
            )
            stops = expected[-1] == EOS and len(expected) >= params.min_tokens
            if was_cut and len(seq.output_token_ids) < len(expected):
                assert seq.output_token_ids == expected[: len(seq.output_token_ids)]
            else:
                assert seq.output_token_ids == expected
                assert was_cut or seq.status.name == (
                    "FINISHED_STOPPED" if stops else "FINISHED_LENGTH_CAPPED"
                )


def root_of(group: SequenceGroup) -> int:
    return root(group.cache_salt, group.request.encoder_token_ids)


def total(runs: list[Simulation], name: str) -> int:
    return sum(run.counts[name] for run in runs)


def test_random_requests_in_a_tiny_pool() -> None:
    runs = [Simulation(seed).run() for seed in range(50)]
    runs += [Simulation(seed, preemption_mode="swap", num_swap_blocks=300).run() for seed in range(20)]
    # All that can happen has happened often.
    least = {
        "preemptions": 100,
        "swaps": 15,
        "chunks": 1000,
        "cached": 500,
        "early": 150,
        "copies": 500,
        "ended": 50,
    }
    assert {name: total(runs, name) for name, n in least.items() if total(runs, name) < n} == {}


@pytest.mark.slow
def test_many_more_random_requests_in_a_tiny_pool() -> None:
    for seed in range(60, 1000):
        Simulation(seed).run()


def test_random_requests_when_every_hash_collides(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix_cache, block_pool):
        monkeypatch.setattr(module, "block_hash", lambda parent, tokens, salt: b"h" * 32)
    for seed in range(20):
        Simulation(seed, caching=True).run()


@pytest.mark.thorough
@pytest.mark.parametrize("scheduling_policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize(
    ("mode", "num_swap_blocks"),
    [("recompute", 400), ("swap", 400), (None, 400), (None, 0), (None, 5), ("swap", 5)],
)
def test_four_times_the_pool(
    scheduling_policy: str, chunked: bool, mode: str | None, num_swap_blocks: int
) -> None:
    """All requests at once; those that may run together need four times the blocks."""
    for groups, scale in (((FULL,), 1), ((FULL, WINDOW), 2)):
        run = Simulation(
            0,
            size=4,
            groups=groups,
            num_blocks=60 * scale,
            num_swap_blocks=num_swap_blocks * scale,
            scheduling_policy=scheduling_policy,
            preemption_mode=mode,
            chunked=chunked,
            scheduler_delay_factor=0.0,
            watermark=0.01,
            max_num_seqs=32,
            budget=64,
            num_requests=80,
            early_ends=0.0,
        ).run(arrival=1.0 - 1e-9)
        assert not run.ended
        worst = max(group.metrics.num_preemptions for group in run.groups)
        assert run.counts["preemptions"] > 0 or not chunked
        assert worst <= 10, f"a request was preempted {worst} times"
        assert run.counts["tokens"] >= run.counts["steps"] / 2, "less than a token in two steps"

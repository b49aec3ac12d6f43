"""Random operations on the block manager, with a toy device: not only counts but contents are checked."""

import dataclasses
from typing import ClassVar, Literal

import pytest
from helpers.toy_device import ToyDevice, chain_of, extend, root
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.features.interactive.request_edits import (
    DropBlocks,
    RequestEditor,
    Rollback,
    max_rollback_tokens,
)
from jax_paged.core.kv_cache.block_pool import NULL_BLOCK
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.request import Request, RequestFeatures, RequestMetrics, Sequence, SequenceGroup
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import ScheduledSequence
from jax_paged.sampling_params import SamplingParams

FULL, CROSS = CacheGroup(), CacheGroup(is_cross=True)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def group_of(seq, encoder=()):
    """Returns a request without an id, with one sequence."""
    features = RequestFeatures(encoder_token_ids=list(encoder)) if encoder else None
    request = Request("", seq.prompt_token_ids, SamplingParams(), features=features)
    return SequenceGroup(request, [seq], RequestMetrics(0.0))


class Recomputing:
    """In place of Preemption: the machine itself lets go of a sequence that has to be computed again."""

    def requeue(self, group: SequenceGroup) -> None:
        assert group.sequences


@dataclasses.dataclass(eq=False)
class Family:
    """Sequences forked from one, as a request has them."""

    salt: str
    encoder: list[int]
    seqs: list[Sequence]
    place: Literal["device", "host", "nowhere"] = "nowhere"


class BlockManagerMachine(RuleBasedStateMachine):
    """Requests that come, grow, fork, move and go; each operation is a step of the toy device."""

    num_operations: ClassVar[int] = 0

    @initialize(
        num_blocks=st.integers(2, 24),
        num_swap_blocks=st.sampled_from([0, 2, 30]),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.sampled_from([True, True, False]),
        groups=st.sampled_from(
            [
                (FULL,),
                (FULL,),
                (FULL, CacheGroup(window=3)),
                (CacheGroup(window=4),),
                (CacheGroup(window=1), CROSS, FULL),
                (CacheGroup(window=6), CacheGroup(window=2)),
            ]
        ),
        num_state_slots=st.sampled_from([0, 0, 2, 3, 5, 12]),
    )
    def start(self, num_blocks, num_swap_blocks, block_size, caching, groups, num_state_slots):
        self.size, self.groups = block_size, groups
        self.manager = BlockManager(
            num_blocks,
            block_size,
            caching,
            groups=groups,
            num_swap_blocks=num_swap_blocks,
            num_state_slots=num_state_slots,
            num_swap_state_slots=num_swap_blocks // 8,
        )
        self.states = self.manager.states
        self.device = ToyDevice(self.manager)
        self.families: list[Family] = []
        self.pins: dict[str, tuple[int, list[int], int]] = {}

    # What is true of the pool, found in another way than the manager does: by looking at the cells.

    def num_cached_tokens(self, family: Family, tokens: list[int]) -> int:
        """The longest prefix that the cache can serve, without the last token."""
        pool, size = self.manager.pool, self.size
        if not self.manager.enable_prefix_caching:
            return 0
        cached = {self.device.cells[b][-1] for b, content in enumerate(pool.contents) if content is not None}
        chains = [root(family.salt, family.encoder)]
        for token_id in tokens:
            chains.append(extend(chains[-1], token_id))
        best = 0
        kept = {self.device.states[s] for s, c in enumerate(self.states.pool.contents) if c is not None}
        for stop in range(size, len(tokens), size):
            first = {
                g: 0 if group.window is None else max(0, stop - group.window + 1) // size
                for g, group in enumerate(self.groups)
                if not group.is_cross
            }
            if all(
                hash((g, chains[end])) in cached
                for g, block in first.items()
                for end in range((block + 1) * size, stop + 1, size)
            ) and (not self.states.has_states or chains[stop] in kept):
                best = stop
        return best

    def held(self, family: Family) -> set[int]:
        return {
            block
            for seq in family.seqs
            for table in self.manager.block_tables.get(seq, [])
            for block in table
            if block != NULL_BLOCK
        }

    def at(self, *places: str) -> list[Family]:
        return [family for family in self.families if family.place in places]

    # Operations

    def allocate(self, family: Family, seq: Sequence, use_cache: bool, num_reserved: int) -> bool:
        manager, pool = self.manager, self.manager.pool
        hit = self.num_cached_tokens(family, seq.tokens(0, len(seq))) if use_cache else 0
        counts, num_free, has_slot = list(pool.ref_counts), pool.num_free, self.states.has_room
        done = manager.allocate(
            seq,
            family.salt,
            use_cache=use_cache,
            num_reserved=num_reserved,
            num_encoder_tokens=len(family.encoder),
        )
        blocks_of = manager.num_blocks_of
        num_needed = 0
        for group in self.groups:
            if group.is_cross:
                num_needed += blocks_of(len(family.encoder))
            elif group.window is None:
                num_needed += blocks_of(len(seq)) - hit // self.size
            else:
                num_needed += 1  # for its next token
        if not done:
            assert seq not in manager.block_tables
            assert pool.ref_counts == counts
            too_many = num_needed + sum(not count for count in counts[1:]) > num_free - num_reserved
            assert too_many or not has_slot
            return False
        tables = manager.block_tables[seq]
        assert seq.num_computed_tokens == hit
        shared = [
            b
            for t, g in zip(tables, self.groups, strict=True)
            if not g.is_cross
            for b in t[: hit // self.size]
        ]
        num_revived = sum(b != NULL_BLOCK and not counts[b] for b in shared)
        assert num_needed + num_revived <= num_free - num_reserved
        if family.encoder:
            group = group_of(seq, family.encoder)
            self.device.encode(group, tables)
        return True

    @rule(
        shared=st.integers(0, 12),
        own=TOKENS,
        salt=st.sampled_from(["", "", "", "s"]),
        use_cache=st.sampled_from([True, True, True, False]),
        num_reserved=st.integers(0, 2),
        encoder=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    )
    def add(self, shared, own, salt, use_cache, num_reserved, encoder):
        encoder = encoder if CROSS in self.groups else []
        seq = Sequence([i % 3 for i in range(shared)] + own)
        family = Family(salt + "".join(map(str, encoder)), encoder, [seq])
        self.families.append(family)
        if self.allocate(family, seq, use_cache, num_reserved):
            family.place = "device"

    @precondition(lambda self: self.at("nowhere"))
    @rule(data=st.data(), use_cache=st.booleans())
    def resume(self, data, use_cache):
        family = data.draw(st.sampled_from(self.at("nowhere")))
        if all(self.allocate(family, seq, use_cache, 0) for seq in family.seqs):
            family.place = "device"
        else:
            self.leave(family)

    @precondition(lambda self: self.at("device"))
    @rule(data=st.data(), token_ids=TOKENS, num_tokens=st.integers(1, 9))
    def compute(self, data, token_ids, num_tokens):
        """Some sequences of a family compute some tokens, in one step."""
        manager, pool = self.manager, self.manager.pool
        family = data.draw(st.sampled_from(self.at("device")))
        chosen = data.draw(st.lists(st.sampled_from(family.seqs), min_size=1, unique=True))
        rows = []
        for i, seq in enumerate(chosen):
            if seq.num_computed_tokens == len(seq):
                seq.output_token_ids += token_ids[i:] or [i % 2]
            rows.append((seq, min(num_tokens, len(seq) - seq.num_computed_tokens)))
        before = {seq: [list(table) for table in manager.block_tables[seq]] for seq, _ in rows}
        num_missing = sum(
            max(0, manager.num_blocks_of(seq.num_computed_tokens + n - seq.num_dropped_tokens) - len(table))
            for seq, n in rows
            for table, group in zip(before[seq], self.groups, strict=True)
            if not group.is_cross
        )
        copies = manager.append_slots(rows)
        if copies is None:
            for seq, _ in rows:
                for old, new, group in zip(before[seq], manager.block_tables[seq], self.groups, strict=True):
                    assert all(
                        b in ((a, NULL_BLOCK) if group.window else (a,))
                        for a, b in zip(old, new, strict=True)
                    )
            lacks_slots = self.states.has_states and self.states.pool.num_free < len(rows)
            assert num_missing + len(rows) * len(self.groups) > pool.num_free or lacks_slots
            return
        self.device.move(copies=tuple(copies))
        self.move_states()
        for source, _ in copies:
            assert pool.ref_counts[source] or pool.contents[source], (
                "the last one that holds a block copied it"
            )
        for seq, n in rows:
            start, tables = seq.num_computed_tokens, manager.block_tables[seq]
            base, stop = root(family.salt, family.encoder), start + n
            tables = [
                t[: manager.num_blocks_of(stop - seq.num_dropped_tokens)] if not g.is_cross else t
                for t, g in zip(tables, self.groups, strict=True)
            ]
            self.device.write(base, seq, tables, start, stop)
            if self.states.has_states:
                at = self.states.begin_checkpoint(seq, start, stop)
                row = ScheduledSequence(1, start, [], [], [], self.states.slot_of(seq), at)
                self.device.advance(base, seq, row, stop)
        for seq, n in rows:
            start, tables = seq.num_computed_tokens, manager.block_tables[seq]
            self.device.check(
                root(family.salt, family.encoder), seq, tables, start, start + n, family.encoder
            )
            manager.cache_full_blocks(seq, family.salt, start, start + n)
            seq.num_computed_tokens = start + n

    @precondition(lambda self: self.at("device"))
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def plan_and_drop(self, data, num_tokens):
        """Some sequences get the blocks of a step, and are dropped from it: copies are made, no token is."""
        family = data.draw(st.sampled_from(self.at("device")))
        chosen = data.draw(st.lists(st.sampled_from(family.seqs), min_size=1, unique=True))
        rows = [(seq, min(num_tokens, len(seq) - seq.num_computed_tokens)) for seq in chosen]
        rows = [row for row in rows if row[1]]
        copies = self.manager.append_slots(rows)
        self.device.move(copies=tuple(copies or ()))
        self.move_states()
        for seq, n in rows if copies is not None else ():
            start = seq.num_computed_tokens
            self.states.begin_checkpoint(seq, start, start + n)
            self.states.revert_prepare(seq, start)

    @precondition(lambda self: self.at("device"))
    @rule(data=st.data())
    def fork(self, data):
        """A beam or a sample goes on from where another is."""
        family = data.draw(st.sampled_from(self.at("device")))
        parent = data.draw(st.sampled_from(family.seqs))
        child = parent.fork(len(family.seqs), 0)
        self.device.inherit(child, parent, parent.num_computed_tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        num_free = self.manager.num_free_blocks
        if self.manager.fork(parent, child, parent.num_computed_tokens):
            family.seqs.append(child)
        else:  # it computed from the cache on, without the blocks of its window being used since
            assert any(group.window for group in self.groups)
        assert self.manager.num_free_blocks == num_free, "a fork shares"

    @precondition(lambda self: self.at("device"))
    @rule(data=st.data(), token_ids=TOKENS)
    def fork_prefix(self, data, token_ids):
        """A sequence begins like another, and goes on in its own way."""
        family = data.draw(st.sampled_from(self.at("device")))
        parent = data.draw(st.sampled_from(family.seqs))
        if parent.num_dropped_tokens:
            return
        num_tokens = data.draw(st.integers(0, parent.num_computed_tokens))
        num_prompt = len(parent.prompt_token_ids)
        child = parent.fork(len(family.seqs), 0)
        child.output_token_ids[max(0, num_tokens - num_prompt) :] = token_ids
        child.num_computed_tokens = num_tokens
        del child.block_hashes[num_tokens // self.size :]
        at = parent.num_computed_tokens
        if self.manager.fork(parent, child, num_tokens):
            assert not self.states.has_states or num_tokens == at, "no state of fewer tokens is there"
            family.seqs.append(child)
            return
        if self.states.has_states and num_tokens != at:
            return
        needed = [
            table[max(0, num_tokens - group.window + 1) // self.size : self.manager.num_blocks_of(num_tokens)]
            for table, group in zip(self.manager.block_tables[parent], self.groups, strict=True)
            if group.window
        ]
        assert any(NULL_BLOCK in blocks for blocks in needed), "all that it needs was there"
        assert child not in self.manager.block_tables

    @precondition(lambda self: self.at("device", "host"))
    @rule(data=st.data())
    def take_back(self, data):
        """A sequence loses its last tokens, wherever its blocks are, and computes others later."""
        family = data.draw(st.sampled_from(self.at("device", "host")))
        seq = data.draw(st.sampled_from(family.seqs))
        most = max_rollback_tokens(seq, self.size)
        if most < 1:
            return
        tables = self.manager.block_tables if family.place == "device" else self.manager.swapped_tables
        before, num_free = [list(table) for table in tables[seq]], self.manager.num_free_blocks
        group = group_of(seq)
        queues = RequestQueues()
        queues.add(group)
        edit = Rollback("", data.draw(st.integers(1, most)))
        # Its family goes on without it if it can't, as a window has passed.
        RequestEditor(self.manager, queues, Recomputing(), 1).apply(edit)
        self.device.forget(seq, len(seq))
        if seq not in tables:
            assert self.states.has_states or any(group.window for group in self.groups)
            family.seqs.remove(seq)
            if not family.seqs:
                self.families.remove(family)
            return
        n = self.manager.num_blocks_of(seq.num_computed_tokens - seq.num_dropped_tokens)
        for old, new, g in zip(before, tables[seq], self.groups, strict=True):
            assert new == (old if g.is_cross else old[:n])
        assert self.manager.num_free_blocks >= num_free

    @precondition(lambda self: self.groups == (FULL,) and not self.states.has_states and self.at("device"))
    @rule(data=st.data())
    def drop_blocks(self, data):
        """A sequence goes on without some of its blocks."""
        family = data.draw(st.sampled_from(self.at("device")))
        seq = data.draw(st.sampled_from(family.seqs))
        n = self.manager.num_blocks_of(seq.num_computed_tokens - seq.num_dropped_tokens)
        (table,) = (list(table) for table in self.manager.block_tables[seq])
        if n < 2 or not seq.num_computed_tokens:
            return
        kept = sorted({*data.draw(st.sets(st.integers(0, n - 1))), n - 1})
        group = group_of(seq)
        queues = RequestQueues()
        queues.add(group)
        positions = [seq.original_block_index(i) for i in kept]
        RequestEditor(self.manager, queues, Recomputing(), 1).apply(DropBlocks("", tuple(kept)))
        assert self.manager.block_tables[seq] == [[table[i] for i in kept]]
        assert [seq.original_block_index(i) for i in range(len(kept))] == positions
        self.device.forget(seq, seq.num_computed_tokens)

    @precondition(lambda self: self.at("device"))
    @rule(data=st.data())
    def swap_out(self, data):
        family = data.draw(st.sampled_from(self.at("device")))
        held, num_free = self.held(family), self.manager.swap_pool.num_free
        slots = {self.states.slot_of(seq) for seq in family.seqs}
        lacks_slots = self.states.has_states and len(slots) > self.states.swap_pool.num_free
        pairs = self.manager.swap_out(family.seqs)
        has_window = any(group.window for group in self.groups)
        if pairs is None:
            assert len(held) > num_free or lacks_slots
        else:
            assert not lacks_slots
            self.move_states()
            sources = [source for source, _ in pairs]
            assert len(set(sources)) == len(sources) <= num_free, "each block moves once"
            assert set(sources) == held or (has_window and set(sources) < held)
            self.device.move(swap_out=tuple(pairs))
            family.place = "host"

    @precondition(lambda self: self.at("host"))
    @rule(data=st.data(), num_reserved=st.integers(0, 3))
    def swap_in(self, data, num_reserved):
        family = data.draw(st.sampled_from(self.at("host")))
        num_free = self.manager.num_free_blocks
        pairs = self.manager.swap_in(family.seqs, num_reserved=num_reserved)
        if pairs is not None:
            assert len(pairs) <= num_free - num_reserved
            self.device.move(swap_in=tuple(pairs))
            self.move_states()
            family.place = "device"
            assert {target for _, target in pairs} == self.held(family)

    @precondition(lambda self: self.at("device"))
    @rule(data=st.data())
    def recompute(self, data):
        """Preemption without swapping; what has dropped blocks can't be computed again, and ends."""
        family = data.draw(st.sampled_from(self.at("device")))
        self.leave(family)
        if any(seq.num_dropped_tokens for seq in family.seqs):
            self.families.remove(family)

    @precondition(lambda self: self.families)
    @rule(data=st.data())
    def end_one(self, data):
        """One sequence ends, wherever it is."""
        family = data.draw(st.sampled_from(self.families))
        seq = family.seqs.pop(data.draw(st.integers(0, len(family.seqs) - 1)))
        if family.place != "nowhere":
            self.manager.free(seq)
        if not family.seqs:
            self.families.remove(family)

    @precondition(lambda self: self.families)
    @rule(data=st.data())
    def abort(self, data):
        """A whole request ends, wherever it is."""
        family = data.draw(st.sampled_from(self.families))
        self.leave(family)
        self.families.remove(family)

    @precondition(lambda self: self.families and self.manager.enable_prefix_caching and len(self.pins) < 2)
    @rule(data=st.data(), name=st.sampled_from(["a", "b"]))
    def pin(self, data, name):
        family = data.draw(st.sampled_from(self.families))
        if family.seqs[0].num_dropped_tokens:
            return
        tokens = family.seqs[0].tokens(0, data.draw(st.integers(0, len(family.seqs[0]))))
        expected = self.num_cached_tokens(family, [*tokens, 0])
        if name in self.pins:
            with pytest.raises(ValueError, match="`name` must be unique among pinned prefixes"):
                self.manager.pin(name, tokens, family.salt)
        else:
            assert self.manager.pin(name, tokens, family.salt) == expected
            self.pins[name] = (root(family.salt, family.encoder), tokens, expected)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        name = data.draw(st.sampled_from(sorted(self.pins)))
        self.manager.unpin(name)
        del self.pins[name]

    def move_states(self) -> None:
        moves = self.states.take_moves()
        self.device.move_states(moves.swap_out, moves.swap_in, moves.copies)

    def leave(self, family: Family) -> None:
        for seq in family.seqs:
            if seq in self.manager.block_tables or seq in self.manager.swapped_tables:
                self.manager.free(seq)
            seq.num_computed_tokens = 0
        family.place = "nowhere"

    # What always holds

    @invariant()
    def all_is_well(self):
        if not hasattr(self, "manager"):
            return
        type(self).num_operations += 1
        manager = self.manager
        manager.check_integrity()
        self.device.wipe()
        everywhere = {"device": manager.block_tables, "host": manager.swapped_tables}
        for place, all_tables in everywhere.items():
            assert set(all_tables) == {seq for family in self.at(place) for seq in family.seqs}
            for family in self.at(place):
                base = root(family.salt, family.encoder)
                for seq in family.seqs:
                    n = seq.num_computed_tokens
                    self.device.check(
                        base, seq, all_tables[seq], n, n, family.encoder, on_host=place == "host"
                    )
                    if self.states.has_states and n:
                        slots, kept = self.states.tables, self.device.states
                        if place == "host":
                            slots, kept = self.states.swapped_tables, self.device.host_states
                        assert kept[slots[seq][0][0]] == self.device.chain(base, seq, n - 1)
        for name, (base, tokens, n) in self.pins.items():
            for g, (group, table) in enumerate(zip(self.groups, manager.pinned[name].tables, strict=True)):
                first = 0 if group.window is None else max(0, n - group.window + 1) // self.size
                for i in range(first, 0 if group.is_cross else n // self.size):
                    value = hash((g, chain_of(base, tokens[: (i + 1) * self.size])))
                    assert self.device.cells[table[i]][-1] == value, "a pinned block was lost"
            if self.states.has_states and n:
                state = self.device.states[manager.pinned[name].slot]
                assert state == chain_of(base, tokens[:n]), "a pinned state was lost"

    def teardown(self):
        if hasattr(self, "manager"):
            for family in self.families:
                self.leave(family)
            for name in self.pins:
                self.manager.unpin(name)
            self.manager.check_integrity()
            assert self.manager.num_free_blocks == self.manager.num_usable_blocks
            for pool in (self.manager.swap_pool, self.states.pool, self.states.swap_pool):
                assert pool.num_free == pool.num_usable


def run_machine(number: int, num_operations: int) -> None:
    """Runs at least so many operations, the same for the same number; what fails is shrunk and printed."""
    machine = type("Machine", (BlockManagerMachine,), {"num_operations": 0})
    seed(number)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=-(-num_operations // 40),
            stateful_step_count=60,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
        ),
    )
    assert machine.num_operations >= num_operations


@pytest.mark.parametrize("number", [0, 1])
def test_random_operations(number):
    run_machine(number, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_ten_thousand_random_operations(number):
    run_machine(number, 10_000)

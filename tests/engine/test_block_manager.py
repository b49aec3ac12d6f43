import hashlib
import struct

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jax_paged import block_manager
from jax_paged.block_manager import NO_PARENT, AllocStatus, BlockManager, block_hash
from jax_paged.sequence import Sequence

OK, LATER, NEVER = AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER


def allocate(manager: BlockManager, seq: Sequence, salt="", use_cache=True, num_reserved=0) -> AllocStatus:
    status = manager.allocate(seq, salt, use_cache=use_cache, num_reserved=num_reserved)
    manager.check_integrity()
    return status


def compute_all(manager: BlockManager, seq: Sequence, salt="") -> None:
    manager.cache_full_blocks(seq, salt, seq.num_computed_tokens, len(seq))
    seq.num_computed_tokens = len(seq)
    manager.check_integrity()


def run_once(manager: BlockManager, seq: Sequence, salt="") -> list[int]:
    """Allocates, computes and frees; returns the blocks, which stay cached."""
    assert allocate(manager, seq, salt) is OK
    table = manager.block_tables[seq.seq_id]
    compute_all(manager, seq, salt)
    manager.free(seq)
    manager.check_integrity()
    return table


def num_hits(manager: BlockManager, seq_id: int, tokens: list[int], salt="", use_cache=True) -> int:
    """Tokens of a prefix hit; leaves the sequence allocated."""
    seq = Sequence(seq_id, tokens)
    assert allocate(manager, seq, salt, use_cache) is OK
    return seq.num_computed_tokens


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (0, 4), (True, 4), (4, 0), (4, 2.0)])
def test_bad_sizes(num_blocks, block_size):
    with pytest.raises(ValueError, match=r"num_blocks|block_size"):
        BlockManager(num_blocks, block_size, True)


def test_hash_is_sha256_of_parent_tokens_salt():
    tokens = [1, 2**40, 0]
    parent = block_hash(NO_PARENT, [5], "x")
    assert (
        block_hash(parent, tokens, "é")
        == hashlib.sha256(parent + struct.pack("=3q", *tokens) + "é".encode()).digest()
    )
    assert len({block_hash(NO_PARENT, [1], s) for s in ("", "1", "\ud800")}) == 3  # no salt is an error


@pytest.mark.parametrize("caching", [False, True])
def test_every_block_but_the_null_block_is_handed_out_and_comes_back(caching):
    manager = BlockManager(5, 2, caching)
    seq = Sequence(0, [1] * 7)
    assert allocate(manager, seq) is OK
    assert sorted(manager.block_tables[0]) == [1, 2, 3, 4]
    assert manager.num_free_blocks == 0
    seq.output_token_ids.append(1)
    assert manager.append_slots(seq)  # the last block has room
    seq.output_token_ids.append(1)
    assert not manager.append_slots(seq)
    assert len(manager.block_tables[0]) == 4
    manager.check_integrity()
    manager.free(seq)
    manager.check_integrity()
    assert manager.num_free_blocks == manager.num_usable_blocks == 4
    assert manager.block_tables == {}


def test_never_later_ok_change_nothing_unless_ok():
    manager = BlockManager(5, 2, True)
    assert allocate(manager, Sequence(0, [1] * 9)) is NEVER
    assert allocate(manager, Sequence(0, [1] * 8), num_reserved=1) is LATER
    assert allocate(manager, Sequence(0, [1] * 6), num_reserved=1) is OK
    before = list(manager._free)
    assert allocate(manager, Sequence(1, [1] * 3)) is LATER
    assert allocate(manager, Sequence(1, [1]), num_reserved=1) is LATER
    assert list(manager._free) == before
    assert list(manager.block_tables) == [0]


def test_hit_takes_full_blocks_and_leaves_a_token():
    manager = BlockManager(32, 4, True)
    tokens = list(range(12))
    table = run_once(manager, Sequence(0, tokens))
    assert num_hits(manager, 1, tokens) == 8  # all 12 are cached, but the last token must be computed
    assert num_hits(manager, 2, [*tokens, 99]) == 12
    assert num_hits(manager, 3, tokens[:7]) == 4
    assert num_hits(manager, 4, tokens[:4]) == 0
    assert num_hits(manager, 5, [*tokens[:4], 99, *tokens[5:]]) == 4
    assert num_hits(manager, 6, [99, *tokens[1:]]) == 0  # equal second block, other parent
    assert manager.block_tables[2][:3] == table
    assert [manager.ref_counts[block] for block in table] == [4, 2, 1]


def test_no_hit_without_permission_or_caching_or_with_another_salt():
    for caching in (True, False):
        manager = BlockManager(32, 4, caching)
        run_once(manager, Sequence(0, [7] * 9), salt="a")
        assert num_hits(manager, 1, [7] * 9, salt="a") == 8 * caching
        assert num_hits(manager, 2, [7] * 9, salt="b") == 0
        assert num_hits(manager, 3, [7] * 9, salt="a", use_cache=False) == 0


def test_blocks_are_hit_only_after_their_tokens_are_computed():
    manager = BlockManager(32, 4, True)
    seq = Sequence(0, [7] * 12)
    allocate(manager, seq)
    assert num_hits(manager, 1, [7] * 12) == 0
    manager.cache_full_blocks(seq, "", 0, 7)
    assert num_hits(manager, 2, [7] * 12) == 4
    manager.cache_full_blocks(seq, "", 7, 8)
    assert num_hits(manager, 3, [7] * 12) == 8


def test_eviction_order():
    manager = BlockManager(7, 1, True)
    old, new = run_once(manager, Sequence(0, [1, 2])), run_once(manager, Sequence(1, [3, 4]))
    scratch = sorted(set(range(1, 7)) - {*old, *new})
    # Without content first; then the least recently freed; of one sequence its tail first.
    assert sorted(list(manager._free)[:2]) == scratch
    assert list(manager._free)[2:] == [old[1], old[0], new[1], new[0]]
    assert num_hits(manager, 2, [1, 9]) == 1  # a hit takes a block out of the middle
    manager.free(Sequence(2, [1, 9]))
    assert list(manager._free)[2:] == [old[1], new[1], new[0], old[0]]
    assert num_hits(manager, 3, [5] * 4) == 0  # evicts old[1] and new[1]
    assert num_hits(manager, 4, [1, 9]) == 1


def test_hits_on_free_blocks_count_as_needed():
    manager = BlockManager(5, 2, True)
    run_once(manager, Sequence(0, [1] * 4))
    assert allocate(manager, Sequence(1, [2] * 4)) is OK  # takes the two other blocks
    assert allocate(manager, Sequence(2, [1] * 5)) is LATER  # two hits and one new block, two are free
    assert allocate(manager, Sequence(2, [1] * 4)) is OK  # one hit, the other free block is new
    assert manager.num_free_blocks == 0


def test_collision_is_not_trusted(monkeypatch):
    monkeypatch.setattr(block_manager, "block_hash", lambda parent, tokens, salt: b"h" * 32)
    manager = BlockManager(32, 2, True)
    assert num_hits(manager, 0, [1, 2, 1, 2, 1]) == 0
    manager.cache_full_blocks(Sequence(0, [1, 2, 1, 2, 1]), "", 0, 5)
    manager.check_integrity()
    assert num_hits(manager, 1, [1, 2, 1, 2, 1]) == 2  # the second block has another parent
    assert num_hits(manager, 2, [3, 4, 1, 2, 1]) == 0
    assert num_hits(manager, 3, [1, 2, 1, 2, 1], salt="a") == 0


def test_integrity_check_sees_damage():
    def damaged(damage) -> BlockManager:
        manager = BlockManager(8, 2, True)
        run_once(manager, Sequence(0, [1] * 4))
        allocate(manager, Sequence(1, [2] * 4))
        damage(manager)
        return manager

    damages = [
        lambda m: m.ref_counts.__setitem__(m.block_tables[1][0], 2),
        lambda m: m.ref_counts.__setitem__(next(iter(m._free)), 1),
        lambda m: m._free.popitem(),
        lambda m: m._free.__setitem__(0, None),
        lambda m: m._free.__setitem__(m.block_tables[1][0], None),
        lambda m: m.block_tables[1].append(m.block_tables[1][0]),
        lambda m: m.block_tables[1].append(0),
        lambda m: m.block_tables.pop(1),
        lambda m: m._cached.popitem(),
        lambda m: m._contents.__setitem__(next(b for b, c in enumerate(m._contents) if c), None),
        lambda m: next(c for c in m._contents if c).tokens.__setitem__(0, 9),
        lambda m: m._free.move_to_end(next(b for b, c in enumerate(m._contents) if c), last=False),
    ]
    for damage in damages:
        with pytest.raises(AssertionError):
            damaged(damage).check_integrity()


class BlockManagerMachine(RuleBasedStateMachine):
    """Random operations against a naive model: caches keyed by whole prefixes, free blocks in a plain list.

    The pool is simulated too: each cell holds the prefix whose last token was written there, which is what
    its keys and values depend on.
    """

    num_operations = 0

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 3, 4]),
        caching=st.sampled_from([1, 1, 0]),
    )
    def start(self, num_blocks, block_size, caching):
        self.manager = BlockManager(num_blocks, block_size, bool(caching))
        self.running: list[tuple[Sequence, str]] = []
        self.waiting: list[tuple[Sequence, str]] = []
        self.free = list(range(1, num_blocks))
        self.cached: dict[tuple, int] = {}
        self.cells: dict[tuple[int, int], tuple] = {}
        self.num_seqs = 0

    def prefix(self, seq: Sequence, salt: str, stop: int) -> tuple:
        return salt, *seq.tokens(0, stop)

    def take(self, num_new: int) -> list[int]:
        taken, self.free = self.free[:num_new], self.free[num_new:]
        self.cached = {key: block for key, block in self.cached.items() if block not in taken}
        return taken

    def allocate(self, seq: Sequence, salt: str, use_cache: bool, num_reserved: int):
        size = self.manager.block_size
        hits = []
        for stop in range(size, len(seq), size) if use_cache and self.manager.enable_prefix_caching else ():
            if self.prefix(seq, salt, stop) not in self.cached:
                break
            hits.append(self.cached[self.prefix(seq, salt, stop)])
        total = -(-len(seq) // size)
        num_free_needed = total - sum(block not in self.free for block in hits)
        expected = NEVER if total >= self.manager.num_blocks else OK
        if expected is OK and num_free_needed > len(self.free) - num_reserved:
            expected = LATER
        status = self.manager.allocate(seq, salt, use_cache=use_cache, num_reserved=num_reserved)
        assert status is expected
        if status is OK:
            self.free = [block for block in self.free if block not in hits]
            assert self.manager.block_tables[seq.seq_id] == hits + self.take(total - len(hits))
            assert seq.num_computed_tokens == len(hits) * size
            self.running.append((seq, salt))
        elif status is LATER:
            self.waiting.append((seq, salt))
        self.check()

    def give_back(self, seq: Sequence):
        table = list(self.manager.block_tables[seq.seq_id])
        self.manager.free(seq)
        for block in reversed(table):
            if not any(block in t for t in self.manager.block_tables.values()):
                self.free.insert(len(self.free) if block in self.cached.values() else 0, block)
        self.check()

    def check(self):
        type(self).num_operations += 1
        self.manager.check_integrity()
        assert list(self.manager._free) == self.free
        assert set(self.manager._cached.values()) == set(self.cached.values())
        size = self.manager.block_size
        for seq, salt in self.running:
            table = self.manager.block_tables[seq.seq_id]
            for position in range(seq.num_computed_tokens):
                cell = self.cells[table[position // size], position % size]
                assert cell == self.prefix(seq, salt, position + 1)

    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from(["", "", "", "s"]),
        use_cache=st.sampled_from([True, True, True, False]),
        num_reserved=st.integers(0, 2),
    )
    def add(self, shared, own, salt, use_cache, num_reserved):
        self.num_seqs += 1
        seq = Sequence(self.num_seqs, [i % 3 for i in range(shared)] + own)
        self.allocate(seq, salt, use_cache, num_reserved)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def resume(self, data):
        seq, salt = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.allocate(seq, salt, True, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute(self, data, num_tokens):
        seq, salt = data.draw(st.sampled_from(self.running))
        table, size = self.manager.block_tables[seq.seq_id], self.manager.block_size
        start = seq.num_computed_tokens
        stop = min(start + num_tokens, len(seq), len(table) * size)
        for position in range(start, stop):
            block = table[position // size]
            assert self.manager.ref_counts[block] == 1
            assert block not in self.cached.values()
            self.cells[block, position % size] = self.prefix(seq, salt, position + 1)
        self.manager.cache_full_blocks(seq, salt, start, stop)
        seq.num_computed_tokens = stop
        for i in range(start // size, stop // size) if self.manager.enable_prefix_caching else ():
            self.cached.setdefault(self.prefix(seq, salt, (i + 1) * size), table[i])
        self.check()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, data, token_ids):
        seq, _ = data.draw(st.sampled_from(self.running))
        seq.output_token_ids.extend(token_ids)
        table = list(self.manager.block_tables[seq.seq_id])
        num_new = max(0, -(-len(seq) // self.manager.block_size) - len(table))
        fits = num_new <= len(self.free)
        assert self.manager.append_slots(seq) == fits
        assert self.manager.block_tables[seq.seq_id] == table + (self.take(num_new) if fits else [])
        self.check()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        seq, salt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.give_back(seq)
        seq.num_computed_tokens = 0
        self.waiting.append((seq, salt))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        seq, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.give_back(seq)

    def teardown(self):
        if hasattr(self, "manager"):
            while self.running:
                self.give_back(self.running.pop()[0])
            assert self.manager.num_free_blocks == self.manager.num_usable_blocks


def test_ten_thousand_random_operations():
    BlockManagerMachine.num_operations = 0
    run_state_machine_as_test(
        BlockManagerMachine,
        settings=settings(
            max_examples=200,
            stateful_step_count=100,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert BlockManagerMachine.num_operations >= 10_000

"""Block pool and block manager: sharing, prefix cache, eviction, windows, swapping, pinning, by example."""

import hashlib
import struct
from collections.abc import Callable

import pytest

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache import block_pool, prefix_cache
from jax_paged.core.kv_cache.block_pool import NO_PARENT, NULL_BLOCK, block_hash
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.kv_cache.prefix_cache import PinnedPrefix
from jax_paged.core.request import Sequence

FULL, CROSS = CacheGroup(), CacheGroup(is_cross=True)


def allocate(
    manager: BlockManager,
    seq: Sequence,
    salt="",
    use_cache=True,
    num_reserved=0,
    num_encoder=0,
) -> bool:
    done = manager.allocate(
        seq,
        salt,
        use_cache=use_cache,
        num_reserved=num_reserved,
        num_encoder_tokens=num_encoder,
    )
    manager.check_integrity()
    return done


def append(manager: BlockManager, *seqs: Sequence) -> list[tuple[int, int]] | None:
    """Makes room for all that the sequences have not computed yet."""
    copies = manager.append_slots([(seq, len(seq) - seq.num_computed_tokens) for seq in seqs])
    manager.check_integrity()
    return copies


def compute_all(manager: BlockManager, seq: Sequence, salt="") -> None:
    manager.cache_full_blocks(seq, salt, seq.num_computed_tokens, len(seq))
    seq.num_computed_tokens = len(seq)
    manager.check_integrity()


def run_once(manager: BlockManager, seq: Sequence, salt="") -> list[int]:
    """Allocates, computes and frees; returns the blocks of the first group, which stay cached."""
    assert allocate(manager, seq, salt)
    assert append(manager, seq) == []
    table = list(manager.block_tables[seq][0])
    compute_all(manager, seq, salt)
    manager.free(seq)
    manager.check_integrity()
    return table


def num_hits(manager: BlockManager, tokens: list[int], salt="", use_cache=True) -> int:
    """Tokens of a prefix hit; leaves the sequence allocated."""
    seq = Sequence(tokens)
    assert allocate(manager, seq, salt, use_cache)
    return seq.num_computed_tokens


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "num_swap_blocks"),
    [(1, 4, 0), (0, 4, 0), (True, 4, 0), (4, 0, 0), (4, 2.0, 0), (4, 2, -1), (4, 2, None)],
)
def test_bad_sizes(num_blocks, block_size, num_swap_blocks):
    with pytest.raises(ValueError, match=r"`(num_blocks|block_size|num_swap_blocks)` must be an integer of"):
        BlockManager(num_blocks, block_size, True, num_swap_blocks=num_swap_blocks)


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
    seq = Sequence([1] * 7)
    assert allocate(manager, seq)
    assert sorted(manager.block_tables[seq][0]) == [1, 2, 3, 4]
    assert manager.num_free_blocks == 0
    seq.output_token_ids.append(1)
    assert append(manager, seq) == []  # the last block has room
    seq.output_token_ids.append(1)
    assert append(manager, seq) is None
    assert len(manager.block_tables[seq][0]) == 4
    manager.free(seq)
    manager.check_integrity()
    assert manager.num_free_blocks == manager.num_usable_blocks == 4
    assert manager.block_tables == {}


def test_allocate_changes_nothing_unless_it_works():
    manager = BlockManager(5, 2, True)
    assert not allocate(manager, Sequence([1] * 9))
    assert not allocate(manager, Sequence([1] * 8), num_reserved=1)
    first = Sequence([1] * 6)
    assert allocate(manager, first, num_reserved=1)
    before = list(manager.pool._free)
    assert not allocate(manager, Sequence([1] * 3))
    assert not allocate(manager, Sequence([1]), num_reserved=1)
    assert list(manager.pool._free) == before
    assert list(manager.block_tables) == [first]


def test_append_slots_serves_all_rows_or_none():
    manager = BlockManager(5, 2, False)
    seqs = [Sequence([i] * 2) for i in range(3)]
    for seq in seqs:
        assert allocate(manager, seq)
        compute_all(manager, seq)
        seq.output_token_ids.append(1)
    before = {seq: list(tables[0]) for seq, tables in manager.block_tables.items()}
    assert append(manager, seqs[0], seqs[1]) is None  # two blocks needed, one free
    assert {seq: tables[0] for seq, tables in manager.block_tables.items()} == before
    assert append(manager, seqs[0]) == []


def test_hit_takes_full_blocks_and_leaves_a_token():
    manager = BlockManager(32, 4, True)
    tokens = list(range(12))
    table = run_once(manager, Sequence(tokens))
    assert num_hits(manager, tokens) == 8  # all 12 are cached, but the last token must be computed
    seq = Sequence([*tokens, 99])
    assert allocate(manager, seq)
    assert seq.num_computed_tokens == 12
    assert num_hits(manager, tokens[:7]) == 4
    assert num_hits(manager, tokens[:4]) == 0
    assert num_hits(manager, [*tokens[:4], 99, *tokens[5:]]) == 4
    assert num_hits(manager, [99, *tokens[1:]]) == 0  # equal second block, other parent
    assert manager.block_tables[seq][0][:3] == table
    assert [manager.pool.ref_counts[block] for block in table] == [4, 2, 1]


def test_no_hit_without_permission_or_caching_or_with_another_salt():
    for caching in (True, False):
        manager = BlockManager(64, 4, caching)
        run_once(manager, Sequence([7] * 9), salt="a")
        assert num_hits(manager, [7] * 9, salt="a") == 8 * caching
        assert num_hits(manager, [7] * 9, salt="b") == 0
        assert num_hits(manager, [7] * 9, salt="a", use_cache=False) == 0


def test_blocks_are_hit_only_after_their_tokens_are_computed():
    manager = BlockManager(32, 4, True)
    seq = Sequence([7] * 12)
    allocate(manager, seq)
    assert num_hits(manager, [7] * 12) == 0
    manager.cache_full_blocks(seq, "", 0, 7)
    assert num_hits(manager, [7] * 12) == 4
    manager.cache_full_blocks(seq, "", 7, 8)
    assert num_hits(manager, [7] * 12) == 8


def test_eviction_order():
    manager = BlockManager(7, 1, True)
    old, new = run_once(manager, Sequence([1, 2])), run_once(manager, Sequence([3, 4]))
    scratch = sorted(set(range(1, 7)) - {*old, *new})
    # Without content first; then the least recently freed; of one sequence its tail first.
    assert sorted(list(manager.pool._free)[:2]) == scratch
    assert list(manager.pool._free)[2:] == [old[1], old[0], new[1], new[0]]
    hit = Sequence([1, 9])
    assert allocate(manager, hit)  # takes a block out of the middle
    assert hit.num_computed_tokens == 1
    manager.free(hit)
    assert list(manager.pool._free)[2:] == [old[1], new[1], new[0], old[0]]
    assert num_hits(manager, [5] * 4) == 0  # evicts old[1] and new[1]
    assert num_hits(manager, [1, 9]) == 1


def test_hits_on_free_blocks_count_as_needed():
    manager = BlockManager(5, 2, True)
    run_once(manager, Sequence([1] * 4))
    assert allocate(manager, Sequence([2] * 4))  # takes the two other blocks
    assert not allocate(manager, Sequence([1] * 5))  # two hits and one new block, two are free
    assert allocate(manager, Sequence([1] * 4))  # one hit, the other free block is new
    assert manager.num_free_blocks == 0


def test_collision_is_not_trusted(monkeypatch):
    for module in (prefix_cache, block_pool):
        monkeypatch.setattr(module, "block_hash", lambda parent, tokens, salt: b"h" * 32)
    manager = BlockManager(32, 2, True)
    tokens = [1, 2, 1, 2, 1]
    first = Sequence(tokens)
    allocate(manager, first)
    manager.cache_full_blocks(first, "", 0, 5)
    manager.check_integrity()
    hits = [
        num_hits(manager, tokens),
        num_hits(manager, [3, 4, 1, 2, 1]),
        num_hits(manager, tokens, salt="a"),
    ]
    assert hits == [2, 0, 0]  # the second block has another parent


def test_integrity_check_sees_damage():
    seq = Sequence([2] * 4)

    def damaged(damage: Callable[[BlockManager], object]) -> BlockManager:
        manager = BlockManager(8, 2, True, num_swap_blocks=4)
        run_once(manager, Sequence([1] * 4))
        other = Sequence([3] * 2)
        allocate(manager, other)
        assert manager.swap_out([other])
        allocate(manager, seq)
        manager.check_integrity()
        damage(manager)
        return manager

    def cached(m: BlockManager) -> int:
        return next(b for b, c in enumerate(m.pool.contents) if c)

    damages: list[Callable[[BlockManager], object]] = [
        lambda m: m.pool.ref_counts.__setitem__(m.block_tables[seq][0][0], 2),
        lambda m: m.pool.ref_counts.__setitem__(next(iter(m.pool._free)), 1),
        lambda m: m.pool._free.popitem(),
        lambda m: m.pool._free.__setitem__(0, None),
        lambda m: m.pool._free.__setitem__(m.block_tables[seq][0][0], None),
        lambda m: m.block_tables[seq][0].append(m.block_tables[seq][0][0]),
        lambda m: m.block_tables[seq][0].append(0),
        lambda m: m.block_tables[seq].append([]),
        lambda m: m.block_tables.pop(seq),
        lambda m: m.swapped_tables.popitem(),
        lambda m: m.swapped_tables.__setitem__(seq, [[]]),
        lambda m: m.swap_pool._free.popitem(),
        lambda m: m.pinned.__setitem__("a", PinnedPrefix([], "", [[cached(m)]])),
        lambda m: m.pool._cached.popitem(),
        lambda m: m.pool.contents.__setitem__(cached(m), None),
        lambda m: m.pool.contents[cached(m)].tokens.__setitem__(0, 9),
        lambda m: m.pool._free.move_to_end(cached(m), last=False),
    ]
    for i, damage in enumerate(damages):
        try:
            damaged(damage).check_integrity()
        except AssertionError:
            continue
        pytest.fail(f"damage {i} was not seen")


def test_what_fell_out_of_the_window_is_given_back_and_not_before():
    manager = BlockManager(20, 2, False, groups=(FULL, CacheGroup(window=4)))
    seq = Sequence([1] * 9)
    assert allocate(manager, seq)
    assert [len(table) for table in manager.block_tables[seq]] == [
        5,
        0,
    ]  # those of the window as they are needed
    assert append(manager, seq) == []
    full, window = (list(table) for table in manager.block_tables[seq])
    assert NULL_BLOCK not in full + window
    freed = []
    for length in range(10, 17):
        seq.num_computed_tokens = length - 1  # a step with one more token: it attends to [length - 4, length)
        seq.output_token_ids.append(1)
        assert append(manager, seq) == []
        freed.append(manager.block_tables[seq][1].count(NULL_BLOCK))
        assert NULL_BLOCK not in manager.block_tables[seq][0]
    assert freed == [3, 3, 4, 4, 5, 5, 6]  # blocks that end before token length - 4
    manager.free(seq)
    assert manager.num_free_blocks == 19


@pytest.mark.parametrize(
    ("window", "num_cached", "expected"), [(3, 4, 8), (3, 1, 8), (4, 2, 8), (5, 1, 0), (5, 2, 8)]
)
def test_a_prefix_hit_needs_only_the_window(window, num_cached, expected):
    """A group of window w needs the w - 1 tokens before the first token that is computed."""
    manager = BlockManager(40, 2, True, groups=(FULL, CacheGroup(window=window)))
    tokens = list(range(9))
    seq = Sequence(tokens)
    allocate(manager, seq)
    append(manager, seq)
    compute_all(manager, seq)
    tables = manager.block_tables[seq]
    for block in tables[1][: 4 - num_cached]:  # as if it had been evicted
        content = manager.pool.contents[block]
        assert content is not None
        del manager.pool._cached[content.hash, content.group]
        manager.pool.contents[block] = None
    hit = Sequence(tokens)
    assert allocate(manager, hit)
    assert hit.num_computed_tokens == expected
    first = max(0, expected - window + 1) // 2
    assert manager.block_tables[hit][0][: expected // 2] == tables[0][: expected // 2]
    assert manager.block_tables[hit][1] == [0] * first + tables[1][first : expected // 2]


def test_cross_attention_holds_a_fixed_number_of_blocks_and_is_not_cached():
    manager = BlockManager(40, 4, True, groups=(CROSS, FULL))
    seq, other = Sequence([1] * 9), Sequence([1] * 9)
    assert allocate(manager, seq, num_encoder=10)
    compute_all(manager, seq)
    assert allocate(manager, other, num_encoder=3)
    assert other.num_computed_tokens == 8
    assert [len(t) for t in manager.block_tables[seq]] == [3, 3]
    assert [len(t) for t in manager.block_tables[other]] == [1, 3]
    assert not set(manager.block_tables[seq][0]) & set(manager.block_tables[other][0])
    seq.output_token_ids += [1] * 7
    assert append(manager, seq) == []
    assert [len(t) for t in manager.block_tables[seq]] == [3, 4]
    child = seq.fork(1, 1)
    assert manager.fork(seq, child, 4)
    assert [len(t) for t in manager.block_tables[child]] == [3, 1]
    assert {manager.pool.contents[b] for b in manager.block_tables[seq][0]} == {None}


def test_a_fork_takes_no_block_beyond_its_tokens():
    manager = BlockManager(20, 4, False)
    seq = Sequence(list(range(14)))
    allocate(manager, seq)
    compute_all(manager, seq)
    for num_tokens, num_blocks in ((0, 0), (1, 1), (4, 1), (5, 2), (14, 4)):
        child = seq.fork(1, 1)
        assert manager.fork(seq, child, num_tokens)
        manager.check_integrity()
        assert manager.block_tables[child][0] == manager.block_tables[seq][0][:num_blocks]
        manager.free(child)
    assert manager.num_free_blocks == 19 - 4


def test_a_fork_needs_the_window_of_its_next_token():
    manager = BlockManager(20, 2, False, groups=(CacheGroup(window=3),))
    seq = Sequence(list(range(10)))
    allocate(manager, seq)
    append(manager, seq)
    compute_all(manager, seq)
    seq.output_token_ids.append(1)
    append(manager, seq)  # token 10 attends to 8 and 9: blocks 0 to 3 are gone
    assert manager.block_tables[seq][0][:4] == [0] * 4
    child = seq.fork(1, 1)
    assert not manager.fork(seq, child, 9)  # token 9 attends to 7
    assert child not in manager.block_tables
    assert manager.fork(seq, child, 10)
    manager.check_integrity()


def test_a_cached_block_is_forgotten_before_its_only_owner_writes_to_it():
    manager = BlockManager(20, 4, True)
    seq = Sequence(list(range(8)))
    allocate(manager, seq)
    compute_all(manager, seq)
    child = Sequence([*range(7), 99])
    assert manager.fork(
        seq, child, 7
    )  # the second block is full and cached, the child shares 3 of its 4 tokens
    child.num_computed_tokens = 7
    block = manager.block_tables[seq][0][1]
    manager.free(seq)
    assert manager.pool.ref_counts[block] == 1
    assert append(manager, child) == []
    assert manager.block_tables[child][0][1] == block
    assert manager.pool.contents[block] is None
    assert num_hits(manager, [*range(8), 5]) == 4
    manager.check_integrity()


def test_swapping_moves_whole_groups_and_keeps_what_they_share():
    manager = BlockManager(10, 2, True, num_swap_blocks=5)
    seq = Sequence([1] * 5)
    allocate(manager, seq)
    compute_all(manager, seq)
    child = seq.fork(1, 1)
    manager.fork(seq, child, 5)
    child.output_token_ids.append(4)
    assert append(manager, child) is not None  # a block of its own: 4 in all
    before = {s: list(manager.block_tables[s][0]) for s in (seq, child)}
    out = manager.swap_out([seq, child])
    manager.check_integrity()
    assert out is not None
    assert {a for a, _ in out} == {*before[seq], *before[child]}
    assert len({b for _, b in out}) == len(out) == 4
    assert manager.num_free_blocks == 9
    assert manager.swap_pool.num_free == 1
    assert manager.block_tables == {}
    moved = dict(out)
    assert {s: t[0] for s, t in manager.swapped_tables.items()} == {
        s: [moved[b] for b in table] for s, table in before.items()
    }
    host = {s: list(manager.swapped_tables[s][0]) for s in (seq, child)}
    assert manager.swap_in([seq, child], num_reserved=6) is None  # 4 of 9 leave 5
    back = manager.swap_in([seq, child], num_reserved=5)
    manager.check_integrity()
    assert back is not None
    assert {s: t[0] for s, t in manager.block_tables.items()} == {
        s: [dict(back)[b] for b in table] for s, table in host.items()
    }
    assert manager.swap_pool.num_free == 5
    manager.free(seq)
    manager.free(child)
    assert manager.num_free_blocks == 9


def test_swap_out_without_room_changes_nothing():
    manager = BlockManager(10, 2, True, num_swap_blocks=2)
    seq = Sequence([1] * 5)
    allocate(manager, seq)
    before = list(manager.block_tables[seq][0])
    assert manager.swap_out([seq]) is None
    manager.check_integrity()
    assert manager.block_tables[seq][0] == before
    assert manager.swap_pool.num_free == 2


def test_pinned_prefixes_stay_until_they_are_let_go():
    manager = BlockManager(8, 2, True)
    run_once(manager, Sequence(list(range(7))), salt="s")
    assert manager.pin("a", [*range(6)], "s") == 6  # no token is left out
    assert manager.pin("b", [0, 1, 9, 9], "s") == 2
    assert manager.pin("c", [0, 1], "other") == 0
    manager.check_integrity()
    assert manager.num_free_blocks == 4
    big = Sequence([7] * 8)
    assert allocate(manager, big)  # takes all the rest
    manager.free(big)
    assert num_hits(manager, [*range(6), 8], salt="s") == 6
    for name in ("a", "b", "c"):
        manager.unpin(name)
        manager.check_integrity()
    with pytest.raises(ValueError, match=r"`name` must be the name of a pinned prefix \(none\), got 'a'"):
        manager.unpin("a")
    manager.pin("a", [], "")
    with pytest.raises(ValueError, match="`name` must be unique among pinned prefixes, got 'a'"):
        manager.pin("a", [], "")
    with pytest.raises(ValueError, match=r"`enable_prefix_caching` must be .*got False"):
        BlockManager(8, 2, False).pin("a", [1, 2], "")


def test_a_copy_needs_a_free_block():
    manager = BlockManager(3, 2, False)
    parent, child = Sequence([1, 2, 3]), Sequence([1, 2, 3, 4])
    allocate(manager, parent)
    compute_all(manager, parent)
    assert manager.fork(parent, child, 3)
    child.num_computed_tokens = 3
    tables = [list(table) for table in manager.block_tables[child]]
    assert manager.append_slots([(child, 1)]) is None  # the parent keeps the block, and there is no other
    assert manager.block_tables[child] == tables
    manager.free(parent)
    assert manager.append_slots([(child, 1)]) == []
    manager.check_integrity()

"""Placeholders are equal tokens: which blocks are shared depends on what they stand for, and where."""

import pytest

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.kv_cache.prefix_cache import PrefixCache
from jax_paged.core.request import PlaceholderData, Sequence

TOKENS = [*range(10), *[99] * 8, *range(20, 30)]  # blocks of 4; the placeholders are at 10 to 17


def computed(manager: BlockManager, seq: Sequence) -> int:
    """Gives a sequence its blocks, computes it, and frees it; returns how many of its tokens were cached."""
    assert manager.allocate(seq, "", use_cache=True, num_reserved=0)
    num_cached = seq.num_computed_tokens
    manager.append_slots([(seq, len(seq) - num_cached)])
    manager.cache_full_blocks(seq, "", num_cached, len(seq))
    seq.num_computed_tokens = len(seq)
    manager.check_integrity()
    manager.free(seq)
    return num_cached


def sequence(*placeholder_data: tuple[int, int, str]) -> Sequence:
    return Sequence(
        list(TOKENS), placeholder_data=tuple(PlaceholderData(*s, data=None) for s in placeholder_data)
    )


@pytest.fixture
def manager() -> BlockManager:
    return BlockManager(60, 4, True)


def test_equal_ones_share_and_others_share_what_is_before(manager: BlockManager) -> None:
    assert computed(manager, sequence((10, 18, "a"))) == 0
    assert computed(manager, sequence((10, 18, "a"))) == 24
    assert computed(manager, sequence((10, 18, "b"))) == 8
    assert computed(manager, sequence((10, 18, "b"))) == 24
    assert computed(manager, sequence()) == 8  # the placeholders themselves
    # The first part is the same: nothing behind it depends on the second.
    assert computed(manager, sequence((10, 14, "x"), (14, 18, "y"))) == 8
    assert computed(manager, sequence((10, 14, "x"), (14, 18, "z"))) == 12
    assert computed(manager, sequence((10, 18, "a"))) == 24


def test_where_it_begins_in_a_block_counts(manager: BlockManager) -> None:
    first = Sequence([99] * 9, placeholder_data=(PlaceholderData(0, 4, "a", None),))
    second = Sequence([99] * 9, placeholder_data=(PlaceholderData(1, 5, "a", None),))
    assert computed(manager, first) == 0
    assert computed(manager, second) == 0


def test_a_fork_has_the_same(manager: BlockManager) -> None:
    seq = sequence((10, 18, "a"))
    assert seq.fork(1, 5).placeholder_data == seq.placeholder_data


def test_a_cache_that_compares_tokens_alone_is_noticed(
    manager: BlockManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "_salt", lambda self, seq, i, salt: salt)
    computed(manager, sequence((10, 18, "a")))
    assert computed(manager, sequence((10, 18, "b"))) == 24  # where test_equal_ones... wants 8

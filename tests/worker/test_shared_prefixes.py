"""The rule for cascade attention: who attends to leading blocks together, and when that pays."""

import itertools

import numpy as np
import pytest

from jax_paged.worker.features import cascade
from jax_paged.worker.features.cascade import num_saved_tokens, shared_blocks

SIZE = 16


def shared(tables: list[list[int]], most: list[int] | None = None, size: int = SIZE) -> list[int]:
    """Returns what each row shares; rows sit in batch slots of another order, among tables of others."""
    batch_slots = np.random.default_rng(0).permutation(len(tables) + 3)[: len(tables)]
    padded = np.full((len(tables) + 3, 64), 5, np.int32)
    for batch_slot, table in zip(batch_slots, tables, strict=True):
        padded[batch_slot, : len(table)] = table
    lens = np.array([len(t) - 1 for t in tables] if most is None else most)
    found = shared_blocks(padded, batch_slots, lens, size)
    saved = sum((len(rows) - 1) * n * size for (n, _), rows in groups_of(tables, found.tolist()).items() if n)
    assert num_saved_tokens(found, padded, batch_slots, size) == saved
    return found.tolist()


def groups_of(tables: list[list[int]], found: list[int]) -> dict[tuple[int, int], list[int]]:
    groups: dict[tuple[int, int], list[int]] = {}
    for i, n in enumerate(found):
        groups.setdefault((n, tables[i][n - 1] if n else 0), []).append(i)
    return groups


def own(row: int) -> list[int]:
    return [1000 + 10 * row + i for i in range(3)]


@pytest.mark.parametrize(
    ("num_rows", "num_blocks", "pays"),
    [
        (64, 32, True),
        (4, 22, True),  # 3 * 22 * 16 tokens less
        (4, 21, False),
        (3, 50, False),  # too few rows
        (64, 3, False),  # too few tokens
        (64, 4, True),
        (18, 4, True),
        (17, 4, True),
        (16, 4, False),
    ],
)
def test_it_pays_from_some_rows_and_tokens_on(num_rows: int, num_blocks: int, pays: bool) -> None:
    prefix = list(range(100, 100 + num_blocks))
    tables = [prefix + own(row) for row in range(num_rows)]
    assert shared(tables) == [num_blocks * pays] * num_rows


def test_others_attend_alone() -> None:
    prefix = list(range(100, 140))
    tables = [prefix + own(row) if row % 3 else own(row) for row in range(12)]
    assert shared(tables) == [40 if row % 3 else 0 for row in range(12)]


def test_a_block_that_is_not_full_in_all_rows_is_not_shared() -> None:
    prefix = list(range(100, 140))
    tables = [prefix + own(row) for row in range(8)]
    assert shared(tables, [40, 41, 42, 43, 38, 40, 0, 40]) == [38] * 6 + [0, 38]
    # The seven others would lose more by a row of few blocks than it gains.
    assert shared(tables, [40] * 7 + [3]) == [40] * 7 + [0]


def test_groups_within_a_group_go_their_own_way() -> None:
    common, deep = list(range(100, 108)), list(range(200, 240))
    tables = [common + deep + own(row) if row < 5 else common + own(row) for row in range(17)]
    # Five rows share 48 blocks, the twelve others 8.
    assert shared(tables) == [48] * 5 + [8] * 12
    # Of several prompts, each with several samples, nothing in common but a few tokens.
    samples = [
        common[:1] + list(range(300 * p, 300 * p + 30)) + own(4 * p + s)
        for p in range(1, 5)
        for s in range(4)
    ]
    assert shared(samples) == [31] * 16


def test_what_follows_a_difference_is_not_shared() -> None:
    tables = [list(range(100, 140)) for _ in range(6)]
    for row, table in enumerate(tables):
        table[20] = 7 + row
    assert shared(tables) == [20] * 6
    tables[0][0] = 3
    assert shared(tables) == [0] + [20] * 5


def test_long_tables_are_compared_to_their_end() -> None:
    tables = [list(range(100, 160)) + own(row) for row in range(4)]
    assert shared(tables) == [60] * 4
    tables[2][59] = 99
    assert shared(tables) == [59] * 4


@pytest.mark.parametrize("seed", range(30))
def test_random_trees(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have in common what they are said to, and save as much as any one group of rows could."""
    for name, value in {"MIN_ROWS": 2, "MIN_TOKENS": 1, "MIN_SAVED_TOKENS": 1}.items():
        monkeypatch.setattr(cascade, name, value)
    rng = np.random.default_rng(seed)
    ids = itertools.count(1)
    tables = [[next(ids) for _ in range(rng.integers(1, 30))]]
    while len(tables) < 12:
        parent = tables[rng.integers(len(tables))]
        tables.append(
            parent[: rng.integers(0, len(parent) + 1)] + [next(ids) for _ in range(rng.integers(1, 20))]
        )
    most = [int(rng.integers(0, len(t))) for t in tables]
    found = shared(tables, most, 4)
    assert all(n <= m for n, m in zip(found, most, strict=True))
    total = 0
    for (n, _), rows in groups_of(tables, found).items():
        if n:
            assert len(rows) > 1
            assert len({tuple(tables[i][:n]) for i in rows}) == 1
            total += (len(rows) - 1) * n * 4
    for i, n in itertools.product(range(12), range(1, 31)):
        rows = [j for j in range(12) if most[j] >= n and tables[j][:n] == tables[i][:n]]
        assert (len(rows) - 1) * n * 4 <= total

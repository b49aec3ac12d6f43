"""What is drafted from a text, how many drafts are worth it, and how long steps are taken to last."""

import itertools
import random

import pytest

from jax_paged.core.features.speculation.ngram_index import NgramIndex
from jax_paged.core.features.speculation.num_drafts import (
    Acceptance,
    choose_drafts,
    choose_length,
)
from jax_paged.core.features.speculation.step_times import StepTimes
from jax_paged.speculation import Speculation, sizes_up_to


def expected_draft(tokens: list[int], least: int, most: int, num_tokens: int) -> list[int]:
    """What followed the latest place with the longest match among the last eight, by brute force."""

    def match(place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(tokens), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], itertools.islice(pairs, most)))

    places = [p for p in range(least, len(tokens)) if tokens[p - least : p] == tokens[len(tokens) - least :]]
    if not places:
        return []
    best = max(places[-8:], key=lambda p: (match(p), p))
    text = list(tokens)
    for i in range(num_tokens):
        text.append(text[best + i])
    return text[len(tokens) :]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_drafts_are_those_of_brute_force(least: int, most: int) -> None:
    rng, found = random.Random(least), 0
    for _ in range(100):
        index, tokens = NgramIndex(least, most), []
        for _ in range(rng.randint(1, 40)):
            more = [rng.randrange(3) for _ in range(rng.choice([0, 1, 1, 1, 2, 5]))]
            tokens += more
            index.extend(more)
            draft = index.propose(7)
            assert draft == expected_draft(tokens, least, most, 7)
            found += bool(draft)
    assert found > 500


def test_the_choice_is_the_best_there_is() -> None:
    rng = random.Random(0)
    num_drafted = 0
    for _ in range(200):
        rates = [rng.choice([0.1, 0.5, 0.8, 0.95]) for _ in range(rng.randint(1, 3))]
        most = [rng.randint(0, 4) for _ in rates]
        free, limit = rng.choice([2, 16, 64]), rng.choice([4, 8, 16])

        def cost(rows: int, _: int, free: int = free) -> float:
            return free + rows

        def gain(counts: tuple[int, ...], rates: list[float] = rates, limit: int = limit) -> float:
            tokens = sum(sum(rate**j for j in range(n + 1)) for rate, n in zip(rates, counts, strict=True))
            size = next(s for s in sizes_up_to(limit) if s >= len(rates) + sum(counts))
            return tokens / cost(size, 0)

        before = free + len(rates)
        every = itertools.product(*(range(n + 1) for n in most))
        best = max((gain(c) for c in every if 0 < sum(c) <= limit - len(rates)), default=0.0)
        chosen = choose_drafts(rates, most, limit, cost, float(before))
        if any(chosen):
            # Drafts below one in twenty are left out.
            assert gain(tuple(chosen)) >= 0.97 * best
            num_drafted += 1
        else:
            assert best <= 1.1 * len(rates) / before * 1.03
    assert num_drafted > 50


def test_a_model_drafts_as_long_as_it_pays() -> None:
    def cost(rows: int, passes: int) -> float:
        return 16 + rows + 2 * passes

    assert choose_length([0.95], [8], 64, cost, 17.0) == 7  # 8 rows with the known token: no padding
    assert choose_length([0.05], [8], 64, cost, 17.0) == 0
    assert choose_length([0.95] * 60, [8] * 60, 64, cost, 76.0) == 0  # no room for a draft each


def test_late_drafts_count_more_and_those_behind_a_wrong_one_not() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == 0.5
    for _ in range(20):
        acceptance.record(3, 3)
    assert acceptance.rate > 0.95
    acceptance.record(0, 15)
    assert acceptance.rate > 0.8
    for _ in range(40):
        acceptance.record(0, 3)
    assert acceptance.rate < 0.05


def test_times_are_means_of_several_and_a_pause_counts_little() -> None:
    times = StepTimes(Speculation("ngram", 3, num_free_rows=16))
    assert times.plain(1) is None
    for _ in range(3):
        times.record_plain(1, 1.0)
    assert times.plain(1) == pytest.approx(1.0)
    assert times.plain(2) is None
    assert times.verifying(8, 0, 1) == pytest.approx(24 / 17)
    for _ in range(3):
        times.record_verifying(8, 0, 5.0)
    assert times.verifying(8, 0, 1) == pytest.approx(5.0)
    assert times.modeled(8, 0, 1) == pytest.approx(24 / 17)
    times.record_plain(1, 1000.0)
    assert times.plain(1) < 1.6

"""The golden corpus: outputs and decisions of requests of every feature are those of the baseline."""

import json

import pytest
from golden.corpus import BASELINE, differences, key, load_scenarios, run_scenario

EXPECTED = json.loads(BASELINE.read_text())


def test_the_baseline_has_every_scenario() -> None:
    assert EXPECTED["scenarios"].keys() == load_scenarios().keys()


LONG = [pytest.param(name, marks=pytest.mark.thorough) for name in EXPECTED["scenarios"] if name != "plain"]


@pytest.mark.parametrize("name", ["plain", *LONG])
def test_results_are_those_of_the_baseline(name: str) -> None:
    """To the bit on the machine of the baseline; elsewhere floats may differ by a relative 1e-3."""
    results = run_scenario(load_scenarios([name])[name])
    found = differences(EXPECTED["scenarios"][name], results, exact=key() == EXPECTED["key"])
    assert not found, "\n".join(found[:20])


def test_differences_are_exact_or_within_the_tolerance() -> None:
    want = {"tokens": [1, 2], "sum": (-1.5).hex(), "array": {"bits": "ab", "numbers": [(0.25).hex()]}}
    close = {"tokens": [1, 2], "sum": (-1.5001).hex(), "array": {"bits": "cd", "numbers": [(0.25).hex()]}}
    assert differences(want, want, exact=True) == []
    assert differences(want, close, exact=False) == []
    assert len(differences(want, close, exact=True)) == 2
    for change in ({"sum": (-1.6).hex()}, {"tokens": [1, 3]}, {"tokens": [1]}, {"more": 1}):
        assert len(differences(want, close | change, exact=False)) == 1

"""No kernel may race: jax 0.12's interpreter raises at a race, 0.11's prints it and goes on."""

import pytest

RACE = "RACE DETECTED"


@pytest.fixture(autouse=True)
def _no_races(request, capsys):
    yield
    out = capsys.readouterr().out
    print(out, end="")
    assert RACE not in out or request.node.originalname == "test_a_missing_wait_is_caught"

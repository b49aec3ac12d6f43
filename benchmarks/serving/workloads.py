"""The scenarios: who asks for what, and when. Every engine's own Python imports this, so it needs nothing."""

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_ID = 260  # below are the special tokens and single bytes of the usual vocabularies


@dataclass(frozen=True)
class Request:
    """One greedy request; end tokens are ignored.

    Args:
        prompt: Token ids.
        max_tokens: Exactly so many tokens are made.
        arrival_s: When it is submitted, in seconds from the start of the scenario.
    """

    prompt: list[int]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One thing that people do with an engine.

    Args:
        name: For the command line.
        title: For tables.
        make: Makes the requests from the size of the vocabulary and the number of the round.
        over_http: Whether the requests go to a server instead of into the engine.
        shares_prefixes: Whether prompts begin alike, so that engines may cache prefixes.
        is_paced: Whether arrivals set the pace: then the time per token says how fast an engine is, and not
            the tokens per second.
    """

    name: str
    title: str
    make: Callable[[int, int], list[Request]]
    over_http: bool = False
    shares_prefixes: bool = False
    is_paced: bool = False


def crowd(vocab_size: int = 8192, round_: int = 0) -> list[Request]:
    """Returns 64 requests, prompts of 16-256 and outputs of 16-128 tokens; the same ones in every round."""
    rng = random.Random(0)
    requests = []
    for _ in range(64):
        prompt_len, max_tokens = rng.randint(16, 256), rng.randint(16, 128)
        requests.append(Request(_tokens(rng, prompt_len, vocab_size), max_tokens))
    return requests


def _at_once(count: int, prompt_len: int, max_tokens: int) -> Callable[[int, int], list[Request]]:
    def make(vocab_size: int, round_: int) -> list[Request]:
        rng = random.Random(count * prompt_len)
        return [Request(_tokens(rng, prompt_len, vocab_size), max_tokens) for _ in range(count)]

    return make


def bursts(vocab_size: int, round_: int) -> list[Request]:
    """Returns 4 bursts of 16 requests, two seconds apart; each starts with one of 4 prefixes of 512 tokens.

    The tokens differ from round to round, so that no round finds prefixes that an earlier one has left.
    """
    rng = random.Random(1000 + round_)
    prefixes = [_tokens(rng, 512, vocab_size) for _ in range(4)]
    return [
        Request([*prefixes[i % 4], *_tokens(rng, rng.randint(16, 64), vocab_size)], 32, 2.0 * burst)
        for burst in range(4)
        for i in range(16)
    ]


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(FIRST_ID, vocab_size) for _ in range(count)]


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("crowd", "64 at once", crowd),
        Scenario("batch-16", "16 at once, 64 in, 64 out", _at_once(16, 64, 64)),
        Scenario("batch-8", "8 at once, 64 in, 64 out", _at_once(8, 64, 64)),
        Scenario("batch-4", "4 at once, 64 in, 64 out", _at_once(4, 64, 64)),
        Scenario("batch-1", "1 alone, 64 in, 128 out", _at_once(1, 64, 128)),
        Scenario("prompts-512", "16 prompts of 512, 16 out", _at_once(16, 512, 16)),
        Scenario("prompts-1984", "16 prompts of 1984, 16 out", _at_once(16, 1984, 16)),
        Scenario("bursts", "bursts, shared prefixes of 512", bursts, shares_prefixes=True, is_paced=True),
        Scenario("http", "64 streams over HTTP", crowd, over_http=True),
    )
}

"""The scenarios: requests and their arrival times.

Every engine imports this module in its own environment, so it uses the standard library only.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

FIRST_ID = 260  # smaller ids are special tokens and single bytes in the usual vocabularies


@dataclass(frozen=True)
class Request:
    """One greedy request, for which end tokens are ignored.

    Args:
        prompt: Token ids.
        max_tokens: Exact number of output tokens.
        arrival_s: Time of submission, counted from the start of the scenario (seconds).
    """

    prompt: list[int]
    max_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """One workload.

    Args:
        name: Name on the command line.
        title: Name in tables.
        make: Returns the requests for a vocabulary size and a round number.
        over_http: Whether the requests are sent to a server instead of directly to the engine.
        shares_prefixes: Whether prompts have common prefixes. Then engines cache prefixes.
        is_paced: Whether the arrival times limit the tokens per second. Then engines are compared by their
            time per token.
    """

    name: str
    title: str
    make: Callable[[int, int], list[Request]]
    over_http: bool = False
    shares_prefixes: bool = False
    is_paced: bool = False


def crowd(vocab_size: int = 8192, round_: int = 0) -> list[Request]:
    """Returns 64 requests with 16-256 prompt tokens and 16-128 output tokens, the same in every round."""
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
    """Returns 4 bursts of 16 requests, two seconds apart. Each prompt has one of 4 prefixes of 512 tokens.

    The tokens differ between rounds, so that no round finds cached prefixes of an earlier round.
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


def _decode(count: int) -> Scenario:
    return Scenario(f"decode-{count}", f"{count} at once, 32 in, 128 out", _at_once(count, 32, 128))


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
        *map(_decode, (1, 8, 32, 64)),
        Scenario("prompts-1500", "8 prompts of 1500, 16 out", _at_once(8, 1500, 16)),
    )
}
REAL_MODEL = ("decode-1", "decode-8", "decode-32", "decode-64", "prompts-512", "prompts-1500")
GROUPS = {
    "server": tuple(name for name in SCENARIOS if name not in REAL_MODEL or name == "prompts-512"),
    "real-model": REAL_MODEL,
}

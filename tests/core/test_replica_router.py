"""Requests go to the replica that has their prefix, unless that would have them wait."""

import collections
import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_paged.core.replicas.conversations import Conversations
from jax_paged.core.replicas.router import ReplicaRouter

KEYS = st.none() | st.integers(0, 20).map(str)
# What to do: choose for a key; or begin, finish or leave, for one of the requests that can.
EVENTS = st.lists(st.tuples(st.sampled_from(["choose"] * 3 + ["begin", "finish", "leave"]), KEYS))


def run(router: ReplicaRouter, events: list[tuple[str, str | None]]) -> list[str]:
    """Returns who was chosen, having compared the loads with those of a plain model."""
    waiting: list[str] = []
    running: list[str] = []
    choices: list[str] = []
    for what, key in events:
        loads = {r: 4 * waiting.count(r) + running.count(r) for r in router.replica_ids}
        assert {r: router.load(r) for r in loads} == loads
        if what == "choose":
            choices.append(router.choose(key))
            waiting.append(choices[-1])
            _check_choice(router, loads, key, choices[-1])
        elif what == "finish" and running:
            router.finish(running.pop(0))
        elif what == "leave" and waiting:
            router.cancel(waiting.pop())
        elif what == "begin" and waiting:
            running.append(waiting.pop(0))
            router.begin(running[-1])
    return choices


def _check_choice(router: ReplicaRouter, loads: dict[str, int], key: str | None, chosen: str) -> None:
    least = min(loads.values())
    assert loads[chosen] - least <= MAX_LAG
    if key is not None and loads[home := router.home(key)] - least <= MAX_LAG:
        assert chosen == home
    else:
        assert loads[chosen] == least


MAX_LAG = 6


@settings(deadline=None)
@given(st.integers(1, 9), EVENTS)
def test_nobody_lags_by_more_than_is_allowed(num_replicas: int, events: list[tuple[str, str | None]]) -> None:
    router = ReplicaRouter(map(str, range(num_replicas)), MAX_LAG)
    again = ReplicaRouter(map(str, range(num_replicas)), MAX_LAG)
    assert run(router, events) == run(again, events)


@settings(deadline=None)
@given(st.sets(st.text(min_size=1), min_size=2, max_size=9), st.data())
def test_who_leaves_moves_only_its_own_prefixes(ids: set[str], data: st.DataObject) -> None:
    router = ReplicaRouter(sorted(ids))
    keys = [f"key {i}" for i in range(50)]
    before = {key: router.home(key) for key in keys}
    gone = data.draw(st.sampled_from(sorted(ids)))
    router.remove_replica(gone)
    assert all(router.home(key) == home for key, home in before.items() if home != gone)
    router.add_replica(gone)
    assert {key: router.home(key) for key in keys} == before


@pytest.mark.parametrize("num_replicas", [2, 3, 8, 50])
def test_homes_are_spread_evenly(num_replicas: int) -> None:
    router = ReplicaRouter(map(str, range(num_replicas)))
    num_keys = 200 * num_replicas
    counts = collections.Counter(router.home(f"key {i}") for i in range(num_keys))
    # A fair choice has a standard deviation of sqrt(200) = 14; five of them are beyond bad luck.
    assert all(abs(counts[r] - 200) < 71 for r in router.replica_ids)


def test_what_replicas_that_have_gone_still_run_counts_no_more() -> None:
    router = ReplicaRouter(["a", "b"])
    chosen = router.choose("key")
    router.remove_replica(chosen)
    for tell in (router.begin, router.finish, router.cancel):
        tell(chosen)
    router.set_load(chosen, 1, 1)
    [left] = router.replica_ids
    assert router.choose("key") == left
    router.remove_replica(left)
    with pytest.raises(ValueError, match="the number of `replicas` must be at least 1, got 0"):
        router.choose("key")
    with pytest.raises(ValueError, match=r"`replica_id` must be one of.*got 'a'"):
        router.remove_replica("a")


def test_replicas_may_say_what_they_have_to_do() -> None:
    router = ReplicaRouter(["a", "b"], max_lag=8)
    router.set_load("a", 2, 3)
    router.set_load("b", 1, 0)
    assert (router.load("a"), router.load("b")) == (11, 4)
    assert [router.choose(), router.choose(), router.choose()] == ["b", "b", "a"]


def test_texts_of_clients_may_hold_anything() -> None:
    assert ReplicaRouter(["a", "b"]).choose("\ud800") in ("a", "b")
    assert Conversations().key_of([1] * 16, salt="\ud800") is not None


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"`max_lag` must be an integer of at least 0.*got -1"):
        ReplicaRouter(["0"], max_lag=-1)
    with pytest.raises(ValueError, match=r"`replica_id` must be unique among replicas.*got '0'"):
        ReplicaRouter(["0", "0"])


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 4, 8]), st.sampled_from([0, 40, 700, 3000]))
def test_conversations_stay_home(seed: int, num_replicas: int, longest_system_prompt: int) -> None:
    """Ten conversations per replica, with one of three system prompts, at a load that fits the seats."""
    draw = random.Random(seed)
    router, conversations = ReplicaRouter(map(str, range(num_replicas))), Conversations()
    systems = [_tokens(draw, longest_system_prompt) for _ in range(3)]
    events: list[tuple[float, int, str, int]] = []  # when, a tie-breaker, what, the conversation
    prompts = [draw.choice(systems) + _tokens(draw, draw.randint(16, 200)) for _ in range(10 * num_replicas)]
    for i in range(len(prompts)):
        heapq.heappush(events, (draw.uniform(0, 30), len(events), "ask", i))
    at: dict[int, str] = {}
    num_turns, num_stayed, num_asked = collections.Counter[int](), 0, 0
    while events:
        now, _, what, i = heapq.heappop(events)
        if what == "ask":
            chosen = router.choose(conversations.key_of(prompts[i]))
            num_asked += i in at
            num_stayed += at.get(i) == chosen
            at[i] = chosen
            router.begin(chosen)
            heapq.heappush(events, (now + draw.uniform(1, 10), num_asked, "end", i))
        else:
            router.finish(at[i])
            num_turns[i] += 1
            if num_turns[i] < 6:
                prompts[i] = prompts[i] + _tokens(draw, draw.randint(5, 300))
                heapq.heappush(events, (now + draw.expovariate(1 / 20), num_asked, "ask", i))
    assert num_stayed >= 0.95 * num_asked
    # Nor did they stay because all were in one place.
    counts = collections.Counter(at.values())
    assert max(counts.values()) <= 10 + 5 * 10**0.5


def _tokens(draw: random.Random, num: int) -> list[int]:
    return [draw.randrange(1000) for _ in range(num)]


def test_a_conversation_has_one_key() -> None:
    conversations = Conversations()
    system, first = list(range(100)), [*range(100), *range(500, 530)]
    key = conversations.key_of(first)
    second, third = [*first, *range(40)], [*first, *range(40), 7]
    assert key == conversations.key_of(second) == conversations.key_of(third) == conversations.key_of(third)
    others = [conversations.key_of([*system, *range(n, n + 30)]) for n in range(600, 700, 10)]
    assert len({key, *others}) == 11
    assert conversations.key_of(second, salt="another") != key
    assert conversations.key_of(list(range(15))) is None


def test_a_system_prompt_that_was_a_prompt_once_is_gone_on_from_once() -> None:
    conversations = Conversations()
    system = list(range(64))
    key = conversations.key_of(system)
    keys = [conversations.key_of([*system, *[n] * 32]) for n in range(5)]
    assert keys[0] == key
    assert len(set(keys)) == 5


def test_conversations_that_rest_longest_are_forgotten() -> None:
    conversations = Conversations(max_num=2)
    prompts = [[n] * 16 for n in range(3)]
    first, second, _ = [conversations.key_of(prompt) for prompt in prompts]
    longer = [[*prompt, *range(16)] for prompt in prompts]
    assert conversations.key_of(longer[1]) == second
    assert conversations.key_of(longer[0]) != first

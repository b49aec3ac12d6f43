"""What Serve's router asks of ReplicaRouter, without a cluster."""

import asyncio
import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from jax_paged.server.ray_serve.continuation import Progress, ReplicaCall

pytest.importorskip("ray", reason="ray is not installed: pip install 'jax-paged[ray]'")


@dataclasses.dataclass(frozen=True)
class Named:
    """The id of a replica, as Serve has it."""

    unique_id: str


@dataclasses.dataclass(frozen=True)
class Running:
    """A replica, as Serve has it."""

    replica_id: Named


REPLICAS = [Running(Named(name)) for name in "abc"]


def request(key: str | None, request_id: str = "1", progress: Progress | None = None) -> Any:
    call = ReplicaCall("POST", "/", b"", (), b"", progress or Progress.begin(), key)
    metadata = SimpleNamespace(internal_request_id=request_id)
    context = SimpleNamespace(should_backoff=False)
    return SimpleNamespace(args=[call], metadata=metadata, future=Future(), routing_context=context)


def router(num_slots: int = 2, max_lag: int = 6) -> Any:
    from jax_paged.server.ray_serve.router import PrefixRouter

    class Alone(PrefixRouter):
        """Knows three replicas, and no Serve."""

        def __init__(self) -> None:
            self.initialize_state(num_slots, max_lag)
            self._replicas = {replica.replica_id: replica for replica in REPLICAS}
            self._sync_replicas()

        @property
        def curr_replicas(self) -> Any:
            return self._replicas

        @property
        def _event_loop(self) -> Any:
            return SimpleNamespace(call_soon_threadsafe=lambda function, *args: function(*args))

    return Alone()


def choose(router: Any, pending: Any) -> str:
    """Returns the replica that comes first; all that are offered follow it."""
    (first,), rest = asyncio.run(router.choose_replicas(list(router._replicas.values()), pending))
    assert first not in rest
    return first.replica_id.unique_id


def loads(router: Any) -> dict[str, int]:
    return {name: router._router.load(name) for name in router._router.replica_ids}


def test_a_prefix_stays_at_home_until_that_has_much_more_to_do() -> None:
    serve = router()
    pending = [request("key", str(i)) for i in range(4)]
    names = [choose(serve, one) for one in pending]
    # Two run at 1 each, the third waits at 4: then home lags by 6, and the fourth goes there still.
    assert len(set(names)) == 1
    assert sorted(loads(serve).values()) == [0, 0, 10]
    away = request("key", "away")
    assert choose(serve, away) not in names
    for one in pending:
        serve.on_request_routed(one, Named(names[0]), None)
        serve.on_request_completed(Named(names[0]), one.metadata.internal_request_id)
        serve.on_request_completed(Named(names[0]), one.metadata.internal_request_id)  # counts once
    assert sorted(loads(serve).values()) == [0, 0, 1]


def test_a_request_that_comes_again_is_not_sent_to_where_it_was() -> None:
    serve, progress = router(), Progress.begin()
    names = []
    for _ in range(3):
        one = request("key", "same", progress)
        names.append(choose(serve, one))
        serve.on_request_routed(one, Named(names[-1]), None)
    assert sorted(names) == ["a", "b", "c"]
    assert progress.tried_replicas == names
    assert asyncio.run(serve.choose_replicas(REPLICAS, request("key", "same", progress))) == []


def test_a_replica_that_does_not_take_a_request_is_offered_it_again() -> None:
    serve, pending = router(), request("key")
    first = choose(serve, pending)
    assert choose(serve, pending) == first
    assert pending.args[0].progress.tried_replicas == [first]
    assert sum(loads(serve).values()) == 1


def test_who_leaves_before_a_replica_has_taken_it_is_not_counted() -> None:
    serve, pending = router(), request("key")
    choose(serve, pending)
    pending.future.cancel()
    choose(serve, request("key", "other"))
    assert sum(loads(serve).values()) == 1


def test_a_replica_that_has_gone_is_forgotten_with_its_requests() -> None:
    serve, pending = router(), request("key")
    home = choose(serve, pending)
    del serve._replicas[Named(home)]
    serve._sync_replicas()
    assert loads(serve).keys() == set("abc") - {home}
    serve.on_request_completed(Named(home), "1")
    assert choose(serve, request("key", "2")) != home
    assert sum(loads(serve).values()) == 1


def test_without_a_call_all_are_candidates() -> None:
    assert asyncio.run(router().choose_replicas(REPLICAS, None)) == [REPLICAS]

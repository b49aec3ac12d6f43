"""Several engines with the same weights: making them, and saying which of them runs a request."""

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from jax_paged.core.replicas.conversations import Conversations
from jax_paged.core.replicas.router import ReplicaRouter
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.new_request import with_seed


class _Closable(Protocol):
    def close(self) -> None: ...


def make_replicas[E: _Closable](num: int, make: Callable[[int], E]) -> tuple[E, ...]:
    """Makes engines one after the other; if one can't be made, closes those before it.

    Args:
        num: How many.
        make: Makes one, of its place among them.
    """
    with contextlib.ExitStack() as stack:
        engines: list[E] = []
        for place in range(num):
            engines.append(make(place))
            stack.callback(engines[-1].close)
        stack.pop_all()
    return tuple(engines)


class Placement:
    """Gives requests to replicas, so that conversations stay in one place, and nobody notices which.

    One thread at a time may use it.

    Args:
        num_replicas: How many there are, which are called 0, 1, ...
        seeds: Of requests that bring none. There is one for all replicas, so that a request gets the seed
            that a single engine would have given it.
        max_lag: As ReplicaRouter takes it.
    """

    def __init__(self, num_replicas: int, seeds: random.Random, max_lag: int) -> None:
        self._router = ReplicaRouter(map(str, range(num_replicas)), max_lag)
        self._conversations = Conversations()
        self._seeds = seeds

    def place(
        self, requests: Sequence[CheckedRequest], loads: Sequence[tuple[int, int]]
    ) -> list[tuple[int, CheckedRequest]]:
        """Returns for each request the replica that runs it, and the request with a seed.

        Args:
            requests: New ones, in their order.
            loads: How many requests wait and run now, per replica.
        """
        for replica, (num_waiting, num_running) in enumerate(loads):
            self._router.count(str(replica), num_waiting, num_running)
        return [(self._replica_of(request), self._with_seed(request)) for request in requests]

    def _replica_of(self, checked: CheckedRequest) -> int:
        request, adapter = checked.request, checked.adapter.key if checked.adapter else ""
        tokens = request.encoder_token_ids or request.prompt_token_ids
        if request.prompt_embeds or request.stand_ins:  # the same placeholders stand for all of them
            tokens = []
        return int(
            self._router.choose(self._conversations.key_of(tokens, f"{request.cache_salt}\0{adapter}"))
        )

    def _with_seed(self, request: CheckedRequest) -> CheckedRequest:
        return with_seed(request, lambda: self._seeds.getrandbits(63))

"""Creation of several engines with the same weights, and the choice of the engine that runs a request."""

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
    """Makes engines one after the other. If one of them can't be made, closes the others.

    Args:
        num: Number of engines.
        make: Makes the engine with a given index.
    """
    with contextlib.ExitStack() as stack:
        engines: list[E] = []
        for index in range(num):
            engines.append(make(index))
            stack.callback(engines[-1].close)
        stack.pop_all()
    return tuple(engines)


class Placement:
    """Choice of the replica that runs each request.

    Requests of the same conversation run on the same replica, so that they find their prefix in its cache,
    unless this replica has too much to do. Requests without a seed get one here, from one generator for all
    replicas. So a request gets the same seed as on a single engine, and its output does not depend on the
    replica. Only one thread at a time may use this object.

    Args:
        num_replicas: Number of replicas. Their indices are 0, 1, ...
        seeds: Generator of seeds for requests without a seed.
        max_lag: Maximum difference between the load of a conversation's replica and the lowest load of all
            replicas; see ReplicaRouter. If it is larger, the replica with the lowest load runs the request.
    """

    def __init__(self, num_replicas: int, seeds: random.Random, max_lag: int) -> None:
        self._router = ReplicaRouter(map(str, range(num_replicas)), max_lag)
        self._conversations = Conversations()
        self._seeds = seeds

    def place(
        self, requests: Sequence[CheckedRequest], loads: Sequence[tuple[int, int]]
    ) -> list[tuple[int, CheckedRequest]]:
        """Returns the replica of each request, and the request with a seed.

        Each placed request counts as waiting when the next one is placed.

        Args:
            requests: The new requests, in order.
            loads: The numbers of waiting and running requests, per replica.
        """
        for replica, (num_waiting, num_running) in enumerate(loads):
            self._router.set_load(str(replica), num_waiting, num_running)
        return [(self._replica_of(request), self._with_seed(request)) for request in requests]

    def _replica_of(self, checked: CheckedRequest) -> int:
        request, adapter = checked.request, checked.adapter.key if checked.adapter else ""
        tokens = request.encoder_token_ids or request.prompt_token_ids
        # Placeholders are equal in all prompts, so they do not identify a conversation.
        if request.prompt_embeds or request.placeholder_data:
            tokens = []
        return int(
            self._router.choose(self._conversations.key_of(tokens, f"{request.cache_salt}\0{adapter}"))
        )

    def _with_seed(self, request: CheckedRequest) -> CheckedRequest:
        return with_seed(request, lambda: self._seeds.getrandbits(63))

"""Serve's router of requests to replicas, which ReplicaRouter decides for."""

import asyncio
from collections import Counter
from typing import Any

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from jax_paged.core.replica_router import MAX_LAG, ReplicaRouter


class PrefixRouter(RequestRouter):
    """Sends a request to the home of its prefix, unless that has much more to do than others.

    It lives in one event loop, of the process that sends the requests, and counts what it has sent itself.
    """

    def initialize_state(self, num_seats: int, max_lag: int = MAX_LAG) -> None:  # pyright: ignore
        """Takes its settings.

        Args:
            num_seats: Requests that a replica runs at a time; others wait there.
            max_lag: As ReplicaRouter takes it.
        """
        self._num_seats = num_seats
        self._router = ReplicaRouter((), max_lag)
        self._num_sent: Counter[str] = Counter()  # to each replica, and not completed
        self._chosen: dict[str, tuple[str, asyncio.Future[Any]]] = {}  # by the id of the request

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that run now."""
        super().update_replicas(replicas)
        self._follow()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets a replica as soon as a request has found it dead."""
        super().on_replica_actor_died(replica_id)
        self._follow()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the replica for a request, and behind it the others, in case that one does not take it.

        A request that comes again is not sent to where it was before.
        """
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        call = pending_request.args[0]
        request_id, asked = pending_request.metadata.internal_request_id, call.progress.asked
        if (before := self._forget(request_id)) is not None and before in asked:
            asked.remove(before)  # it has not taken the request
        for other, (_, future) in list(self._chosen.items()):
            if future.cancelled():  # who sent it has left before it was taken
                self._forget(other)
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        free = [replica for name, replica in names.items() if name not in asked]
        name = self._router.choose(call.prefix_key)
        self._num_sent[name] += 1
        if self._num_sent[name] <= self._num_seats:
            self._router.begin(name)
        self._chosen[request_id] = name, pending_request.future
        if name in asked or name not in names:
            self._forget(request_id)
            if not free:
                return []  # until there is another
            name = min((replica.replica_id.unique_id for replica in free), key=self._router.load)
        asked.append(name)
        return [[names[name]], [replica for replica in free if replica is not names[name]]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forgets a request; called by any thread."""
        self._event_loop.call_soon_threadsafe(self._forget, internal_request_id)

    def _forget(self, request_id: str) -> str | None:
        """Takes back the count of a request; returns where it was sent, None if it is not counted."""
        name, _ = self._chosen.pop(request_id, (None, None))
        if name is None:
            return None
        self._num_sent[name] -= 1
        if self._num_sent[name] >= self._num_seats:  # one that waited runs now
            self._router.leave(name)
        else:
            self._router.finish(name)
        return name

    def _follow(self) -> None:
        """Lets the router know the replicas that there are."""
        names = {replica_id.unique_id for replica_id in self.curr_replicas}
        for name in set(self._router.replica_ids) - names:
            self._router.remove_replica(name)
            del self._num_sent[name]
        for name in sorted(names.difference(self._router.replica_ids)):
            self._router.add_replica(name)

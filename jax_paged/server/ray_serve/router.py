"""Serve's router of requests to replicas, which ReplicaRouter decides for."""

from collections import Counter

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from jax_paged.core.replicas.router import MAX_LAG, ReplicaRouter


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
        # Of requests that are counted: their id, which those that come again share, and the replica.
        self._counted: set[tuple[str, str]] = set()
        self._offered: list[tuple[PendingRequest, str]] = []  # not taken yet by the replica

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Takes the replicas that run now."""
        super().update_replicas(replicas)
        self._follow()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forgets a replica as soon as a request has found it dead; called by any thread."""
        super().on_replica_actor_died(replica_id)
        self._event_loop.call_soon_threadsafe(self._follow)

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
        for other, name in list(self._offered):
            if other is pending_request:  # the replica has not taken it
                asked.remove(name)
            if other is pending_request or other.future.cancelled():
                self._forget(other.metadata.internal_request_id, name)
        pending_request.routing_context.should_backoff = True  # all that may take it are offered at once
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        free = [name for name in names if name not in asked]
        if not free:
            return []  # until there is another
        name = self._router.choose(call.prefix_key)
        if name in free:
            self._num_sent[name] += 1
            if self._num_sent[name] <= self._num_seats:
                self._router.begin(name)
            self._counted.add((request_id, name))
        else:
            self._router.leave(name)
            name = min(free, key=self._router.load)
        self._offered.append((pending_request, name))
        asked.append(name)
        return [[names[name]], [names[other] for other in free if other != name]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Notes that a replica has taken a request."""
        self._offered = [pair for pair in self._offered if pair[0] is not pending_request]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forgets a request; called by any thread."""
        self._event_loop.call_soon_threadsafe(self._forget, internal_request_id, replica_id.unique_id)

    def _forget(self, request_id: str, name: str) -> None:
        """Takes back the count of a request at a replica, if it is counted."""
        self._offered = [
            (other, where)
            for other, where in self._offered
            if (other.metadata.internal_request_id, where) != (request_id, name)
        ]
        if (request_id, name) not in self._counted:
            return
        self._counted.remove((request_id, name))
        self._num_sent[name] -= 1
        if self._num_sent[name] >= self._num_seats:  # one that waited runs now
            self._router.leave(name)
        else:
            self._router.finish(name)

    def _follow(self) -> None:
        """Lets the router know the replicas that there are."""
        names = {replica_id.unique_id for replica_id in self.curr_replicas}
        for name in set(self._router.replica_ids) - names:
            self._router.remove_replica(name)
            self._counted = {pair for pair in self._counted if pair[1] != name}
            del self._num_sent[name]
        for name in sorted(names.difference(self._router.replica_ids)):
            self._router.add_replica(name)

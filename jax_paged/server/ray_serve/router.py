"""Request router for Ray Serve that applies the policy of ReplicaRouter."""

from collections import Counter

from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from jax_paged.core.replicas.router import MAX_LAG, ReplicaRouter


class PrefixRouter(RequestRouter):
    """Request router that prefers the replica for a request's prefix, unless its load is much higher.

    It runs in the event loop of the process that sends the requests, and counts only the load from there.
    """

    def initialize_state(self, num_slots: int, max_lag: int = MAX_LAG) -> None:  # pyright: ignore
        """Initializes the router with the arguments from the deployment.

        Args:
            num_slots: Number of requests that a replica runs at once. Further requests wait there.
            max_lag: Maximum difference between the load of a prefix's replica and the least load, as in
                ReplicaRouter.
        """
        self._num_slots = num_slots
        self._router = ReplicaRouter((), max_lag)
        self._num_sent: Counter[str] = Counter()  # number of requests at each replica that are not completed
        # Request id and replica of each counted request. A request that is sent again keeps its id.
        self._counted: set[tuple[str, str]] = set()
        # requests that their replica has not accepted yet
        self._unaccepted: list[tuple[PendingRequest, str]] = []

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Updates the set of running replicas."""
        super().update_replicas(replicas)
        self._sync_replicas()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Removes a replica as soon as a request finds that it has died; may be called from any thread."""
        super().on_replica_actor_died(replica_id)
        self._event_loop.call_soon_threadsafe(self._sync_replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the selected replica for a request, followed by the others in case it does not accept it.

        A request that is sent again does not go to a replica that has been tried for it.
        """
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        call = pending_request.args[0]
        request_id, tried = pending_request.metadata.internal_request_id, call.progress.tried_replicas
        for other, name in list(self._unaccepted):
            if other is pending_request:  # The replica has not accepted it.
                tried.remove(name)
            if other is pending_request or other.future.cancelled():
                self._forget(other.metadata.internal_request_id, name)
        # All suitable replicas are offered at once, so Ray Serve should wait before it asks again.
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        free = [name for name in replicas if name not in tried]
        if not free:
            return []  # Ray Serve asks again later.
        name = self._router.choose(call.prefix_key)
        if name in free:
            self._num_sent[name] += 1
            if self._num_sent[name] <= self._num_slots:
                self._router.begin(name)
            self._counted.add((request_id, name))
        else:
            # The replica has been tried. The request goes to another one and is not counted there, because
            # ReplicaRouter counts a request only at the replica that it chooses.
            self._router.cancel(name)
            name = min(free, key=self._router.load)
        self._unaccepted.append((pending_request, name))
        tried.append(name)
        return [[replicas[name]], [replicas[other] for other in free if other != name]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Records that a replica has accepted a request."""
        self._unaccepted = [pair for pair in self._unaccepted if pair[0] is not pending_request]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Removes a completed request from the counts; may be called from any thread."""
        self._event_loop.call_soon_threadsafe(self._forget, internal_request_id, replica_id.unique_id)

    def _forget(self, request_id: str, name: str) -> None:
        """Removes a request at a replica from the counts, if it is counted."""
        self._unaccepted = [
            (other, where)
            for other, where in self._unaccepted
            if (other.metadata.internal_request_id, where) != (request_id, name)
        ]
        if (request_id, name) not in self._counted:
            return
        self._counted.remove((request_id, name))
        self._num_sent[name] -= 1
        if self._num_sent[name] >= self._num_slots:  # A request that waited at the replica is running now.
            self._router.cancel(name)
        else:
            self._router.finish(name)

    def _sync_replicas(self) -> None:
        """Updates the replicas of the ReplicaRouter to the current ones."""
        names = {replica_id.unique_id for replica_id in self.curr_replicas}
        for name in set(self._router.replica_ids) - names:
            self._router.remove_replica(name)
            self._counted = {pair for pair in self._counted if pair[1] != name}
            del self._num_sent[name]
        for name in sorted(names.difference(self._router.replica_ids)):
            self._router.add_replica(name)

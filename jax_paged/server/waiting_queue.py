"""Queue of the requests that wait in the server: which one the engine gets next, and which are refused."""

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import AsyncIterator

from jax_paged.server.protocol.responses import ApiError

_MAX_RETRY_AFTER_S = 60


@dataclasses.dataclass
class _WaitingRequest:
    """A request in the queue.

    Args:
        num_seqs: Sequences that it brings.
        admitted: Done once it may run, or once its client has left.
        is_inside: Whether it holds its place.
    """

    num_seqs: int
    admitted: asyncio.Future[None]
    is_inside: bool = False


class WaitingQueue:
    """Admits requests to the engine: by priority, then client after client, then first come, first served.

    The queue of the engine is kept short, because those in it are served as they came: a client that sends
    a thousand requests would be served before all others. So the thousand wait here:

        priority 0    key a: 7 8 9 ...    key b: 4        runs next: 7, 4, 8, 9, ...
        priority 5    key c: 1 2                          then: 1, 2

    Lives in one event loop.

    Args:
        capacity: Sequences that may be in the engine at once, at least 1; a request of more counts as these.
        max_waiting: Requests that may wait at once.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.num_waiting = 0
        self._capacity = capacity
        self._free = capacity
        self._max_waiting = max_waiting
        # By priority; the clients of a priority stand in the order of their turns.
        self._queues: dict[int, dict[str, deque[_WaitingRequest]]] = {}
        self._seconds_per_request = 1.0
        self._last_admission: float | None = None  # while requests wait

    def refusal(self) -> ApiError | None:
        """Returns the error for a new request if the queue is full; None if it may wait."""
        has_room = self._free > 0 and not self._queues
        if has_room or self.num_waiting < self._max_waiting:
            return None
        return self._too_many()

    def _too_many(self) -> ApiError:
        seconds = math.ceil(self.num_waiting * self._seconds_per_request)
        seconds = max(1, min(seconds, _MAX_RETRY_AFTER_S))
        return ApiError(
            f"{self.num_waiting} requests wait already, as many as may (--max-num-waiting); "
            f"try again in about {seconds} s",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )

    @contextlib.asynccontextmanager
    async def admission(
        self, num_seqs: int, client: str, priority: int, *, has_begun: bool = False
    ) -> AsyncIterator[None]:
        """Waits until a request may run, and holds its capacity while it runs.

        Args:
            num_seqs: Sequences that it brings, at least 1.
            client: Who sent it; all clients take turns.
            priority: Lower goes first.
            has_begun: Whether it ran elsewhere before, and must not be refused any more.

        Raises:
            ApiError: If too many wait already.
        """
        num_seqs = min(num_seqs, self._capacity)
        is_first = not self._queues and num_seqs <= self._free
        if not (is_first or has_begun) and self.num_waiting >= self._max_waiting:
            raise self._too_many()
        request = _WaitingRequest(num_seqs, asyncio.get_running_loop().create_future())
        queue = self._queues.setdefault(priority, {}).setdefault(client, deque())
        queue.append(request)
        self.num_waiting += 1
        self._admit()
        try:
            await request.admitted
            yield
        finally:
            if request.is_inside:
                self._free += num_seqs
            else:  # its client has left
                self._remove(request, priority, client)
            self._admit()

    def _admit(self) -> None:
        while self._queues:
            priority = min(self._queues)
            client = next(iter(self._queues[priority]))
            request = self._queues[priority][client][0]
            if request.num_seqs > self._free:
                return
            self._remove(request, priority, client)
            self._free -= request.num_seqs
            request.is_inside = True
            if not request.admitted.done():  # a client that leaves in this moment gives its place back
                request.admitted.set_result(None)
            now = time.monotonic()
            if self._last_admission is not None:
                self._seconds_per_request += 0.1 * (now - self._last_admission - self._seconds_per_request)
            self._last_admission = now if self._queues else None

    def _remove(self, request: _WaitingRequest, priority: int, client: str) -> None:
        """Takes a request from its queue; the other clients of its priority have their turns first."""
        clients = self._queues[priority]
        queue = clients.pop(client)
        queue.remove(request)
        self.num_waiting -= 1
        if queue:
            clients[client] = queue
        elif not clients:
            del self._queues[priority]

"""Queue of requests that wait in the server until the engine has room for them."""

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
        num_seqs: Number of sequences of the request.
        admitted: Done when the request has been admitted; cancelled when its client has disconnected.
        is_admitted: Whether the request has been admitted and counts towards the capacity.
    """

    num_seqs: int
    admitted: asyncio.Future[None]
    is_admitted: bool = False


class WaitingQueue:
    """Queue that admits requests to the engine by priority, then by client in turn, then by order of arrival.

    The engine serves requests of equal priority in order of arrival, so a client that sends a thousand
    requests would be served before all others. Therefore the engine's queue is kept short, and the requests
    wait here:

        priority 0    client a: 7 8 9 ...    client b: 4        admitted next: 7, 4, 8, 9, ...
        priority 5    client c: 1 2                             then: 1, 2

    All methods must be called in the same event loop.

    Args:
        capacity: Maximum number of sequences in the engine, at least 1. A request with more sequences counts
            as this number.
        max_waiting: Maximum number of waiting requests.

    Attributes:
        num_waiting: Number of waiting requests.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.num_waiting = 0
        self._capacity = capacity
        self._free = capacity
        self._max_waiting = max_waiting
        # Waiting requests by priority and client. The clients of a priority are in the order of their turns.
        self._queues: dict[int, dict[str, deque[_WaitingRequest]]] = {}
        self._seconds_per_request = 1.0
        # time of the last admission; None if no request was waiting afterwards
        self._last_admission: float | None = None

    def rejection(self) -> ApiError | None:
        """Returns the error for a new request if the queue is full; None if the request may wait."""
        has_room = self._free > 0 and not self._queues
        if has_room or self.num_waiting < self._max_waiting:
            return None
        return self._too_many()

    def _too_many(self) -> ApiError:
        seconds = math.ceil(self.num_waiting * self._seconds_per_request)
        seconds = max(1, min(seconds, _MAX_RETRY_AFTER_S))
        return ApiError(
            f"the server is busy: {self.num_waiting} requests are already waiting (--max-num-waiting); "
            f"try again in about {seconds} s",
            status=429,
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )

    @contextlib.asynccontextmanager
    async def admission(
        self, num_seqs: int, client: str, priority: int, *, has_begun: bool = False
    ) -> AsyncIterator[None]:
        """Waits until a request is admitted, and holds its share of the capacity within the context.

        Args:
            num_seqs: Number of sequences of the request, at least 1.
            client: Name of the client. Clients take turns.
            priority: Priority of the request. Lower values are admitted first.
            has_begun: Whether another replica has begun the response, so that the request must not be
                rejected.

        Raises:
            ApiError: If too many requests are waiting.
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
            if request.is_admitted:
                self._free += num_seqs
            else:  # The client has disconnected while the request was waiting.
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
            request.is_admitted = True
            # If the client has just disconnected, `admission` releases the capacity.
            if not request.admitted.done():
                request.admitted.set_result(None)
            now = time.monotonic()
            if self._last_admission is not None:
                self._seconds_per_request += 0.1 * (now - self._last_admission - self._seconds_per_request)
            self._last_admission = now if self._queues else None

    def _remove(self, request: _WaitingRequest, priority: int, client: str) -> None:
        """Removes a request from the queue, and moves its client to the end of the turns of its priority."""
        clients = self._queues[priority]
        queue = clients.pop(client)
        queue.remove(request)
        self.num_waiting -= 1
        if queue:
            clients[client] = queue
        elif not clients:
            del self._queues[priority]

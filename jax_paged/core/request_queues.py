"""Queues of the requests that wait, run or are swapped out."""

import heapq
from collections.abc import Iterable
from typing import Any

from jax_paged.core.request import SequenceGroup


class RequestQueues:
    """Owner of all unfinished requests. Each request is in one of three queues.

    The queues are dictionaries keyed by request id. `running` and `swapped` are sorted in scheduling order.
    `waiting` is not sorted: a heap finds its first request, so that the cost of a step does not grow with the
    number of waiting requests. The first waiting request can be set aside, so that the request after it
    becomes the first.

    Attributes:
        waiting: Requests that have no blocks, including those that are set aside.
        running: Requests with blocks on the device.
        swapped: Requests whose blocks are in host memory.
        num_reserved_slots: Sum of the batch slots that running requests reserve.
        running_adapters: Number of running requests per LoRA adapter. Read-only for others.
        set_aside_version: Number that changes whenever the requests that are set aside change.
        num_arrivals: Number of requests added so far.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, SequenceGroup] = {}
        self.running: dict[str, SequenceGroup] = {}
        self.swapped: dict[str, SequenceGroup] = {}
        self.num_reserved_slots = 0
        self.running_adapters: dict[str, int] = {}
        self._reserved_slots: dict[str, int] = {}
        self._heap: list[tuple[tuple[Any, int], SequenceGroup]] = []
        self._in_heap: set[SequenceGroup] = set()
        self._aside: dict[SequenceGroup, None] = {}
        self.set_aside_version = 0
        self.num_arrivals = 0

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.swapped)

    def find(self, request_id: str) -> SequenceGroup | None:
        """Returns the unfinished request with this id, or None."""
        queues = (self.running, self.waiting, self.swapped)
        return next((q[request_id] for q in queues if request_id in q), None)

    def add(self, group: SequenceGroup) -> None:
        """Adds a new request to the waiting requests."""
        assert self.find(group.request_id) is None, f"request id {group.request_id} is in use"
        group.arrival, self.num_arrivals = self.num_arrivals, self.num_arrivals + 1
        self.move_to_waiting(group)

    def move_to_waiting(self, group: SequenceGroup) -> None:
        """Moves a request to the waiting requests."""
        self.remove(group)
        if group not in self._in_heap:
            self._push(group)
        self.waiting[group.request_id] = group

    def move_to_running(self, group: SequenceGroup) -> None:
        """Moves a request to the running requests."""
        self.remove(group)
        last = self.last_running()
        self.running[group.request_id] = group
        self._reserved_slots[group.request_id] = group.num_reserved_slots
        self.num_reserved_slots += group.num_reserved_slots
        if group.request.features is not None:
            self._count_adapter(group, 1)
        if last is not None and group.order < last.order:
            self.running = _in_order(self.running)

    def move_to_swapped(self, group: SequenceGroup) -> None:
        """Moves a request to the swapped requests."""
        self.remove(group)
        self.swapped[group.request_id] = group
        self.swapped = _in_order(self.swapped)

    def remove(self, group: SequenceGroup) -> None:
        """Removes a request from the queue that it is in, if any."""
        if self.running.pop(group.request_id, None) is not None:
            self.num_reserved_slots -= self._reserved_slots.pop(group.request_id)
            if group.request.features is not None:
                self._count_adapter(group, -1)
        elif self.waiting.pop(group.request_id, None) is not None:
            if group in self._aside:
                del self._aside[group]
                self.set_aside_version += 1
            self._forget_stale_entries()
        else:
            self.swapped.pop(group.request_id, None)

    def release_reserved_slots(self, group: SequenceGroup) -> None:
        """Releases the reserved batch slots of sequences that have ended, if their request still runs."""
        if group.request_id in self.running:
            self.num_reserved_slots += group.num_reserved_slots - self._reserved_slots[group.request_id]
            self._reserved_slots[group.request_id] = group.num_reserved_slots

    def last_running(self) -> SequenceGroup | None:
        """Returns the last running request in scheduling order, which is preempted first."""
        return next(reversed(self.running.values()), None)

    def first_swapped(self) -> SequenceGroup | None:
        """Returns the first swapped request in scheduling order, which is swapped in first."""
        return next(iter(self.swapped.values()), None)

    def first_waiting(self) -> SequenceGroup | None:
        """Returns the first waiting request in scheduling order, without requests that are set aside."""
        heap = self._heap
        while heap and self.waiting.get(heap[0][1].request_id) is not heap[0][1]:
            self._in_heap.remove(heapq.heappop(heap)[1])
        return heap[0][1] if heap else None

    @property
    def requests_set_aside(self) -> Iterable[SequenceGroup]:
        """The waiting requests that are set aside."""
        return self._aside.keys()

    def set_aside(self, group: SequenceGroup) -> None:
        """Sets the first waiting request aside until `restore_set_aside` is called."""
        assert self.first_waiting() is group, "only the first waiting request can be set aside"
        self._in_heap.remove(heapq.heappop(self._heap)[1])
        self._aside[group] = None
        self.set_aside_version += 1

    def restore_set_aside(self) -> None:
        """Makes the requests that were set aside available again, in their order."""
        for group in self._aside:
            self._push(group)
        self.set_aside_version += len(self._aside)
        self._aside.clear()

    def _count_adapter(self, group: SequenceGroup, change: int) -> None:
        if adapter := group.adapter:
            self.running_adapters[adapter] = self.running_adapters.get(adapter, 0) + change
            if not self.running_adapters[adapter]:
                del self.running_adapters[adapter]

    def _push(self, group: SequenceGroup) -> None:
        """Adds a request to the heap.

        If its key cannot be compared with the other keys, raises the error and leaves the heap unchanged.
        Keys may come from a user's function.
        """
        try:
            heapq.heappush(self._heap, (group.order, group))
        except BaseException:
            self._heap = [entry for entry in self._heap if entry[1] is not group]
            heapq.heapify(self._heap)
            raise
        self._in_heap.add(group)

    def _forget_stale_entries(self) -> None:
        """Rebuilds the heap when most of its entries belong to requests that no longer wait."""
        if len(self._heap) > 2 * len(self.waiting) + 16:
            self._in_heap = set(self.waiting.values()) - self._aside.keys()
            self._heap = [(group.order, group) for group in self._in_heap]
            heapq.heapify(self._heap)


def _in_order(groups: dict[str, SequenceGroup]) -> dict[str, SequenceGroup]:
    return dict(sorted(groups.items(), key=lambda item: item[1].order))

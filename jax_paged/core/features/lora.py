"""Device slots of LoRA adapters."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax_paged.core.request import Request, SequenceGroup
from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import AdapterLoad


class AdapterSlots:
    """Owner of the device slots of LoRA adapters.

    It decides which requests can run with the available slots.

    An adapter that no running request uses keeps its slot until another adapter needs it. The least recently
    used adapter is replaced first. The slot of an adapter is never taken while a running request uses the
    adapter.

    A request whose adapter cannot get a slot is set aside. Requests after it may overtake it if they do not
    need a free slot: requests without an adapter, and requests whose adapter is already running. To prevent
    starvation, one of the running adapters is closed: requests with this adapter wait if they come after the
    first request that waits for a slot. The closed adapter is the one with the fewest running requests,
    because its slot becomes free soonest. If a slot becomes free while a step is being scheduled, only the
    first request that was set aside may take it.

    Requests that were set aside are tried again when the conditions under which they were refused have
    changed.

    Args:
        num_slots: Maximum number of adapters on the device.
        queues: Owner of the requests.
    """

    def __init__(self, num_slots: int, queues: RequestQueues) -> None:
        self.num_slots = num_slots
        self._queues = queues
        self._slots: dict[str, int] = {}  # least recently used first
        self._loads: list[AdapterLoad] = []
        self._closed: str | None = None  # the running adapter that is closed to later requests
        self._closed_after: tuple[Any, int] | None = None  # order of the request after which it is closed
        self._first_aside: SequenceGroup | None = None
        self._state: Any = None  # state of the queues for which _closed_after and _first_aside were computed
        # Conditions (see _conditions) under which requests that are set aside were refused.
        self._refused_under: set[tuple[Any, ...]] = set()

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each adapter on the device, least recently used first."""
        return self._slots

    def begin_step(self) -> None:
        """Makes requests that were set aside available again if they may find a slot now."""
        queues = self._queues
        if not queues.requests_set_aside:
            self._closed = self._closed_after = self._first_aside = None
            self._refused_under.clear()
            return
        running = queues.running_adapters
        state = queues.set_aside_version, set(running)
        if state != self._state:  # only then, because many requests may be set aside
            self._state = state
            missing = [group.order for group in queues.requests_set_aside if group.adapter not in running]
            self._closed_after = min(missing) if missing and running else None
            self._first_aside = min(queues.requests_set_aside, key=lambda group: group.order)
        is_closed = self._closed_after is not None
        self._closed = min(running, key=lambda adapter: running[adapter]) if is_closed else None
        if self._refused_under != {self._conditions()} or self._may_preempt():
            queues.restore_set_aside()
            self._refused_under.clear()
            self._first_aside = None

    def set_aside(self, group: SequenceGroup) -> None:
        """Sets the first waiting request aside because no slot is available for it."""
        self._queues.set_aside(group)
        if self._first_aside is None or group.order < self._first_aside.order:
            self._first_aside = group
        self._refused_under.add(self._conditions())

    def _conditions(self) -> tuple[Any, ...]:
        """Returns everything that `has_room` depends on, except the request."""
        return frozenset(self._queues.running_adapters), self._closed, self._closed_after

    def _may_preempt(self) -> bool:
        """Returns whether preempting others would free an adapter slot for the first request set aside.

        Only running requests with higher keys count as others. If it would, the request is tried again in
        every step, because the number of free blocks changes with every step.
        """
        first = self._first_aside
        assert first is not None, "no request is set aside"
        last = self._queues.last_running()
        if last is None or last.key <= first.key:
            return False
        victims = (group for group in self._queues.running.values() if group.key > first.key)
        return self.has_room(first, without=victims)

    def has_room(self, group: SequenceGroup, without: Iterable[SequenceGroup] = ()) -> bool:
        """Returns whether there is a slot for the adapter of a request.

        Args:
            group: The request.
            without: Running requests to treat as preempted.
        """
        adapter = group.adapter
        if not adapter:
            return True
        running = dict(self._queues.running_adapters)
        for other in without:
            if other.adapter:
                running[other.adapter] -= 1
        if running.get(adapter, 0) > 0:
            last = self._closed_after if adapter == self._closed else None
            return last is None or group.order < last
        first = self._first_aside
        is_after_first = first is not None and first.order < group.order
        return not is_after_first and sum(count > 0 for count in running.values()) < self.num_slots

    def assign_slot(self, adapter: str) -> int:
        """Returns the slot of an adapter that a running request uses. Assigns one if it has none."""
        slot = self._slots.pop(adapter, None)
        if slot is None:
            if len(self._slots) < self.num_slots:
                slot = len(self._slots) + 1
            else:
                running = self._queues.running_adapters
                unused = next((other for other in self._slots if other not in running), None)
                assert unused is not None, "running requests use more adapters than there are slots"
                slot = self._slots.pop(unused)
            self._loads.append(AdapterLoad(slot, adapter))
        self._slots[adapter] = slot
        return slot

    def slot_of(self, request: Request) -> int:
        """Returns the slot of the adapter of a request, and assigns one if needed; 0 without an adapter."""
        return self.assign_slot(request.adapter) if request.adapter else 0

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Returns the adapters that received a slot since the last call, to be loaded in this step."""
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

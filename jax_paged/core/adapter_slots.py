"""Which adapters lie on the device: a slot for each that a running request uses, as long as slots last."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax_paged.core.request_queues import RequestQueues
from jax_paged.core.scheduler_output import AdapterLoad
from jax_paged.core.sequence import SequenceGroup


class AdapterSlots:
    """Gives adapters their slots, and says which requests there are slots for.

    An adapter that no running request uses keeps its slot until another needs it; the one that was used
    least recently goes first. So a slot in use is never taken away.

    A request whose adapter finds no slot waits, and those behind it may overtake it if they need no slot
    that it could get: without an adapter, or with one that runs. So that it does not wait for ever, one of
    these is closed to them: the adapter that the fewest running requests use, whose slot is the next to be
    free.

    Args:
        num_slots: Adapters on the device at a time.
        queues: Know which adapters run, and which requests were set aside.
    """

    def __init__(self, num_slots: int, queues: RequestQueues) -> None:
        self.num_slots = num_slots
        self._queues = queues
        self._slots: dict[str, int] = {}  # least recently used first
        self._loads: list[AdapterLoad] = []
        self._closed: str | None = None
        self._closed_behind: tuple[Any, int] | None = None
        self._lowest_key: Any = None
        self._state: Any = None  # what these two were looked up for
        self._seen: Any = None  # what the requests that were set aside have been refused for

    @property
    def slots(self) -> Mapping[str, int]:
        """The slot of each adapter on the device, least recently used first."""
        return self._slots

    def begin_step(self) -> None:
        """Lets requests that were set aside stand in line again, if they may find a slot now."""
        queues = self._queues
        if not queues.set_aside:
            self._closed = None
            return
        running, last = queues.running_adapters, queues.last_running()
        state = queues.num_changes_aside, set(running)
        if state != self._state:  # they may be many
            self._state = state
            missing = [group.order for group in queues.set_aside if group.adapter not in running]
            self._closed_behind = min(missing) if missing and running else None
            self._lowest_key = min(group.key for group in queues.set_aside)
        is_closed = self._closed_behind is not None
        self._closed = min(running, key=lambda adapter: running[adapter]) if is_closed else None
        may_preempt = last is not None and self._lowest_key < last.key
        seen = set(running), self._closed, self._closed_behind, may_preempt and (last, dict(running))
        if seen != self._seen:
            self._seen = seen
            queues.bring_back()

    def has_room(self, group: SequenceGroup, without: Iterable[SequenceGroup] = ()) -> bool:
        """Returns whether a request can run.

        Args:
            group: The request.
            without: Running requests that would not run any more.
        """
        adapter = group.adapter
        if not adapter:
            return True
        running = dict(self._queues.running_adapters)
        for other in without:
            if other.adapter:
                running[other.adapter] -= 1
        if running.get(adapter, 0) > 0:
            behind = self._closed_behind if adapter == self._closed else None
            return behind is None or group.order < behind
        return sum(count > 0 for count in running.values()) < self.num_slots

    def place(self, adapter: str) -> int:
        """Returns the slot of an adapter that runs; it takes one with this step if it has none."""
        slot = self._slots.pop(adapter, None)
        if slot is None:
            if len(self._slots) < self.num_slots:
                slot = len(self._slots) + 1
            else:
                running = self._queues.running_adapters
                unused = next((other for other in self._slots if other not in running), None)
                assert unused is not None, "more adapters run than there are slots"
                slot = self._slots.pop(unused)
            self._loads.append(AdapterLoad(slot, adapter))
        self._slots[adapter] = slot
        return slot

    def take_loads(self) -> tuple[AdapterLoad, ...]:
        """Returns the adapters that take a slot with this step."""
        loads = tuple(self._loads)
        self._loads.clear()
        return loads

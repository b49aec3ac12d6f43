"""Who waits, who is next, and who is sent away."""

import asyncio
import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_paged.server.protocol.responses import ApiError
from jax_paged.server.waiting_queue import WaitingQueue


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


class Visitors:
    """Requests in a queue of which each holds its place until it is let go."""

    def __init__(self, queue: WaitingQueue):
        self.queue = queue
        self.entered: list[str] = []
        self.tasks: dict[str, asyncio.Task] = {}
        self.leaves: dict[str, asyncio.Event] = {}

    async def come(self, name: str, client: str = "", priority: int = 0, num_seqs: int = 1) -> None:
        self.leaves[name] = asyncio.Event()

        async def visit():
            async with self.queue.admission(num_seqs, client, priority):
                self.entered.append(name)
                await self.leaves[name].wait()

        self.tasks[name] = asyncio.create_task(visit())
        await settle()

    async def leave(self, name: str) -> None:
        self.leaves[name].set()
        await settle()


def run(coroutine):
    return asyncio.run(coroutine)


def test_requests_go_by_priority_then_client_by_client():
    async def check():
        visitors = Visitors(WaitingQueue(1, 10))
        await visitors.come("running")
        for name, client, priority in [
            ("a1", "a", 0),
            ("a2", "a", 0),
            ("a3", "a", 0),
            ("b1", "b", 0),
            ("c1", "c", 5),
            ("b2", "b", 0),
            ("d1", "d", -1),
        ]:
            await visitors.come(name, client, priority)
        assert visitors.entered == ["running"]
        for i in range(7):
            await visitors.leave(visitors.entered[i])
        assert visitors.entered == ["running", "d1", "a1", "b1", "a2", "b2", "a3", "c1"]
        await visitors.leave("c1")
        assert visitors.queue.num_waiting == 0

    run(check())


def test_a_full_room_says_when_to_come_back():
    async def check():
        visitors = Visitors(WaitingQueue(2, 1))
        await visitors.come("a", num_seqs=2)
        assert visitors.queue.rejection() is None
        await visitors.come("b")
        await visitors.come("c")
        with pytest.raises(ApiError) as refused:
            await visitors.tasks["c"]
        error = refused.value
        assert error.status == 429
        assert error.headers is not None
        assert 1 <= int(error.headers["Retry-After"]) <= 60
        assert visitors.queue.rejection() is not None
        await visitors.leave("a")
        assert visitors.entered == ["a", "b"]
        assert visitors.queue.rejection() is None
        await visitors.leave("b")

    run(check())


def test_a_room_without_seats_to_wait_takes_who_can_run_at_once():
    async def check():
        visitors = Visitors(WaitingQueue(2, 0))
        assert visitors.queue.rejection() is None
        await visitors.come("a")
        await visitors.come("b", num_seqs=2)
        with pytest.raises(ApiError):
            await visitors.tasks["b"]
        await visitors.come("c")
        assert visitors.entered == ["a", "c"]
        assert visitors.queue.rejection() is not None

    run(check())


def test_a_request_larger_than_the_engine_runs_alone():
    async def check():
        visitors = Visitors(WaitingQueue(4, 10))
        await visitors.come("large", num_seqs=9)
        await visitors.come("small")
        assert visitors.entered == ["large"]
        await visitors.leave("large")
        assert visitors.entered == ["large", "small"]

    run(check())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 10**6)), max_size=60))
def test_no_place_is_lost_whoever_leaves_and_when(events):
    async def check():
        queue = WaitingQueue(3, 8)
        visitors = Visitors(queue)
        for i, (event, number) in enumerate(events):
            alive = [name for name, task in visitors.tasks.items() if not task.done()]
            if event == "come":
                await visitors.come(f"{i}", str(number % 3), number % 2, 1 + number % 4)
            elif alive and event == "leave":
                await visitors.leave(alive[number % len(alive)])
            elif alive:
                visitors.tasks[alive[number % len(alive)]].cancel()
                if number % 2:  # else somebody leaves in the same turn of the loop
                    await settle()
        for name in visitors.leaves:
            await visitors.leave(name)
        for task in visitors.tasks.values():
            with contextlib.suppress(ApiError, asyncio.CancelledError):
                await task
        assert queue.num_waiting == 0
        await visitors.come("all", num_seqs=3)
        assert visitors.entered[-1] == "all"
        await visitors.leave("all")

    run(check())


def test_the_time_to_come_back_is_measured_while_somebody_waits(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    async def check():
        visitors = Visitors(WaitingQueue(1, 4))
        for hour in range(30):
            clock[0] = 3600.0 * hour
            await visitors.come(f"{hour}")
            await visitors.leave(f"{hour}")
        for i in range(5):
            await visitors.come(f"waits {i}")
        error = visitors.queue.rejection()
        assert error is not None
        assert error.headers == {"Retry-After": "4"}
        for i in range(5):
            clock[0] += 0.01
            await visitors.leave(f"waits {i}")

    run(check())

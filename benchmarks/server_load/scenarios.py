"""Load tests of the server. Each scenario starts its own server and returns measured values.

Some values have an upper bound.
"""

import asyncio
import dataclasses
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable

from server_load.client import Answer, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
QUESTION = {
    "messages": [{"role": "user", "content": "What is a block table?"}],
    "temperature": 0,
    "max_tokens": 64,
}


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One measured value.

    Args:
        name: Description for the table.
        value: The value.
        unit: Unit of the value.
        bound: Maximum of the value; None if there is no bound.
    """

    name: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the value is within its bound."""
        return self.bound is None or self.value <= self.bound


def _p99(seconds: list[float]) -> float:
    """Returns the 99th percentile in milliseconds."""
    return 1e3 * sorted(seconds)[max(0, -(-99 * len(seconds) // 100) - 1)]


async def _repeat(until: float, call: Callable[[], Awaitable[Answer]], pause_s: float = 0.0) -> list[Answer]:
    answers = []
    while time.perf_counter() < until:
        answers.append(await call())
        await asyncio.sleep(pause_s)
    return answers


def _stream(num_tokens: int, **more) -> dict:
    return {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, **more}


async def storm(seconds: float = 15) -> list[Measurement]:
    """Sends /health and chat requests while 8 clients send prompts that are too long.

    First, the prompts have 2 MB. The server rejects them without tokenizing them. Later, they have 51,000
    characters, about the longest text that the server tokenizes before it rejects the request.
    """
    with serving() as server:
        await server.wait_until_compiled()
        await server.ask(CHAT, QUESTION)
        refused = b'{"prompt": "' + b"block table " * 170_000 + b'"}'
        longest = b'{"prompt": "' + b"x9 " * 17_000 + b'", "max_tokens": 1}'

        async def probe(length_s: float) -> tuple[float, float]:
            """Returns the p99 of /health (ms) and the median time of a chat request (seconds)."""
            until = time.perf_counter() + length_s
            health, answers = await asyncio.gather(
                _repeat(until, lambda: server.ask("/health"), 0.02),
                _repeat(until, lambda: server.ask(CHAT, QUESTION)),
            )
            assert {answer.status for answer in health + answers} == {200}
            return _p99([a.total_s for a in health]), statistics.median(a.total_s for a in answers)

        quiet_health, quiet_chat = await probe(seconds / 3)
        measurements = [Measurement("health p99 without other clients", quiet_health, "ms")]
        for name, prompt in (("2 MB prompts", refused), ("prompts of 51,000 characters", longest)):
            storming = asyncio.create_task(server.storm(COMPLETIONS, prompt, 8, seconds + 2))
            await asyncio.sleep(1)
            health, chat = await probe(seconds)
            statuses, elapsed_s = await storming
            # 0: the connection ended before the response arrived.
            assert statuses.keys() <= {0, 400, 413, 429}, statuses
            num_unanswered = statuses.pop(0, 0)
            measurements += [
                Measurement(f"{name}: answered", sum(statuses.values()) / elapsed_s, "per second"),
                Measurement(f"{name}: without an answer", num_unanswered / elapsed_s, "per second"),
                Measurement(f"{name}: health p99", health, "ms", 100),
                Measurement(
                    f"{name}: time of a chat request, relative to no load", chat / quiet_chat, "times", 2
                ),
            ]
        await server.wait_until_idle()
        return [*measurements, Measurement("memory", server.memory_mib(), "MiB")]


async def overload(seconds: float = 10) -> list[Measurement]:
    """Sends ten times as many requests per second as the server can handle, evenly spread."""
    with serving("--max-num-waiting", "64") as server:
        await server.wait_until_compiled()
        body = {"prompt": "a", "max_tokens": 512, "ignore_eos": True}
        await asyncio.gather(*(server.ask(COMPLETIONS, body) for _ in range(64)))  # warm-up
        start = time.perf_counter()
        await asyncio.gather(*(server.ask(COMPLETIONS, body) for _ in range(128)))
        rate = 128 / (time.perf_counter() - start)
        asked = []
        start = time.perf_counter()
        for i in range(int(10 * rate * seconds)):
            await asyncio.sleep(max(0.0, start + i / (10 * rate) - time.perf_counter()))
            asked.append(asyncio.create_task(server.ask(COMPLETIONS, body)))
        elapsed = time.perf_counter() - start
        answers = await asyncio.gather(*asked)
        refused = [a for a in answers if a.status == 429]
        served = [a for a in answers if a.status == 200]
        assert len(refused) + len(served) == len(answers), {a.status for a in answers}
        await server.wait_until_idle()
        return [
            Measurement("served without overload", rate, "requests per second"),
            Measurement("sent", len(answers) / elapsed, "requests per second"),
            Measurement("served in overload", len(served) / elapsed, "requests per second"),
            Measurement("429: p50", 1e3 * statistics.median(a.total_s for a in refused), "ms"),
            Measurement("429: p99", _p99([a.total_s for a in refused]), "ms", 50),
        ]


async def drain() -> list[Measurement]:
    """Sends SIGTERM while 20 short and 20 long streams run."""
    timeout = 3.0
    with serving("--shutdown-timeout", str(timeout)) as server:
        await server.wait_until_compiled()
        await server.ask(CHAT, QUESTION)
        streams = [asyncio.create_task(server.ask(COMPLETIONS, _stream(n))) for n in 20 * [20] + 20 * [1900]]
        await asyncio.sleep(0.3)
        start = time.perf_counter()
        server.process.send_signal(signal.SIGTERM)
        ready, answers = await server.ask("/ready"), await asyncio.gather(*streams)
        streams_end_s = time.perf_counter() - start
        code = await asyncio.to_thread(server.process.wait, 30)
        elapsed = time.perf_counter() - start
        num_complete = sum(a.events[-1] == "[DONE]" for a in answers[:20])
        num_notified = sum("shutting down" in a.events[-1] for a in answers[20:])
        assert ready.status == 503, ready
        errors = server.log.read_text()
        assert "Traceback" not in errors, errors
        return [
            Measurement("short streams that are incomplete", 20 - num_complete, "of 20", 0),
            Measurement("long streams that end without an error event", 20 - num_notified, "of 20", 0),
            Measurement("until the last stream ends", streams_end_s, "s", timeout + 2),
            Measurement("until the process ends", elapsed, "s"),
            # The server ends with status 3 if it aborted requests at the end of the timeout.
            Measurement("exit status other than 3 (0: no, 1: yes)", float(code != 3), "", 0),
        ]


async def disconnects() -> list[Measurement]:
    """Closes 200 streams after their first token."""
    with serving() as server:
        await server.wait_until_compiled()
        body = _stream(1900)
        await asyncio.gather(
            *(server.ask(COMPLETIONS, body, until=lambda data: b"data:" in data) for _ in range(200))
        )
        seconds = await server.wait_until_idle()
        return [Measurement("until all blocks are free", seconds, "s", 2)]


async def silent() -> list[Measurement]:
    """Requests 50 long streams and never reads them; measures how much memory the server needs for them."""
    with serving("--kv-cache-memory-bytes", str(2**30)) as server:
        await server.wait_until_compiled()
        body = _stream(1900, n=4, logprobs=5)
        # The memory that the server needs for the same streams with clients that read them is not counted.
        await asyncio.gather(*(server.ask(COMPLETIONS, body) for _ in range(50)))
        before = server.memory_mib()
        most = before
        async with asyncio.TaskGroup() as group:
            stop = asyncio.Event()
            for _ in range(50):
                group.create_task(server.never_read(COMPLETIONS, body, stop))
            for _ in range(40):
                await asyncio.sleep(1)
                most = max(most, server.memory_mib())
            answer = await server.ask("/health")
            assert answer.status == 200
            stop.set()
        seconds = await server.wait_until_idle()
        return [
            Measurement("growth of memory", most - before, "MiB", 50),
            Measurement("until all blocks are free after they disconnect", seconds, "s", 2),
        ]


async def soak(num_requests: int = 10_000) -> list[Measurement]:
    """Sends mixed requests: streams, chats, several outputs, invalid requests, early disconnects."""
    rng = random.Random(1)
    with serving() as server:
        await server.wait_until_compiled()
        points: list[tuple[int, float]] = []  # number of finished requests, memory (MiB)
        limit = asyncio.Semaphore(32)
        done = 0

        async def one() -> None:
            nonlocal done
            kind, salt = rng.randrange(10), f"{rng.random()}"
            body = {"prompt": f"{salt} a block", "max_tokens": rng.randrange(1, 16), "ignore_eos": True}
            async with limit:
                if kind == 0:
                    answer = await server.ask(COMPLETIONS, b'{"prompt": ')
                    assert answer.status == 400, answer
                elif kind == 1:
                    body = {**body, "stream": True, "max_tokens": 200}
                    await server.ask(COMPLETIONS, body, until=lambda data: b"data:" in data)
                elif kind == 2:
                    assert (await server.ask(CHAT, {**QUESTION, "max_tokens": 8})).status == 200
                else:
                    more = [{}, {"stream": True}, {"n": 2, "temperature": 1}, {"logprobs": 3}][kind % 4]
                    answer = await server.ask(COMPLETIONS, {**body, **more})
                    assert answer.status == 200, answer
            done += 1
            if done % 500 == 0:
                points.append((done, server.memory_mib()))

        for _ in range(num_requests // 500):
            await asyncio.gather(*(one() for _ in range(500)))
        seconds = await server.wait_until_idle()
        late = points[len(points) // 2 :]
        slope = statistics.linear_regression([n / 1000 for n, _ in late], [mib for _, mib in late]).slope
        return [
            Measurement("memory at the beginning", points[0][1], "MiB"),
            Measurement("memory at the end", points[-1][1], "MiB"),
            Measurement("growth in the second half", slope, "MiB per 1,000 requests", 1),
            Measurement("until all blocks are free", seconds, "s", 2),
        ]


SCENARIOS = {f.__name__: f for f in (storm, overload, drain, disconnects, silent, soak)}

"""The engine for asyncio: streams, slow and leaving consumers, errors; a scripted executor."""

import asyncio
import threading
import time

import pytest
from helpers.scripted_engine import LONG, no_block_lost

from jax_paged import AsyncLLMEngine, SamplingParams
from jax_paged.engine.async_engine import engine as engine_module
from jax_paged.engine.errors import EngineDeadError


def test_async_streams_equal_the_whole(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        engine.engine.executor.during_step = lambda output: time.sleep(0.002)
        try:
            stream = await engine.submit("hello wörld?", SamplingParams(max_tokens=None, logprobs=0), "a")
            parts = [part async for part in stream]
            whole = [o async for o in engine.generate("hello wörld?", LONG, "b")]
        finally:
            engine.close()
        assert "".join(p.outputs[0].text for p in parts) == whole[-1].outputs[0].text == "hello wörld"
        tokens = [t for p in parts for t in p.outputs[0].token_ids]
        assert tokens == whole[-1].outputs[0].token_ids
        assert sum(len(p.outputs[0].logprobs) for p in parts) == len(tokens)
        assert [p.finished for p in parts] == [False] * (len(parts) - 1) + [True]
        texts = [o.outputs[0].text for o in whole]
        assert texts == sorted(texts, key=len)
        assert len(set(texts)) > 3  # an earlier output does not grow
        assert [o.outputs[0].token_ids == tokens[: len(o.outputs[0].token_ids)] for o in whole] == [
            True
        ] * len(whole)
        assert len({len(o.outputs[0].token_ids) for o in whole}) == len(whole)

    asyncio.run(main())


def test_async_slow_consumer_gets_joined_parts(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        stream = await engine.submit("abcdefghij?", LONG, "a")
        while engine.engine.has_unfinished_requests() or engine.engine.executor.num_steps < 11:
            await asyncio.sleep(0.01)
        parts = [part async for part in stream]
        engine.close()
        assert len(parts) < 11
        assert "".join(p.outputs[0].text for p in parts) == "abcdefghij"

    asyncio.run(main())


def test_async_leaving_early_and_cancelling_abort(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        gate = threading.Event()
        engine.engine.executor.during_step = lambda output: gate.wait(0.005)

        async def consume(request_id):
            async for _ in engine.generate("abcdefghij?" * 20, LONG, request_id):
                pass

        task = asyncio.create_task(consume("cancelled"))
        async for _ in (left := engine.generate("abcdefghij?" * 20, LONG, "left")):
            break
        await left.aclose()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        start = time.monotonic()
        while engine.engine.has_unfinished_requests() and time.monotonic() < start + 5:
            await asyncio.sleep(0.01)
        assert engine.engine.executor.num_steps < 200
        assert no_block_lost(engine.engine)
        engine.close()

    asyncio.run(main())


def test_async_errors_reach_everyone(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        with pytest.raises(ValueError, match=r"`prompt` must be .*got ''"):
            await engine.submit("", None, "empty")
        gate = threading.Event()
        engine.engine.executor.during_step = lambda output: gate.wait()
        first = await engine.submit("abc?", None, "a")
        same_id = await engine.submit("abc?", None, "a")
        gate.set()
        with pytest.raises(ValueError, match=r"`request_id` must be .*got 'a'"):
            await anext(same_id)
        assert [p async for p in first][-1].finished

        gate.clear()

        def fail(output):
            gate.wait()
            raise RuntimeError("device lost")

        engine.engine.executor.during_step = fail
        streams = [await engine.submit("abc?", None, str(i)) for i in range(3)]
        gate.set()
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine has stopped: device lost"):
                await anext(stream)
        with pytest.raises(RuntimeError, match="device lost"):
            await engine.submit("abc?", None, "late")
        engine.close()

    asyncio.run(main())


def test_async_who_calls_an_engine_that_hangs_is_told_too(scripted):
    async def main():
        engine, gate = AsyncLLMEngine(*scripted()), threading.Event()
        begun = threading.Event()
        engine.engine.executor.during_step = lambda output: begun.set() or gate.wait()
        await engine.submit("abc?", None, "a")
        assert await asyncio.to_thread(begun.wait, 60)
        calls = [asyncio.create_task(call) for call in (engine.sleep(), engine.wake_up())]
        await asyncio.sleep(0.05)
        engine.fail(EngineDeadError("it hangs"))
        for call in calls:
            with pytest.raises(EngineDeadError, match="it hangs"):
                await asyncio.wait_for(call, 10)
        gate.set()
        engine.close()

    asyncio.run(main())


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


def test_async_an_error_that_is_no_exception_reaches_everyone(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())

        def panic(output):
            raise Panic("in Rust")

        engine.engine.executor.during_step = panic
        stream = await engine.submit("abc?", None, "a")
        with pytest.raises(RuntimeError, match="the engine has stopped: in Rust") as error:
            await asyncio.wait_for(anext(stream), 10)
        assert isinstance(error.value.__cause__, Panic)
        assert isinstance(engine.error, Panic)
        with pytest.raises(RuntimeError, match="in Rust"):
            await engine.submit("abc?", None, "late")
        engine.close()

    asyncio.run(main())


def test_async_abort_and_close(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        engine.engine.executor.during_step = lambda output: time.sleep(0.005)
        stream = await engine.submit("abcdefghij?" * 20, LONG, "a")
        await anext(stream)
        engine.abort("a")
        parts = [p async for p in stream]
        assert parts[-1].outputs[0].finish_reason == "abort"
        stream = await engine.submit("abcdefghij?" * 20, LONG, "b")
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RuntimeError, match="closed"):
            [p async for p in stream]
        with pytest.raises(RuntimeError, match="closed"):
            await engine.submit("abc?", None, "c")

    asyncio.run(main())


def test_async_abort_can_be_awaited_in_every_way(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        engine.engine.executor.during_step = lambda output: time.sleep(0.001)
        ways = [
            lambda: asyncio.create_task(engine.abort("a")),
            lambda: asyncio.gather(engine.abort("a"), engine.abort(["a", "nobody"])),
            lambda: asyncio.wait_for(engine.abort("a"), 10),
            lambda: engine.abort("a"),
        ]
        for way in ways:
            stream = await engine.submit("abcdefghij?" * 20, LONG, "a")
            await anext(stream)
            await way()
            assert [part async for part in stream][-1].outputs[0].finish_reason == "abort"
        done = engine.abort("nobody")
        await done
        await done
        engine.close()
        asyncio.run_coroutine_threadsafe(engine.abort("late"), asyncio.get_running_loop())

    asyncio.run(main())


def test_idle_engine_sleeps(scripted):
    engine = AsyncLLMEngine(*scripted())
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1
    engine.close()


def test_async_many_streams_of_a_fast_engine_get_joined_parts(scripted, monkeypatch):
    """First tokens and ends come at once; what comes between is handed over in turns."""

    async def main():
        engine = AsyncLLMEngine(*scripted())
        texts = [f"{'abcdefghij' * 3}{i}" for i in range(8)]
        handed_over: list[int] = []
        deliver = engine_module.deliver
        monkeypatch.setattr(
            engine_module, "deliver", lambda items: (handed_over.append(len(items)), deliver(items))[1]
        )
        try:
            streams = [await engine.submit(f"{text}?", LONG, text) for text in texts]
            parts = [[part async for part in stream] for stream in streams]
        finally:
            engine.close()
        assert ["".join(p.outputs[0].text for p in own) for own in parts] == texts
        num_tokens = sum(len(p.outputs[0].token_ids) for own in parts for p in own)
        assert sum(handed_over) < num_tokens
        assert all(own[-1].finished for own in parts)
        assert not engine._undelivered

    asyncio.run(main())


def test_async_held_tokens_of_an_aborted_request_come(scripted):
    async def main():
        engine = AsyncLLMEngine(*scripted())
        asked = "abcdefghij" * 20
        stream = await engine.submit(f"{asked}?", LONG, "a")
        first = await anext(stream)
        await engine.abort("a")
        rest = [part async for part in stream]
        engine.close()
        text = "".join(part.outputs[0].text for part in (first, *rest))
        assert asked.startswith(text)
        assert text
        assert [first, *rest][-1].finished

    asyncio.run(main())

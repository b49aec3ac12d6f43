"""Calls of several threads on one LLM or LLMEngine: they run one at a time, and each is right."""

import contextlib
import inspect
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.scripted_engine import LONG, ScriptedExecutor, no_block_lost, run
from helpers.waiting import wait_until

from jax_paged import LLM, LLMEngine, SamplingParams
from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.synchronized import CallLock

# Methods that are safe beside a step, and must not wait for one: the server calls them from its event loop.
BESIDE_STEPS = {
    "LLMEngine": {
        "add_lora",
        "check_request",
        "close",
        "get_tokenizer",
        "is_sleeping",
        "list_loras",
        "remove_lora",
    },
    "LLM": {"close", "get_default_sampling_params", "get_tokenizer"},
}
# Waits for the lock by another name.
WAITS = {"exclusive"}


class NotingLock(CallLock):
    """A lock that counts the calls made under it."""

    num_calls = 0

    def call(self, function, /, *args, **kwargs):
        self.num_calls += 1
        return super().call(function, *args, **kwargs)


class LoneExecutor(ScriptedExecutor):
    """Notes if two threads are in it at a time, or a step is not taken in by the thread that began it."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.problems: list[str] = []
        self._inside = threading.Lock()
        self._stepping: int | None = None

    def dispatch(self, output):
        with self._alone("dispatch"):
            self._stepping = threading.get_ident()
            super().dispatch(output)

    def result(self):
        with self._alone("result"):
            if self._stepping != threading.get_ident():
                self.problems.append("the result is read by another thread")
            return super().result()

    def close(self):
        with self._alone("close"):
            super().close()

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._inside.acquire(blocking=False):
            self.problems.append(f"{what} beside another call")
            yield
            return
        try:
            time.sleep(0)  # lets other threads run
            yield
        finally:
            self._inside.release()


@pytest.fixture
def lone(scripted):
    """An LLM of scripted tokens that notes overlapping calls; threads change as often as they can."""
    args, _ = scripted()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    executor = LoneExecutor(args)
    with LLM(args.model, executor=executor, async_scheduling=False) as llm:
        yield llm
    sys.setswitchinterval(interval)
    assert executor.problems == []


def in_threads(*functions: Callable[[], object]) -> list[BaseException]:
    """Runs functions, each in a thread of its own; returns their errors."""
    errors: list[BaseException] = []

    def note(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=note, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return errors


def public_methods(cls: type) -> list[str]:
    """Returns the names of public methods that are called on an object."""
    return [
        name
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if not name.startswith("_") and name not in WAITS
    ]


def arguments_of(method: Callable[..., Any]) -> dict[str, Any]:
    """Returns values for the arguments that a method needs; they may be wrong ones."""
    parameters = inspect.signature(method).parameters.values()
    return {p.name: "x" for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("cls", [LLM, LLMEngine], ids=lambda cls: cls.__name__)
def test_every_public_method_takes_the_lock_or_is_known_to_be_safe_beside_a_step(cls, make_llm):
    """A new method fails here only if it escapes the mechanism, or is exempt and not listed above."""
    without_lock = set()
    for name in public_methods(cls):
        with make_llm() as llm:
            target = llm if cls is LLM else llm.llm_engine
            target._calls = lock = NotingLock()
            method = getattr(target, name)
            positional = [
                "x" for p in inspect.signature(method).parameters.values() if p.kind is p.POSITIONAL_ONLY
            ]
            with contextlib.suppress(Exception):
                method(*positional, **arguments_of(method))
            if not lock.num_calls or name == "close":  # close takes it after it has told others to end
                without_lock.add(name)
    assert without_lock == BESIDE_STEPS[cls.__name__]


def test_a_method_that_a_subclass_adds_or_overrides_takes_the_lock(scripted):
    class Mine(LLMEngine):
        def mine(self):
            return self._calls.is_held

        def step(self):
            assert self._calls.is_held
            return super().step()

        def check_request(self, *args, **kwargs):  # safe beside a step, as the one that it overrides
            assert not self._calls.is_held
            return super().check_request(*args, **kwargs)

    with Mine(*scripted()) as engine:
        assert engine.mine()
        engine.check_request("abc?")
        engine.step()


def test_generate_in_several_threads(lone):
    texts = [chr(ord("a") + i) * (i + 1) for i in range(8)]
    found = {}

    def ask(text):
        for _ in range(3):
            outputs = lone.generate([f"{text}?"] * 2, LONG, use_tqdm=False)
            found.setdefault(text, []).extend(o.outputs[0].text for o in outputs)

    assert in_threads(*[lambda text=text: ask(text) for text in texts]) == []
    assert found == {text: [text] * 6 for text in texts}
    assert no_block_lost(lone.llm_engine)


@pytest.mark.parametrize("seed", range(3))
def test_any_methods_in_several_threads(lone, seed):
    """Threads that do what comes to their minds: requests by hand and in lists, looks, prefixes, state."""
    engine = lone.llm_engine

    def by_hand(name):
        engine.add_request(name, "abc?", LONG)
        engine.step()
        engine.abort_request(name)

    def pin(name):
        with contextlib.suppress(RuntimeError):  # requests may be running
            lone.unpin_prefix(lone.pin_prefix("abcdefghijklmnopqrs" + name))

    def plan(_):
        with contextlib.suppress(ValueError):  # another thread may have stepped meanwhile
            engine.run(engine.schedule())

    actions = [
        by_hand,
        pin,
        plan,
        lambda _: lone.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc" or 1 / 0,
        lambda _: lone.pool_map(),
        lambda _: lone.chat([{"role": "user", "content": "abc"}], use_tqdm=False),
        lambda _: engine.wait_if_idle(),
        lambda _: engine.wait_for_steps(),
        lambda _: repr(lone),
    ]

    def act(thread):
        choose = random.Random(f"{seed} {thread}")
        for i in range(12):
            choose.choice(actions)(f"{thread}-{i}")

    assert in_threads(*[lambda i=i: act(i) for i in range(4)]) == []
    run(engine)
    assert no_block_lost(engine)


def test_a_thread_that_waits_comes_between_two_steps_of_another(scripted):
    """A loop of steps releases the lock for no time at all, and must not keep it from others for ever."""
    with LLMEngine(*scripted()) as engine:
        engine.add_request("long", "a" * 300 + "?", SamplingParams(max_tokens=90))
        begun, came = threading.Event(), threading.Event()

        def note(output):
            begun.set()
            time.sleep(0.001)

        engine.executor.during_step = note

        def come():
            begun.wait(60)
            engine.abort_request("another")
            came.set()

        thread = threading.Thread(target=come)
        thread.start()
        while not came.is_set():
            assert engine.has_unfinished_requests(), "the other thread has waited for all steps"
            engine.step()
        thread.join()


def test_close_ends_the_call_of_another_thread(make_llm):
    llm = make_llm()
    executor, closed_during_step = llm.llm_engine.executor, []
    begun, may_go_on = threading.Event(), threading.Event()

    def wait(output):
        begun.set()
        may_go_on.wait(60)
        closed_during_step.append(executor.num_closed)

    executor.during_step = wait
    closing = threading.Thread(target=lambda: (begun.wait(60), llm.close()))
    closing.start()
    # Set before the lock is waited for, which the call that runs has.

    def go_on():
        wait_until(lambda: llm.llm_engine._core.is_closed, "another thread closes the engine")
        may_go_on.set()

    waiting = threading.Thread(target=go_on)
    waiting.start()
    with pytest.raises(EngineDeadError, match="this engine is closed"):
        llm.generate(["abcdefgh?"] * 2, LONG, use_tqdm=False)
    closing.join(60)
    waiting.join(60)
    assert closed_during_step == [0], "the step that ran has ended before the memory was freed"
    assert executor.num_closed == 1
    with pytest.raises(EngineDeadError):
        llm.generate("abc?", LONG, use_tqdm=False)


@pytest.mark.parametrize("holder", ["llm", "engine"])
def test_ctrl_c_interrupts_a_call_that_waits_for_another_thread(llm, holder):
    """Whether the wait is for another call of the LLM, or for one of its engine."""
    begun, may_end = threading.Event(), threading.Event()

    calls = (llm if holder == "llm" else llm.llm_engine)._calls

    def occupy():
        calls.call(lambda: (begun.set(), may_end.wait(60)))

    thread = threading.Thread(target=occupy)
    thread.start()
    begun.wait(60)

    def press():
        wait_until(calls._turn.locked, "the call waits")
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate("abc?", LONG, use_tqdm=False)
    finally:
        may_end.set()
        thread.join(60)
    assert llm.generate("abc?", LONG, use_tqdm=False)[0].outputs[0].text == "abc"
    assert no_block_lost(llm.llm_engine)


def test_an_error_or_ctrl_c_leaves_the_lock_free(llm):
    executor = llm.llm_engine.executor
    executor.during_step = lambda output: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("abc?", LONG, use_tqdm=False)
    executor.during_step = lambda output: None
    with pytest.raises(ValueError, match="prompts"):
        llm.generate([[-1]], LONG, use_tqdm=False)
    found = []
    assert in_threads(lambda: found.extend(llm.generate("abc?", LONG, use_tqdm=False))) == []
    assert found[0].outputs[0].text == "abc"

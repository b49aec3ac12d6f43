"""User code that raises inside LLM.generate: afterwards the engine is idle and works, or has clearly stopped.

User code is the progress bar, functions and classes that replace the scheduler, observers, prompts and
Ctrl-C. Each test counts how often user code is called in a run, and then raises at each of these calls.
"""

import dataclasses
import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.scripted_engine import ScriptedExecutor, no_block_lost

from jax_paged import LLM, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from jax_paged.core.request import SequenceGroup
from jax_paged.core.scheduler import Scheduler
from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.list_runner import ListRunner

PROMPTS = ["abcdefgh?", "ab?", "abcdefghijklm?", "a?"]
PARAMS = SamplingParams(n=2, max_tokens=20)


class UserError(BaseException):
    """What the user's code raises; not an Exception, as KeyboardInterrupt is none."""


class Trap:
    """Raises at a certain call of user code.

    Args:
        at: The index of the call; -1 for none.
        error: What it raises, or None to press Ctrl-C.
    """

    def __init__(self, at: int, error: type[BaseException] | None = UserError) -> None:
        self.at, self.error, self.num_calls = at, error, 0

    def __call__(self, *_: Any) -> None:
        self.num_calls += 1
        if self.num_calls - 1 == self.at:
            if self.error is not None:
                raise self.error("user code")
            signal.raise_signal(signal.SIGINT)


class Bar:
    """A progress bar in place of tqdm, each of whose methods may raise."""

    def __init__(self, trap: Trap, **_: Any) -> None:
        self.trap = trap
        trap()

    def __enter__(self) -> "Bar":
        self.trap()
        return self

    def __exit__(self, *_: object) -> None:
        self.trap()

    def set_postfix_str(self, *_: Any, **__: Any) -> None:
        self.trap()

    def update(self, *_: Any) -> None:
        self.trap()


def bar_of(trap: Trap) -> Any:
    return functools.partial(Bar, trap)


def make_scripted_engine(folder: str, *, scheduler: Any = None, **settings: Any) -> LLMEngine:
    """Makes an engine of scripted tokens with slots for states and, by default, two steps in flight."""
    args = EngineArgs(**{"model": folder, "async_scheduling": True, "max_num_seqs": 4, **settings})
    executor = ScriptedExecutor(args)
    executor.config = dataclasses.replace(executor.config, num_state_slots=12, num_swap_state_slots=0)
    return LLMEngine(args, executor, scheduler=scheduler)


def is_idle(engine: LLMEngine) -> bool:
    """Returns whether an engine holds nothing for any request."""
    queues, states = engine.scheduler.queues, engine.scheduler.block_manager.states
    return (
        not engine.has_unfinished_requests()
        and not engine._core.requests
        and not len(queues)
        and not queues.num_reserved_slots
        and not queues.running_adapters
        and states.pool.num_free == states.pool.num_usable
        and no_block_lost(engine)
    )


def texts_of(runner: ListRunner, engine: LLMEngine, use_tqdm: Any = False) -> list[str]:
    requests = [engine.check_request(prompt, PARAMS) for prompt in PROMPTS]
    return [output.outputs[0].text for output in runner.run(requests, use_tqdm)]


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("error", [UserError, ValueError, KeyboardInterrupt, None])
def test_a_progress_bar_that_raises_leaves_nothing_behind(
    folder: str, num_engines: int, error: type[BaseException] | None
) -> None:
    """At each of its calls, or Ctrl-C is pressed there; the same engines go on afterwards."""
    engines = [make_scripted_engine(folder) for _ in range(num_engines)]
    runner, counted, caught = ListRunner(engines), Trap(-1), error or KeyboardInterrupt
    expected = texts_of(runner, engines[0], bar_of(counted))
    assert counted.num_calls > 10
    for at in range(min(counted.num_calls, 24)):
        trap = Trap(at, error)
        try:
            # With several engines the number of steps that a bar sees varies.
            assert texts_of(runner, engines[0], bar_of(trap)) == expected
            assert trap.num_calls <= at or error is None
        except caught:
            assert trap.num_calls > at
        assert all(map(is_idle, engines)), f"call {at} of the bar left something behind"
    assert texts_of(runner, engines[0]) == expected


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_in_any_step_leaves_nothing_behind(folder: str) -> None:
    engine = make_scripted_engine(folder)
    runner, executor, counted = ListRunner([engine]), engine.executor, Trap(-1)
    assert isinstance(executor, ScriptedExecutor)
    executor.during_step = counted
    expected = texts_of(runner, engine)
    for at in range(counted.num_calls - 1):
        executor.during_step = Trap(at, None)
        with pytest.raises(KeyboardInterrupt):
            texts_of(runner, engine)
        assert is_idle(engine)
    executor.during_step = counted
    assert texts_of(runner, engine) == expected


@pytest.mark.parametrize("place", ["device", "observer", "schedule", "update"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_an_error_inside_a_step_stops_the_engine_clearly(folder: str, num_engines: int, place: str) -> None:
    """Whichever step it is; other engines are idle and go on."""
    for at in (0, 1, 4):
        trap = Trap(at)

        class Trapped(Scheduler):
            def schedule(self, now: float) -> Any:
                if place == "schedule":
                    trap()  # noqa: B023
                return super().schedule(now)

            def update(self, output: Any, result: Any, now: float) -> Any:
                if place == "update":
                    trap()  # noqa: B023
                return super().update(output, result, now)

        schedulers = [Trapped, *[None] * (num_engines - 1)]
        engines = [make_scripted_engine(folder, scheduler=scheduler) for scheduler in schedulers]
        executor = engines[0].executor
        assert isinstance(executor, ScriptedExecutor)
        if place == "device":
            executor.during_step = trap
        if place == "observer":
            engines[0].observers.append(trap)
        runner = ListRunner(engines)
        with pytest.raises(UserError):
            texts_of(runner, engines[0])
        assert "failed" in repr(engines[0])
        assert not engines[0]._core.requests
        with pytest.raises(EngineDeadError, match="the engine has failed: UserError"):
            engines[0].check_request("a", PARAMS)
        for engine in engines[1:]:
            assert is_idle(engine)


def test_a_key_function_that_raises_leaves_nothing_behind(folder: str) -> None:
    """It raises for some request, or returns what can't be compared with other keys."""
    keys: list[Any] = []

    def key_of(group: SequenceGroup) -> Any:
        return keys.pop(0)() if keys else 0

    def fail() -> Any:
        raise UserError

    engine = make_scripted_engine(folder, scheduler=key_of)
    runner = ListRunner([engine])
    expected = texts_of(runner, engine)
    for at in range(1, len(PROMPTS)):
        for key, error in ((fail, UserError), (lambda: None, TypeError)):
            keys[:] = [*[lambda: 0] * at, key]
            with pytest.raises(error):
                texts_of(runner, engine)
            assert is_idle(engine)
            keys.clear()
            assert texts_of(runner, engine) == expected


def test_a_request_of_the_user_is_not_ended_with_those_of_a_call(folder: str) -> None:
    engine = make_scripted_engine(folder)
    engine.add_request("generate-1", "abc?", PARAMS)
    with pytest.raises(ValueError, match=r"`request_id` must be .*got 'generate-1'"):
        texts_of(ListRunner([engine]), engine)
    assert set(engine._core.requests) == {"generate-1"}


@pytest.mark.parametrize("method", ["chat", "beam_search", "generate"])
def test_every_method_leaves_nothing_behind(make_llm: Callable[..., LLM], method: str) -> None:
    calls: dict[str, Callable[[LLM, Any], Any]] = {
        "chat": lambda llm, bar: llm.chat([{"role": "user", "content": "abc"}], use_tqdm=bar),
        "beam_search": lambda llm, bar: llm.beam_search(
            ["abc?", "ab?"], BeamSearchParams(beam_width=1, max_tokens=6), use_tqdm=bar
        ),
        "generate": lambda llm, bar: llm.generate("abc?", use_tqdm=bar),
    }
    with make_llm(async_scheduling=True) as llm:
        counted = Trap(-1)
        calls[method](llm, bar_of(counted))
        for at in range(min(counted.num_calls, 12)):
            with pytest.raises(UserError):
                calls[method](llm, bar_of(Trap(at)))
            assert is_idle(llm.llm_engine)


def test_prompts_that_raise_while_they_are_read_leave_nothing_behind(llm: LLM) -> None:
    class Prompts(list[str]):
        def __iter__(self) -> Iterator[str]:
            yield from PROMPTS[:2]
            raise UserError

    with pytest.raises(UserError):
        llm.generate(Prompts(PROMPTS), use_tqdm=False)
    assert is_idle(llm.llm_engine)
    assert llm.generate("ab?", use_tqdm=False)[0].outputs[0].text == "ab"

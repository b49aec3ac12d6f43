"""Prefixes that are pinned, and salts: who shares blocks with whom, on the real model."""

import os
import signal
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    VOCAB_SIZE,
    Request,
    add,
    assert_no_block_lost,
    finished_outputs,
    reschedule,
    run,
    run_alone,
    tokens_of,
)
from helpers.scripted_engine import LONG, no_block_lost
from helpers.scripted_engine import run as run_scripted

from jax_paged import LLM, BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.core.stop_conditions import POOL_TOO_SMALL
from jax_paged.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
RNG = np.random.default_rng(8)
PREFIX = RNG.integers(0, VOCAB_SIZE, 42).tolist()  # 10 full blocks of 4, and two tokens
OTHERS = [Request(RNG.integers(0, VOCAB_SIZE, 60).tolist(), GREEDY) for _ in range(12)]


def with_prefix(count: int, salt: str = "") -> list[Request]:
    rng = np.random.default_rng(count)
    prompts = [[*PREFIX, *rng.integers(0, VOCAB_SIZE, 1 + 3 * i).tolist()] for i in range(count)]
    return [Request(prompt, GREEDY, salt=salt) for prompt in prompts]


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def test_pinned_prefix_stays(shared_engine: LLMEngine) -> None:
    requests = with_prefix(4)
    expected = tokens_of(run_alone(shared_engine, requests))
    reschedule(shared_engine, num_blocks=40)
    manager = shared_engine.scheduler.block_manager
    name = shared_engine.pin_prefix(PREFIX)
    assert manager.num_free_blocks == 39 - 10
    for _ in range(2):
        # They need more than the pool: whatever can be evicted is.
        run_unchecked(shared_engine, OTHERS)
        outputs = run_unchecked(shared_engine, requests)
        assert cached(outputs) == [40] * 4
        assert tokens_of(outputs) == expected
    run_unchecked(shared_engine, [Request([*PREFIX, 1], GREEDY, BeamSearchParams(4, 6)), *requests, *OTHERS])
    manager.check_integrity()
    assert manager.num_free_blocks == 39 - 10
    shared_engine.unpin_prefix(name)
    assert_no_block_lost(shared_engine)
    assert cached(run(shared_engine, requests[:1])) == [40], (
        "it stays cached as long as no one needs its blocks"
    )
    run(shared_engine, OTHERS)
    assert cached(run(shared_engine, requests[:1])) == [0]


def run_unchecked(engine: LLMEngine, requests: list[Request]) -> list[RequestOutput]:
    """As `run`, where blocks are pinned."""
    add(engine, requests)
    outputs = finished_outputs(engine)
    return [outputs[str(i)] for i in range(len(requests))]


@pytest.mark.parametrize("length", [4, 5, 7, 40, 41])
def test_full_blocks_are_pinned(shared_engine: LLMEngine, length: int) -> None:
    name = shared_engine.pin_prefix({"prompt_token_ids": PREFIX[:length]})
    manager = shared_engine.scheduler.block_manager
    num_blocks = length // 4
    assert [list(map(len, prefix.tables)) for prefix in manager.pinned.values()] == [[num_blocks]]
    assert manager.num_free_blocks == manager.num_usable_blocks - num_blocks
    shared_engine.unpin_prefix(name)
    assert_no_block_lost(shared_engine)


def test_less_than_a_block_is_not_pinned(shared_engine: LLMEngine) -> None:
    with pytest.raises(
        ValueError, match=r"the number of tokens of `prompt` must be at least 4 \(block_size\) .*got 3"
    ):
        shared_engine.pin_prefix(PREFIX[:3])
    assert_no_block_lost(shared_engine)


def test_pinned_twice_and_one_prefix_of_the_other(shared_engine: LLMEngine) -> None:
    manager = shared_engine.scheduler.block_manager
    names = [shared_engine.pin_prefix(PREFIX[:n]) for n in (40, 40, 20, 42)]
    assert len(set(names)) == 4
    num_held = []
    for name in names:
        num_held.append(manager.num_usable_blocks - manager.num_free_blocks)
        manager.check_integrity()
        shared_engine.unpin_prefix(name)
    assert num_held == [10, 10, 10, 10]
    assert_no_block_lost(shared_engine)


def test_salts(shared_engine: LLMEngine) -> None:
    expected = tokens_of(run_alone(shared_engine, with_prefix(2)))
    reschedule(shared_engine)
    name = shared_engine.pin_prefix(PREFIX, cache_salt="mine")
    # The second prompt is 46 tokens long: when it comes again, 44 are found.
    for salt, num_cached in (
        ("", [0, 40]),
        ("yours", [0, 40]),
        ("mine", [40, 40]),
        ("yours", [40, 44]),
        ("", [40, 44]),
        ("\ud800", [0, 40]),
    ):
        outputs = [run_unchecked(shared_engine, [r])[0] for r in with_prefix(2, salt)]
        assert cached(outputs) == num_cached
        assert tokens_of(outputs) == expected
    shared_engine.unpin_prefix(name)
    assert_no_block_lost(shared_engine)


def test_prefix_that_does_not_fit(shared_engine: LLMEngine) -> None:
    reschedule(shared_engine, num_blocks=16)
    manager = shared_engine.scheduler.block_manager
    name = shared_engine.pin_prefix(PREFIX)
    other = RNG.integers(0, VOCAB_SIZE, 24).tolist()
    with pytest.raises(
        ValueError, match=r"the KV cache is too small .* must fit into the free KV blocks \(5 of 15\)"
    ):
        shared_engine.pin_prefix(other)
    with pytest.raises(ValueError, match="max_model_len"):
        shared_engine.pin_prefix([1] * 400)
    with pytest.raises(ValueError, match=r"`cache_salt` must be a string.*got 5"):
        shared_engine.pin_prefix([1], cache_salt=5)  # pyright: ignore[reportArgumentType]
    assert list(manager.pinned) == [name]
    assert manager.num_free_blocks == 5
    assert not shared_engine.has_unfinished_requests()
    # A request that doesn't fit beside it ends at once, another runs; and with the prefix all of it fits.
    outputs = run_unchecked(shared_engine, [Request(p, GREEDY) for p in (other, other[:10], [*PREFIX, 7])])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [0, 6, 6]
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == (
        "error",
        POOL_TOO_SMALL,
    )
    second = shared_engine.pin_prefix(other[:20])
    for held in (second, name):
        shared_engine.unpin_prefix(held)
    assert_no_block_lost(shared_engine)


def test_errors(shared_engine: LLMEngine) -> None:
    with pytest.raises(ValueError, match=r"`name` must be the name of a pinned prefix \(none\), got 'x'"):
        shared_engine.unpin_prefix("x")
    name = shared_engine.pin_prefix(PREFIX)
    with pytest.raises(ValueError, match=f"`name` must be the name of a pinned prefix .'{name}'., got 'x'"):
        shared_engine.unpin_prefix("x")
    shared_engine.unpin_prefix(name)
    with pytest.raises(ValueError, match=r"a pinned prefix \(none\)"):
        shared_engine.unpin_prefix(name)
    shared_engine.add_request("a", [1, 2], GREEDY)
    with pytest.raises(RuntimeError, match="requests are running"):
        shared_engine.pin_prefix(PREFIX)
    shared_engine.abort_request("a")
    reschedule(shared_engine, enable_prefix_caching=False)
    with pytest.raises(ValueError, match=r"`enable_prefix_caching` must be True to pin prefixes.*got False"):
        shared_engine.pin_prefix(PREFIX)
    assert_no_block_lost(shared_engine)


def test_text_is_pinned(llm: LLM) -> None:
    text = "a prefix of two blocks and a bit of another, "
    name = llm.pin_prefix(text)
    (output,) = llm.generate(f"{text}more?", LONG, use_tqdm=False)
    assert output.num_cached_tokens == len(text) // 16 * 16 == 32
    assert output.outputs[0].text == f"{text}more"
    llm.unpin_prefix(name)
    assert no_block_lost(llm.llm_engine)


def test_prefix_with_non_finite_values_is_refused(llm: LLM) -> None:
    engine: Any = llm.llm_engine
    engine.executor.bad_request = "prefix-0"
    with pytest.raises((ValueError, RuntimeError), match="finite"):
        llm.pin_prefix("a prefix of two blocks and a bit")
    assert not engine.scheduler.block_manager.pinned
    assert no_block_lost(engine)


def test_ctrl_c_while_a_prefix_is_computed(llm: LLM) -> None:
    engine: Any = llm.llm_engine
    engine.executor.during_step = lambda output: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        llm.pin_prefix("a prefix of several steps, " * 10)
    engine.executor.during_step = lambda output: None
    assert not engine.has_unfinished_requests()
    assert no_block_lost(engine)


def test_priorities(scripted: Any, make_llm: Any) -> None:
    with LLMEngine(*scripted(scheduling_policy="priority", max_num_seqs=1)) as engine:
        for i, priority in enumerate((3, -1, 2, -1)):
            engine.add_request(str(i), "abc?", LONG, priority=priority)
        assert list(run_scripted(engine)) == ["1", "3", "2", "0"]
        assert no_block_lost(engine)
    with make_llm(scheduling_policy="priority") as llm:
        for bad, message in (
            ([1], r"`priority` must be a list of 2 integers, one per prompt, got \[1\]"),
            (5, "`priority` must be .*got 5"),
            ([1, 0.5], r"prompts\[1\]: `priority` must be .*got 0.5"),
        ):
            with pytest.raises(ValueError, match=message):
                llm.generate(["abc?", "abc?"], LONG, priority=bad, use_tqdm=False)  # pyright: ignore
        outputs = llm.generate(["abc?", "de?"], LONG, priority=[5, 1], use_tqdm=False)
        assert [o.outputs[0].text for o in outputs] == ["abc", "de"]
    with make_llm() as llm:
        with pytest.raises(ValueError, match=r"prompts\[1\]: `priority` must be 0 with .*'fcfs'.*got 2"):
            llm.generate(["abc?", "abc?"], LONG, priority=[0, 2], use_tqdm=False)
        assert llm.llm_engine.executor.num_steps == 0  # pyright: ignore[reportAttributeAccessIssue]

"""Outputs of running requests: each stays as it was, and none costs more than what is new in it."""

import asyncio
import copy
import gc
import json
import pickle
import threading
import time
from collections.abc import Sequence

import pytest
from helpers.scripted_engine import LONG
from hypothesis import given
from hypothesis import strategies as st

from jax_paged import AsyncLLMEngine, CompletionOutput, LLMEngine, RequestOutput, SamplingParams
from jax_paged.outputs import Snapshot

ITEMS = st.lists(st.integers(0, 3), max_size=6)
BOUND = st.none() | st.integers(-8, 8)


@given(items=ITEMS, later=ITEMS, start=BOUND, stop=BOUND, step=st.none() | st.sampled_from([-3, -1, 1, 2]))
def test_a_snapshot_is_as_a_list_that_does_not_grow(items, later, start, stop, step):
    growing = list(items)
    snapshot = Snapshot(growing)
    growing += later
    assert isinstance(snapshot, Sequence)
    assert snapshot == items
    assert items == snapshot
    assert (snapshot == growing) == (not later)
    assert list(snapshot) == items
    assert list(reversed(snapshot)) == items[::-1]
    assert len(snapshot) == len(items)
    assert bool(snapshot) == bool(items)
    assert snapshot[start:stop:step] == items[start:stop:step]
    assert (snapshot + later, later + snapshot) == (items + later, later + items)
    assert (snapshot * 2, 2 * snapshot) == (items * 2, items * 2)
    assert repr(snapshot) == repr(items)
    assert json.dumps({"ids": snapshot}, default=list) == json.dumps({"ids": items})
    copies = [snapshot.copy(), copy.copy(snapshot), copy.deepcopy(snapshot)]
    for copied in (*copies, pickle.loads(pickle.dumps(snapshot))):
        assert type(copied) is list
        assert copied == items
    for i in range(-len(items), len(items)):
        assert snapshot[i] == items[i]
    for i in (-len(items) - 1, len(items)):
        with pytest.raises(IndexError):
            snapshot[i]


def num_kept(outputs: list[RequestOutput]) -> int:
    """Returns how many items there are in all lists that outputs keep alive, each list counted once."""
    lists, seen, found = [], set(), list(outputs)
    while found:
        item = found.pop()
        if id(item) in seen or not isinstance(
            item, list | tuple | Snapshot | RequestOutput | CompletionOutput
        ):
            continue
        seen.add(id(item))
        lists += [item] if isinstance(item, list) else []
        found += gc.get_referents(item)
    return sum(map(len, lists))


PARAMS = SamplingParams(max_tokens=None, logprobs=1, prompt_logprobs=1, n=2)


def generated(scripted, num_tokens: int) -> list[RequestOutput]:
    """The outputs of AsyncLLMEngine.generate, to a consumer that gets one per token."""
    turn = threading.Semaphore(0)

    async def main():
        engine = AsyncLLMEngine(*scripted(max_num_batched_tokens=1000))
        # What comes within 1.5 ms would be joined.
        engine.engine.executor.during_step = lambda output: turn.acquire(timeout=10) and time.sleep(0.003)
        outputs = engine.generate("a" * (num_tokens - 1) + "?", PARAMS, "a")
        kept = []
        try:
            turn.release()
            async for output in outputs:
                kept.append(output)
                turn.release()
        finally:
            engine.close()
        return kept

    return asyncio.run(main())


def stepped(scripted, num_tokens: int) -> list[RequestOutput]:
    """The outputs of LLMEngine.step."""
    with LLMEngine(*scripted(max_num_batched_tokens=1000)) as engine:
        engine.add_request("a", "a" * (num_tokens - 1) + "?", PARAMS)
        kept = []
        while engine.has_unfinished_requests():
            kept += engine.step()
    return kept


@pytest.mark.parametrize("outputs_of", [generated, stepped])
def test_outputs_cost_what_is_new_in_them(scripted, outputs_of):
    """All that are kept hold a number of items that grows as the output does, not as its square."""
    counts = {}
    for num_tokens in (40, 160):
        outputs = outputs_of(scripted, num_tokens)
        assert len(outputs) == num_tokens
        for i, output in enumerate(outputs, 1):
            for completion in output.outputs:
                assert (
                    len(completion.token_ids)
                    == len(completion.logprobs)
                    == len(completion.text) + (i == num_tokens)
                )
                assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
            assert len(output.prompt_logprobs) == num_tokens
        counts[num_tokens] = num_kept(outputs)
    assert counts[160] < 5 * counts[40]
    assert counts[160] < 20 * 160


@pytest.mark.parametrize("outputs_of", [generated, stepped])
def test_the_last_output_has_lists_of_its_own(scripted, outputs_of):
    outputs = outputs_of(scripted, 10)
    for lists in ([o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs] for o in outputs):
        assert all(isinstance(values, list) == (lists[0] is outputs[-1].prompt_logprobs) for values in lists)
    kept = [(list(o.prompt_logprobs), [*o.outputs[0].token_ids]) for o in outputs[:-1]]
    last = outputs[-1]
    last.prompt_logprobs.clear()
    last.outputs[0].token_ids.clear()
    last.outputs[0].logprobs.clear()
    assert [(o.prompt_logprobs, o.outputs[0].token_ids) for o in outputs[:-1]] == kept
    assert len(last.outputs[1].token_ids) == 10


@pytest.mark.parametrize("outputs_of", [generated, stepped])
def test_metrics_of_an_output_stay_as_they_were(scripted, outputs_of):
    *running, last = (output.metrics for output in outputs_of(scripted, 5))
    assert [metrics.finished_time for metrics in running] == [None] * 4
    assert last.finished_time > last.first_token_time == running[0].first_token_time


def test_joined_parts_have_the_last_metrics(scripted):
    with LLMEngine(*scripted(max_num_batched_tokens=4)) as engine:
        engine.add_request("a", "abcdef?", LONG)
        (state,) = [*engine.advance(), *engine.advance()]
        whole = state.take_delta()
        while engine.has_unfinished_requests():
            engine.advance()
        whole.extend(state.take_delta())
    assert whole.metrics == state.group.metrics
    assert whole.metrics.finished_time is not None


def test_prompt_logprobs_of_an_output_do_not_grow(scripted):
    """An output that was made while the prompt was computed keeps what there was."""
    with LLMEngine(*scripted(max_num_batched_tokens=4)) as engine:
        engine.add_request("a", "abcdefghij?", SamplingParams(prompt_logprobs=0))
        engine.step()
        early = engine._core.requests["a"].output()
        lengths = [len(early.prompt_logprobs)]
        engine.step()
        lengths.append(len(early.prompt_logprobs))
        aborted = engine.abort_request("a").output()
    assert lengths == [5, 5]
    assert len(aborted.prompt_logprobs) == 9


def test_text_held_back_does_not_replace_why_an_output_ended(scripted):
    """The first bytes of a character are shown as U+FFFD, which no stop string matches."""
    with LLMEngine(*scripted()) as engine:
        prompt = [*engine.tokenizer.encode("ok🙂")[:-1], 5]
        stop = engine.tokenizer.encode("k")
        for name, settings in {
            "end token": {"max_tokens": None},
            "length": {"max_tokens": 4},
            "stop token": {"stop_token_ids": prompt[-2:-1]},
        }.items():
            engine.add_request(name, prompt, SamplingParams(stop=["\ufffd"], **settings))
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
        assert len(stop) == 1
    found = {name: (o.text, o.finish_reason, o.stop_reason) for name, o in ended.items()}
    assert found == {
        "end token": ("ok\ufffd", "stop", None),
        "length": ("ok\ufffd", "length", None),
        "stop token": ("ok\ufffd", "stop", prompt[-2]),
    }


def test_a_stop_string_in_text_held_back_is_why_an_output_ended(scripted):
    """A token may hold a whole character and the start of another, which holds back both."""

    class Tokenizer:
        """As the engine's, but token 200 is " " and the first byte of a character."""

        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            return getattr(self._real, name)

        def adds_text(self, token_id, **options):
            return True

        def decode(self, token_ids, **options):
            return "".join(" \ufffd" if t == 200 else self._real.decode([t], **options) for t in token_ids)

    with LLMEngine(*scripted()) as engine:
        engine.tokenizer = engine._core.tokenizer = Tokenizer(engine.tokenizer)
        a = engine.tokenizer.encode("a")[0]
        engine.add_request("a", [a, 200, 5], SamplingParams(stop=[" "], max_tokens=2))
        engine.add_request("b", [a, 200, 5], SamplingParams(stop=["b"], max_tokens=2))
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {o.request_id: o.outputs[0] for o in engine.step() if o.finished}
        found = {name: (o.text, o.finish_reason, o.stop_reason) for name, o in ended.items()}
    assert found == {"a": ("a", "stop", " "), "b": ("a \ufffd", "length", None)}


def test_deltas_join_to_the_whole(scripted):
    with LLMEngine(*scripted()) as engine:
        engine.add_request("a", "hello?", LONG)
        (state,) = engine.advance()
        total = state.take_delta()
        while engine.has_unfinished_requests():
            (state,) = engine.advance()
            total.extend(state.take_delta())
        assert total == state.output()

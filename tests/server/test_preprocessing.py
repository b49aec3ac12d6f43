"""Texts that are refused without being tokenized, and long ones that hold nobody up."""

import asyncio
import random
import threading

import pytest

from jax_paged.engine.text.control_tokens import ControlTokens
from jax_paged.server.preprocessing import Preprocessor, ThrottledLock, _num_characters


def test_a_text_of_too_many_characters_is_refused_unread(served, monkeypatch):
    tokenizer = served.engine.tokenizer
    longest = max(map(len, tokenizer._backend.get_vocab()))

    class ShortOnly:
        encode = tokenizer._backend.encode

    monkeypatch.setattr(ControlTokens, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    monkeypatch.setattr(tokenizer, "_backend", ShortOnly)
    long = "a" * (longest * 512 + 1)
    for path, body in (
        ("/completions", {"prompt": long}),
        ("/completions", {"prompt": ["a", long]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": long + "<|end|>"}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
        ("/responses", {"input": long}),
    ):
        answer = served.client.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in ("prompt", "messages", "input")
        limit = "must be at most 512 (max_model_len), got at least 513"
        assert limit in error["message"] or path != "/completions"


LONG = "a block table " * 1000


@pytest.mark.parametrize("keep", [-1, 5])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", {"prompt": LONG}),
        ("/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/responses", {"input": LONG}),
    ],
)
def test_a_long_text_that_is_cut_is_accepted(served, path, body, keep):
    limit = "max_output_tokens" if path == "/responses" else "max_tokens"
    usage = served.post(path, **body, truncate_prompt_tokens=keep, **{limit: 1})["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) == (511 if keep == -1 else keep)


def test_long_texts_that_are_not_the_prompt_are_accepted(served):
    messages = [{"role": "user", "content": "a", "name": LONG}]
    served.post("/chat/completions", messages=messages, max_tokens=1)
    assert served.client.post("../tokenize", json={"prompt": LONG}).json()["count"] >= 1000


def test_short_texts_do_not_wait_for_long_ones(served):
    running: list[int] = []
    most, let_go = [0], threading.Event()

    def read_long():
        running.append(1)
        most[0] = max(most[0], len(running))
        assert let_go.wait(30)
        running.pop()

    async def check():
        preprocessor = Preprocessor(ThrottledLock())
        long = [asyncio.create_task(preprocessor.run(["a" * 20_000], read_long)) for _ in range(8)]
        assert await preprocessor.run(["a"], lambda: 1) == 1
        assert await preprocessor.run([[1] * 100_000], lambda: 2) == 2
        let_go.set()
        await asyncio.gather(*long)

    asyncio.run(check())
    assert most == [1]


def test_long_bodies_are_parsed_one_by_one():
    async def check():
        lane, order = ThrottledLock(), []

        async def take(name):
            await lane.body_turn(1_000_000)
            order.append(name)

        begin = asyncio.get_running_loop().time()
        await asyncio.gather(*(take(i) for i in range(4)))
        assert order == [0, 1, 2, 3]
        assert asyncio.get_running_loop().time() - begin > 3 * 0.03 * 0.9

    asyncio.run(check())


def test_a_function_that_ends_an_iterator_too_early_is_an_error_and_no_endless_wait():
    async def check():
        with pytest.raises(RuntimeError, match="StopIteration was raised"):
            await asyncio.wait_for(Preprocessor(ThrottledLock()).run([], lambda: next(iter(()))), 10)

    asyncio.run(check())


def test_all_strings_of_a_value_count():
    assert _num_characters({"ab": [1, "cde", {"f": ["gh"]}], "i": [1, 2, 3]}) == 2 + 3 + 1 + 2 + 1


def test_a_long_text_has_the_tokens_of_a_short_one(served):
    tokenizer, rng = served.engine.tokenizer, random.Random(2)
    for _ in range(20):
        text = "".join(rng.choice(["block ", "table\n", "é", "<|end|>", "17", " "]) for _ in range(2000))
        assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids


@pytest.mark.parametrize("text", ["a" * 1024, [1] * 1024, ["a" * 1023]])
def test_short_texts_are_tokenized_in_the_event_loop(text):
    preprocessor = Preprocessor(ThrottledLock())
    longer = text + text[-1:]

    def is_own_thread():
        return threading.current_thread() is threading.main_thread()

    async def runs_here(text):
        return await preprocessor.run([text], is_own_thread)

    assert asyncio.run(runs_here(text))
    assert not asyncio.run(runs_here(longer))

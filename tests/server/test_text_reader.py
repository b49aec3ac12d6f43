"""Texts that are refused without being tokenized, and long ones that hold nobody up."""

import asyncio
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jax_paged.engine.tokenizer import Tokenizer
from jax_paged.server.text_reader import Lane, TextReader, _num_characters


def test_a_text_of_too_many_characters_is_refused_unread(served, monkeypatch):
    tokenizer = served.engine.tokenizer
    most = tokenizer.max_characters(512)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    long = "a" * (most + 1)
    for path, body in (
        ("/completions", {"prompt": long}),
        ("/completions", {"prompt": ["a", long]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": long}]}]}),
    ):
        answer = served.client.post(path, json=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] in ("prompt", "messages")
        assert f"allowed: at most {most} characters" in error["message"]


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_text_has_more_characters_than_its_tokens_can_hold(served, text):
    tokenizer = served.engine.tokenizer
    assert len(text) <= tokenizer.max_characters(max(1, len(tokenizer.encode(text))))


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_characters_that_a_normalizer_joins_are_allowed_for(served, monkeypatch, form):
    backend = Backend(models.BPE(vocab={chr(i): i for i in range(0x20, 0x200)}, merges=[]))
    backend.normalizer = getattr(normalizers, form)()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    tokenizer = served.engine.tokenizer
    monkeypatch.setattr(tokenizer, "_backend", backend)
    rng = random.Random(1)
    text = "".join(rng.choice("aeiou") + rng.choice("\u0301\u0300\u0308") for _ in range(100))
    assert 100 <= len(tokenizer.encode(text)) < len(text) <= tokenizer.max_characters(100)


def test_short_texts_do_not_wait_for_long_ones(served):
    running: list[int] = []
    most, let_go = [0], threading.Event()

    def read_long():
        running.append(1)
        most[0] = max(most[0], len(running))
        assert let_go.wait(30)
        running.pop()

    async def check():
        reader = TextReader(served.engine.tokenizer, 1 << 20, Lane())
        long = [asyncio.create_task(reader.read("prompt", ["a" * 20_000], read_long)) for _ in range(8)]
        assert await reader.read("prompt", ["a"], lambda: 1) == 1
        assert await reader.read("prompt", [[1] * 100_000], lambda: 2) == 2
        let_go.set()
        await asyncio.gather(*long)

    asyncio.run(check())
    assert most == [1]


def test_long_bodies_are_parsed_one_by_one():
    async def check():
        lane, order = Lane(), []

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
        with pytest.raises(RuntimeError, match="too early"):
            await asyncio.wait_for(TextReader(None, 8, Lane()).read("prompt", [], next, iter(())), 10)

    asyncio.run(check())


def test_all_strings_of_a_value_count():
    assert _num_characters({"ab": [1, "cde", {"f": ["gh"]}], "i": [1, 2, 3]}) == 2 + 3 + 1 + 2 + 1


def test_without_a_tokenizer_the_engine_says_what_is_wrong():
    async def check():
        assert await TextReader(None, 8, Lane()).read("prompt", ["abc"], lambda: 3) == 3

    asyncio.run(check())


def test_a_long_text_has_the_tokens_of_a_short_one(served):
    tokenizer, rng = served.engine.tokenizer, random.Random(2)
    for _ in range(20):
        text = "".join(rng.choice(["block ", "table\n", "é", "<|end|>", "17", " "]) for _ in range(2000))
        assert tokenizer.encode(text) == tokenizer._backend.encode(text).ids

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
from jax_paged.server.text_reader import TextReader


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
    reader = TextReader(served.engine.tokenizer, 1 << 20)
    running, let_go = [], threading.Event()

    def read_long():
        running.append(threading.current_thread().name)
        assert let_go.wait(30)

    async def check():
        long = [asyncio.create_task(reader.read("prompt", ["a" * 20_000], read_long)) for _ in range(8)]
        assert await reader.read("prompt", ["a"], lambda: 1) == 1
        assert await reader.read("prompt", [[1] * 100_000], lambda: 2) == 2
        assert len(running) <= 1
        let_go.set()
        await asyncio.gather(*long)

    asyncio.run(check())
    assert len(set(running)) == 1
    assert len(running) == 8


def test_without_a_tokenizer_the_engine_says_what_is_wrong():
    async def check():
        assert await TextReader(None, 8).read("prompt", ["abc"], lambda: 3) == 3

    asyncio.run(check())

"""The built-in model: its folder is complete, and it answers as its card says."""

import json
import re
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from jax_paged.models.causal_lm import CausalLM
from jax_paged.models.pagelet.corpus import SPECIAL_TOKENS
from jax_paged.models.pagelet.dialogue import choices, is_held_out, read_held_out, read_topics
from jax_paged.models.pagelet.evaluate import FOLDER, answer, sum_questions
from jax_paged.models.weights import load_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return load_model(FOLDER, "float32").model


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower())


def test_folder_is_small_and_in_hugging_face_layout():
    size = (FOLDER / "model.safetensors").stat().st_size
    assert size < 10e6
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    with safe_open(FOLDER / "model.safetensors", "numpy") as f:
        assert f.get_slice("model.embed_tokens.weight").get_shape() == [config["vocab_size"], 256]
        # Hugging Face lays matrices out [out, in].
        assert f.get_slice("model.layers.0.mlp.up_proj.weight").get_shape() == [640, 256]


def test_end_tokens_are_the_same_everywhere(tokenizer: Any):
    ends = sorted(tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|end|>"]))
    for name in ("config.json", "generation_config.json"):
        assert sorted(json.loads((FOLDER / name).read_text())["eos_token_id"]) == ends
    loaded = load_model(FOLDER)
    assert loaded.eos_token_ids == frozenset(ends)
    assert loaded.vocab_size == len(tokenizer)


def test_digits_are_single_tokens(tokenizer: Any):
    numbers = np.random.default_rng(0).integers(0, 10**6, 50)
    text = " and ".join(map(str, numbers)) + " x86 a1b22"
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode(text))
    assert [t for t in tokens if re.search(r"\d", t)] == re.findall(r"\d", text)
    assert len({tokenizer.convert_tokens_to_ids(d) for d in "0123456789"}) == 10


@pytest.mark.parametrize(
    "text", ["What is 12 + 3?", "def f(x):\n\treturn x  # é €, 你好 🙂\r\n", "  two  spaces "]
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template(tokenizer: Any):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "1 + 1"},
    ]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    turns = ["system|>Be brief.", "user|>Hi", "assistant|>Hello!", "user|>1 + 1", "assistant|>"]
    wanted = "<|" + "<|end|><|".join(turns)
    assert tokenizer.decode(ids) == wanted
    special = set(tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS))
    assert sum(i in special for i in ids) == 9
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Be brief.HiHello!1 + 1"


def test_held_out_wordings_are_not_in_the_training_text():
    topics = {topic.name: topic for topic in read_topics()}
    trained = {plain(w) for topic in topics.values() for w in (*topic.written, *topic.templated)}
    held_out = read_held_out()
    assert len(held_out) >= 20
    assert held_out.keys() <= topics.keys()
    for wordings in held_out.values():
        assert len(wordings) >= 3
        assert not trained & {plain(wording) for wording in wordings}


def test_held_out_pairs_are_some_in_both_orders():
    pairs = {(a, b) for a in range(100) for b in range(100) if is_held_out(a, b)}
    assert 300 < len(pairs) < 700
    assert pairs == {(b, a) for a, b in pairs}


def test_answers(model: CausalLM, tokenizer: Any):
    answers = {topic.name: topic.answer for topic in read_topics()}
    asked = {
        "block_table": "What is a block table?",
        "paged_attention": "Explain paged attention, please.",
        "server_start": "How do I start the server?",
        "identity": "Who are you?",
    }
    said = answer(model, tokenizer, list(asked.values()), 90)
    assert dict(zip(asked, said, strict=True)) == {name: answers[name] for name in asked}


def test_sums(model: CausalLM, tokenizer: Any):
    pairs = [
        (23, 45),
        (17, 25),
        (99, 99),
        (58, 67),
        (10, 90),
        (34, 34),
        (76, 5),
        (88, 13),
        (49, 51),
        (62, 29),
    ]
    wordings = choices("what is {a} + {b}? | {a}+{b}= | add {a} and {b} | compute {a} plus {b}.")
    questions, right = sum_questions(wordings, pairs, seed=0)
    said = answer(model, tokenizer, questions, 16)
    assert sum(a == r for a, r in zip(said, right, strict=True)) >= 9, said

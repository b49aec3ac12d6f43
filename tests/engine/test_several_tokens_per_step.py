"""Steps that bring a sequence several tokens: the outputs are those of one token per step."""

import dataclasses

import pytest
from helpers.scripted_engine import ScriptedExecutor, no_block_lost, run

from jax_paged import LLMEngine, SamplingParams

TEXT = "abcabdabcdefgh ijk?"
SETTINGS = {
    "plain": {},
    "logprobs": {"logprobs": 1},
    "length": {"max_tokens": 7},
    "length and a stop string before it": {"max_tokens": 7, "stop": ["bd"]},
    "stop string": {"stop": ["abd"], "logprobs": 0},
    "stop string of one character": {"stop": ["c"]},
    "several, the first one listed last": {"stop": ["gh", "zzz", "efg", "ab"], "min_tokens": 8},
    "shown stop string": {"stop": ["cde"], "include_stop_str_in_output": True},
    "stop string after min_tokens": {"stop": ["ab"], "min_tokens": 5},
    "stop token": {"stop_token_ids": ["d"]},
    "stop token and a stop string before it": {"stop_token_ids": ["d"], "stop": ["a"], "min_tokens": 2},
    "no stop string, but the start of one": {"stop": ["ijkl", "k?"]},
    "samples": {"n": 3, "stop": ["def"]},
}


def outputs_of(scripted, num_tokens):
    args, _ = scripted(
        block_size=64, num_gpu_blocks_override=200, max_num_seqs=64, max_num_batched_tokens=512
    )
    with LLMEngine(args, ScriptedExecutor(args, num_tokens=num_tokens)) as engine:
        for name, settings in SETTINGS.items():
            stop = [engine.tokenizer.encode(t)[0] for t in settings.get("stop_token_ids", ())]
            params = SamplingParams(**({"max_tokens": None} | settings | {"stop_token_ids": stop}))
            engine.add_request(name, TEXT, params)
        outputs = run(engine)
        assert no_block_lost(engine)
    return {name: [dataclasses.asdict(o) for o in output.outputs] for name, output in outputs.items()}


@pytest.fixture(scope="module")
def expected(scripted):
    return outputs_of(scripted, 1)


def test_cases_are_as_demanding_as_they_should_be(expected):
    ends = {
        name: [(o["text"], o["finish_reason"], o["stop_reason"]) for o in os] for name, os in expected.items()
    }
    assert ends["plain"] == ends["logprobs"] == [(TEXT[:-1], "stop", None)]
    assert ends["length"] == [("abcabda", "length", None)]
    assert ends["length and a stop string before it"] == [("abca", "stop", "bd")]
    assert ends["stop string"] == [("abc", "stop", "abd")]
    assert ends["several, the first one listed last"] == [("abcabdabcd", "stop", "efg")]
    assert ends["stop string after min_tokens"] == [("abcabd", "stop", "ab")]
    assert ends["shown stop string"] == [("abcabdabcde", "stop", "cde")]
    assert ends["stop token and a stop string before it"] == [("abc", "stop", "a")]
    assert ends["no stop string, but the start of one"] == [(TEXT[:-1], "stop", None)]
    assert len(expected["samples"]) == 3


@pytest.mark.parametrize("num_tokens", [2, 3, 5, 30])
def test_equal_to_one_token_per_step(scripted, expected, num_tokens):
    assert outputs_of(scripted, num_tokens) == expected

"""Requests whose parameters forbid every token end with a reason, and the rest of the batch is exact."""

from typing import Any

import pytest
from helpers.real_model import EOS, Request, add, drain, mixed_requests, run, tokens_of

from jax_paged import LLMEngine, SamplingParams
from jax_paged.core.stop_conditions import NO_TOKEN_ALLOWED
from jax_paged.lab.recording import replay

ONLY = [300, 301]
# By name: the parameters, and the output before nothing is left to choose.
CONTRADICTIONS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "end token held back": ({"allowed_token_ids": [EOS], "min_tokens": 5}, []),
    "stop token held back": ({"allowed_token_ids": [300], "stop_token_ids": [300], "min_tokens": 1}, []),
    "bad word": ({"allowed_token_ids": [300], "bad_words_token_ids": [[300]]}, []),
    "bad words": ({"allowed_token_ids": ONLY, "bad_words_token_ids": [[300], [301]]}, []),
    "bad word in the output": ({"allowed_token_ids": [300], "bad_words_token_ids": [[300] * 4]}, [300] * 3),
    "logit_bias": (
        {"allowed_token_ids": [300], "bad_words_token_ids": [[300]], "logit_bias": {300: 99.0}},
        [],
    ),
    "penalties": (
        {"allowed_token_ids": [300], "bad_words_token_ids": [[300] * 3], "frequency_penalty": 1},
        [300] * 2,
    ),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_end_alone(engine: LLMEngine, temperature: float) -> None:
    good = mixed_requests(seed=5, count=8, max_prompt=60, max_output=25)
    expected = run(engine, good)
    lines: list[str] = []
    engine.record(lines.append)
    add(engine, good[:4])
    for name, (settings, _) in CONTRADICTIONS.items():
        params = SamplingParams(temperature=temperature, max_tokens=9, logprobs=1, **settings)
        engine.add_request(name, [1, 2, 3, 4], params)
    engine.step()
    add(engine, good[4:], prefix="later ")
    outputs = drain(engine)
    assert tokens_of([outputs[str(i)] for i in range(4)]) == tokens_of(expected[:4])
    assert tokens_of([outputs[f"later {i}"] for i in range(4)]) == tokens_of(expected[4:])
    for name, (_, token_ids) in CONTRADICTIONS.items():
        (completion,) = outputs[name].outputs
        assert (completion.finish_reason, completion.stop_reason) == ("abort", NO_TOKEN_ALLOWED), name
        assert list(completion.token_ids) == token_ids, name
        assert len(completion.logprobs or []) == len(token_ids), name
    assert replay(lines).num_steps > 0


@pytest.mark.parametrize("n", [1, 3])
def test_every_sample_of_a_request_ends(engine: LLMEngine, n: int) -> None:
    params = SamplingParams(n=n, seed=1, allowed_token_ids=ONLY, bad_words_token_ids=[[300], [301]])
    (output,) = run(engine, [Request([1, 2, 3], params)])
    ends = [(c.index, c.finish_reason, c.stop_reason, list(c.token_ids)) for c in output.outputs]
    assert ends == [(i, "abort", NO_TOKEN_ALLOWED, []) for i in range(n)]
    assert output.metrics.first_token_time is None


def test_what_min_tokens_holds_back_comes_after_them(engine: LLMEngine) -> None:
    """Parameters that forbid little are none of this."""
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=9, allowed_token_ids=[300, EOS])
    params.logit_bias = {EOS: 100.0}
    (output,) = run(engine, [Request([1, 2, 3], params)])
    (completion,) = output.outputs
    assert list(completion.token_ids) == [300, 300, 300, EOS]
    assert completion.finish_reason == "stop"

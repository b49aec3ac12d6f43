"""Requests that go on with the tokens that another engine has drawn, from every point of their outputs."""

import dataclasses

import pytest

from jax_paged import LLMEngine, SamplingParams
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.replicas.prior_outputs import PriorOutput, joined
from jax_paged.outputs import CompletionOutput, RequestOutput

PROMPT = list(range(3, 40))
CHOICES = {
    "greedy": SamplingParams(temperature=0, max_tokens=12),
    "drawn": SamplingParams(temperature=1, seed=7, max_tokens=12, ignore_eos=True),
    "top p": SamplingParams(temperature=1.3, seed=5, max_tokens=12, ignore_eos=True, top_p=0.8, top_k=40),
    "penalties": SamplingParams(
        temperature=1,
        seed=3,
        max_tokens=16,
        ignore_eos=True,
        presence_penalty=1.5,
        frequency_penalty=1.0,
        repetition_penalty=1.3,
    ),
    "min tokens": SamplingParams(temperature=0.9, seed=1, max_tokens=12, min_tokens=8),
    "several": SamplingParams(temperature=1, seed=11, n=3, max_tokens=9),
    "log-probabilities": SamplingParams(temperature=1, seed=2, max_tokens=9, logprobs=3),
}


def run(engine: LLMEngine, checked: CheckedRequest) -> list[RequestOutput]:
    """Runs a request; returns its outputs so far, after every step."""
    engine.add_request("a", checked)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def given(output: CompletionOutput) -> PriorOutput:
    values = output.token_ids, output.logprobs, output.finish_reason, output.stop_reason
    tokens, logprobs, *ending = values
    return PriorOutput(list(tokens), None if logprobs is None else list(logprobs), *ending)


def values(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (list(o.token_ids), o.text, o.finish_reason, o.stop_reason, [list(e) for e in o.logprobs or ()])
        for o in output.outputs
    ]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_request_goes_on_from_everywhere_as_if_nothing_had_happened(engine: LLMEngine, choice: str) -> None:
    checked = engine.check_request({"prompt_token_ids": PROMPT}, CHOICES[choice])
    parts = run(engine, checked)
    for part in parts[:-1]:
        begun = dataclasses.replace(checked, prior_outputs=tuple(given(output) for output in part.outputs))
        assert values(run(engine, begun)[-1]) == values(parts[-1])


def test_samples_that_have_ended_stay_as_they_are(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=1, seed=4, n=2, max_tokens=8, ignore_eos=True)
    checked = engine.check_request({"prompt_token_ids": PROMPT}, params)
    whole = run(engine, checked)[-1]
    first, second = (given(output) for output in whole.outputs)
    begun = PriorOutput(second.token_ids[:3])
    (*_, last) = run(engine, dataclasses.replace(checked, prior_outputs=(first, begun)))
    assert values(last)[0][0] == first.token_ids
    assert values(last)[1] == values(whole)[1]


def test_text_that_was_held_back_for_a_stop_string_comes_behind_the_seam(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=1, seed=9, max_tokens=12, ignore_eos=True)
    text = run(engine, engine.check_request({"prompt_token_ids": PROMPT}, params))[-1].outputs[0].text
    # It begins in one token, and ends in another.
    stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]
    params = dataclasses.replace(params, stop=[stop])
    checked = engine.check_request({"prompt_token_ids": PROMPT}, params)
    parts = run(engine, checked)
    assert parts[-1].outputs[0].stop_reason == stop
    for part in parts[:-1]:
        begun = dataclasses.replace(checked, prior_outputs=(given(part.outputs[0]),))
        assert values(run(engine, begun)[-1]) == values(parts[-1])


def test_parts_are_joined() -> None:
    parts = [PriorOutput([1, 2]), PriorOutput([3]), PriorOutput((), None, "stop", 3)]
    assert joined(parts) == PriorOutput([1, 2, 3], None, "stop", 3)
    assert joined([]) == PriorOutput([])

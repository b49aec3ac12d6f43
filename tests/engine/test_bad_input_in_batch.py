"""Bad requests, NaN and aborts in the middle of a batch: the others are exact, and no block is lost."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Request,
    add,
    drain,
    greedy_requests,
    make_engine,
    nan_embedding,
    reschedule,
    reset,
    run,
    tokens_of,
)

from jax_paged import BeamSearchParams, LLMEngine, SamplingParams
from jax_paged.core.stop_conditions import POOL_TOO_SMALL

NAN_TOKEN = 300


def _without_nan_token(requests: list[Request]) -> list[Request]:
    bias = {NAN_TOKEN: -100.0}
    return [
        Request(
            [1 if t == NAN_TOKEN else t for t in r.prompt],
            SamplingParams(temperature=0, max_tokens=r.params.max_tokens, logit_bias=bias),
        )
        for r in requests
    ]


GOOD = _without_nan_token(greedy_requests(seed=9, count=8))


@pytest.fixture(scope="module")
def expected(session_engine: LLMEngine) -> list[list[int]]:
    return tokens_of(run(reset(session_engine), GOOD))


def _params(**settings: Any) -> Callable[[LLMEngine], None]:
    return lambda engine: engine.add_request("bad", [1, 2], SamplingParams(**settings))


def _beams(**settings: Any) -> Callable[[LLMEngine], None]:
    return lambda engine: engine.add_request("bad", [1, 2], BeamSearchParams(**settings))


def _prompt(prompt: Any, max_tokens: int = 4) -> Callable[[LLMEngine], None]:
    return lambda engine: engine.add_request("bad", prompt, SamplingParams(max_tokens=max_tokens))


def _option(**options: Any) -> Callable[[LLMEngine], None]:
    return lambda engine: engine.add_request("bad", [1, 2], SamplingParams(max_tokens=4), **options)


BAD: dict[str, tuple[Callable[[LLMEngine], None], str]] = {
    # The first one tried: the request of this id is still running then.
    "id in use": (lambda engine: add(engine, GOOD[:1]), "request_id"),
    "empty prompt": (_prompt([]), "at least one token"),
    "empty text": (_prompt(""), "`prompt` must be a non-empty string, got ''"),
    "negative id": (_prompt([1, -1]), r"`prompt_token_ids\[1\]` must be .*got -1"),
    "id out of vocabulary": (_prompt([VOCAB_SIZE]), rf"\[0, {VOCAB_SIZE - 1}\], got {VOCAB_SIZE}"),
    "id beyond int32": (_prompt([2**32 + 5]), str(2**32 + 5)),
    "boolean id": (_prompt([1, True]), "True"),
    "float id": (_prompt([1.0]), "1.0"),
    "no prompt": (_prompt(None), "None"),
    "prompt too long": (_prompt([1] * MAX_MODEL_LEN), f"{MAX_MODEL_LEN}"),
    "prompt and one token too long": (
        _prompt([1] * MAX_MODEL_LEN, 1),
        rf"must be at most {MAX_MODEL_LEN - 1} \(max_model_len - 1\), got {MAX_MODEL_LEN}",
    ),
    "temperature": (_params(temperature=-0.1), "`temperature` must be .*got -0.1"),
    "temperature NaN": (_params(temperature=math.nan), "`temperature` must be .*got nan"),
    "top_p 0": (_params(top_p=0.0), "top_p"),
    "top_p NaN": (_params(top_p=math.nan), "top_p"),
    "top_k": (_params(top_k=-2), "top_k"),
    "min_p": (_params(min_p=1.5), "min_p"),
    "presence_penalty": (_params(presence_penalty=2.5), "presence_penalty"),
    "frequency_penalty": (_params(frequency_penalty=math.inf), "frequency_penalty"),
    "repetition_penalty": (_params(repetition_penalty=0.0), "repetition_penalty"),
    "seed": (_params(seed=-2), "seed"),
    "n": (_params(n=0), "`n` must be an integer of at least 1, got 0"),
    "n over the seats": (_params(n=17), r"`n` must be an integer in \[1, 16\] \(the smaller of .*\), got 17"),
    "best_of": (_params(n=3, best_of=2), r"`best_of` must be an integer of at least 3 \(n\), got 2"),
    "best_of over the seats": (
        _params(n=2, best_of=17),
        r"`best_of` must be an integer in \[1, 16\] \(the smaller of .*\), got 17",
    ),
    "best_of True": (_params(best_of=True), "`best_of` must be .*got True"),
    "beam_width": (_beams(beam_width=0), "`beam_width` must be an integer of at least 1, got 0"),
    # The device reports 20 tokens, and a beam needs twice the width.
    "beam_width over the top": (
        _beams(beam_width=11),
        r"`beam_width` must be an integer in \[1, 10\], got 11",
    ),
    "beam max_tokens": (_beams(beam_width=2, max_tokens=0), "`max_tokens` must be .*got 0"),
    "beams too long": (
        lambda engine: engine.add_request("bad", [1] * MAX_MODEL_LEN, BeamSearchParams(2)),
        rf"must be at most {MAX_MODEL_LEN - 1} \(max_model_len - 1\)",
    ),
    "beam temperature": (_beams(beam_width=2, temperature=-1.0), "`temperature` must be .*got -1.0"),
    "length_penalty": (_beams(beam_width=2, length_penalty=math.nan), "`length_penalty` must be .*got nan"),
    "ignore_eos": (_beams(beam_width=2, ignore_eos=1), "`ignore_eos` must be .*got 1"),
    "priority": (_option(priority=1), "`priority` must be 0 with scheduling_policy='fcfs', got 1"),
    "priority beyond int64": (_option(priority=2**63), "`priority` must be .*got 9223372036854775808"),
    "priority True": (_option(priority=True), "`priority` must be .*got True"),
    "cache_salt bytes": (_option(cache_salt=b"x"), "`cache_salt` must be a string, got b'x'"),
    "max_tokens": (_params(max_tokens=0), "max_tokens"),
    "min_tokens": (_params(max_tokens=2, min_tokens=3), "min_tokens"),
    "logprobs": (_params(logprobs=21), "logprobs"),
    "prompt_logprobs": (_params(prompt_logprobs=-2), "prompt_logprobs"),
    "logit_bias id": (_params(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
    "logit_bias NaN": (_params(logit_bias={1: math.nan}), "logit_bias"),
    "stop_token_ids": (_params(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
    # All of them are held back until min_tokens, which takes a row of fixed size each.
    "stop": (_params(stop=[""]), "stop"),
    "cache_salt": (_option(cache_salt=None), "`cache_salt` must be a string, got None"),
    "arrival_time": (
        _option(arrival_time="now"),
        "`arrival_time` must be a finite number or None, got 'now'",
    ),
    "arrival_time of another clock": (
        _option(arrival_time=1e300),
        r"`arrival_time` must be at most .*, the current value of time.monotonic\(\) .*got 1e\+300",
    ),
    "arrival_time NaN": (_option(arrival_time=math.nan), "`arrival_time` must be .*got nan"),
    "arrival_time infinite": (_option(arrival_time=-math.inf), "`arrival_time` must be .*got -inf"),
    "arrival_time beyond a float": (_option(arrival_time=10**400), "`arrival_time` must be .*got 10000"),
}


def test_bad_requests_do_not_touch_the_batch(engine: LLMEngine, expected: list[list[int]]) -> None:
    add(engine, GOOD)
    bad = list(BAD.values())[::-1]
    outputs = {}
    while engine.has_unfinished_requests():
        for _ in range(3):
            if bad:
                request, message = bad.pop()
                num_free = engine.scheduler.block_manager.num_free_blocks
                with pytest.raises(ValueError, match=message):
                    request(engine)
                assert engine.scheduler.block_manager.num_free_blocks == num_free
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert not bad
    assert drain(engine) == {}
    assert tokens_of([outputs[str(i)] for i in range(len(GOOD))]) == expected


def test_requests_that_never_fit_the_pool(small_engine: LLMEngine, expected: list[list[int]]) -> None:
    # 40 blocks of 4 tokens, fewer than the engine knows of: what it would refuse gets to the scheduler.
    reschedule(small_engine, num_blocks=41)
    fitting = [i for i, r in enumerate(GOOD) if len(r.prompt) + len(expected[i]) < 160]
    assert len(fitting) >= 3
    add(small_engine, [GOOD[i] for i in fitting])
    small_engine.step()
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    small_engine.add_request("prompt too long", [1] * 161, params)
    # The outputs of these outgrow the pool: they end at its size.
    small_engine.add_request("long", [1] * 130, params)
    samples = dataclasses.replace(params, n=4, temperature=1, seed=5)
    small_engine.add_request("samples", [1] * 130, samples)
    small_engine.add_request("beams", [1] * 130, BeamSearchParams(4, max_tokens=100, ignore_eos=True))
    outputs = drain(small_engine)
    assert tokens_of([outputs[str(i)] for i in range(len(GOOD)) if str(i) in outputs]) == [
        expected[i] for i in fitting
    ]
    assert not outputs["prompt too long"].outputs[0].token_ids
    assert len(outputs["long"].outputs[0].token_ids) == 160 + 1 - 130
    for name, reasons in {
        "prompt too long": ["error"],
        "long": ["length"],
        "samples": ["length"] * 4,
        "beams": ["length"] * 4,
    }.items():
        assert [o.finish_reason for o in outputs[name].outputs] == reasons, name
        assert {o.stop_reason for o in outputs[name].outputs} == {POOL_TOO_SMALL}, name
    # 33 blocks hold the prompt, the last of them copied by each sequence: 2 more for 4 of them.
    for name in ("samples", "beams"):
        assert {len(o.token_ids) for o in outputs[name].outputs} == {7}, name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "LlamaForCausalLM"),
        ({"num_hidden_layers": 3}, "layers.2.self_attn.q_proj.weight is missing"),
        ({"intermediate_size": 96}, "must have shape"),
    ],
)
def test_an_engine_that_can_not_start_leaves_others_alone(
    engine: LLMEngine,
    expected: list[list[int]],
    checkpoint: Path,
    tmp_path: Path,
    config: dict[str, Any],
    message: str,
) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    original = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(original | config))
    add(engine, GOOD)
    engine.step()
    with pytest.raises(ValueError, match=message):
        make_engine(tmp_path)
    outputs = drain(engine)
    assert tokens_of([outputs[str(i)] for i in range(len(GOOD))]) == expected


@pytest.mark.parametrize("budget", [128, 24])
def test_nan_ends_its_request_alone(engine: LLMEngine, expected: list[list[int]], budget: int) -> None:
    engine.scheduler.max_num_batched_tokens = budget
    params = SamplingParams(temperature=0.7, max_tokens=20, logprobs=2)
    shared = GOOD[0].prompt
    bad = {
        "at once": Request([5, NAN_TOKEN], params),
        "early in a long prompt": Request([NAN_TOKEN, *([9] * 150)], params),
        # Its first blocks are good ones, which others share.
        "late in a shared prompt": Request([*shared, *([9] * 40), NAN_TOKEN, *([9] * 40)], params),
        # It is the output that goes wrong: the NaN token is forced as the first one.
        "in the output": Request([3, 4], SamplingParams(temperature=0, logit_bias={NAN_TOKEN: 100.0})),
        "samples": Request([6, NAN_TOKEN], dataclasses.replace(params, n=2)),
        "beams": Request([7, NAN_TOKEN], params, BeamSearchParams(2)),
    }
    add(engine, GOOD[:4])
    for request_id, request in bad.items():
        engine.add_request(request_id, request.prompt, request.beams or request.params)
    for i in range(4, 8):
        engine.add_request(str(i), GOOD[i].prompt, GOOD[i].params)
    with nan_embedding(engine, [NAN_TOKEN]):
        outputs = drain(engine)
    assert tokens_of([outputs[str(i)] for i in range(len(GOOD))]) == expected
    for request_id in bad:
        for completion in outputs[request_id].outputs:
            assert completion.finish_reason == "abort", request_id
            assert "finite" in str(completion.stop_reason), request_id
            assert list(completion.token_ids) == ([NAN_TOKEN] if request_id == "in the output" else [])
    # Nothing that held NaN was kept as a cached prefix: with the weights healed all is well.
    again = run(engine, [*bad.values(), *GOOD])
    assert {o.outputs[0].finish_reason for o in again[: len(bad)]} <= {"stop", "length"}
    assert tokens_of(again[len(bad) :]) == expected


def test_blocks_that_held_nan_are_reused(small_engine: LLMEngine, expected: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=5)
    with nan_embedding(small_engine, list(range(VOCAB_SIZE))):
        outputs = run(small_engine, [Request([i] * 150, params) for i in range(20)])
    assert {o.outputs[0].finish_reason for o in outputs} == {"abort"}
    held_nan = np.isnan(np.asarray(small_engine.executor.runner._state.kv_cache[0])).any(axis=(1, 2, 3, 4))
    assert held_nan.sum() >= 8
    # The blocks freed last are handed out first.
    assert held_nan[list(small_engine.scheduler.block_manager.pool._free)[:8]].all()
    assert tokens_of(run(small_engine, GOOD)) == expected


def test_abort_in_the_middle(engine: LLMEngine, expected: list[list[int]]) -> None:
    engine.scheduler.max_num_batched_tokens = 24
    long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    engine.add_request("decoding", [1, 2, 3], long)
    add(engine, GOOD)
    engine.add_request("waiting", [4] * 100, long)
    engine.step()
    engine.step()
    assert "decoding" in engine.scheduler.queues.running
    assert "waiting" in engine.scheduler.queues.waiting
    being_prefilled = next(reversed(engine.scheduler.queues.running))
    assert not engine.scheduler.queues.running[being_prefilled].sequences[0].output_token_ids
    state = engine.abort_request("decoding")
    assert state is not None
    assert state.output().outputs[0].finish_reason == "abort"
    assert state.output().finished
    engine.abort_request("waiting")
    engine.abort_request(being_prefilled)
    assert engine.abort_request("waiting") is None
    assert engine.abort_request("unknown") is None
    outputs = drain(engine)
    others = [i for i in range(len(GOOD)) if str(i) != being_prefilled]
    assert outputs.keys() == {str(i) for i in others}
    assert tokens_of([outputs[str(i)] for i in others]) == [expected[i] for i in others]

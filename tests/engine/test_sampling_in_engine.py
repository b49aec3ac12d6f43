"""Sampling parameters through the real engine: against the dense model's logits, alone and in a batch."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.real_model import (
    EOS,
    TOLERANCE,
    VOCAB_SIZE,
    DenseModel,
    Request,
    log_softmax,
    mixed_requests,
    reset,
    run,
    run_alone,
    tokens_of,
)

from jax_paged import LLMEngine, SamplingParams
from jax_paged.outputs import RequestOutput
from jax_paged.worker.sampling.sampler import IN_PROMPT, SamplerOptions, SamplingBatch

REQUESTS = mixed_requests(seed=1, count=16, max_prompt=100, max_output=40)


@pytest.fixture(scope="module")
def alone(session_engine: LLMEngine) -> list[RequestOutput]:
    return run_alone(reset(session_engine), REQUESTS)


def test_batched(engine: LLMEngine, alone: list[RequestOutput]) -> None:
    outputs = run(engine, REQUESTS)
    assert tokens_of(outputs) == tokens_of(alone)
    assert len({t for tokens in tokens_of(alone) for t in tokens}) > 100
    others = run(engine, mixed_requests(seed=2, count=9, max_prompt=100, max_output=40) + REQUESTS[::-1])
    assert tokens_of(others[9:]) == tokens_of(alone)[::-1]


def test_chunked(engine: LLMEngine, alone: list[RequestOutput]) -> None:
    engine.scheduler.max_num_batched_tokens = 20
    assert tokens_of(run(engine, REQUESTS)) == tokens_of(alone)


def test_preempted(small_engine: LLMEngine, alone: list[RequestOutput]) -> None:
    outputs = run(small_engine, REQUESTS)
    assert sum(o.metrics.num_preemptions for o in outputs) >= 3
    assert tokens_of(outputs) == tokens_of(alone)
    # A preempted request computes its prompt twice, and reports it once.
    for output, request in zip(outputs, REQUESTS, strict=True):
        if request.params.prompt_logprobs is not None:
            assert len(output.prompt_logprobs or []) == len(request.prompt)


def _bias(request: Request, num_output: int) -> dict[int, float]:
    bias = dict(request.params.logit_bias or {})
    if num_output < request.params.min_tokens:
        bias[EOS] = -math.inf
    return bias


def test_tokens_are_those_of_the_dense_logits(alone: list[RequestOutput], dense: DenseModel) -> None:
    """The sampler, given the dense logits and parameters straight from the request, draws the same."""
    draw = jax.jit(SamplerOptions(max_logprobs=1).sample)
    rows, num_bias = 40, 8
    for request, output, logits in zip(REQUESTS, alone, dense.output_logits(alone), strict=True):
        p, n = request.params, len(logits)
        text = np.array(request.prompt + list(output.outputs[0].token_ids))
        total = len(request.prompt) + np.arange(rows)
        counts = np.zeros((rows, VOCAB_SIZE), np.int32)
        ids, values = np.full((rows, num_bias), VOCAB_SIZE), np.zeros((rows, num_bias))
        for i in range(n):
            counts[i, request.prompt] = IN_PROMPT
            np.add.at(counts[i], text[len(request.prompt) : total[i]], 1)
            bias = _bias(request, i)
            ids[i, : len(bias)], values[i, : len(bias)] = list(bias), list(bias.values())

        def column(x: float, dtype: type = np.float32) -> jax.Array:
            return jnp.full(rows, x, dtype)

        assert p.seed is not None
        batch = SamplingBatch(
            temperature=column(p.temperature),
            top_p=column(p.top_p),
            top_k=column(p.top_k, np.int32),
            min_p=column(p.min_p),
            presence_penalty=column(p.presence_penalty),
            frequency_penalty=column(p.frequency_penalty),
            repetition_penalty=column(p.repetition_penalty),
            logprob_temperature=column(1.0),
            seed=jnp.tile(jnp.array([p.seed & 0xFFFFFFFF, p.seed >> 32], jnp.uint32), (rows, 1)),
            position=jnp.asarray(total, jnp.int32),
            wants_logprobs=column(False, np.bool_),
            count_slots=jnp.arange(rows, dtype=jnp.int32),
            token_counts=jnp.asarray(counts, jnp.int32),
            has_token_mask=column(False, np.bool_),
            keeps_draw=column(False, np.bool_),
            token_mask=jnp.zeros((rows, -(-VOCAB_SIZE // 32)), jnp.int32),
            bias_ids=jnp.asarray(ids, jnp.int32),
            bias_values=jnp.asarray(values, jnp.float32),
        )
        padded = np.zeros((rows, VOCAB_SIZE), np.float32)
        padded[:n] = logits
        expected = np.asarray(draw(padded, batch).token_ids)[:n]
        assert list(output.outputs[0].token_ids) == expected.tolist(), p


def test_logprobs_are_those_of_the_dense_logits(alone: list[RequestOutput], dense: DenseModel) -> None:
    assert sum(r.params.logprobs is not None for r in REQUESTS) >= 4
    for request, output, logits in zip(REQUESTS, alone, dense.output_logits(alone), strict=True):
        completion, k = output.outputs[0], request.params.logprobs
        reference = log_softmax(logits)
        chosen = reference[np.arange(len(reference)), completion.token_ids]
        # A sum of n values, each within the tolerance.
        assert abs(completion.cumulative_logprob - chosen.sum()) < TOLERANCE * len(chosen)
        if k is None:
            assert completion.logprobs is None
            continue
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(chosen)
        for entry, row, token_id in zip(completion.logprobs, reference, completion.token_ids, strict=True):
            assert next(iter(entry)) == token_id
            assert k <= len(entry) <= k + 1
            assert all(abs(x.logprob - row[i]) < TOLERANCE for i, x in entry.items())
            assert entry[token_id].rank is not None
            bounds = [1 + (row > row[token_id] + side * TOLERANCE).sum() for side in (1, -1)]
            assert bounds[0] <= entry[token_id].rank <= bounds[1]
            top = sorted((x.logprob for x in entry.values() if (x.rank or 0) <= k), reverse=True)
            assert np.allclose(top, np.sort(row)[::-1][:k], rtol=0, atol=TOLERANCE)


def test_seeds_matter(engine: LLMEngine) -> None:
    def draw(seed: int | None) -> Request:
        return Request([1, 2, 3], SamplingParams(temperature=1, seed=seed, max_tokens=20, ignore_eos=True))

    tokens = tokens_of(run(engine, [draw(5), draw(6), draw(5), draw(5 + 2**32), draw(None), draw(None)]))
    assert tokens[0] == tokens[2]
    different = [tokens[i] for i in (0, 1, 3, 4, 5)]
    assert len(set(map(tuple, different))) == 5


GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = [np.random.default_rng(i).integers(0, VOCAB_SIZE, 5 + 7 * i).tolist() for i in range(6)]


@pytest.fixture(scope="module")
def plain(session_engine: LLMEngine) -> list[RequestOutput]:
    return run(reset(session_engine), [Request(p, GREEDY) for p in PROMPTS])


def _with_one_changed(
    engine: LLMEngine, plain: list[RequestOutput], **changes: Any
) -> tuple[RequestOutput, list[int]]:
    """Runs all prompts, the third with other parameters; returns its output and its plain tokens."""
    params = dataclasses.replace(GREEDY, **changes)
    outputs = run(engine, [Request(p, params if i == 2 else GREEDY) for i, p in enumerate(PROMPTS)])
    others = [0, 1, 3, 4, 5]
    assert [tokens_of(outputs)[i] for i in others] == [tokens_of(plain)[i] for i in others]
    return outputs[2], tokens_of(plain)[2]


def test_stop_token_ids(engine: LLMEngine, plain: list[RequestOutput]) -> None:
    stop = tokens_of(plain)[2][9]
    output, tokens = _with_one_changed(engine, plain, stop_token_ids=[stop])
    assert list(output.outputs[0].token_ids) == tokens[: tokens.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop


def test_min_tokens_hold_a_stop_token_back(
    engine: LLMEngine, plain: list[RequestOutput], dense: DenseModel
) -> None:
    stop = tokens_of(plain)[2][3]
    output, tokens = _with_one_changed(engine, plain, stop_token_ids=[stop], min_tokens=10)
    ours = list(output.outputs[0].token_ids)
    assert ours[:3] == tokens[:3]
    assert stop not in ours[:10]
    (logits,) = dense.output_logits([output])
    logits[:10, stop] = -np.inf
    assert ours == logits.argmax(-1).tolist()


def test_end_token(engine: LLMEngine, plain: list[RequestOutput]) -> None:
    bias = {EOS: 100.0}
    output, _ = _with_one_changed(engine, plain, logit_bias=bias, ignore_eos=False)
    assert list(output.outputs[0].token_ids) == [EOS]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None
    output, _ = _with_one_changed(engine, plain, logit_bias=bias, ignore_eos=False, min_tokens=4)
    assert EOS not in list(output.outputs[0].token_ids)[:4]
    assert list(output.outputs[0].token_ids)[4:] == [EOS]
    output, _ = _with_one_changed(engine, plain, logit_bias=bias)
    assert list(output.outputs[0].token_ids) == [EOS] * 30


def test_logit_bias(engine: LLMEngine, plain: list[RequestOutput], dense: DenseModel) -> None:
    first = tokens_of(plain)[2][0]
    bias = {first: -100.0, 11: 1.5, VOCAB_SIZE - 1: 1.5}
    output, _ = _with_one_changed(engine, plain, logit_bias=bias)
    (logits,) = dense.output_logits([output])
    logits[:, list(bias)] += list(bias.values())
    assert list(output.outputs[0].token_ids) == logits.argmax(-1).tolist()
    assert first not in output.outputs[0].token_ids


def test_stop_string(engine: LLMEngine, plain: list[RequestOutput]) -> None:
    text = plain[2].outputs[0].text
    assert len(text) >= 20
    stop = text[8:11]
    output, tokens = _with_one_changed(engine, plain, stop=[stop, "not in the text"])
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop
    assert list(completion.token_ids) == tokens[: len(completion.token_ids)]
    assert len(completion.token_ids) < 30

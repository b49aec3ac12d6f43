"""Log-probabilities of given texts: to the bit those that the tokens were drawn with."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_paged import LLM, SamplingParams
from jax_paged.models.weights import load_model

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(8, 300, n).tolist() for n in (3, 30, 11, 17)]
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 80,
}


def params(**kwargs: Any) -> SamplingParams:
    defaults = {"temperature": 1.2, "seed": 5, "max_tokens": 20, "ignore_eos": True, "logprobs": 0}
    return SamplingParams(**defaults | kwargs)


def drawn(outputs: list[Any]) -> tuple[list[list[int]], list[int], list[list[float]]]:
    """Returns the texts of all outputs, the lengths of their prompts, and the log-probabilities."""
    samples = [(o.prompt_token_ids, s) for o in outputs for s in o.outputs]
    texts = [prompt + list(s.token_ids) for prompt, s in samples]
    logprobs = [[at[t].logprob for t, at in zip(s.token_ids, s.logprobs, strict=True)] for _, s in samples]
    return texts, [len(prompt) for prompt, _ in samples], logprobs


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), dtype=request.param, **SETTINGS) as llm:
        llm.llm_engine.executor.wait_until_compiled()
        yield llm


def test_the_importance_ratio_of_a_rollout_is_one(llm: LLM) -> None:
    # Scored in the same batch the steps have the same shapes: then nothing at all may differ.
    texts, lens, logprobs = drawn(llm.generate(PROMPTS, params(), use_tqdm=False))
    assert llm.llm_engine.score(texts, lens) == logprobs
    texts, lens, logprobs = drawn(llm.generate(PROMPTS[2], params(), use_tqdm=False))
    assert (
        llm.llm_engine.score(texts, lens, params(temperature=0.3)) == logprobs
    )  # how tokens are drawn does not count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_one_in_any_batch_of_an_engine_that_is_batch_invariant(
    checkpoint: Path, dtype: Any
) -> None:
    settings = SETTINGS | {"enable_prefix_caching": True, "num_gpu_blocks_override": 30}
    with LLM(str(checkpoint), dtype=dtype, batch_invariant=True, **settings) as llm:
        # They end at different times, and lose their blocks to each other.
        given = params(n=2, max_tokens=32, ignore_eos=False, stop_token_ids=list(range(10, 30)))
        outputs = llm.generate(PROMPTS, given, use_tqdm=False)
        texts, lens, logprobs = drawn(outputs)
        assert len(set(map(len, logprobs))) > 2
        assert llm.llm_engine.score(texts, lens) == logprobs
        for text, n, want in zip(texts[:3], lens, logprobs, strict=False):
            assert llm.llm_engine.score([text], n) == [want]
            assert llm.llm_engine.score([text])[0][n - 1 :] == want  # the prompt token by token


def test_every_token_behind_the_first_is_scored_as_the_dense_model_does(llm: LLM, checkpoint: Path) -> None:
    if llm.llm_engine.config.dtype == "bfloat16":
        pytest.skip("other sums, other roundings")
    model = load_model(checkpoint, "float32").model
    scores = llm.llm_engine.score(PROMPTS)
    for text, score in zip(PROMPTS, scores, strict=True):
        logits = np.asarray(model(np.asarray([text])))[0, :-1].astype(np.float64)
        total = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        want = np.take_along_axis(logits, np.asarray(text[1:])[:, None], 1)[:, 0] - total
        np.testing.assert_allclose(score, want, atol=1e-4)


def test_forced_tokens_are_the_output_until_they_end(llm: LLM) -> None:
    given = params(forced_token_ids=[9, 8, 9], n=2, max_tokens=6, allowed_token_ids=[20, 21])
    (output,) = llm.generate(PROMPTS[0], given, use_tqdm=False)
    for sample in output.outputs:
        assert list(sample.token_ids[:3]) == [9, 8, 9]
        assert set(sample.token_ids[3:]) <= {20, 21}
    with pytest.raises(ValueError, match="forced_token_ids"):
        llm.generate(PROMPTS[0], params(forced_token_ids=[384]), use_tqdm=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2], [3]],), r"the length of `token_lists\[1\]` must be an integer in \[2, .*got 1"),
        (([[1, 2]], 2), r"`num_prompt_tokens` must be .*1\], got 2"),
        (
            ([[1, 2]], [1, 1]),
            r"`num_prompt_tokens` must be an integer or a list of 1 integers, got \[1, 1\]",
        ),
        (([[1, 2], [1, 999]],), r"token_lists\[1\]: each token id in `forced_token_ids` must be .*got 999"),
        (([[1] * 65],), r"the length of `token_lists\[0\]` must be an integer in \[2, 64\], got 65"),
    ],
)
def test_texts_that_are_not_scored(llm: LLM, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.llm_engine.score(*arguments)
    llm.llm_engine.add_request("a", PROMPTS[0], params())
    with pytest.raises(RuntimeError, match="requests are running"):
        llm.llm_engine.score([[1, 2]])
    llm.llm_engine.abort_request("a")


def processed(logits: np.ndarray, given: SamplingParams) -> np.ndarray:
    """Returns log-probabilities of the distribution that is drawn from, in float64."""
    x = logits.astype(np.float64)
    for token, bias in (given.logit_bias or {}).items():
        x[token] += bias
    if given.temperature:
        x /= given.temperature
        kept = np.ones(len(x), bool)
        if given.min_p:
            kept &= x >= x.max() + math.log(given.min_p)
        if given.top_k:
            kept &= x >= np.sort(x[kept])[-min(given.top_k, kept.sum())]
        order = np.argsort(-x)
        p = np.where(kept, np.exp(x - x.max()), 0)[order]
        before = np.cumsum(p / p.sum()) - p / p.sum()
        kept[order[before >= given.top_p]] = False
        x = np.where(kept, x, -np.inf)
    return x - x.max() - math.log(np.exp(x - x.max()).sum())


@pytest.mark.quick
def test_processed_logprobs_are_of_what_is_drawn_from(checkpoint: Path) -> None:
    model = load_model(checkpoint, "float32").model
    each = [
        params(temperature=0.0, logit_bias={12: 5.0}, logprobs=5),
        params(temperature=0.7, top_k=3, logprobs=5),
        params(temperature=1.5, top_p=0.5, logit_bias={12: 5.0}, logprobs=5),
        params(temperature=0.9, min_p=0.05, logprobs=5),
    ]
    with LLM(str(checkpoint), dtype="float32", logprobs_mode="processed_logprobs", **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, each, use_tqdm=False)
        texts, lens, logprobs = drawn(outputs)
        for i, given in enumerate(each):  # scored as it was drawn
            np.testing.assert_allclose(
                llm.llm_engine.score([texts[i]], lens[i], given), [logprobs[i]], atol=1e-4
            )
    for text, first, output, given in zip(texts, lens, outputs, each, strict=True):
        logits = np.asarray(model(np.asarray([text])))[0, first - 1 : -1]
        for row, entry in zip(logits, output.outputs[0].logprobs, strict=True):
            want = processed(row, given)
            for token, found in entry.items():
                np.testing.assert_allclose(found.logprob, want[token], atol=1e-4)


@pytest.mark.quick
def test_modes_that_there_are_not(checkpoint: Path) -> None:
    with pytest.raises(
        ValueError, match=r"`logprobs_mode` must be 'raw_logprobs' or 'processed_.*got 'raw_logits'"
    ):
        LLM(str(checkpoint), logprobs_mode="raw_logits")

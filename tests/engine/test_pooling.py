"""Pooling: embeddings, classes and scores against transformers, alone and together, beside generation."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_paged import LLM, PoolingParams, SamplingParams
from jax_paged.models.registry import POOLING_MODELS

pytestmark = pytest.mark.thorough

FIXTURES = Path(__file__).parent.parent / "models" / "pooling_fixtures"
RERANKER = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
OVERRIDES: dict[str, Any] = {
    "qwen3_reranker": RERANKER | {"architectures": ["Qwen3ForSequenceClassification"]},
    "qwen3_embedder": {"matryoshka_dimensions": [8, 16]},
}
NAMES = sorted(f.name for f in FIXTURES.iterdir())
# Float32 sums in another order.
MIN_COSINE, TOLERANCE = 1 - 1e-6, 1e-5


def cases_of(name: str) -> list[dict[str, Any]]:
    return json.loads((FIXTURES / name / "reference.json").read_text())["cases"]


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., LLM]]:
    made: dict[Any, LLM] = {}

    def make(name: str, **args: Any) -> LLM:
        key = name, *sorted(map(str, args.items()))
        if key not in made:
            sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**22}
            overrides = OVERRIDES.get(name)
            made[key] = LLM(str(FIXTURES / name), hf_overrides=overrides, **(sizes | args))
        return made[key]

    yield make
    for llm in made.values():
        llm.close()


def prompt_of(case: dict[str, Any], *, activates: bool = False) -> tuple[Any, PoolingParams]:
    second = case["second_text"]
    extra = None if second is None else {"compressed_token_type_ids": second}
    return case["token_ids"], PoolingParams(use_activation=activates, extra_kwargs=extra)


def pooled(llm: LLM, cases: list[dict[str, Any]], *, activates: bool = False) -> list[np.ndarray]:
    prompts, params = zip(*(prompt_of(case, activates=activates) for case in cases), strict=True)
    return [o.outputs.data for o in llm.encode(list(prompts), list(params), use_tqdm=False)]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.quick
def test_every_pooling_model_has_a_fixture() -> None:
    configs = [json.loads((FIXTURES / name / "config.json").read_text()) for name in NAMES]
    found = {config["architectures"][0] for config in configs}
    kinds = {name.replace("ForSequenceClassification", "").replace("Model", "") for name in POOLING_MODELS}
    assert all(any(name.startswith(kind) for name in found) for kind in kinds)


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers_alone_and_together(make: Callable[..., LLM], name: str) -> None:
    llm, cases = make(name), cases_of(name)
    for found, case in zip(pooled(llm, cases), cases, strict=True):
        want = np.array(case["pooled"])
        if len(want) > 3:
            assert cosine(found, want) >= MIN_COSINE
        np.testing.assert_allclose(found, want, rtol=TOLERANCE, atol=TOLERANCE)
    together = pooled(llm, cases, activates=True)
    for case, found in zip(cases, together, strict=True):
        (alone,) = pooled(llm, [case], activates=True)
        np.testing.assert_allclose(alone, found, rtol=0, atol=1e-6)


@pytest.mark.quick
def test_embeddings_and_their_sizes(make: Callable[..., LLM]) -> None:
    llm, cases = make("qwen3_embedder"), cases_of("qwen3_embedder")
    prompts = [case["token_ids"] for case in cases]
    for output, case in zip(llm.embed(prompts, use_tqdm=False), cases, strict=True):
        want = np.array(case["pooled"])
        np.testing.assert_allclose(output.outputs.embedding, want / np.linalg.norm(want), atol=1e-6)
        assert output.outputs.hidden_size == 32
        assert output.prompt_token_ids == case["token_ids"]
    cut = llm.embed(prompts, pooling_params=PoolingParams(dimensions=8), use_tqdm=False)
    for output, case in zip(cut, cases, strict=True):
        want = np.array(case["pooled"][:8])
        # The part is as far off as the whole, which is longer.
        longer = np.linalg.norm(case["pooled"]) / np.linalg.norm(want)
        np.testing.assert_allclose(
            output.outputs.embedding, want / np.linalg.norm(want), atol=1e-6 * longer, rtol=0
        )


@pytest.mark.quick
@pytest.mark.parametrize(("normalize", "use_activation"), [(True, False), (False, True)])
def test_normalize_overrides_use_activation(
    make: Callable[..., LLM], normalize: bool, use_activation: bool
) -> None:
    """In the parameters of a request and in the settings of an engine, as in vLLM."""
    prompt = cases_of("llama_mean")[0]["token_ids"]
    names = {"normalize": normalize, "use_activation": use_activation}
    by_request = make("llama_mean").embed([prompt], pooling_params=PoolingParams(**names), use_tqdm=False)
    by_engine = make("llama_mean", pooler_config=names).embed([prompt], use_tqdm=False)
    for (output,) in (by_request, by_engine):
        assert (abs(np.linalg.norm(output.outputs.embedding) - 1) < 1e-6) == normalize


@pytest.mark.parametrize("pooling_type", ["LAST", pytest.param("MEAN", marks=pytest.mark.slow)])
def test_long_texts_beside_generation(make: Callable[..., LLM], pooling_type: str) -> None:
    """In one engine, with chunks, cached prefixes and few blocks: as alone, and nothing is traced anew."""
    cases = [case for case in cases_of("qwen3_embedder") if len(case["token_ids"]) > 15]
    small = {"max_num_batched_tokens": 16, "block_size": 4, "num_gpu_blocks_override": 40}
    llm = make("qwen3_embedder", pooler_config={"pooling_type": pooling_type}, **small)
    engine = llm.llm_engine
    engine.executor.wait_until_compiled()
    want = {i: pooled(llm, [case])[0] for i, case in enumerate(cases)}
    prompts = [case["token_ids"][:30] for case in cases]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    num_traces = engine.executor.runner.compiled.num_traces  # pyright: ignore[reportAttributeAccessIssue]
    for i, case in enumerate(cases):
        prompt, given = prompt_of(case)
        engine.add_request(f"pool-{i}", prompt, given)
        engine.add_request(f"generate-{i}", prompts[i], params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    for i in range(len(cases)):
        found = outputs[f"pool-{i}"].outputs[0].captured["pooled"]
        np.testing.assert_allclose(found, want[i], rtol=0, atol=1e-6 * np.linalg.norm(want[i]))
        assert outputs[f"generate-{i}"].outputs[0].token_ids == texts[i]
    assert engine.executor.runner.compiled.num_traces == num_traces  # pyright: ignore[reportAttributeAccessIssue]


def test_all_hidden_states(make: Callable[..., LLM]) -> None:
    llm = make("llama_mean", max_num_batched_tokens=16)
    for case in cases_of("llama_mean"):
        (output,) = llm.encode([case["token_ids"]], pooling_task="token_embed", use_tqdm=False)
        assert output.outputs.data.shape == (len(case["token_ids"]), 32)
        np.testing.assert_allclose(output.outputs.data.mean(0), case["pooled"], atol=1e-5)


@pytest.mark.quick
def test_classes_and_scores(make: Callable[..., LLM]) -> None:
    cases = cases_of("llama_classifier")
    outputs = make("llama_classifier").classify([c["token_ids"] for c in cases], use_tqdm=False)
    for output, case in zip(outputs, cases, strict=True):
        exp = np.exp(case["pooled"])
        np.testing.assert_allclose(output.outputs.probs, exp / exp.sum(), atol=1e-6)
        assert output.outputs.num_classes == 3


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("reranker")])
def test_an_order_of_documents(make: Callable[..., LLM], name: str) -> None:
    cases = [case for case in cases_of(name) if "query" in case]
    documents = [case["document"] if name != "qwen3_reranker" else " " + case["document"] for case in cases]
    scores = [o.outputs.score for o in make(name).score(cases[0]["query"], documents, use_tqdm=False)]
    want = [1 / (1 + np.exp(-case["pooled"][0])) for case in cases]
    np.testing.assert_allclose(scores, want, atol=1e-6)
    assert np.argsort(scores).tolist() == np.argsort(want).tolist()


def test_scores_of_an_embedder_are_cosines(make: Callable[..., LLM]) -> None:
    cases = cases_of("qwen3_embedder")
    vectors = [np.array(case["pooled"]) for case in cases]
    texts = [case["token_ids"] for case in cases]
    scores = make("qwen3_embedder").score([texts[3]], texts, use_tqdm=False)
    for output, vector in zip(scores, vectors, strict=True):
        assert output.outputs.score == pytest.approx(cosine(vectors[3], vector), abs=1e-6)


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        (
            "llama_mean",
            lambda llm: llm.classify([[1]]),
            "`task` must be .*the tasks that LlamaModel supports, got 'classify'",
        ),
        (
            "llama_classifier",
            lambda llm: llm.embed([[1]]),
            "`task` must be .*the tasks that LlamaForSeq.*got 'embed'",
        ),
        (
            "llama_classifier",
            lambda llm: llm.generate([[1]]),
            "`sampling_params` must be PoolingParams .*got None",
        ),
        (
            "llama_mean",
            lambda llm: llm.generate("no", SamplingParams()),
            "`sampling_params` must be .*got SamplingParams",
        ),
        (
            "bert_embedder",
            lambda llm: llm.generate([[1]]),
            "`sampling_params` must be PoolingParams .*got None",
        ),
        ("bert_embedder", lambda llm: llm.embed([[1] * 65]), r"must be at most 64 \(max_model_len\), got 65"),
        (
            "bert_reranker",
            lambda llm: llm.embed([[1]]),
            "`task` must be .*the tasks that BertForSequence.*got 'embed'",
        ),
        (
            "llama_mean",
            lambda llm: llm.embed([]),
            "`prompts` must be a prompt or a non-empty list of prompts, got",
        ),
        ("llama_mean", lambda llm: llm.embed(""), "`prompt` must be a non-empty string, got ''"),
        ("llama_mean", lambda llm: llm.embed([[]]), "`prompt_token_ids` must be at least one token id, got"),
        (
            "llama_mean",
            lambda llm: llm.embed([[1] * 65]),
            r"must be at most 64 \(max_model_len\), got 65",
        ),
        (
            "llama_mean",
            lambda llm: llm.embed([[1]], pooling_params=PoolingParams(dimensions=8)),
            "`dimensions` must be None because the model does not declare .*got 8",
        ),
        (
            "qwen3_embedder",
            lambda llm: llm.embed([[1]], pooling_params=PoolingParams(dimensions=9)),
            "`dimensions` must be 8 or 16, got 9",
        ),
        (
            "llama_mean",
            lambda llm: llm.embed([[1]], pooling_params=PoolingParams(skip_reading_prefix_cache=False)),
            "`skip_reading_prefix_cache` must be .*got False",
        ),
        (
            "llama_mean",
            lambda llm: llm.embed([[1]], truncate_prompt_tokens=0),
            "`truncate_prompt_tokens` must be .*got 0",
        ),
        (
            "qwen2_classifier",
            lambda llm: llm.score(["no"] * 2, ["no"] * 3),
            "the number of texts in `data_1` must be 1 or 3, got 2",
        ),
        (
            "qwen2_classifier",
            lambda llm: llm.score("no", ""),
            "`data_2` must be a non-empty string, got ''",
        ),
    ],
)
def test_bad_input(make: Callable[..., LLM], name: str, call: Callable[[LLM], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(make(name))


def test_texts_are_cut(make: Callable[..., LLM]) -> None:
    llm, text = make("qwen3_embedder"), list(range(4, 84))
    want = llm.embed([text[-64:], text[-8:]], use_tqdm=False)
    for n, output in zip((-1, 8), want, strict=True):
        (found,) = llm.embed([text], truncate_prompt_tokens=n, use_tqdm=False)
        assert found.prompt_token_ids == output.prompt_token_ids
        np.testing.assert_allclose(found.outputs.embedding, output.outputs.embedding, atol=1e-6)


def test_texts_of_an_encoder_are_cut(make: Callable[..., LLM]) -> None:
    llm, text = make("bert_embedder"), "the cat sleeps on the mat"
    whole, cut, most = (llm.embed([text], truncate_prompt_tokens=n, use_tqdm=False)[0] for n in (None, 5, -1))
    first, *_, last = whole.prompt_token_ids
    assert cut.prompt_token_ids == [first, *whole.prompt_token_ids[1:4], last]
    assert most.prompt_token_ids == whole.prompt_token_ids
    (found,) = llm.embed([list(range(4, 84))], truncate_prompt_tokens=-1, use_tqdm=False)
    assert found.prompt_token_ids == list(range(4, 68))


def test_texts_come_and_go(make: Callable[..., LLM]) -> None:
    """An encoder's texts of all lengths, some of which are aborted; nothing is traced after the warm-up."""
    llm, cases = make("bert_embedder"), cases_of("bert_embedder")
    engine = llm.llm_engine
    engine.executor.wait_until_compiled()
    num_traces = engine.executor.runner.compiled.num_traces  # pyright: ignore[reportAttributeAccessIssue]
    want, outputs = [case["pooled"] for case in cases], {}
    for i in range(100):
        engine.add_request(str(i), *prompt_of(cases[i % len(cases)]))
        if i % 7 == 3:
            outputs |= {o.request_id: o for o in engine.step() if o.finished}
            engine.abort_request(str(i))
    while engine.has_unfinished_requests():
        outputs |= {o.request_id: o for o in engine.step() if o.finished}
    assert len(outputs) >= 100 - 14
    for name, output in outputs.items():
        found = output.outputs[0].captured["pooled"]
        np.testing.assert_allclose(found, want[int(name) % len(cases)], atol=1e-5)
    assert engine.executor.runner.compiled.num_traces == num_traces  # pyright: ignore[reportAttributeAccessIssue]


def test_who_pools() -> None:
    folder = str(FIXTURES / "qwen3_reranker")
    small = {"kv_cache_memory_bytes": 2**20, "max_num_seqs": 2, "max_num_batched_tokens": 32}
    with LLM(folder, **small) as llm:
        assert llm.llm_engine.config.pooling is None
        assert "pool" not in llm.compile_plan().split()
        with pytest.raises(ValueError, match="`model` must be a pooling model, got"):
            llm.embed("no")
        with pytest.raises(
            ValueError, match="`pooling` must be None because the model does not support pooling, got"
        ):
            llm.generate("no", SamplingParams(pooling="LAST"), use_tqdm=False)
    with pytest.raises(ValueError, match="`runner` must be 'auto' or 'pooling' with LlamaModel"):
        LLM(str(FIXTURES / "llama_mean"), runner="generate")
    with LLM(folder, runner="pooling", **small) as llm:
        assert len(llm.embed("no", use_tqdm=False)[0].outputs.embedding) == 32

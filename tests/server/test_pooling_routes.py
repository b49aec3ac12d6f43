"""The routes that pool: their answers against transformers, and their errors."""

import asyncio
import base64
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from server.conftest import Served, serving
from tqdm import tqdm

from jax_paged import AsyncLLMEngine, EngineArgs, PoolingParams
from jax_paged.server.protocol import schemas
from jax_paged.server.run_batch import Batch, FinishedLines, Summary

FIXTURES = Path(__file__).parent.parent / "models" / "pooling_fixtures"
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**22}


def cases_of(name: str) -> list[dict[str, Any]]:
    return json.loads((FIXTURES / name / "reference.json").read_text())["cases"]


@pytest.fixture(scope="module")
def by_name() -> Iterator[dict[str, Served]]:
    overrides = {"qwen3_embedder": {"matryoshka_dimensions": [8]}}
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(
                serving(
                    AsyncLLMEngine(
                        EngineArgs(str(FIXTURES / name), hf_overrides=overrides.get(name), **SIZES)
                    ),
                    name,
                )
            )
            for name in ("qwen3_embedder", "llama_classifier", "qwen2_classifier", "bert_embedder")
        }


def unit(vector: list[float]) -> np.ndarray:
    return np.array(vector) / np.linalg.norm(vector)


def checked(body: dict[str, Any], form: Any) -> dict[str, Any]:
    TypeAdapter(form).validate_python(body, extra="forbid")
    return body


def test_embeddings(by_name: dict[str, Served]) -> None:
    served, cases = by_name["qwen3_embedder"], cases_of("qwen3_embedder")
    texts = [case["token_ids"] for case in cases]
    body = checked(served.post("/embeddings", input=texts), schemas.EmbeddingResponse)
    for entry, case in zip(body["data"], cases, strict=True):
        np.testing.assert_allclose(entry["embedding"], unit(case["pooled"]), atol=1e-6)
    num_tokens = sum(map(len, texts))
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == num_tokens
    again = served.post("/embeddings", input=texts, encoding_format="base64")
    for entry, first in zip(again["data"], body["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        np.testing.assert_allclose(decoded, first["embedding"], atol=1e-6)
    (cut,) = served.post("/embeddings", input=texts[3], dimensions=8)["data"]
    np.testing.assert_allclose(cut["embedding"], unit(cases[3]["pooled"][:8]), atol=1e-6)
    (text,) = served.post("/embeddings", input="the cat sleeps")["data"]
    (same,) = served.post("/embeddings", input=["the cat sleeps"])["data"]
    assert text == same
    served.wait_until_idle()


def test_an_encoder(by_name: dict[str, Served]) -> None:
    served, cases = by_name["bert_embedder"], cases_of("bert_embedder")
    cases = [case for case in cases if case["second_text"] is None]
    body = served.post("/embeddings", input=[case["token_ids"] for case in cases])
    for entry, case in zip(body["data"], cases, strict=True):
        np.testing.assert_allclose(entry["embedding"], unit(case["pooled"]), atol=1e-6)
    answer = served.client.post("/completions", json={"prompt": "cat"})
    assert answer.status_code == 400
    assert served.client.get("../metrics").status_code == 200
    served.wait_until_idle()


def test_pooling_and_generation(by_name: dict[str, Served]) -> None:
    served, cases = by_name["qwen3_embedder"], cases_of("qwen3_embedder")
    body = served.post("../pooling", input=[cases[3]["token_ids"]], use_activation=False)
    (entry,) = checked(body, schemas.PoolingResponse)["data"]
    np.testing.assert_allclose(entry["data"], cases[3]["pooled"], atol=1e-5)
    body = served.post("../pooling", input=[cases[3]["token_ids"]], use_activation=False, task="token_embed")
    rows = np.array(checked(body, schemas.PoolingResponse)["data"][0]["data"])
    assert rows.shape == (len(cases[3]["token_ids"]), 32)
    np.testing.assert_allclose(rows[-1], cases[3]["pooled"], atol=1e-5)
    assert served.complete(cases[3]["token_ids"], max_tokens=4)["usage"]["completion_tokens"] == 4


def test_classify(by_name: dict[str, Served]) -> None:
    cases = cases_of("llama_classifier")
    body = by_name["llama_classifier"].post("../classify", input=[case["token_ids"] for case in cases])
    for entry, case in zip(checked(body, schemas.ClassificationResponse)["data"], cases, strict=True):
        exp = np.exp(case["pooled"])
        np.testing.assert_allclose(entry["probs"], exp / exp.sum(), atol=1e-6)
        assert (entry["label"], entry["num_classes"]) == (f"LABEL_{np.argmax(case['pooled'])}", 3)


@pytest.mark.parametrize("name", ["qwen3_embedder", "qwen2_classifier"])
def test_scores_and_ranks(by_name: dict[str, Served], name: str) -> None:
    served, query = by_name[name], "what is a block table"
    documents = ["the cat sleeps", "a block", "a red car is fast"]
    body = checked(served.post("/score", text_1=query, text_2=documents), schemas.ScoreResponse)
    scores = [entry["score"] for entry in body["data"]]
    assert served.post("../score", data_1=query, data_2=documents)["data"] == body["data"]
    for path in ("../rerank", "/rerank", "../v2/rerank"):
        ranked = checked(served.post(path, query=query, documents=documents), schemas.RerankResponse)
        assert [r["relevance_score"] for r in ranked["results"]] == sorted(scores, reverse=True)
        assert all(r["document"] == {"text": documents[r["index"]]} for r in ranked["results"])
    assert len(served.post("/rerank", query=query, documents=documents, top_n=2)["results"]) == 2


def test_a_text_of_many_pairs_is_read_once(by_name: dict[str, Served]) -> None:
    served, query, documents = by_name["qwen3_embedder"], "what is a block table", ["a", "b", "a", "b b"]
    encode = served.engine.tokenizer.encode  # pyright: ignore[reportOptionalMemberAccess]
    num_tokens = sum(len(encode(text)) for text in {query, *documents})
    body = served.post("/score", text_1=query, text_2=documents)
    assert body["usage"]["prompt_tokens"] == num_tokens
    alone = [served.post("/score", text_1=query, text_2=text)["data"][0]["score"] for text in documents]
    np.testing.assert_allclose([entry["score"] for entry in body["data"]], alone, atol=1e-6)
    most = served.post("/rerank", query=query, documents=["a"] * 2048)
    assert len(most["results"]) == 2048


def test_encode_of_an_asyncio_engine(by_name: dict[str, Served]) -> None:
    case = cases_of("qwen3_embedder")[3]

    async def encoded() -> list[Any]:
        prompt, params = {"prompt_token_ids": case["token_ids"]}, PoolingParams(task="embed")
        return [o async for o in by_name["qwen3_embedder"].server.engine.encode(prompt, params, "one")]

    (output,) = asyncio.run(encoded())
    np.testing.assert_allclose(output.outputs.data, unit(case["pooled"]), atol=1e-6)
    assert (output.request_id, output.prompt_token_ids) == ("one", case["token_ids"])


def test_a_file_of_pooling_requests(by_name: dict[str, Served], tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embeddings": {"input": ["a", "b"]},
        "/v1/score": {"text_1": "a", "text_2": "b"},
        "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    }
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    summary, output = Summary(), io.BytesIO()
    done, engine = FinishedLines.read(tmp_path / "out.jsonl"), by_name["qwen3_embedder"].server.engine
    with tqdm(total=3, disable=True) as bar:
        asyncio.run(Batch(engine, "qwen3_embedder", done, summary, output, bar).run(file))
    entries = map(json.loads, output.getvalue().splitlines())
    found = {entry["custom_id"]: entry["response"] for entry in entries}
    assert {url: response["status_code"] for url, response in found.items()} == dict.fromkeys(bodies, 200)
    assert len(found["/v1/embeddings"]["body"]["data"]) == 2
    assert (summary.num_answered, summary.num_tokens) == (3, 0)


@pytest.mark.parametrize(
    ("name", "path", "body", "param", "message"),
    [
        (
            "qwen3_embedder",
            "embeddings",
            {"input": ""},
            "input",
            "`prompt` must be a non-empty string, got ''",
        ),
        ("qwen3_embedder", "embeddings", {"input": []}, "input", "at least one text"),
        (
            "qwen3_embedder",
            "score",
            {"text_1": ["a", "b"], "text_2": ["a"] * 3},
            "text_1",
            "the number of texts in `text_1` must be 1 or 3, got 2",
        ),
        (
            "qwen3_embedder",
            "embeddings",
            {"input": 3},
            "input",
            "`input` must be a string, a list of token ids, or a list of these, got 3",
        ),
        (
            "qwen3_embedder",
            "embeddings",
            {"input": [[1, 999]]},
            "input",
            "`prompt_token_ids[1]` must be an integer in [0, 127], got 999",
        ),
        (
            "qwen3_embedder",
            "embeddings",
            {"input": ["a"] * 2049},
            "input",
            "must be an integer in [1, 2048], got 2049",
        ),
        (
            "qwen3_embedder",
            "embeddings",
            {"input": [1] * 65},
            "input",
            "must be at most 64 (max_model_len), got 65",
        ),
        ("qwen3_embedder", "embeddings", {"input": "a", "dimensions": 9}, "dimensions", "must be 8"),
        ("qwen3_embedder", "embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format", "base64"),
        (
            "qwen3_embedder",
            "embeddings",
            {"input": "a", "truncate_prompt_tokens": 0},
            None,
            "`truncate_prompt_tokens` must be -1 or an integer of at least 1, got 0",
        ),
        (
            "qwen3_embedder",
            "../classify",
            {"input": "a"},
            None,
            "`task` must be one of 'embed', 'score', 'token_embed', the tasks that",
        ),
        (
            "llama_classifier",
            "embeddings",
            {"input": "a"},
            None,
            "`task` must be 'classify', the tasks that LlamaForSequenceClassification supports, got 'embed'",
        ),
        (
            "llama_classifier",
            "score",
            {"text_1": "a", "text_2": "b"},
            None,
            "`task` must be 'classify', the tasks that LlamaForSequenceClassification supports, got 'score'",
        ),
        (
            "llama_classifier",
            "completions",
            {"prompt": "a"},
            None,
            "`sampling_params` must be PoolingParams because LlamaForSequenceClassification",
        ),
        ("qwen2_classifier", "score", {"text_1": ["a", "b"], "text_2": ["a"]}, None, "must be 1 or 1"),
        (
            "qwen3_embedder",
            "rerank",
            {"query": "", "documents": ["b"]},
            "query",
            "`query` must be a non-empty string or a list of non-empty strings, got ''",
        ),
        (
            "qwen3_embedder",
            "rerank",
            {"query": "a", "documents": ["b", ""]},
            "documents",
            "`documents` must be a non-empty string or a list of non-empty strings, got ['b', '']",
        ),
        (
            "qwen3_embedder",
            "rerank",
            {"query": "a", "documents": ["b"] * 2049},
            "documents",
            "must be an integer in [1, 2048], got 2049",
        ),
        ("qwen2_classifier", "rerank", {"query": "a", "documents": []}, "documents", "at least 1"),
        (
            "qwen2_classifier",
            "rerank",
            {"query": "a", "documents": ["b"], "top_n": -1},
            "top_n",
            "`top_n` must be an integer of at least 0, got -1",
        ),
    ],
)
def test_bad_input(
    by_name: dict[str, Served], name: str, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    answer = by_name[name].client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert message in error["message"]
    assert param is None or error["param"] == param


def test_a_model_that_only_generates(served: Served) -> None:
    for path, body in (
        ("embeddings", {"input": "a"}),
        ("../pooling", {"input": "a"}),
        ("../classify", {"input": "a"}),
        ("score", {"text_1": "a", "text_2": "b"}),
        ("rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = served.client.post(path, json=body)
        assert answer.status_code == 400
        assert (
            "`model` must be a pooling model, got 'pagelet'. Pass runner='pooling' to use a generative"
            in answer.json()["error"]["message"]
        )

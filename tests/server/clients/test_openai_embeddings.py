"""openai-python's embeddings: floats, and base64, which it asks for by itself."""

import json
from pathlib import Path

import numpy as np
import openai
import pytest

pytestmark = pytest.mark.server

FOLDER = Path(__file__).resolve().parents[2] / "models" / "pooling_fixtures" / "qwen3_embedder"


@pytest.fixture(scope="module")
def client(start):
    sizes = "--max-num-seqs=4", "--max-num-batched-tokens=64", "--kv-cache-memory-bytes=4000000"
    override = '--hf-overrides={"matryoshka_dimensions": [8]}'
    url = start(f"--model={FOLDER}", "--served-model-name=embedder", override, *sizes)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("encoding_format", [None, "float", "base64"])
def test_embeddings(client, encoding_format):
    cases = json.loads((FOLDER / "reference.json").read_text())["cases"]
    given = {} if encoding_format is None else {"encoding_format": encoding_format}
    texts = [case["token_ids"] for case in cases]
    answer = client.embeddings.create(model="embedder", input=texts, **given)
    for entry, case in zip(answer.data, cases, strict=True):
        found = entry.embedding
        if isinstance(found, str):
            import base64

            found = np.frombuffer(base64.b64decode(found), "<f4")
        want = np.array(case["pooled"]) / np.linalg.norm(case["pooled"])
        np.testing.assert_allclose(found, want, atol=1e-6)
    assert answer.usage.prompt_tokens == sum(map(len, texts))


def test_dimensions(client):
    answer = client.embeddings.create(model="embedder", input="the cat", dimensions=8)
    assert len(answer.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="embedder", input="the cat", dimensions=9)
    assert caught.value.param == "dimensions"

"""smollm2 from its real sources: it is downloaded (98 MB) unless it is cached. Skipped without a network."""

import hashlib

import pytest

from jax_paged import LLM, SamplingParams
from jax_paged.models.checkpoint import resolve_model_dir
from jax_paged.models.loading.pretrained import SMOLLM2

pytestmark = pytest.mark.slow


def test_it_answers_questions() -> None:
    try:
        file = resolve_model_dir("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SMOLLM2.sha256
    answers = {"What is the capital of France?": "Paris", "What color is the sky on a clear day?": "blue"}
    conversations = [[{"role": "user", "content": question}] for question in answers]
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM(
        "smollm2",
        max_num_seqs=2,
        max_num_batched_tokens=128,
        max_model_len=512,
        num_gpu_blocks_override=80,
        num_scheduler_steps=1,
    ) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    for output, word in zip(outputs, answers.values(), strict=True):
        assert word in output.outputs[0].text
        assert output.outputs[0].finish_reason == "stop"

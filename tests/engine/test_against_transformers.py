"""The reference checkpoints of tests/models through the real engine: tokens and log-probabilities."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_model import TOLERANCE, DenseModel, Request, log_softmax, make_engine, run, tokens_of

from jax_paged import SamplingParams
from jax_paged.outputs import TokenLogprobDict

FIXTURES = sorted((Path(__file__).parents[1] / "models" / "fixtures").iterdir())
MAX_LEN = 128
NUM_TOP = 5


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda f: f.name)
def test_equals_transformers(folder: Path) -> None:
    cases = json.loads((folder / "reference.json").read_text())["cases"]
    prompts = [case["prompt_token_ids"] for case in cases]
    assert {1, 16, 17, 32, 100} <= {len(p) for p in prompts}
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    settings = {"max_model_len": MAX_LEN, "max_num_seqs": len(cases), "num_gpu_blocks_override": 200}
    with make_engine(
        folder, few_buckets=True, skip_tokenizer_init=True, max_num_batched_tokens=128, **settings
    ) as engine:
        batched = run(engine, [Request(prompt, params) for prompt in prompts])
        engine.scheduler.max_num_batched_tokens = 24
        chunked = run(engine, [Request(prompt, params) for prompt in prompts])

    reference_prompts = [log_softmax(x) for x in DenseModel(folder, MAX_LEN).logits(prompts)]
    for outputs in (batched, chunked):
        assert tokens_of(outputs) == [case["token_ids"] for case in cases]
        for output, case, reference in zip(outputs, cases, reference_prompts, strict=True):
            _check_output_logprobs(output.outputs[0].logprobs or [], case)
            _check_prompt_logprobs(output.prompt_logprobs or [], case["prompt_token_ids"], reference)


def _check_output_logprobs(ours: list[TokenLogprobDict], case: dict[str, Any]) -> None:
    assert len(ours) == 24
    for i, entry in enumerate(ours):
        chosen = entry[case["token_ids"][i]]
        assert chosen.rank == 1
        assert abs(chosen.logprob - case["logprobs"][i]) < TOLERANCE
        # Tokens closer than rounding may stand in another order, so the values are compared in order.
        values = sorted((x.logprob for x in entry.values()), reverse=True)
        assert np.abs(np.array(values) - case["top_logprobs"][i]).max() < TOLERANCE
        reference = dict(zip(case["top_token_ids"][i], case["top_logprobs"][i], strict=True))
        for token_id, x in entry.items():
            assert abs(x.logprob - reference.get(token_id, case["top_logprobs"][i][-1])) < TOLERANCE


def _check_prompt_logprobs(
    ours: list[TokenLogprobDict | None], prompt: list[int], reference: np.ndarray
) -> None:
    assert len(ours) == len(prompt)
    assert ours[0] is None
    for position, entry in enumerate(ours[1:], 1):
        assert entry is not None
        row = reference[position - 1]
        assert next(iter(entry)) == prompt[position]
        assert all(abs(x.logprob - row[token_id]) < TOLERANCE for token_id, x in entry.items())
        chosen = row[prompt[position]]
        rank = entry[prompt[position]].rank
        assert rank is not None
        assert 1 + (row > chosen + TOLERANCE).sum() <= rank <= 1 + (row > chosen - TOLERANCE).sum()
        top = sorted((x.logprob for x in entry.values() if (x.rank or 0) <= NUM_TOP), reverse=True)
        assert np.abs(np.array(top) - np.sort(row)[::-1][:NUM_TOP]).max() < TOLERANCE

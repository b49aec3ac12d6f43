"""Dynamic rotary positions, served: texts longer than the original context, and what may be asked for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from helpers.dynamic_rope import dynamic_checkpoint
from helpers.real_model import TOLERANCE, Request, log_softmax, make_engine, run

from jax_paged import SamplingParams
from jax_paged.models.weights import load_model

pytestmark = pytest.mark.thorough

REFERENCE = Path(__file__).parents[1] / "models" / "dynamic_rope.json"
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.mark.parametrize("length", [128, 256])
def test_served_texts_equal_transformers(length: int, tmp_path: Path) -> None:
    """A prompt in chunks against transformers, what follows it against our dense call; a short text too."""
    cases = json.loads(REFERENCE.read_text())
    (case,) = (case for case in cases if len(case["token_ids"]) == length)
    folder, text = dynamic_checkpoint(tmp_path), case["token_ids"]
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=0, prompt_logprobs=5)
    generated = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    with make_engine(folder, few_buckets=True, max_model_len=length, **SETTINGS) as engine:
        assert engine.config.max_model_len == length
        (whole,) = run(engine, [Request(text[:-1], asked)])
        outputs = run(engine, [Request(text[: length - 40], generated), Request(text[:10], generated)])
    # The reference begins 24 positions before the end; a position's logits are those of the next token.
    for row, entry in enumerate((whole.prompt_logprobs or [])[length - 23 :]):
        values = {token_id: x.logprob for token_id, x in (entry or {}).items()}
        for token_id, logprob in zip(case["top_token_ids"][row], case["top_logprobs"][row], strict=True):
            assert abs(values[token_id] - logprob) < TOLERANCE
    model = load_model(folder, max_model_len=length).model
    dense = nnx.jit(lambda model, tokens: model(tokens))
    for output in outputs:
        tokens = np.zeros((1, length), np.int32)
        all_tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        tokens[0, : len(all_tokens)] = all_tokens
        rows = log_softmax(np.asarray(dense(model, tokens))[0, len(output.prompt_token_ids) - 1 :])
        assert len(output.outputs[0].token_ids) == 40
        for token_id, entry, row in zip(
            output.outputs[0].token_ids, output.outputs[0].logprobs or [], rows, strict=False
        ):
            assert abs(entry[token_id].logprob - row[token_id]) < TOLERANCE
            assert row.max() - row[token_id] < TOLERANCE


@pytest.mark.quick
def test_lengths_that_may_be_asked_for(tmp_path: Path) -> None:
    folder = dynamic_checkpoint(tmp_path)
    with make_engine(folder, few_buckets=True, max_model_len=None, **SETTINGS) as engine:
        assert engine.config.max_model_len == 64
    with pytest.raises(ValueError, match=r"`max_model_len` must be .*256.*, got 257"):
        make_engine(folder, few_buckets=True, max_model_len=257, **SETTINGS)

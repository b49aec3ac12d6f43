"""The reference checkpoints of tests/models through the real engine: tokens and log-probabilities."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx
from helpers.real_model import TOLERANCE, DenseModel, Request, log_softmax, make_engine, run, tokens_of

from jax_paged import SamplingParams
from jax_paged.models.encoder_decoder import EncoderDecoderLM
from jax_paged.models.weights import load_model
from jax_paged.outputs import RequestOutput, TokenLogprobDict

pytestmark = pytest.mark.thorough

FIXTURES = sorted((Path(__file__).parents[1] / "models" / "fixtures").iterdir())
# Enough for every day: one of each family, and of the relatives of Llama those that differ most from it. What
# the others differ in the dense tests of tests/models show too.
EVERY_DAY = {
    "cohere2",
    "deepseek_v2_yarn_groups",
    "deepseek_v3_groups",
    "gemma2",
    "gemma3_old_config",
    "gemma4_hub_images",
    "gemma4_moe_capped",
    "gpt2_variants",
    "gpt_oss_mxfp4",
    "lfm2_biases_old_config",
    "llama3_tied_biases_old_config",
    "mistral_window",
    "mixtral_window",
    "olmo3",
    "opt_post_norm_projected",
    "phi3_window",
    "qwen2_window",
    "qwen3_bias_window",
    "qwen3_moe_and_mlps",
    "qwen3_5_two_layers",
    "t5_gated_untied",
}
QUICK = {"gemma3_old_config", "gpt2_variants"}
MAX_LEN = 128
# All prompts with their outputs are 80 blocks of each group of layers.
NUM_BLOCKS = 26
# Its layers are more groups, so that nothing would stay cached in so few.
NUM_BLOCKS_OF = {"gemma4_images": 32}
NUM_TOP = 5
# The same float32 sums, but for those of the attention.
DENSE_TOLERANCE = 1e-5
SETTINGS: dict[str, Any] = {
    "matmul_backend": "xla",
    "few_buckets": True,
    "skip_tokenizer_init": True,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 17,
}


def fixtures() -> list[Any]:
    assert {f.name for f in FIXTURES} >= EVERY_DAY
    quick, slow = pytest.mark.quick, pytest.mark.slow
    marks = {f.name: quick if f.name in QUICK else () if f.name in EVERY_DAY else slow for f in FIXTURES}
    return [pytest.param(f, id=f.name, marks=marks[f.name]) for f in FIXTURES]


def read_cases(folder: Path) -> list[dict[str, Any]]:
    cases = json.loads((folder / "reference.json").read_text())["cases"]
    assert {1, 16, 17, 32, 100} <= {len(case["prompt_token_ids"]) for case in cases}
    return cases


@pytest.mark.parametrize("folder", fixtures())
def test_equals_transformers(folder: Path) -> None:
    """Also in chunks, with prompts that are cached, and in a pool that is too small for all of them."""
    cases = read_cases(folder)
    prompts = [case["prompt_token_ids"] for case in cases]
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=NUM_TOP)
    with_prompts = SamplingParams(temperature=0, max_tokens=24, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    num_blocks = NUM_BLOCKS_OF.get(folder.name, NUM_BLOCKS)
    with make_engine(folder, max_model_len=MAX_LEN, num_gpu_blocks_override=num_blocks, **SETTINGS) as engine:
        batched = run(engine, [Request(prompt, with_prompts) for prompt in prompts])
        engine.scheduler.max_num_batched_tokens = 24
        # The last ones first: theirs are the blocks that are cached still.
        chunked = run(engine, [Request(prompt, params) for prompt in prompts[::-1]])[::-1]
    for outputs in (batched, chunked):
        assert tokens_of(outputs) == [case["token_ids"] for case in cases]
        for output, case in zip(outputs, cases, strict=True):
            _check_output_logprobs(output.outputs[0].logprobs or [], case)
    assert sum(output.metrics.num_preemptions for output in batched + chunked) > 0
    model = load_model(folder).model
    if isinstance(model, EncoderDecoderLM):
        return _check_beside_dense_call(model, batched)
    assert sum(output.num_cached_tokens for output in chunked) > 0
    dense = [log_softmax(x) for x in DenseModel(folder, MAX_LEN).logits(prompts)]
    for output, prompt, logprobs in zip(batched, prompts, dense, strict=True):
        _check_prompt_logprobs(output.prompt_logprobs or [], prompt, logprobs)


def _check_beside_dense_call(model: EncoderDecoderLM, outputs: list[RequestOutput]) -> None:
    texts = np.zeros((len(outputs), MAX_LEN), np.int32)
    decoded = np.zeros((len(outputs), 24), np.int32)
    lens = np.array([len(output.encoder_prompt_token_ids) for output in outputs])
    for output, text, tokens in zip(outputs, texts, decoded, strict=True):
        text[: len(output.encoder_prompt_token_ids)] = output.encoder_prompt_token_ids
        tokens[:] = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    logits = nnx.jit(lambda model, *inputs: model(*inputs))(model, texts, lens, decoded)
    for output, rows in zip(outputs, log_softmax(np.asarray(logits)), strict=True):
        for entry, row in zip(output.outputs[0].logprobs or [], rows, strict=True):
            assert all(abs(x.logprob - row[token]) < DENSE_TOLERANCE for token, x in entry.items())


@pytest.mark.slow
@pytest.mark.parametrize("folder", [f for f in FIXTURES if f.name in EVERY_DAY], ids=lambda f: f.name)
def test_bfloat16(folder: Path) -> None:
    cases = read_cases(folder)
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    with make_engine(folder, dtype="bfloat16", max_model_len=MAX_LEN, **SETTINGS) as engine:
        outputs = run(engine, [Request(case["prompt_token_ids"], params) for case in cases])
    firsts = [next(iter((output.outputs[0].logprobs or [])[0].values())) for output in outputs]
    assert all(first.rank == 1 for first in firsts)
    # Rounding by 2^-8 in a few layers: some per cent of a log-probability, and now and then another token.
    differences = [abs(f.logprob - case["logprobs"][0]) for f, case in zip(firsts, cases, strict=True)]
    assert np.median(differences) < 0.1


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
        # Rounding grows with the numbers: OPT's are up to 23.
        tolerance = DENSE_TOLERANCE * max(1.0, float(np.abs(row).max()) / 16)
        assert all(abs(x.logprob - row[token_id]) < tolerance for token_id, x in entry.items())
        chosen = row[prompt[position]]
        rank = entry[prompt[position]].rank
        assert rank is not None
        assert (
            1 + (row > chosen + DENSE_TOLERANCE).sum() <= rank <= 1 + (row > chosen - DENSE_TOLERANCE).sum()
        )
        top = sorted((x.logprob for x in entry.values() if (x.rank or 0) <= NUM_TOP), reverse=True)
        assert np.abs(np.array(top) - np.sort(row)[::-1][:NUM_TOP]).max() < DENSE_TOLERANCE

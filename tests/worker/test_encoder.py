"""The encoder of a real small T5, run by the runner: its decoder answers as transformers does."""

import json
from pathlib import Path

import pytest
from helpers.steps import execute, make_output, make_row, new_sequence

from jax_paged.config.engine_args import EngineArgs
from jax_paged.core.scheduler_output import EncoderInput, Sample
from jax_paged.worker.compilation import plan_steps
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.model_runner import ModelRunner

FOLDER = Path(__file__).parent.parent / "models" / "fixtures" / "t5_tied"
BLOCK_SIZE = 4


def test_two_texts_are_encoded_side_by_side() -> None:
    cases = json.loads((FOLDER / "reference.json").read_text(encoding="utf-8"))["cases"][:2]
    args = EngineArgs(
        model=str(FOLDER),
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        num_gpu_blocks_override=200,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_steps, "plan_buckets", lambda *limits, **kind: [Bucket(True, 2, 2)])
        runner = ModelRunner(args)
    start = runner.config.decoder_start_token_id
    assert start is not None
    texts = [case.get("encoder_token_ids") or case["prompt_token_ids"] for case in cases]
    blocks = iter(range(1, 200))
    tables = [
        [
            [next(blocks) for _ in range(-(-len(text) // BLOCK_SIZE) if group.is_cross else 8)]
            for group in groups
        ]
        for text in texts
        for groups in [runner.config.cache_groups]
    ]
    new = [
        new_sequence(i, [start], tables=tables[i], num_encoder_tokens=len(text))
        for i, text in enumerate(texts)
    ]
    to_encode = [EncoderInput(f"r{i}", text, tables[i]) for i, text in enumerate(texts)]
    samples = [Sample(i, i) for i in range(2)]
    rows = [make_row(i, 0, [start]) for i in range(2)]
    result = execute(runner, make_output(rows, samples, new=new, to_encode=to_encode))
    outputs = [list(tokens) for tokens in result.token_ids]
    num_tokens = min(24, *(len(case["token_ids"]) for case in cases))
    for position in range(1, num_tokens):
        rows = [make_row(i, position, outputs[i][-1:]) for i in range(2)]
        for output, tokens in zip(
            outputs, execute(runner, make_output(rows, samples)).token_ids, strict=True
        ):
            output += tokens
    assert outputs == [case["token_ids"][:num_tokens] for case in cases]
    assert [str(p) for p in runner.compiled.programs if str(p).startswith("encode")]
    runner.close()

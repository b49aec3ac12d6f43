"""A gpt-oss in engines that attend in other ways: every output is that of the xla backend, sinks and all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import TOLERANCE, Request, make_engine, run

from jax_paged import SamplingParams
from jax_paged.pallas_kernels import native
from jax_paged.worker.features import cascade

FOLDER = Path(__file__).parents[1] / "models" / "fixtures" / "gpt_oss"
SIZES: dict[str, Any] = {
    "few_buckets": True,
    "skip_tokenizer_init": True,
    "matmul_backend": "xla",
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "num_gpu_blocks_override": 300,
}
needs_native = pytest.mark.skipif(not native.is_built(), reason=str(native.problem()))


def outputs_of(folder: Path, lengths: list[int], num_tokens: int, **settings: Any) -> tuple[list[Any], int]:
    """Returns tokens and log-probabilities, and how many tokens were read less, as prompts share a prefix."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, logprobs=1, ignore_eos=True)
    rng = np.random.default_rng(3)
    prefix = rng.integers(0, 256, 60).tolist()
    prompts = [prefix[:n] + rng.integers(0, 256, 1 + n // 9).tolist() for n in lengths]
    with make_engine(folder, **SIZES | settings) as engine:
        outputs = [o.outputs[0] for o in run(engine, [Request(prompt, params) for prompt in prompts])]
        return [(o.token_ids, o.cumulative_logprob) for o in outputs], engine.num_saved_reads


def check(found: list[Any], expected: list[Any], tolerance: float) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in expected], atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=needs_native)])
def test_cascade_attention_and_a_cache_of_bytes(
    backend: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MIN_ROWS": 2, "MIN_TOKENS": 1, "MIN_SAVED_TOKENS": 1}.items():
        monkeypatch.setattr(cascade, name, value)
    settings = {"attention_backend": backend, "kv_cache_dtype": kind}
    found, shared = outputs_of(FOLDER, [60, 60, 50, 7], 20, **settings)
    alone, none = outputs_of(FOLDER, [60, 60, 50, 7], 20, disable_cascade_attn=True, **settings)
    assert shared > 500
    assert none == 0
    # Beside a rounding step, a sum in another order takes a quantised number to the other side.
    check(found, alone, 20 * TOLERANCE if kind == "auto" else 0.3)


def test_what_tokens_attend_to() -> None:
    """A sink takes its share; what is seen of a window is no more than the window."""
    prompt = np.random.default_rng(0).integers(0, 256, 40).tolist()
    with make_engine(FOLDER, **SIZES) as engine:
        engine.add_request("a", prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for _ in range(4):
            engine.step()
        found = engine.inspect("a", [0, 1]).attention
    for rows in found.values():
        total = rows.sum(-1)
        assert ((total > 0.5) & (total < 1 - 1e-4)).all()
    assert ((found[0] > 0).sum(-1) == 24).all()

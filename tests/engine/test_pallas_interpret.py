"""The whole engine on the Pallas kernels, in JAX's interpreter: the same tokens as with the xla backend."""

from pathlib import Path

import numpy as np
import pytest
from helpers.real_model import Request, make_engine, run

from jax_paged import SamplingParams

pytestmark = pytest.mark.thorough


# Beside a rounding step, a sum in another order takes a quantised number to the other side.
@pytest.mark.parametrize(
    ("kv_cache_dtype", "tolerance"), [("auto", 1e-4), pytest.param("int8", 0.02, marks=pytest.mark.slow)]
)
def test_engine_gives_the_same_tokens_on_pallas_and_xla(kv_cache_dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(5)
    # One prompt is longer than a step, so that steps have chunks, and a chunk with a decode.
    requests = [
        Request(
            rng.integers(3, 2000, length).tolist(), SamplingParams(temperature=0, max_tokens=3, logprobs=1)
        )
        for length in (9, 25)
    ]
    outputs = []
    for backend in ("xla", "pallas_interpret"):
        engine = make_engine(
            Path("pagelet"),
            few_buckets=True,
            attention_backend=backend,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=64,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            num_gpu_blocks_override=12,
        )
        outputs.append([output.outputs[0] for output in run(engine, requests)])
        engine.close()
    for xla, pallas in zip(*outputs, strict=True):
        assert list(pallas.token_ids) == list(xla.token_ids)
        assert abs(pallas.cumulative_logprob - xla.cumulative_logprob) < tolerance

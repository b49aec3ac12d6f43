"""Temporaries of a step on a CPU: above 32 MiB, malloc maps and clears new memory at every step."""

import jax
import numpy as np
import pytest
from engine_step import abstract_context
from jax.sharding import Mesh
from throughput import HF_CONFIG

from jax_paged.models.layers import TENSOR
from jax_paged.worker.buckets import Bucket, plan_buckets
from jax_paged.worker.step import StepProgram

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512
BUCKETS = plan_buckets(MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, is_fine=True)
LARGEST = [max(b for b in BUCKETS if b.is_decode), BUCKETS[-1]]
assert not LARGEST[1].is_decode


def temp_bytes(bucket: Bucket, num_layers: int) -> int:
    context = abstract_context(
        HF_CONFIG | {"num_hidden_layers": num_layers},
        Mesh(np.array(jax.devices()[:1]), (TENSOR,)),
        num_blocks=1024,
        backend="xla",
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    memory = StepProgram(bucket).lower(context).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("bucket", LARGEST, ids=str)
def test_temporaries_of_the_largest_steps(bucket: Bucket) -> None:
    assert temp_bytes(bucket, num_layers=2) < 32 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_temporaries_of_every_step(bucket: Bucket) -> None:
    assert temp_bytes(bucket, num_layers=HF_CONFIG["num_hidden_layers"]) < 32 * 2**20

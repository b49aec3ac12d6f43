"""The whole step of the engine lowers for GPUs with the Pallas kernels in it, on a machine that has none."""

import sys
from pathlib import Path

import pytest
from jax.sharding import AbstractMesh, use_abstract_mesh
from test_lowering import A100, H100

from jax_paged.worker.compilation.buckets import Bucket

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from engine_step import abstract_context, lower_for_cuda

pytestmark = pytest.mark.thorough
NUM_LAYERS = 2
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
# Kernels of a layer: in a decode step write_kv, paged_decode and combine, else write_kv and ragged_attention.
BUCKETS = [(Bucket(True, 8, 8), 3), (Bucket(False, 64, 8), 2), (Bucket(True, 8, 8, 8), 3)]


@pytest.mark.parametrize("gpu", [A100, H100], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize(("bucket", "kernels"), BUCKETS, ids=["decode", "mixed", "burst"])
def test_step_lowers(gpu, bucket, kernels):
    mesh = AbstractMesh((1,), ("tensor",))
    limits = {"max_model_len": 512, "max_num_seqs": 24, "max_num_batched_tokens": 64}
    context = abstract_context(SMALL, mesh, num_blocks=64, **limits)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        text = lower_for_cuda(context, bucket)
    calls = text.count("stablehlo.custom_call @mosaic_gpu")
    # Layers that are equal may share functions, which hold a call each.
    assert kernels <= calls <= NUM_LAYERS * kernels
    pool = "tensor<64x2x2x16x64xbf16>"
    signature = next(line for line in text.splitlines() if "@main" in line)
    donated = [part for part in signature.split("%arg") if pool in part and "aliasing_output" in part]
    assert len(donated) == NUM_LAYERS
    counts = [part for part in signature.split("%arg") if "tensor<24x512xi32>" in part]
    assert sum("aliasing_output" in part for part in counts) == 1

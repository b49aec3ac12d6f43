"""Helpers that lower the engine's step for GPUs on a machine without a GPU. Weights are shapes only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jax_paged.models.attention import Backend
from jax_paged.models.parallel.sharding import DeviceGrid
from jax_paged.models.registry import get_model_class
from jax_paged.worker.compilation.buckets import Bucket
from jax_paged.worker.compilation.feature_set import FeatureSet
from jax_paged.worker.compilation.programs import TraceContext
from jax_paged.worker.kv_cache import plan_layout
from jax_paged.worker.loading.weights import flatten
from jax_paged.worker.sampling.sampler import SamplerOptions
from jax_paged.worker.traced_step import StepProgram

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}


def abstract_context(
    hf_config: dict[str, Any],
    mesh: Mesh | AbstractMesh,
    *,
    num_blocks: int,
    backend: Backend = "pallas",
    max_model_len: int = 8192,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    block_size: int = 16,
) -> TraceContext:
    """Returns the context for tracing the programs of a model in bfloat16.

    Args:
        hf_config: Contents of the model's config.json.
        mesh: The devices, which need not be present.
        num_blocks: Number of blocks in the KV cache.
        backend: The attention backend.
        max_model_len: Maximum number of tokens of a sequence. It sets the number of block table columns.
        max_num_seqs: Number of batch slots.
        max_num_batched_tokens: Number of token rows of the largest bucket.
        block_size: Number of tokens per block.
    """
    _, model_class = get_model_class(hf_config)
    config = model_class.config_class.from_hf(hf_config)
    dtype = jnp.dtype(jnp.bfloat16)
    model = nnx.eval_shape(lambda: model_class(config, dtype=dtype, rngs=nnx.Rngs(0)))
    flat, weights, splits = flatten(model)
    grid = DeviceGrid(mesh)
    return TraceContext(
        model=flat,
        weights=[
            jax.ShapeDtypeStruct(grid.shape(x.shape, split), x.dtype, sharding=grid.sharding(split))
            for x, split in zip(weights, splits, strict=True)
        ],
        layout=plan_layout(model.kv_cache_specs(), dtype, grid.num_devices),
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        features=FeatureSet(),
        sampling=SamplerOptions(max_logprobs=20),
        backend=backend,
        batch_invariant=False,
        mesh=mesh,
    )


def lower_for_cuda(context: TraceContext, bucket: Bucket) -> str:
    """Returns the StableHLO text of a step lowered for CUDA.

    Call it in a use_abstract_mesh(...) block whose mesh has a GPU as its abstract device.
    """
    weights = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in context.weights]
    context = dataclasses.replace(context, weights=weights, mesh=None)
    return StepProgram(bucket).lower(context, platforms=("cuda",)).as_text()

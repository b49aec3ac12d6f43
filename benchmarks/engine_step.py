"""The engine's step without a GPU and without weights: what lowers and compiles it on any machine."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jax_paged.models.registry import get_model_class
from jax_paged.worker.batch import MAX_BIAS_IDS, Bucket, layout
from jax_paged.worker.kv_cache import plan_layout
from jax_paged.worker.model_runner import ModelRunner

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


def abstract_runner(
    hf_config: dict[str, Any],
    mesh: Mesh | AbstractMesh,
    *,
    backend: str = "pallas",
    max_model_len: int = 8192,
    max_num_batched_tokens: int = 2048,
    block_size: int = 16,
) -> ModelRunner:
    """Returns a runner in bfloat16 that can do nothing but trace its steps: its weights are shapes.

    Args:
        hf_config: A config.json.
        mesh: One device, of a machine at hand or not.
        backend: Of the attention.
        max_model_len: Sets the columns of block tables.
        max_num_batched_tokens: Rows of the largest bucket.
        block_size: Tokens a block.
    """
    _, model_class = get_model_class(hf_config)
    config = model_class.config_class.from_hf(hf_config)
    model = nnx.eval_shape(lambda: model_class(config, dtype=jnp.dtype(jnp.bfloat16), rngs=nnx.Rngs(0)))
    runner = object.__new__(ModelRunner)
    runner._mesh, runner._replicated = mesh, NamedSharding(mesh, PartitionSpec())  # pyright: ignore
    runner._graphdef, state = nnx.split(model)
    leaves, runner._treedef = jax.tree.flatten(state)
    specs = jax.tree.leaves(nnx.get_partition_spec(state), is_leaf=lambda x: isinstance(x, PartitionSpec))
    runner._weights = [  # pyright: ignore[reportAttributeAccessIssue]
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    runner._layout = plan_layout(model.kv_cache_specs())
    runner._backend = backend  # pyright: ignore[reportAttributeAccessIssue]
    runner._dtype, runner._block_size = jnp.dtype(jnp.bfloat16), block_size
    runner._max_model_len, runner._max_tokens = max_model_len, max_num_batched_tokens
    runner._max_blocks_per_seq = -(-max_model_len // block_size)
    runner._max_logprobs = 20
    runner.num_traces = 0
    return runner


def lower_for_cuda(runner: ModelRunner, bucket: Bucket, num_blocks: int) -> str:
    """Returns the text of a step lowered for CUDA; call it under the abstract mesh of a GPU."""

    def plain(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    _, size = layout(bucket, runner._max_blocks_per_seq, len(runner._layout.groups))
    shape = runner._layout.pool_shape(num_blocks, runner._block_size)
    args = (
        [plain(w.shape, w.dtype) for w in runner._weights],
        [plain(shape, runner._dtype)] * runner._layout.num_pools,
        plain((size,), jnp.int32),
        plain((bucket.num_seqs, runner._max_model_len), jnp.int32),
        plain((bucket.num_seqs, MAX_BIAS_IDS), jnp.int32),
        plain((bucket.num_seqs, MAX_BIAS_IDS), jnp.float32),
    )

    def step(*args: Any) -> Any:
        return runner._step(bucket, *args)

    return jax.jit(step, donate_argnums=1).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

"""Choice of the buckets of an engine from its configuration, with the functions of buckets.py."""

from jax_paged.config.engine_config import EngineConfig
from jax_paged.worker.compilation.buckets import (
    Bucket,
    plan_buckets,
    plan_invariant_buckets,
    plan_multi_step,
    plan_variants,
    plan_verifying,
)


def plan_steps(config: EngineConfig, *, on_cpu: bool, has_packed_weights: bool) -> list[Bucket]:
    """Returns the buckets for all steps of an engine, for each variant in ascending order.

    Args:
        config: Configuration of the engine.
        on_cpu: Whether the engine runs on a CPU, where a padded row costs as much as a used one.
        has_packed_weights: Whether oneDNN or the native backend computes the matrix products.
    """
    limits = config.max_num_seqs, config.max_num_batched_tokens
    is_invariant = config.batch_invariant
    if is_invariant:
        # Products with packed weights are invariant. XLA computes the products of adapters, which are not.
        has_invariant_matmuls = has_packed_weights and not config.max_loras
        buckets = plan_invariant_buckets(*limits, has_invariant_matmuls=has_invariant_matmuls)
    else:
        # In bfloat16, XLA computes a matrix product with one row several times slower than one with two rows.
        min_rows = 2 if on_cpu and config.dtype == "bfloat16" and not has_packed_weights else 1
        buckets = plan_buckets(*limits, minimizes_padding=on_cpu, min_rows=min_rows)
    may_have = config.max_loras > 0, config.prompt_embed_size > 0 or config.images is not None
    buckets = [*buckets, *plan_verifying(config)]
    buckets = plan_variants(buckets, *may_have, is_invariant=is_invariant)
    return [*buckets, *plan_multi_step(buckets, config.num_scheduler_steps)]

"""The shapes of all steps of an engine."""

from jax_paged.config.engine_args import EngineConfig
from jax_paged.worker.compilation.buckets import (
    Bucket,
    plan_buckets,
    plan_invariant_buckets,
    plan_multi_step,
    plan_variants,
    plan_verifying,
)


def plan_steps(config: EngineConfig, *, on_cpu: bool, packs: bool) -> list[Bucket]:
    """Returns the shapes of an engine's steps: each kind in ascending order.

    Args:
        config: Of the engine.
        on_cpu: Whether a padded row costs as much as a live one.
        packs: Whether oneDNN multiplies.
    """
    limits = config.max_num_seqs, config.max_num_batched_tokens
    is_invariant = config.batch_invariant
    if is_invariant:
        # XLA computes what adapters add.
        buckets = plan_invariant_buckets(*limits, has_invariant_products=packs and not config.max_loras)
    else:
        # XLA multiplies a single row in bfloat16 several times slower than two.
        min_rows = 2 if on_cpu and config.dtype == "bfloat16" and not packs else 1
        buckets = plan_buckets(*limits, is_fine=on_cpu, min_rows=min_rows)
    may_have = config.max_loras > 0, config.embed_size > 0 or config.images is not None
    buckets = [*buckets, *plan_verifying(config)]
    buckets = plan_variants(buckets, *may_have, is_invariant=is_invariant)
    return [*buckets, *plan_multi_step(buckets, config.num_scheduler_steps)]

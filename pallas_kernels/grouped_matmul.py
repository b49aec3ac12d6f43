"""The product for mixture-of-experts layers: checks its arguments, chooses a backend and calls it.

A "kernel" in this module is a weight matrix, one per expert (group).
"""

from typing import Literal

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels import grouped_loop, ops, reference
from jax_paged.pallas_kernels.jax_settings import with_default_settings


@with_default_settings
def grouped_matmul(
    x: Float[Array, "n i"],
    kernels: Float[Array, "g i o"],
    group_sizes: Int[Array, " g"],
    *,
    backend: ops.Backend = "auto",
) -> Float[Array, "n o"]:
    """Multiplies the first group_sizes[0] rows by kernels[0], the next group_sizes[1] by kernels[1], ...

    Kernels of empty groups are not read, except by the backend "reference". A row's result does not depend on
    the other rows. All implementations except the Pallas kernel can be differentiated.

    Args:
        x: Rows, sorted by group.
        kernels: One matrix per group, in the dtype of x.
        group_sizes: int32, number of rows of each group. Their sum may be less than n, but not more.
        backend: The implementation, see ops.resolve_backend and implementation_of.

    Returns:
        The products, in the order of x; exactly 0 in rows after the last group.

    Raises:
        ValueError: If shapes or dtypes are not valid, or the backend does not support them.
    """
    if x.ndim != 2 or not x.shape[0]:
        raise ValueError(f"the shape of `x` must be [rows, columns] with at least one row, got {x.shape}")
    if kernels.ndim != 3 or kernels.shape[1] != x.shape[1]:
        raise ValueError(
            f"the shape of `kernels` must be [groups, {x.shape[1]}, columns] with `x`, got {kernels.shape}"
        )
    if kernels.dtype != x.dtype:
        raise ValueError(f"the dtype of `kernels` must be that of `x`, {x.dtype}, got {kernels.dtype}")
    if group_sizes.shape != kernels.shape[:1]:
        raise ValueError(
            f"the shape of `group_sizes` must be {kernels.shape[:1]} with `kernels`, got {group_sizes.shape}"
        )
    if group_sizes.dtype != jnp.int32:
        raise ValueError(f"the dtype of `group_sizes` must be int32, got {group_sizes.dtype}")
    if not isinstance(x, Tracer):  # a trace may be lowered for another machine
        ops.resolve_backend(backend)
    match implementation_of(backend):
        case "loop":
            return grouped_loop.grouped_matmul(x, kernels, group_sizes)
        case "reference":
            return reference.grouped_matmul(x, kernels, group_sizes)
    from jax_paged.pallas_kernels.gpu import grouped_wgmma

    return grouped_wgmma.grouped_matmul(x, kernels, group_sizes, interpret=backend == "pallas_interpret")


def implementation_of(backend: str) -> Literal["loop", "reference", "wgmma"]:
    """Returns the implementation of grouped_matmul for a backend and the device that a trace is lowered for.

    The Pallas kernel needs wgmma, which only GPUs of compute capability 9.x have. On other GPUs, and with the
    backends "xla" and "native", the implementation is a loop in plain JAX.
    """
    if backend == "reference":
        return "reference"
    if backend in ("pallas", "pallas_interpret"):
        from jax_paged.pallas_kernels.gpu import tuning

        if tuning.target(interpret=backend == "pallas_interpret").has_wgmma:
            return "wgmma"
    return "loop"

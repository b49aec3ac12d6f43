"""grouped_matmul as a loop over blocks of rows, in plain JAX.

jax.lax.ragged_dot returns this too, but on a CPU, and on an NVIDIA GPU, it multiplies all rows by all
kernels. This loop reads only the kernels of groups that are not empty.

Source: Gale et al., MegaBlocks, 2022 (the blocks of rows).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "n i"], kernels: Float[Array, "g i o"], group_sizes: Int[Array, " g"]
) -> Float[Array, "n o"]:
    """See grouped_matmul.grouped_matmul."""

    def multiply(rows: Array, group: Array) -> Array:
        return rows @ jax.lax.dynamic_index_in_dim(kernels, group, keepdims=False)

    return by_group(x, multiply, kernels.shape[2], group_sizes)


def by_group(
    x: Float[Array, "n i"],
    multiply: Callable[[Array, Array], Array],
    num_columns: int,
    group_sizes: Int[Array, " g"],
) -> Float[Array, "n o"]:
    """Returns what a function of some rows and their group makes of all rows, in blocks of one group each.

    Args:
        x: Rows, sorted by group.
        multiply: Takes rows [b, I] and their group, and returns [b, O] in the dtype of x.
        num_columns: O.
        group_sizes: int32, rows of each group; they sum to n or less.

    Returns:
        In the order of x; exactly 0 in rows behind the last group.
    """
    num_rows, num_groups = x.shape[0], len(group_sizes)
    per_group = -(-num_rows // num_groups)
    block = min(max(1 << (per_group - 1).bit_length(), 8), 128)
    num_blocks = -(-group_sizes // block)
    ends = jnp.cumsum(num_blocks)
    # The work list: blocks of rows. There can't be more of them than this.
    items = jnp.arange(num_rows // block + min(num_groups, num_rows))
    group = jnp.minimum(jnp.sum(items[:, None] >= ends, axis=1), num_groups - 1)
    first = (jnp.cumsum(group_sizes) - group_sizes)[group] + (items - (ends - num_blocks)[group]) * block
    x = jnp.pad(x, ((0, block), (0, 0)))

    def add_block(i: Array, y: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, first[i], block)
        # Rows past the group's end belong to later groups, whose blocks overwrite them.
        return jax.lax.dynamic_update_slice_in_dim(y, multiply(rows, group[i]), first[i], 0)

    y = jnp.zeros((num_rows + block, num_columns), x.dtype)
    y = jax.lax.fori_loop(0, ends[-1], add_block, y)[:num_rows]
    return jnp.where(jnp.arange(num_rows)[:, None] < jnp.sum(group_sizes), y, 0)


def _forward(x: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, kernels, group_sizes), (x, kernels, group_sizes)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    x, kernels, group_sizes = saved
    _, pull = jax.vjp(lambda x, kernels: jax.lax.ragged_dot(x, kernels, group_sizes), x, kernels)
    return *pull(cotangent), None


grouped_matmul.defvjp(_forward, _backward)

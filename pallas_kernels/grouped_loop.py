"""Implementation of grouped_matmul in plain JAX, as a loop over blocks of rows.

jax.lax.ragged_dot computes the same, but on CPUs and NVIDIA GPUs it multiplies all rows by all kernels. This
loop reads only the kernels of groups that are not empty:

1. The rows of each group are divided into blocks of 8 to 128 rows, depending on the average group size. The
   last block of a group may extend past the end of the group.
2. The blocks are numbered group by group. The number of a block determines its group and its first row.
3. A loop over the blocks multiplies the rows of each block by the kernel of its group and writes the result.
   Rows past the end of the group receive wrong results, which the blocks of the following groups overwrite.

The gradient is the gradient of ragged_dot.

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
    """Applies `multiply` to blocks of rows, each of a single group, and returns the results of all rows.

    Args:
        x: Rows, sorted by group.
        multiply: Takes rows [b, I] and their group, and returns [b, O] in the dtype of x.
        num_columns: O.
        group_sizes: int32, number of rows of each group. Their sum may be less than n, but not more.

    Returns:
        [n, O] in the order of x; exactly 0 in rows after the last group.
    """
    num_rows, num_groups = x.shape[0], len(group_sizes)
    per_group = -(-num_rows // num_groups)
    block = min(max(1 << (per_group - 1).bit_length(), 8), 128)
    num_blocks = -(-group_sizes // block)
    ends = jnp.cumsum(num_blocks)
    # The work list with one entry per block. Its length is an upper bound for the number of blocks.
    items = jnp.arange(num_rows // block + min(num_groups, num_rows))
    group = jnp.minimum(jnp.sum(items[:, None] >= ends, axis=1), num_groups - 1)
    first = (jnp.cumsum(group_sizes) - group_sizes)[group] + (items - (ends - num_blocks)[group]) * block
    x = jnp.pad(x, ((0, block), (0, 0)))

    def write_block(i: Array, y: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(x, first[i], block)
        # Rows past the end of the group belong to later groups. Their own blocks overwrite these results.
        return jax.lax.dynamic_update_slice_in_dim(y, multiply(rows, group[i]), first[i], 0)

    y = jnp.zeros((num_rows + block, num_columns), x.dtype)
    y = jax.lax.fori_loop(0, ends[-1], write_block, y)[:num_rows]
    return jnp.where(jnp.arange(num_rows)[:, None] < jnp.sum(group_sizes), y, 0)


def _forward(x: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(x, kernels, group_sizes), (x, kernels, group_sizes)


def _backward(saved: tuple[Array, Array, Array], cotangent: Array) -> tuple[Array, Array, None]:
    x, kernels, group_sizes = saved
    _, pull = jax.vjp(lambda x, kernels: jax.lax.ragged_dot(x, kernels, group_sizes), x, kernels)
    return *pull(cotangent), None


grouped_matmul.defvjp(_forward, _backward)

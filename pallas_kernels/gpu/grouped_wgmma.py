"""The grouped_matmul kernel for Hopper (sm_90): rows, sorted by group, times one weight matrix per group.

The weight matrices are called kernels in the arguments, as in Flax; a group is an expert.

Division of the work. The work list (`work_list`) consists of tiles of rows that belong to one group. The
first tile of a group begins at the group's first row, rounded down to a multiple of 8, because TMA copies
swizzled tiles from such rows only. Example with tiles of 16 rows:

    groups       a a a a a a | b b b | (c is empty) | d d d d d d d d d
    row          0           6       9              9
    tiles        0 ----------------- 15             of a: rows 0 to 5 are stored
                 0 ----------------- 15             of b: rows 6 to 8
                             8 --------------- 23   of d: rows 9 to 17

The grid is (column range, tile). A thread block multiplies a tile of rows by `columns` columns of the group's
weight matrix. One warpgroup copies, and one or two others multiply 64 rows each.

Memory:

- Global memory: rows, weight matrices, work list, and products.
- Shared memory: a ring of `num_stages` stages, each with `inner` columns of the rows and `inner` rows of the
  weight matrix; a buffer for the products.
- Registers: float32 accumulator [64, columns] of each multiplying warpgroup.

The loop over steps of `inner` elements of the inner dimension:

1. The copying warpgroup waits until the stage is free and starts two TMA copies, of rows and of weights.
2. The multiplying warpgroups wait for both copies and start the wgmma of the step. They then wait for the
   wgmma of the previous step and mark its stage as free.
3. After the last step, the products are written to shared memory, and the rows that belong to the group are
   stored by TMA. Since TMA copies boxes of static size, n rows are stored as one copy for each bit of n, such
   as 4 + 1 rows for n = 5.

JAX includes a similar kernel (jax.experimental.pallas.ops.gpu.ragged_dot_mgpu, in 0.11.2 and 0.12). It is not
used because its loop does not wait for wgmma before a stage is overwritten, which our emulator reports as a
race; its grid is made for one GPU model; and it imports JAX's tests.

Source: Gale et al., MegaBlocks, 2022 (the blocks of rows).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jax_paged.pallas_kernels.gpu import tuning

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
# Rows of one wgmma product, and elements of a swizzled line. The numbers of columns are multiples of a line.
WGMMA_ROWS = LINE = 64
# First rows of swizzled TMA copies must be multiples of this.
ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernel.

    Args:
        rows: Rows of a tile: 64 for each multiplying warpgroup.
        columns: Columns of the result that a thread block computes.
        inner: Elements of the inner dimension in a stage.
        num_stages: Number of stages, one of which is being read while the others are being copied.
    """

    rows: int
    columns: int
    inner: int
    num_stages: int

    @property
    def smem_bytes(self) -> int:
        """The shared memory of the stages and the result (bytes), two bytes per element, without barriers."""
        return 2 * (self.num_stages * self.inner * (self.rows + self.columns) + self.rows * self.columns)


def choose_tiles(gpu: tuning.Target, num_rows: int, num_groups: int, size: int, width: int) -> Tiles:
    """Returns tile sizes for a shape. The rules have not been tuned on a GPU.

    - Rows: 128, with two warpgroups that share the tile of weights, if groups have more than 64 rows on
      average; otherwise 64.
    - Columns: 128, or 64 if 128 would leave SMs without work or does not divide `width`.
    - Stages: as many as fit twice on an SM, at most six, so that one thread block can copy while another
      stores its result.

    Args:
        gpu: The GPU that the kernel is lowered for.
        num_rows: N.
        num_groups: G.
        size: I, the inner dimension.
        width: O, the columns of the weight matrices.
    """
    rows = 128 if num_rows > WGMMA_ROWS * num_groups else WGMMA_ROWS
    busy = min(num_groups, num_rows) * (width // 128) >= gpu.num_sms
    columns = 128 if width % 128 == 0 and busy else LINE
    one = Tiles(rows, columns, LINE, 1)
    stage_bytes = 2 * one.inner * (rows + columns)
    room = gpu.smem_bytes // 2 - 2048 - 2 * rows * columns
    return dataclasses.replace(one, num_stages=max(2, min(6, room // stage_bytes, -(-size // one.inner))))


def work_list(group_sizes: Int[Array, " g"], num_rows: int, rows: int) -> Int[Array, "w 4"]:
    """Returns the tiles of a batch: group, first row, and range [begin, end) of the rows that are stored.

    Args:
        group_sizes: int32 [G], number of rows of each group.
        num_rows: N. Rows of groups beyond N are cut off.
        rows: Rows per tile.
    """
    max_groups = min(group_sizes.shape[0], num_rows)
    # Upper bound for the number of tiles: a group with n rows, and up to ALIGNMENT - 1 rows before them, has
    # at most 1 + (n + ALIGNMENT - 2) // rows tiles.
    items = jnp.arange(max_groups + (num_rows + (ALIGNMENT - 2) * max_groups) // rows)
    groups = jnp.arange(group_sizes.shape[0])

    # XLA fuses this sum, but would make a separate kernel of a cumsum.
    def running_sum(values: Array) -> Array:
        return jnp.sum(jnp.where(groups <= groups[:, None], values, 0), axis=1)

    ends = running_sum(group_sizes)
    begins, ends = jnp.minimum(ends - group_sizes, num_rows), jnp.minimum(ends, num_rows)
    firsts = begins // ALIGNMENT * ALIGNMENT
    counts = jnp.where(ends > begins, pl.cdiv(ends - firsts, rows), 0)
    end_items = running_sum(counts)
    group = jnp.sum(items[:, None] >= end_items, axis=1)
    is_used, group = group < len(groups), jnp.minimum(group, len(groups) - 1)
    first = firsts[group] + (items - (end_items - counts)[group]) * rows
    begin = jnp.maximum(begins[group], first)
    end = jnp.where(is_used, jnp.minimum(ends[group], first + rows), begin)
    return jnp.stack([group, first, begin, end], axis=1).astype(jnp.int32)


def check_shape(x: Array, kernels: Array, *, interpret: bool) -> None:
    """Raises ValueError if the kernel does not support these shapes and dtypes."""
    dtypes = ("bfloat16", "float16", *(["float32"] if interpret else []))
    if x.dtype.name not in dtypes:
        raise ValueError(
            f"the dtype of `x` must be one of {', '.join(dtypes)} for grouped_matmul with backend 'pallas', "
            f"got {x.dtype}. Backend 'xla' has no such limit"
        )
    for name, number in (("columns", kernels.shape[2]), ("rows", kernels.shape[1])):
        if number % LINE or not number:
            raise ValueError(
                f"the number of {name} of `kernels` must be a multiple of {LINE} for grouped_matmul with "
                f"backend 'pallas', got {number}. Backend 'xla' has no such limit"
            )


def grouped_matmul(
    x: Float[Array, "n i"],
    kernels: Float[Array, "g i o"],
    group_sizes: Int[Array, " g"],
    *,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "n o"]:
    """See grouped_matmul.grouped_matmul.

    Args:
        x: Rows, sorted by group.
        kernels: One weight matrix per group.
        group_sizes: int32 [G], number of rows of each group.
        tiles: Tile sizes; None for the sizes of choose_tiles.
        interpret: Whether to run in the interpreter.

    Raises:
        ValueError: If the shapes or the dtype are not supported.
    """
    check_shape(x, kernels, interpret=interpret)
    gpu = tuning.target(interpret=interpret)
    tiles = tiles or choose_tiles(gpu, *x.shape[:1], *kernels.shape)
    tuning.check_smem(tiles.smem_bytes, gpu, f"grouped_matmul with {tiles}")
    return _multiply(x, kernels, group_sizes, tiles, interpret)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _multiply(x: Array, kernels: Array, group_sizes: Array, tiles: Tiles, interpret: bool) -> Array:
    """Runs the kernel. The function is jitted so that equal layers are lowered once."""
    num_rows, (_, size, width), dtype = x.shape[0], kernels.shape, x.dtype
    num_computing, num_stages = tiles.rows // WGMMA_ROWS, tiles.num_stages
    num_steps = size // tiles.inner
    items = work_list(group_sizes, num_rows, tiles.rows)
    # TMA fills rows past the end of an array with zeros, except in an incomplete tile of 8 rows. The
    # interpreter does not fill anything.
    padding = tiles.rows if interpret else max(tiles.rows - num_rows, -num_rows % ALIGNMENT)
    x = jnp.pad(x, ((0, padding), (0, 0)))

    def body(items_ref, x_ref, kernels_ref, y_ref, x_smem, kernel_smem, y_smem, loaded, free):
        group, first, begin, end = (items_ref[lax.axis_index("item"), i] for i in range(4))
        columns = pl.ds(lax.axis_index("column") * tiles.columns, tiles.columns)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when((warpgroup == num_computing) & (end > begin))
        def _copy():
            @pl.loop(0, num_steps)
            def _(step):
                slot = lax.rem(step, jnp.int32(num_stages))
                pl.when(step >= num_stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                inner = pl.ds(step * tiles.inner, tiles.inner)
                rows = x_ref.at[pl.ds(pl.multiple_of(first, ALIGNMENT), tiles.rows), inner]
                plgpu.copy_gmem_to_smem(rows, x_smem.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(
                    kernels_ref.at[group, inner, columns], kernel_smem.at[slot], loaded.at[slot]
                )

            @pl.loop(max(0, num_steps - num_stages), num_steps)
            def _(step):  # wait for all arrivals before the kernel ends
                plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(num_stages))])

        @pl.when((warpgroup < num_computing) & (end > begin))
        def _compute():
            own = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)

            def slot_of(step):
                return lax.rem(step, jnp.int32(num_stages))

            def multiply(acc_ref):
                @pl.loop(0, num_steps)
                def _(step):
                    slot = slot_of(step)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(acc_ref, x_smem.at[slot, own], kernel_smem.at[slot])
                    plgpu.wgmma_wait(1)  # for the previous step, whose stage is then free
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(step - 1)]))

                return acc_ref[...]

            acc = pl.run_scoped(multiply, ACC((WGMMA_ROWS, tiles.columns), jnp.float32))
            plgpu.barrier_arrive(free.at[slot_of(num_steps - 1)])
            # JAX may swizzle this buffer. The swizzle pattern depends on addresses only, so TMA can store
            # from any row.
            tuning.store(y_smem.at[own], acc.astype(dtype))
            plgpu.commit_smem()
            row = jnp.clip(begin - first - warpgroup * WGMMA_ROWS, 0, WGMMA_ROWS)
            count = jnp.clip(end - first - warpgroup * WGMMA_ROWS, 0, WGMMA_ROWS) - row
            row += warpgroup * WGMMA_ROWS
            for bit in reversed(range(WGMMA_ROWS.bit_length())):
                power = 1 << bit

                @pl.when(count & power > 0)
                def _(row=row, power=power):
                    target = y_ref.at[pl.ds(first + row, power), columns]
                    plgpu.copy_smem_to_gmem(y_smem.at[pl.ds(row, power)], target)

                row += count & power
            plgpu.wait_smem_to_gmem(0)

    transforms = tuning.smem_transforms(LINE, dtype)
    out_rows = max(num_rows, tiles.rows)  # TMA needs an array of at least one box
    y = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((out_rows, width), dtype),
        scratch_types=[
            plgpu.SMEM((num_stages, tiles.rows, tiles.inner), dtype, transforms=transforms),
            plgpu.SMEM((num_stages, tiles.inner, tiles.columns), dtype, transforms=transforms),
            plgpu.SMEM((tiles.rows, tiles.columns), dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=num_stages),
            plgpu.Barrier(num_arrivals=num_computing, num_barriers=num_stages),
        ],
        # The tiles are the fastest grid axis, so that the tiles of a group read the same weights at about the
        # same time.
        grid=(width // tiles.columns, items.shape[0]),
        grid_names=("column", "item"),
        kernel_name="grouped_matmul",
        num_threads=num_computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=tuning.interpret_params(interpret),
    )(items, x, kernels)
    is_stored = jnp.arange(num_rows) < jnp.sum(group_sizes)
    return jnp.where(is_stored[:, None], y[:num_rows], 0)

"""The grouped_matmul kernel, for sm_90: rows, sorted by group, times one matrix ("kernel") per group.

The work list has tiles of rows of one group. Those of a group begin at its first row, rounded down to 8, as
TMA copies swizzled tiles from there only:

    groups       a a a a a a | b b b | (c is empty) | d d d d d d d d d
    row          0           6       9              9
    tiles        0 ----------------- 15             of a: rows 0 to 5 are stored
                 0 ----------------- 15             of b: rows 6 to 8
                             8 --------------- 23   of d: rows 9 to 17

A block of threads computes a tile's products with some columns of the kernel. One warpgroup copies rows and
kernel by TMA into a ring of stages, one or two others multiply by wgmma. Rows of other groups are computed
too, and not stored: a run of n rows is stored as its powers of two, as TMA stores boxes of fixed sizes.

JAX ships such a kernel (jax.experimental.pallas.ops.gpu.ragged_dot_mgpu, in 0.11.2 as in 0.12). It is not
used: its loop has no wait for wgmma before a stage is filled again, which the emulator calls a race, its grid
is that of one GPU, and it imports JAX's tests.

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
# Rows of one wgmma; elements of a swizzled line, so that columns come in multiples of them.
WGMMA_ROWS = LINE = 64
# TMA copies swizzled tiles from rows that are multiples of this.
ALIGNMENT = 8


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the kernel's tiles.

    Args:
        rows: Of a tile: 64 for each warpgroup that multiplies.
        columns: Of the result that a block of threads computes.
        inner: Elements that a stage holds of a row, and of a column.
        num_stages: All but one are in flight.
    """

    rows: int
    columns: int
    inner: int
    num_stages: int

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the stages and of the result, two bytes per element, without barriers."""
        return 2 * (self.num_stages * self.inner * (self.rows + self.columns) + self.rows * self.columns)


def choose_tiles(gpu: tuning.Target, num_rows: int, num_groups: int, size: int, width: int) -> Tiles:
    """Returns the tiles for a shape, by rules that no GPU has measured.

    - Rows: 128, with two warpgroups that share the kernel's tile, where groups have more than 64 rows on
      average; else 64.
    - Columns: 128, or 64 where 128 would leave multiprocessors without work or do not divide `width`.
    - Stages: as many as fit twice on a multiprocessor, up to six, so that one block of threads copies while
      the other stores.

    Args:
        gpu: The GPU that the kernel is lowered for.
        num_rows: N.
        num_groups: G.
        size: I.
        width: O.
    """
    rows = 128 if num_rows > WGMMA_ROWS * num_groups else WGMMA_ROWS
    busy = min(num_groups, num_rows) * (width // 128) >= gpu.num_sms
    columns = 128 if width % 128 == 0 and busy else LINE
    one = Tiles(rows, columns, LINE, 1)
    stage_bytes = 2 * one.inner * (rows + columns)
    room = gpu.smem_bytes // 2 - 2048 - 2 * rows * columns
    return dataclasses.replace(one, num_stages=max(2, min(6, room // stage_bytes, -(-size // one.inner))))


def work_list(group_sizes: Int[Array, " g"], num_rows: int, rows: int) -> Int[Array, "w 4"]:
    """Returns the tiles of a batch: group, first row, and the rows that are stored, [begin, end).

    Args:
        group_sizes: int32, rows of each group.
        num_rows: N; what groups have beyond it is cut off.
        rows: Of a tile.
    """
    most = min(group_sizes.shape[0], num_rows)
    items = jnp.arange(most + (num_rows + (ALIGNMENT - 2) * most) // rows)
    groups = jnp.arange(group_sizes.shape[0])

    def running_sum(values: Array) -> Array:  # which XLA fuses, while a cumsum is a kernel of its own
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
            f"got {x.dtype}. Backend 'xla' supports any"
        )
    for name, number in (("columns", kernels.shape[2]), ("rows", kernels.shape[1])):
        if number % LINE or not number:
            raise ValueError(
                f"the number of {name} of `kernels` must be a multiple of {LINE} for grouped_matmul with "
                f"backend 'pallas', got {number}. Backend 'xla' supports any"
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
        tiles: Sizes; None for those of choose_tiles.
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
    """Jitted, so that equal layers are lowered once."""
    num_rows, (_, size, width), dtype = x.shape[0], kernels.shape, x.dtype
    num_computing, num_stages = tiles.rows // WGMMA_ROWS, tiles.num_stages
    num_steps = size // tiles.inner
    items = work_list(group_sizes, num_rows, tiles.rows)
    # TMA fills what is behind the end with zeros, but not tiles of 8 rows that are not whole, nor the
    # interpreter's.
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
            def _(step):  # a kernel must not end with an arrival that nobody waited for
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
                    plgpu.wgmma_wait(1)  # for the step before, whose stage may be filled again
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[slot_of(step - 1)]))

                return acc_ref[...]

            acc = pl.run_scoped(multiply, ACC((WGMMA_ROWS, tiles.columns), jnp.float32))
            plgpu.barrier_arrive(free.at[slot_of(num_steps - 1)])
            # JAX may swizzle this buffer. The pattern is one of addresses, so TMA stores from any row on.
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
    out_rows = max(num_rows, tiles.rows)  # at least a box of TMA
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
        # Items change fastest: the tiles of a group read the same part of its kernel at about the same time.
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

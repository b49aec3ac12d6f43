"""The block tables of all batch slots, on the device: a step brings along only what has changed in them.

An int32 array [G, S, M]: G cache groups, S batch slots, M columns. A place is an index into it, flattened:

    group g, batch slot s, column m        place (g * S + s) * M + m

A step writes its changes into the array, in place, and then reads the tables of its rows by their batch
slots. What stands behind the end of a table is left over from others: the kernels never look at it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jax_paged.worker.compilation.programs import Program, TraceContext

# Changes that one call of WriteBlockTablesProgram takes in.
NUM_WRITTEN = 1024


def write_changes(block_tables: Int[Array, "g s m"], changes: Int[Array, "2 n"]) -> Int[Array, "g s m"]:
    """Writes changes: places and the blocks that stand there now; places past the end are dropped."""
    places, blocks = changes
    return block_tables.reshape(-1).at[places].set(blocks, mode="drop").reshape(block_tables.shape)


def tables_of(block_tables: Int[Array, "g s m"], batch_slots: Int[Array, " b"]) -> Int[Array, "g b m"]:
    """Returns the tables of some batch slots; null blocks for batch slots from S on."""
    return block_tables.at[:, batch_slots].get(mode="fill", fill_value=0)


@dataclasses.dataclass(frozen=True)
class WriteBlockTablesProgram(Program):
    """Writes NUM_WRITTEN changes ahead of a step, such as those of long tables in new batch slots."""

    def __str__(self) -> str:
        return "write block tables"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        jitted = jax.jit(write_changes, donate_argnums=0, out_shardings=context.replicated)
        return jitted.trace(context.state().block_tables, context.shape((2, NUM_WRITTEN), np.int32))


def write_block_tables[T](run: Callable[..., Any], block_tables: T, changes: np.ndarray) -> T:
    """Writes any number of changes ahead of a step; returns the array, which is donated.

    Args:
        run: Runs a program on arguments.
        block_tables: int32 [G, S, M], or a tuple of them, see StepState.
        changes: int32 [2, n], as InputBatch.take_table_changes returns them.
    """
    num_places = jax.tree.leaves(block_tables)[0].size
    for start in range(0, changes.shape[1], NUM_WRITTEN):
        chunk = changes[:, start : start + NUM_WRITTEN]
        padded = np.full((2, NUM_WRITTEN), num_places, np.int32)
        padded[:, : chunk.shape[1]] = chunk
        block_tables = run(WriteBlockTablesProgram(), block_tables, padded)
    return block_tables

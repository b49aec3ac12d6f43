"""Block tables of all batch slots, kept on the device. A step transfers only the entries that have changed.

The array is int32 [G, S, M]: G cache groups, S batch slots, M columns. Changes refer to an entry by its
flattened index:

    group g, batch slot s, column m        index (g * S + s) * M + m

A step first writes its changes into the array, in place. Then it gathers the tables of its sequences by batch
slot. Entries after the end of a table are left over from earlier sequences. The kernels never read them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jax_paged.worker.compilation.programs import Program, TraceContext

# Number of changes that one call of WriteBlockTablesProgram writes.
NUM_WRITTEN = 1024


def write_changes(block_tables: Int[Array, "g s m"], changes: Int[Array, "2 n"]) -> Int[Array, "g s m"]:
    """Returns the block tables with changes applied.

    Args:
        block_tables: Block tables of all batch slots.
        changes: Flattened indices and the block ids to write there. Indices outside the array are dropped.
    """
    indices, blocks = changes
    return block_tables.reshape(-1).at[indices].set(blocks, mode="drop").reshape(block_tables.shape)


def tables_of(block_tables: Int[Array, "g s m"], batch_slots: Int[Array, " b"]) -> Int[Array, "g b m"]:
    """Returns the tables of some batch slots; for a batch slot that does not exist, null blocks."""
    return block_tables.at[:, batch_slots].get(mode="fill", fill_value=0)


@dataclasses.dataclass(frozen=True)
class WriteBlockTablesProgram(Program):
    """Program that writes NUM_WRITTEN block table changes before a step.

    It is needed, for example, when sequences with long tables take batch slots.
    """

    def __str__(self) -> str:
        return "write block tables"

    def trace(self, context: TraceContext) -> jax.stages.Traced:
        """Traces the program; see Program."""
        jitted = jax.jit(write_changes, donate_argnums=0, out_shardings=context.replicated)
        return jitted.trace(context.state().block_tables, context.shape((2, NUM_WRITTEN), np.int32))


def write_block_tables[T](run: Callable[..., Any], block_tables: T, changes: np.ndarray) -> T:
    """Writes any number of changes before a step.

    Args:
        run: Runs a program with the given arguments.
        block_tables: int32 [G, S, M], or a tuple of such arrays, see StepState. Donated.
        changes: int32 [2, n], as returned by InputBatch.take_table_changes.

    Returns:
        The updated block tables.
    """
    num_entries = jax.tree.leaves(block_tables)[0].size
    for start in range(0, changes.shape[1], NUM_WRITTEN):
        chunk = changes[:, start : start + NUM_WRITTEN]
        padded = np.full((2, NUM_WRITTEN), num_entries, np.int32)
        padded[:, : chunk.shape[1]] = chunk
        block_tables = run(WriteBlockTablesProgram(), block_tables, padded)
    return block_tables

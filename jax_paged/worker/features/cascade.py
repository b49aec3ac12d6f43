"""Which sequences of a step attend to their leading blocks together, as they have them in common.

This is cascade attention. The rule: rows that compute one token each form groups by the blocks that their
tables begin with, so that as few tokens as possible are read more than once. A group of n rows with t tokens
in common reads (n - 1) * t tokens less. But each row has a second softmax then, and a join. So it pays from
MIN_ROWS rows, MIN_TOKENS tokens in common and MIN_SAVED_TOKENS tokens less on, as measured on a CPU in
float32, where it pays least. Only whole blocks are shared, and each row's newest token is in none of them.
"""

import numpy as np

from jax_paged.worker.input_batch import InputBatch

MIN_ROWS, MIN_TOKENS = 4, 64
MIN_SAVED_TOKENS = 1024
# Groups within groups that are looked at.
_MAX_DEPTH = 32
# Columns of the tables that are compared at first; then twice as many each time.
_MIN_COLUMNS = 32


def shared_blocks(
    tables: np.ndarray, batch_slots: np.ndarray, most: np.ndarray, block_size: int
) -> np.ndarray:
    """Returns how many leading blocks each row attends to together with the rows that have the same ones.

    Args:
        tables: int32 [S, M], the block tables of all batch slots.
        batch_slots: int64 [B], the batch slot of each row.
        most: int32 [B], how many blocks each row may share; 0 leaves it out.
        block_size: Tokens per block.

    Returns:
        int32 [B]; 0 for rows that attend alone.

    Source: Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes, 2024.
    """
    shared = np.zeros(len(batch_slots), np.int32)

    def group(rows: np.ndarray, start: int, depth: int) -> int:
        """Groups rows whose first `start` blocks are the same; returns how many tokens less they read."""
        stop = _num_common(tables, batch_slots[rows], start, int(most[rows].min()))
        tokens, longer = stop * block_size, rows[most[rows] > stop]
        rest, apart = rows, 0
        for part in _parts(longer, tables[batch_slots[longer], stop]) if depth else []:
            saved = group(part, stop, depth - 1)
            if saved > len(part) * tokens:
                rest, apart = np.setdiff1d(rest, part), apart + saved
        if _num_saved(len(rows), tokens) >= apart + _num_saved(len(rest), tokens):
            rest, apart = rows, 0
        saved = _num_saved(len(rest), tokens)
        shared[rest] = stop if saved else 0
        return apart + saved

    rows = np.flatnonzero(most > 0)
    for part in _parts(rows, tables[batch_slots[rows], 0]):
        group(part, 0, _MAX_DEPTH)
    return shared


def num_saved_tokens(shared: np.ndarray, tables: np.ndarray, batch_slots: np.ndarray, block_size: int) -> int:
    """Returns how many tokens less are read, of what `shared_blocks` has returned."""
    rows = np.flatnonzero(shared)
    if not len(rows):
        return 0
    last = tables[batch_slots[rows], shared[rows] - 1]
    groups, counts = np.unique(np.stack([shared[rows], last]), axis=1, return_counts=True)
    return int((groups[0] * (counts - 1)).sum()) * block_size


def _num_saved(num_rows: int, num_tokens: int) -> int:
    """Returns how many tokens less a group of rows reads; 0 if it does not pay."""
    saved = (num_rows - 1) * num_tokens
    return saved if num_rows >= MIN_ROWS and num_tokens >= MIN_TOKENS and saved >= MIN_SAVED_TOKENS else 0


def _parts(rows: np.ndarray, blocks: np.ndarray) -> list[np.ndarray]:
    """Returns the rows that have the same block, where they are enough for a group."""
    if len(rows) < MIN_ROWS:
        return []
    values, place, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    return [rows[place == i] for i in range(len(values)) if counts[i] >= MIN_ROWS]


def _num_common(tables: np.ndarray, batch_slots: np.ndarray, start: int, stop: int) -> int:
    """Returns how many leading blocks all batch slots have in common: at least `start`, at most `stop`."""
    width = _MIN_COLUMNS
    while start < stop:
        blocks = tables[batch_slots, start : min(start + width, stop)]
        is_same = (blocks == blocks[0]).all(axis=0)
        if not is_same.all():
            return start + int(is_same.argmin())
        start, width = start + blocks.shape[1], 2 * width
    return stop


class SharedPrefixes:
    """Finds the leading blocks that sequences of a step attend to together.

    Args:
        batch: The batch slots.
        group: A cache group whose layers attend to all tokens.
        block_size: Tokens per block.

    Attributes:
        min_rows: Fewest sequences that share blocks.
    """

    def __init__(self, batch: InputBatch, group: int, block_size: int) -> None:
        self._batch, self._group, self._block_size = batch, group, block_size
        self.min_rows = MIN_ROWS

    def fill(
        self, shared: np.ndarray, batch_slots: np.ndarray, start: np.ndarray, num_tokens: np.ndarray
    ) -> int:
        """Fills the field shared_blocks; returns how many tokens less are read."""
        # Where blocks were dropped, equal last blocks do not tell that those before them are equal.
        can_share = (num_tokens == 1) & (self._batch.num_dropped[batch_slots] == 0)
        most = np.where(can_share, start // self._block_size, 0)
        tables = self._batch.block_tables[self._group]
        shared[:] = shared_blocks(tables, batch_slots, most, self._block_size)
        return num_saved_tokens(shared, tables, batch_slots, self._block_size)

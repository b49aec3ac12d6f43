"""Cascade attention: sequences of a step read their common leading blocks only once.

Sequences that compute one token each are grouped by the blocks at the beginning of their block tables. A
group of n sequences with t common tokens reads these tokens once, which saves (n - 1) * t reads. A group may
be split into smaller groups with longer common prefixes if that saves more. In return, each sequence needs a
second softmax and a merge of two results. Cascade attention therefore pays off only for groups with at least
MIN_ROWS sequences, MIN_TOKENS common tokens and MIN_SAVED_TOKENS saved reads. These limits were measured on a
CPU in float32, where the benefit is smallest. Only whole blocks are shared, and never the block of a
sequence's newest token.
"""

import numpy as np

from jax_paged.worker.input_batch import InputBatch

MIN_ROWS, MIN_TOKENS = 4, 64
MIN_SAVED_TOKENS = 1024
# Maximum nesting depth of groups within groups.
_MAX_DEPTH = 32
# Number of table columns that are compared first. It doubles for each further comparison.
_MIN_COLUMNS = 32


def shared_blocks(
    tables: np.ndarray, batch_slots: np.ndarray, max_blocks: np.ndarray, block_size: int
) -> np.ndarray:
    """Returns the number of leading blocks that each sequence reads together with others.

    The sequences of a group have the same number, and the same blocks.

    Args:
        tables: int32 [S, M], the block tables of all batch slots.
        batch_slots: int64 [B], the batch slot of each sequence.
        max_blocks: int32 [B], maximum number of blocks that each sequence may share; 0 excludes the sequence.
        block_size: Tokens per block.

    Returns:
        int32 [B]; 0 for sequences that share no blocks.

    Source: Juravsky et al., Hydragen: High-Throughput LLM Inference with Shared Prefixes, 2024.
    """
    num_shared = np.zeros(len(batch_slots), np.int32)

    def group(sequences: np.ndarray, start: int, depth: int) -> int:
        """Groups sequences whose first `start` blocks are equal; returns the number of token reads saved."""
        stop = _num_common(tables, batch_slots[sequences], start, int(max_blocks[sequences].min()))
        # All sequences share the first `stop` blocks. Sequences with more blocks may be split by their next
        # block into parts with longer common prefixes.
        num_tokens, longer = stop * block_size, sequences[max_blocks[sequences] > stop]
        rest, num_saved = sequences, 0
        for part in _split_by_block(longer, tables[batch_slots[longer], stop]) if depth else []:
            saved = group(part, stop, depth - 1)
            # In the undivided group, each sequence of the part saves num_tokens reads.
            if saved > len(part) * num_tokens:
                rest, num_saved = np.setdiff1d(rest, part), num_saved + saved
        # The remaining sequences may be too few for a group, so the split is undone unless it saves more.
        if _num_saved(len(sequences), num_tokens) >= num_saved + _num_saved(len(rest), num_tokens):
            rest, num_saved = sequences, 0
        saved = _num_saved(len(rest), num_tokens)
        num_shared[rest] = stop if saved else 0
        return num_saved + saved

    sequences = np.flatnonzero(max_blocks > 0)
    for part in _split_by_block(sequences, tables[batch_slots[sequences], 0]):
        group(part, 0, _MAX_DEPTH)
    return num_shared


def num_saved_tokens(shared: np.ndarray, tables: np.ndarray, batch_slots: np.ndarray, block_size: int) -> int:
    """Returns how many token reads the result of `shared_blocks` saves."""
    sequences = np.flatnonzero(shared)
    if not len(sequences):
        return 0
    last = tables[batch_slots[sequences], shared[sequences] - 1]
    groups, counts = np.unique(np.stack([shared[sequences], last]), axis=1, return_counts=True)
    return int((groups[0] * (counts - 1)).sum()) * block_size


def _num_saved(num_seqs: int, num_tokens: int) -> int:
    """Returns the number of token reads that a group saves; 0 if the group does not pay off."""
    saved = (num_seqs - 1) * num_tokens
    return saved if num_seqs >= MIN_ROWS and num_tokens >= MIN_TOKENS and saved >= MIN_SAVED_TOKENS else 0


def _split_by_block(sequences: np.ndarray, blocks: np.ndarray) -> list[np.ndarray]:
    """Splits sequences by their next block; returns the parts that are large enough for a group."""
    if len(sequences) < MIN_ROWS:
        return []
    values, index, counts = np.unique(blocks, return_inverse=True, return_counts=True)
    return [sequences[index == i] for i in range(len(values)) if counts[i] >= MIN_ROWS]


def _num_common(tables: np.ndarray, batch_slots: np.ndarray, start: int, stop: int) -> int:
    """Returns the number of leading blocks that all batch slots have in common, in [start, stop]."""
    width = _MIN_COLUMNS
    while start < stop:
        blocks = tables[batch_slots, start : min(start + width, stop)]
        is_same = (blocks == blocks[0]).all(axis=0)
        if not is_same.all():
            return start + int(is_same.argmin())
        start, width = start + blocks.shape[1], 2 * width
    return stop


class SharedPrefixes:
    """Finder of the leading blocks that sequences of a step read together.

    Args:
        batch: State of the batch slots.
        group: Index of a cache group with full attention.
        block_size: Tokens per block.

    Attributes:
        min_rows: Minimum number of sequences in a group.
    """

    def __init__(self, batch: InputBatch, group: int, block_size: int) -> None:
        self._batch, self._group, self._block_size = batch, group, block_size
        self.min_rows = MIN_ROWS

    def fill(
        self, num_shared: np.ndarray, batch_slots: np.ndarray, start: np.ndarray, num_tokens: np.ndarray
    ) -> int:
        """Fills the field `shared_blocks` of the packed buffer.

        Args:
            num_shared: The field, int32 [B].
            batch_slots: The batch slot of each sequence.
            start: Position of the first token that each sequence computes.
            num_tokens: Number of tokens that each sequence computes.

        Returns:
            The number of token reads saved.
        """
        # The kernels identify a group by the number of its shared blocks and the last of them. After blocks
        # were dropped, an equal last block does not imply that the blocks before it are equal.
        can_share = (num_tokens == 1) & (self._batch.num_dropped[batch_slots] == 0)
        max_blocks = np.where(can_share, start // self._block_size, 0)
        tables = self._batch.block_tables[self._group]
        num_shared[:] = shared_blocks(tables, batch_slots, max_blocks, self._block_size)
        return num_saved_tokens(num_shared, tables, batch_slots, self._block_size)

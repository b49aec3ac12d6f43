"""Bugs planted where the worker takes in what a step says."""

from planted_bugs.mutation import Mutation

WORKER = [
    Mutation(
        "worker/batch_builder.py",
        "blocks * size + table_slots % size",
        "blocks * size + (table_slots + 1) % size",
        "slots shifted",
    ),
    Mutation(
        "worker/batch_builder.py",
        "rows.end_loc[logits_rows.rows] - 1 - tokens_back",
        "rows.end_loc[logits_rows.rows] - tokens_back",
        "logits of the next row",
    ),
    Mutation(
        "worker/batch_builder.py",
        'view["context_lens"][g, :n] = stop - batch.num_dropped[batch_slots]\n',
        'view["context_lens"][g, :n] = stop - batch.num_dropped[batch_slots] - 1\n',
        "own tokens not attended to",
    ),
    Mutation(
        "worker/batch_builder.py",
        '        view["slot_mapping"][:] = self._num_blocks * size\n',
        "",
        "padding is written to block 0",
    ),
    Mutation(
        "worker/input_batch.py",
        "self.block_tables[g, batch_slot, index] = block\n",
        "pass\n",
        "a replaced block is not taken in",
    ),
    Mutation(
        "worker/input_batch.py",
        "self._write(g, batch_slot, int(self.num_table_blocks[g, batch_slot]), blocks)",
        "self._write(g, batch_slot, 0, blocks)",
        "new blocks stand at the wrong place",
    ),
    Mutation(
        "worker/features/multi_step.py",
        'view["end_tokens"][:n] = batch.end_tokens[batch_slots]',
        'view["end_tokens"][:n] = -1',
        "a burst goes on after an end token",
    ),
    Mutation(
        "worker/input_batch.py",
        "            self._changed_entries.append(self._table_index(g, batch_slot, index))\n",
        "",
        "the device is not told of a replaced block",
    ),
    Mutation(
        "worker/input_batch.py",
        "range(index, index + len(blocks))",
        "range(index, index + 1)",
        "the device is told of the first new block only",
    ),
    Mutation(
        "worker/batch_builder.py",
        "changes_before_step=changes[:, :num_before],",
        "changes_before_step=changes[:, :0],",
        "changes of tables that do not fit into the buffer are dropped",
    ),
    Mutation(
        "worker/batch_builder.py",
        '        view["batch_slots"][n:] = self._input_batch.num_batch_slots\n',
        "",
        "rows that are not used read the table of seat 0",
    ),
    Mutation(
        "worker/block_mover.py", "pairs = pairs[size:]", "pairs = ()", "copies beyond the first call left out"
    ),
    Mutation(
        "worker/block_mover.py",
        "np.array([host for _, host in chunk], np.int32)",
        "np.array([device for device, _ in chunk], np.int32)",
        "swapped out to the wrong block",
    ),
]

"""Bugs planted in what a user does to requests: forks, tokens taken back, drafts, dropped blocks."""

from planted_bugs.mutation import Mutation

REQUEST_EDITS = [
    Mutation(
        "core/features/interactive/request_edits.py",
        "        del seq.block_hashes[len(seq) // manager.block_size :]\n",
        "",
        "hashes of tokens that were taken back are kept",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "        manager.prefixes.discard_lookup()  #",
        "        #",
        "a walk goes on along tokens that were taken back",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "min(seq.num_computed_tokens, len(seq) - 1)",
        "min(seq.num_computed_tokens, len(seq))",
        "the last token that is left is not computed again",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "        lacks_blocks = manager.lacks_window_blocks(tables, seq.num_computed_tokens)\n",
        "        lacks_blocks = False\n",
        "a request goes on behind a window whose blocks are gone",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "seq.num_dropped_tokens += (len(computed)",
        "seq.num_dropped_tokens = (len(computed)",
        "the first of two drops is forgotten",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "- 2 - seq.kept_block_indices",
        "- 1 - seq.kept_block_indices",
        "taken back up to the last kept block",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "self._manager.fork(seq, child, seq.num_computed_tokens)",
        "self._manager.fork(seq, child, seq.num_computed_tokens - 1)",
        "a fork of a request lacks its last token",
    ),
    Mutation(
        "core/features/interactive/request_edits.py",
        "self._queues.num_reserved_slots < self._max_num_seqs",
        "self._queues.num_reserved_slots <= self._max_num_seqs",
        "a fork takes a seat that is not there",
    ),
    Mutation(
        "core/block_manager.py",
        "            start = seq.next_position - seq.num_dropped_tokens\n",
        "            start = seq.next_position\n",
        "slots count what was dropped",
    ),
    Mutation(
        "core/block_manager.py",
        " and not seq.num_dropped_tokens:",
        ":",
        "blocks behind dropped ones are cached",
    ),
    Mutation(
        "core/block_manager.py",
        "                pool.release_tables([[table[i] for i in sorted(dropped)]])\n",
        "",
        "dropped blocks are kept",
    ),
    Mutation(
        "core/block_manager.py",
        "        if is_here:\n            self.sequences_without_blocks.append(seq)\n",
        "",
        "a sequence keeps its seat when it loses blocks",
    ),
    Mutation(
        "core/preemption.py",
        '        swaps = mode == "swap" or _has_dropped(group)\n',
        '        swaps = mode == "swap"\n',
        "a request with dropped blocks ends though it could be swapped",
    ),
    Mutation(
        "core/preemption.py",
        "return bool(step.swap_in) and _has_dropped(group)",
        "return False",
        "a request with dropped blocks ends in a step that swaps in",
    ),
    Mutation(
        "core/batch_slots.py",
        "return token_ids + drafts, 1 + len(drafts), 1",
        "return drafts, 1 + len(drafts), 1",
        "a draft without the token before it",
    ),
    Mutation(
        "core/batch_slots.py",
        "            num_dropped_tokens=seq.num_dropped_tokens,\n",
        "",
        "the executor does not know what was dropped",
    ),
    Mutation(
        "worker/batch_builder.py",
        "        table_slots = rows.positions - batch.num_dropped[rows.token_batch_slots]\n",
        "        table_slots = rows.positions\n",
        "slots of a sequence with dropped blocks",
    ),
    Mutation(
        "worker/features/multi_step.py",
        "    table_slots = start - batch.num_dropped[batch_slots]\n",
        "    table_slots = start\n",
        "a burst of a sequence with dropped blocks is checked at the wrong place",
    ),
    Mutation(
        "worker/input_batch.py",
        "        self.num_dropped[batch_slot] = new.num_dropped_tokens\n",
        "",
        "dropped tokens are not taken in",
    ),
]

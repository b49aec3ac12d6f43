"""Bugs planted in the block tables, the pool and the prefix cache."""

from planted_bugs.mutation import Mutation

BLOCKS = [
    Mutation(
        "core/kv_cache/block_pool.py",
        "fromkeys(range(1, num_blocks))",
        "fromkeys(range(num_blocks))",
        "null block handed out",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "self.ref_counts[block] += 1",
        "self.ref_counts[block] = 1",
        "reference not counted",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "self.ref_counts[block] -= 1",
        "self.ref_counts[block] = 0",
        "freed while referenced",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "                del self._free[block]\n",
        "                pass\n",
        "a hit stays free",
    ),
    Mutation("core/kv_cache/block_pool.py", "parent + array(", "array(", "hash without the parent"),
    Mutation("core/kv_cache/block_pool.py", " + salt.encode(", ' + "".encode(', "hash without the salt"),
    Mutation("core/kv_cache/block_pool.py", "and self.contents[block] == content", "", "a hash is trusted"),
    Mutation(
        "core/kv_cache/block_pool.py", "            del self._cached[key]\n", "", "an evicted block is found"
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "move_to_end(block, last=False)",
        "move_to_end(block)",
        "cached blocks evicted first",
    ),
    Mutation(
        "core/block_manager.py",
        "                copies.append((block, table[i]))\n",
        "",
        "a copy is left out",
    ),
    Mutation(
        "core/block_manager.py",
        "                pool.release(block)\n                copies",
        "                copies",
        "a copied block keeps its reference",
    ),
    Mutation(
        "core/block_manager.py",
        "            if pool.ref_counts[block] > 1:\n",
        "            if True:\n",
        "the last writer copies too",
    ),
    Mutation(
        "core/block_manager.py",
        "                pool.remove_from_cache(block)\n",
        "                pass\n",
        "a cached block is written",
    ),
    Mutation(
        "core/block_manager.py",
        "n - (pool.ref_counts[block] == n)",
        "n - 1",
        "one copy too few is counted",
    ),
    Mutation(
        "core/block_manager.py",
        "+ num_copies > pool.num_free",
        "> pool.num_free",
        "room for copies not counted",
    ),
    Mutation(
        "core/block_manager.py",
        "list(table) if group.is_cross else table[:num_blocks]\n            for",
        "list(table)\n            for",
        "a fork without truncation",
    ),
    Mutation(
        "core/block_manager.py",
        "        for table in self.block_tables[child]:\n            for block in table:\n"
        "                self.pool.share(block)\n",
        "",
        "a fork takes no references",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window + 2) // self.block_size",
        "the window a token too short",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "max(0, position - window + 1) // self.block_size",
        "max(0, position - window - self.block_size) // self.block_size",
        "blocks kept after they fell out of the window",
    ),
    Mutation(
        "core/block_manager.py",
        "        for block in prefix.blocks:  # before any new block is taken, which could evict them\n"
        "            self.pool.share(block)\n"
        "        self.block_tables[seq] = [list(table) for table in prefix.tables]\n"
        "        self.prefixes.discard_lookup()\n"
        "        for table, n in zip(self.block_tables[seq], num_new, strict=True):\n"
        "            table.extend(self.pool.allocate() for _ in range(n))\n",
        "        self.block_tables[seq] = [list(table) for table in prefix.tables]\n"
        "        self.prefixes.discard_lookup()\n"
        "        for table, n in zip(self.block_tables[seq], num_new, strict=True):\n"
        "            table.extend(self.pool.allocate() for _ in range(n))\n"
        "        for block in prefix.blocks:\n"
        "            self.pool.share(block)\n",
        "hits claimed after new blocks are taken",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "parent = hashes[i - 1] if i else NO_PARENT",
        "parent = NO_PARENT",
        "blocks found without what is before them",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "(len(lookup.seq) - 1) // self.block_size):",
        "len(lookup.seq) // self.block_size):",
        "the last token is a hit",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "range(start // self.block_size, stop // self.block_size):",
        "range(start // self.block_size, -(-stop // self.block_size)):",
        "half full blocks cached",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "self.pool.add_to_cache(tables[g][i], content._replace(group=g))",
        "self.pool.add_to_cache(tables[g][i], content)",
        "cache groups mixed up",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "                new_pool.share(block)\n",
        "                pass\n",
        "what moves keeps no references",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "return [(block, moved[block]) for block in blocks]",
        "return [(moved[block], block) for block in blocks]",
        "pairs of a swap the wrong way round",
    ),
    Mutation(
        "core/block_manager.py",
        "        self.pool.release_tables(prefix.tables)\n",
        "",
        "unpin without letting go",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "        if self._last_step is None:\n",
        "        if True:\n",
        "nothing is held back for a step in flight",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "next(iter(self._held.values())) <= step_id",
        "next(iter(self._held.values())) <= step_id + 1",
        "a block is freed a step too early",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "lookup.num_valid, lookup.result = position, None",
        "lookup.num_valid, lookup.result = position + 1, None",
        "an evicted block is found again",
    ),
    Mutation(
        "core/kv_cache/prefix_cache.py",
        "position is not None and position < lookup.num_valid:",
        "position is not None:",
        "a walk goes on behind a hole",
    ),
    Mutation(
        "core/block_manager.py",
        "release_tables(self.block_tables.pop(seq))\n            self.sequences_without_blocks.append(seq)\n",
        "release_tables(self.block_tables.pop(seq))\n",
        "seats are kept by those that lost their blocks",
    ),
    Mutation(
        "core/block_manager.py",
        "                self._record_replaced(seq, g, i)\n",
        "",
        "a copied block is not told",
    ),
    Mutation(
        "core/block_manager.py",
        "                    self._record_replaced(seq, i, j)\n",
        "",
        "a block that fell out of a window is not told",
    ),
    Mutation(
        "core/block_manager.py",
        "            start = seq.next_position - seq.num_dropped_tokens\n            first,",
        "            start = seq.num_computed_tokens - seq.num_dropped_tokens\n            first,",
        "a step ahead has no block for its token",
    ),
    Mutation(
        "core/kv_cache/block_pool.py",
        "        if self._last_step is None:\n",
        "        if True:\n",
        "a block is handed out that a step in flight still writes to",
    ),
]

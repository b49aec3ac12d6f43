"""BlockManager: block tables of all sequences, with sharing, copy-on-write and swapping."""

from collections import Counter
from collections.abc import Iterable

from jax_paged.core.kv_cache.block_pool import NULL_BLOCK, BlockPool, distinct, move_tables
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.kv_cache.prefix_cache import CachedPrefix, PinnedPrefix, PrefixCache
from jax_paged.core.kv_cache.state_slots import StateSlots
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import BlockTables, Copies
from jax_paged.errors import ArgumentError, check_int


class BlockManager:
    """Owner of the block tables of all sequences, over a block pool on the device and one in host memory.

    A sequence has one block table per cache group. Sequences share blocks after a fork, and through the
    prefix cache. A shared block is copied before a sequence writes to it (copy-on-write). Only full blocks
    whose keys and values have been computed are in the prefix cache, and these blocks are never written
    again. When a sequence releases its blocks, it releases the last block first, so that the end of a cached
    prefix is evicted before its beginning.

    Args:
        num_blocks: Number of blocks on the device, including the null block.
        block_size: Tokens per block.
        enable_prefix_caching: Whether sequences share the full blocks of common prefixes.
        groups: Cache groups of the model's layers. All of them use the same pool.
        num_swap_blocks: Number of blocks in host memory for sequences that are swapped out.
        num_state_slots: Number of slots for recurrent states, including the null slot; 0 if no layer has any.
        num_swap_state_slots: Number of state slots in host memory.

    Raises:
        ValueError: If num_blocks is less than 2, block_size is less than 1, or num_swap_blocks is negative.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        *,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        num_swap_blocks: int = 0,
        num_state_slots: int = 0,
        num_swap_state_slots: int = 0,
    ) -> None:
        check_int("num_blocks", num_blocks, 2)
        check_int("block_size", block_size, 1)
        check_int("num_swap_blocks", num_swap_blocks, 0)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.groups = groups
        self.pool = BlockPool(num_blocks)
        self.swap_pool = BlockPool(num_swap_blocks + 1)
        self.block_tables: dict[Sequence, BlockTables] = {}
        self.swapped_tables: dict[Sequence, BlockTables] = {}
        self.pinned: dict[str, PinnedPrefix] = {}
        self.states = StateSlots(
            num_state_slots, num_swap_state_slots, block_size, makes_checkpoints=enable_prefix_caching
        )
        self.prefixes = PrefixCache(self.pool, groups, block_size, self.states)
        # Changes since the last step was built. BatchSlots sends them to the executor and clears them.
        # Sequences that have lost their blocks on the device:
        self.sequences_without_blocks: list[Sequence] = []
        # Sequences whose block tables have changed, with (cache group, index, block id) of replaced entries:
        self.table_changes: dict[Sequence, list[tuple[int, int, int]]] = {}
        self._windows = [(i, g.window) for i, g in enumerate(groups) if g.window is not None]

    @property
    def num_usable_blocks(self) -> int:
        """The number of blocks that sequences can use: all blocks except the null block."""
        return self.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """The number of free blocks, including those in the prefix cache."""
        return self.pool.num_free

    def begin_step(self, step_id: int) -> None:
        """Holds back blocks that are released from now on, until the step has returned."""
        self.pool.begin_step(step_id)
        self.states.pool.begin_step(step_id)

    def end_step(self, step_id: int) -> None:
        """Frees the blocks that were held back for this step. Steps must end in order."""
        self.pool.end_step(step_id)
        self.states.pool.end_step(step_id)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens` tokens in one cache group."""
        return -(-num_tokens // self.block_size)

    def allocate(
        self, seq: Sequence, salt: str, *, use_cache: bool, num_reserved: int, num_encoder_tokens: int = 0
    ) -> bool:
        """Allocates the blocks for all tokens of a sequence without block tables.

        Shares the cached blocks of the longest cached prefix. At least the last token is left to compute.
        Sets `seq.num_computed_tokens` to the number of tokens in shared blocks. Groups with a
        window get their new blocks later, from `append_slots`. For each of these groups, one block must be
        free now.

        Args:
            seq: The sequence. Its `block_hashes` are extended.
            salt: Sequences share blocks only if their salts are equal.
            use_cache: Whether the sequence may share cached blocks.
            num_reserved: Number of blocks that must stay free.
            num_encoder_tokens: Number of encoder tokens in cross-attention groups.

        Returns:
            True on success. If False, no blocks have been allocated.
        """
        if self.pool.num_free - num_reserved < 1 or not self.states.has_room:
            return False  # at least one block is new, so a long prefix need not be looked up
        prefix = self._cached_prefix(seq, salt, use_cache)
        num_new = self._num_new(seq, prefix.num_blocks, num_encoder_tokens)
        if self._num_taken(num_new, prefix.blocks) > self.pool.num_free - num_reserved:
            return False
        self.states.allocate(seq, prefix.slot, prefix.num_blocks * self.block_size)
        for block in prefix.blocks:  # before any new block is taken, which could evict them
            self.pool.share(block)
        self.block_tables[seq] = [list(table) for table in prefix.tables]
        self.prefixes.discard_lookup()
        for table, n in zip(self.block_tables[seq], num_new, strict=True):
            table.extend(self.pool.allocate() for _ in range(n))
        seq.num_computed_tokens = prefix.num_blocks * self.block_size
        return True

    def preview_allocation(
        self, seq: Sequence, salt: str, *, use_cache: bool, num_encoder_tokens: int
    ) -> tuple[int, CachedPrefix]:
        """Returns how many free blocks `allocate` needs, and the cached prefix that it would share."""
        prefix = self._cached_prefix(seq, salt, use_cache)
        num_new = self._num_new(seq, prefix.num_blocks, num_encoder_tokens)
        return self._num_taken(num_new, prefix.blocks), prefix

    def num_swapped_blocks(self, seqs: list[Sequence]) -> int:
        """Returns the number of free blocks that `swap_in` needs."""
        return len(distinct(self.swapped_tables[seq] for seq in seqs if seq in self.swapped_tables))

    def released_by(self, seqs: Iterable[Sequence]) -> set[int]:
        """Returns the blocks that would have no references left if the given sequences released theirs."""
        held = (self.block_tables[seq] for seq in seqs if seq in self.block_tables)
        counts = Counter(block for tables in held for table in tables for block in table)
        return {b for b, n in counts.items() if b != NULL_BLOCK and self.pool.ref_counts[b] == n}

    def limit_to_free_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` tokens can be written with the free blocks; at least 1.

        Only groups with a window limit the number, because they get their blocks while the sequence is
        computed. Each of them may use an equal share of the free blocks.
        """
        if not self._windows:
            return num_tokens
        table = self.block_tables[seq][self._windows[0][0]]
        num_slots = (len(table) + self.pool.num_free // len(self._windows)) * self.block_size
        return max(1, min(num_tokens, num_slots - seq.next_position))

    def append_slots(self, rows: list[tuple[Sequence, int]]) -> Copies | None:
        """Allocates the blocks that sequences need to write their next tokens, for all of them or for none.

        Extends block tables in place, replaces blocks that are shared with other sequences by copies, and
        frees blocks that fell out of a window.

        Args:
            rows: Pairs of a sequence and the number of tokens that it computes next.

        Returns:
            (source, destination) blocks to copy before the tokens are written. None if there are not enough
            free blocks; then only blocks outside of windows have been freed.
        """
        size, pool = self.block_size, self.pool
        if self._windows:
            self._free_out_of_window(rows)
        missing: list[tuple[Sequence, list[int], int]] = []
        writes: list[tuple[Sequence, int, list[int], int]] = []
        for seq, num_tokens in rows:
            start = seq.next_position - seq.num_dropped_tokens
            first, num_blocks = start // size, -(-(start + num_tokens) // size)
            for g, table in enumerate(self.block_tables[seq]):
                if self.groups[g].is_cross:
                    continue
                if num_blocks > len(table):
                    missing.append((seq, table, num_blocks - len(table)))
                # The block is shared, or it is in the prefix cache because the sequence was forked at a token
                # inside of it.
                if first < len(table) and (
                    pool.ref_counts[table[first]] > 1 or pool.contents[table[first]] is not None
                ):
                    writes.append((seq, g, table, first))
        if not missing and not writes:
            return [] if self.states.prepare(rows) else None
        # If all sequences that reference a block write to it, the last of them needs no copy.
        writers = Counter(table[i] for _, _, table, i in writes)
        num_copies = sum(n - (pool.ref_counts[block] == n) for block, n in writers.items())
        if sum(n for _, _, n in missing) + num_copies > pool.num_free or not self.states.prepare(rows):
            return None
        copies: Copies = []
        for seq, g, table, i in writes:
            block = table[i]
            if pool.ref_counts[block] > 1:
                table[i] = pool.allocate()
                pool.release(block)
                copies.append((block, table[i]))
                self._record_replaced(seq, g, i)
            else:
                pool.remove_from_cache(block)
        for seq, table, n in missing:
            table.extend(pool.allocate() for _ in range(n))
            self.table_changes.setdefault(seq, [])
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Lets a sequence without block tables share the blocks of another sequence's first tokens.

        Args:
            parent: A sequence with blocks for at least num_tokens tokens.
            child: A sequence that begins with the same num_tokens tokens.
            num_tokens: Number of tokens whose blocks are shared.

        Returns:
            True on success. False if blocks in the child's windows, or the recurrent state after these
            tokens, no longer exist; then nothing has changed.
        """
        num_blocks = self.num_blocks_of(num_tokens - parent.num_dropped_tokens)
        tables = self.block_tables[parent]
        if self.lacks_window_blocks(tables, num_tokens) or not self.states.can_fork(parent, num_tokens):
            return False
        self.states.fork(parent, child)
        self.block_tables[child] = [
            list(table) if group.is_cross else table[:num_blocks]
            for group, table in zip(self.groups, tables, strict=True)
        ]
        for table in self.block_tables[child]:
            for block in table:
                self.pool.share(block)
        return True

    def lacks_window_blocks(self, tables: BlockTables, num_tokens: int) -> bool:
        """Returns whether computing the token at position `num_tokens` requires blocks that were freed.

        Blocks are freed once they lie outside of the window of all later tokens. If a sequence continues from
        an earlier position, the window at that position may contain freed blocks.
        """
        first, num_blocks = self.prefixes.first_in_window, self.num_blocks_of(num_tokens)
        return any(
            NULL_BLOCK in tables[i][first(window, num_tokens) : num_blocks] for i, window in self._windows
        )

    def cache_full_blocks(self, seq: Sequence, salt: str, start: int, stop: int) -> None:
        """Adds to the prefix cache the blocks that became full when tokens [start, stop) were computed."""
        if self.enable_prefix_caching and not seq.num_dropped_tokens:  # dropped tokens would be missing
            self.prefixes.add_full_blocks(seq, salt, self.block_tables[seq], start, stop)
            self.prefixes.add_checkpoints(seq, salt, stop)

    def keep_only(self, seq: Sequence, indices: list[int]) -> None:
        """Releases all blocks of a sequence except those at the given indices of its block tables.

        The sequence then takes another batch slot, because SchedulerOutput cannot remove block table entries.
        Blocks of cross-attention groups are kept.

        Args:
            seq: The sequence.
            indices: Ascending indices of the blocks to keep.
        """
        is_here = seq in self.block_tables
        pool, held = (self.pool, self.block_tables) if is_here else (self.swap_pool, self.swapped_tables)
        dropped = set(range(len(held[seq][0]))).difference(indices)
        for table, group in zip(held[seq], self.groups, strict=True):
            if not group.is_cross:
                pool.release_tables([[table[i] for i in sorted(dropped)]])
                table[:] = [table[i] for i in indices]
        if is_here:
            self.sequences_without_blocks.append(seq)

    def free(self, seq: Sequence) -> None:
        """Releases the blocks of a sequence on the device or in host memory.

        The list objects of its block tables are not modified.
        """
        self.table_changes.pop(seq, None)
        self.states.free(seq)
        if seq in self.block_tables:
            self.pool.release_tables(self.block_tables.pop(seq))
            self.sequences_without_blocks.append(seq)
        else:
            self.swap_pool.release_tables(self.swapped_tables.pop(seq))

    def swap_out(self, seqs: list[Sequence]) -> Copies | None:
        """Moves the block tables of one request to host memory. Shared blocks stay shared.

        Returns:
            (device block, host block) pairs to copy before the device blocks are overwritten. None if host
            memory does not have enough free blocks; then only blocks outside of windows have been freed.
        """
        # Blocks outside of windows are freed now instead of being swapped out. Otherwise, the step that swaps
        # them in again would free them in append_slots, and a step must not free blocks that it swaps in.
        self._free_out_of_window([(seq, 0) for seq in seqs if seq in self.block_tables])
        if len(
            distinct(self.block_tables[seq] for seq in seqs if seq in self.block_tables)
        ) > self.swap_pool.num_free or not self.states.can_swap_out(seqs):
            return None
        self.states.swap_out(seqs)
        for seq in seqs:
            self.table_changes.pop(seq, None)
        self.sequences_without_blocks.extend(seqs)
        return move_tables(seqs, (self.pool, self.block_tables), (self.swap_pool, self.swapped_tables))

    def swap_in(self, seqs: list[Sequence], *, num_reserved: int) -> Copies | None:
        """Moves the block tables of one request back to the device.

        Args:
            seqs: The sequences of the request.
            num_reserved: Number of device blocks that must stay free.

        Returns:
            (host block, device block) pairs to copy before tokens are computed. None if fewer than
            num_reserved blocks would stay free; then nothing has changed.
        """
        num_free = self.pool.num_free - num_reserved
        if self.num_swapped_blocks(seqs) > num_free or not self.states.can_swap_in(seqs):
            return None
        self.states.swap_in(seqs)
        return move_tables(seqs, (self.swap_pool, self.swapped_tables), (self.pool, self.block_tables))

    def pin(self, name: str, token_ids: list[int], salt: str) -> int:
        """Keeps the cached blocks of a prefix until `unpin` is called.

        Returns:
            The number of tokens in these blocks.

        Raises:
            ValueError: If the name is in use, or prefix caching is disabled.
        """
        if name in self.pinned:
            raise ArgumentError("name", name, "unique among pinned prefixes")
        if not self.enable_prefix_caching:
            raise ArgumentError("enable_prefix_caching", False, "True for pinned prefixes")
        # One more token, because the lookup leaves out the last token.
        prefix = self.prefixes.longest(Sequence([*token_ids, 0]), salt)
        self.prefixes.discard_lookup()
        for block in prefix.blocks:
            self.pool.share(block)
        self.states.pool.share(prefix.slot)
        self.pinned[name] = PinnedPrefix(token_ids, salt, prefix.tables, prefix.slot)
        return prefix.num_blocks * self.block_size

    def unpin(self, name: str) -> None:
        """Unpins a prefix. Its blocks stay cached until they are evicted.

        Raises:
            ValueError: If no pinned prefix has this name.
        """
        if name not in self.pinned:
            names = ", ".join(map(repr, self.pinned)) or "none"
            raise ArgumentError("name", name, f"the name of a pinned prefix ({names})")
        prefix = self.pinned.pop(name)
        self.pool.release_tables(prefix.tables)
        self.states.pool.release(prefix.slot)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. Sequences keep their blocks."""
        assert not self.pinned, "the prefix cache cannot be emptied while prefixes are pinned"
        for cache in (self.pool, self.states.pool):
            for block in range(cache.num_blocks):
                cache.remove_from_cache(block)

    def check_integrity(self) -> None:
        """Asserts all invariants of the class. Takes time proportional to the size of the pools."""
        assert not self.block_tables.keys() & self.swapped_tables.keys(), "a sequence is in both pools"
        on_device = [*self.block_tables.values(), *(prefix.tables for prefix in self.pinned.values())]
        for pool, held in ((self.pool, on_device), (self.swap_pool, list(self.swapped_tables.values()))):
            counts = [0] * pool.num_blocks
            for tables in held:
                assert len(tables) == len(self.groups), f"{len(tables)} tables for {len(self.groups)} groups"
                blocks = [block for table in tables for block in table if block != NULL_BLOCK]
                assert len(set(blocks)) == len(blocks), f"block tables contain a block twice: {tables}"
                assert all(0 < block < pool.num_blocks for block in blocks), f"invalid block ids: {tables}"
                for group, table in zip(self.groups, tables, strict=True):
                    assert group.window or NULL_BLOCK not in table, f"null block without a window: {table}"
                for block in blocks:
                    counts[block] += 1
            pool.check_integrity(counts, self.block_size)
        slots = [prefix.slot for prefix in self.pinned.values() if prefix.slot]
        self.states.check_integrity(set(self.block_tables), set(self.swapped_tables), slots)

    def _cached_prefix(self, seq: Sequence, salt: str, use_cache: bool) -> CachedPrefix:
        if use_cache and self.enable_prefix_caching:
            return self.prefixes.longest(seq, salt)
        return CachedPrefix(0, [[] for _ in self.groups], [])

    def _num_new(self, seq: Sequence, num_shared: int, num_encoder_tokens: int) -> list[int]:
        """Returns the number of new blocks that `allocate` takes for a sequence, per cache group."""
        num_own = self.num_blocks_of(len(seq)) - num_shared
        num_cross = self.num_blocks_of(num_encoder_tokens)
        return [num_cross if g.is_cross else num_own if g.window is None else 0 for g in self.groups]

    def _num_taken(self, num_new: list[int], shared: list[int]) -> int:
        """Returns how many free blocks are needed: new ones, free ones to share, and one per window group."""
        # Cached blocks without references are free now, and no longer free once they are shared.
        counts = list(map(self.pool.ref_counts.__getitem__, shared))
        return sum(num_new) + len(self._windows) + counts.count(0)

    def _record_replaced(self, seq: Sequence, g: int, i: int) -> None:
        """Records a changed block table entry for the executor."""
        self.table_changes.setdefault(seq, []).append((g, i, self.block_tables[seq][g][i]))

    def _free_out_of_window(self, rows: list[tuple[Sequence, int]]) -> None:
        """Releases blocks that fell out of a window, and puts the null block in their place."""
        for seq, _ in rows:
            tables = self.block_tables[seq]
            for i, window in self._windows:
                table = tables[i]
                # Go back from the last block outside of the window. Blocks before a null block are free
                # already.
                j = min(self.prefixes.first_in_window(window, seq.next_position), len(table)) - 1
                while j >= 0 and table[j] != NULL_BLOCK:
                    self.pool.release(table[j])
                    table[j] = NULL_BLOCK
                    self._record_replaced(seq, i, j)
                    j -= 1

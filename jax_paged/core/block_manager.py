"""Who holds which block of the KV pool: block tables, sharing, copy-on-write, swap. No arrays."""

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
    """Owns the block tables of all sequences, over one pool on the device and one in host memory.

    A sequence's blocks are released last block first, so that the tail of a prefix is evicted before its
    head. Only full blocks whose keys and values are in the pool are cached, and these are never written
    again. A block that several sequences reference is copied before one of them writes to it.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.
        enable_prefix_caching: Whether sequences share the full blocks of equal prefixes.
        groups: What the model's layers need; all take their blocks from the one pool.
        num_swap_blocks: Blocks of host memory for sequences that are swapped out.
        num_state_slots: Slots for states, that of the null block included; 0 if no layer keeps any.
        num_swap_state_slots: Slots of host memory.

    Raises:
        ValueError: If there is no block besides the null block, or a block holds no token.
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
            num_state_slots, num_swap_state_slots, block_size, keeps_checkpoints=enable_prefix_caching
        )
        self.prefixes = PrefixCache(self.pool, groups, block_size, self.states)
        # Sequences that have lost their blocks on the device since the executor was told last, and ...
        self.lost: list[Sequence] = []
        # ... sequences whose tables have changed since the executor was told last, and of entries that were
        # replaced the (cache group, index, block id). Whoever tells it takes them out.
        self.changed: dict[Sequence, list[tuple[int, int, int]]] = {}
        self._windows = [(i, g.window) for i, g in enumerate(groups) if g.window is not None]

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can have: all but the null block."""
        return self.pool.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.pool.num_free

    def begin_step(self, step_id: int) -> None:
        """Holds back blocks that are released from now on, until the step has returned."""
        self.pool.begin_step(step_id)
        self.states.pool.begin_step(step_id)

    def end_step(self, step_id: int) -> None:
        """Frees the blocks that waited for this step; steps end in the order in which they began."""
        self.pool.end_step(step_id)
        self.states.pool.end_step(step_id)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks of one group that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(
        self, seq: Sequence, salt: str, *, use_cache: bool, num_reserved: int, num_encoder_tokens: int = 0
    ) -> bool:
        """Gives a sequence without a block table the blocks of all its tokens.

        Cached blocks of its prefix are shared, up to the last full block before the last token: one token
        at least is left to compute. Sets `seq.num_computed_tokens` to the tokens of the shared blocks.
        Groups with a window get their new blocks by `append_slots` as the sequence is computed; one each is
        free afterwards.

        Args:
            seq: The sequence; extends its `block_hashes`.
            salt: Only sequences of equal salt share blocks.
            use_cache: Whether it may share blocks.
            num_reserved: Blocks that must stay free.
            num_encoder_tokens: Tokens that groups of cross attention hold.

        Returns:
            Whether it has them; if not, no block has changed hands.
        """
        if self.pool.num_free - num_reserved < 1 or not self.states.has_room:
            return False  # at least one block is new; saves the walk along a long prefix
        prefix = self._cached_prefix(seq, salt, use_cache)
        num_new = self._num_new(seq, prefix.num_blocks, num_encoder_tokens)
        if self._num_taken(num_new, prefix.blocks) > self.pool.num_free - num_reserved:
            return False
        self.states.allocate(seq, prefix.slot, prefix.num_blocks * self.block_size)
        for block in prefix.blocks:  # before any new block is taken, which could evict them
            self.pool.share(block)
        self.block_tables[seq] = [list(table) for table in prefix.tables]
        self.prefixes.forget_walk()
        for table, n in zip(self.block_tables[seq], num_new, strict=True):
            table.extend(self.pool.take() for _ in range(n))
        seq.num_computed_tokens = prefix.num_blocks * self.block_size
        return True

    def needed_by(
        self, seq: Sequence, salt: str, *, use_cache: bool, num_encoder_tokens: int
    ) -> tuple[int, CachedPrefix]:
        """Returns what `allocate` needs: how many free blocks, and the cached ones that it would share."""
        prefix = self._cached_prefix(seq, salt, use_cache)
        num_new = self._num_new(seq, prefix.num_blocks, num_encoder_tokens)
        return self._num_taken(num_new, prefix.blocks), prefix

    def num_swapped_blocks(self, seqs: list[Sequence]) -> int:
        """Returns how many free blocks `swap_in` needs."""
        return len(distinct(self.swapped_tables[seq] for seq in seqs if seq in self.swapped_tables))

    def released_by(self, seqs: Iterable[Sequence]) -> set[int]:
        """Returns the blocks that nobody would reference if certain sequences lost theirs."""
        held = (self.block_tables[seq] for seq in seqs if seq in self.block_tables)
        counts = Counter(block for tables in held for table in tables for block in table)
        return {b for b, n in counts.items() if b != NULL_BLOCK and self.pool.ref_counts[b] == n}

    def within_windows(self, seq: Sequence, num_tokens: int) -> int:
        """Returns how many of a sequence's next tokens find free blocks in windows; at least 1."""
        if not self._windows:
            return num_tokens
        table = self.block_tables[seq][self._windows[0][0]]
        num_slots = (len(table) + self.pool.num_free // len(self._windows)) * self.block_size
        return max(1, min(num_tokens, num_slots - seq.next_position))

    def append_slots(self, rows: list[tuple[Sequence, int]]) -> Copies | None:
        """Makes sure that some sequences can write their next tokens, all of them or none.

        Extends their block tables in place, copies blocks that others reference too, and gives back blocks
        that fell out of a window.

        Args:
            rows: Sequences, and how many tokens each computes next.

        Returns:
            The blocks to copy before anything is written; None if blocks lack, and then nothing but
            windows has changed.
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
                # Shared, or (of a sequence that was forked in its middle) still to be found in the cache.
                if first < len(table) and (
                    pool.ref_counts[table[first]] > 1 or pool.contents[table[first]] is not None
                ):
                    writes.append((seq, g, table, first))
        if not missing and not writes:
            return [] if self.states.prepare(rows) else None
        # Of those that write to a block, the last one that references it needs no copy.
        writers = Counter(table[i] for _, _, table, i in writes)
        num_copies = sum(n - (pool.ref_counts[block] == n) for block, n in writers.items())
        if sum(n for _, _, n in missing) + num_copies > pool.num_free or not self.states.prepare(rows):
            return None
        copies: Copies = []
        for seq, g, table, i in writes:
            block = table[i]
            if pool.ref_counts[block] > 1:
                table[i] = pool.take()
                pool.release(block)
                copies.append((block, table[i]))
                self._note_replaced(seq, g, i)
            else:
                pool.forget(block)
        for seq, table, n in missing:
            table.extend(pool.take() for _ in range(n))
            self.changed.setdefault(seq, [])
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Gives a sequence without a block table the blocks of another's first tokens, shared.

        Args:
            parent: Holds blocks for at least num_tokens tokens.
            child: Begins with the same num_tokens tokens.
            num_tokens: Tokens that need not be computed again.

        Returns:
            Whether it was possible: False, and nothing has changed, if blocks that the child's window
            needs are no longer there, or the state of these tokens is not.
        """
        num_blocks = self.num_blocks_of(num_tokens - parent.num_dropped_tokens)
        tables = self.block_tables[parent]
        if self.lacks(tables, num_tokens) or not self.states.can_fork(parent, num_tokens):
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

    def lacks(self, tables: BlockTables, num_tokens: int) -> bool:
        """Returns whether a token behind the first ones would attend to blocks that fell out of a window."""
        first, num_blocks = self.prefixes.first_in_window, self.num_blocks_of(num_tokens)
        return any(
            NULL_BLOCK in tables[i][first(window, num_tokens) : num_blocks] for i, window in self._windows
        )

    def cache_full_blocks(self, seq: Sequence, salt: str, start: int, stop: int) -> None:
        """Offers the blocks that became full when tokens [start, stop) were computed to later sequences."""
        if self.enable_prefix_caching and not seq.num_dropped_tokens:  # no prefix without what was dropped
            self.prefixes.remember(seq, salt, self.block_tables[seq], start, stop)
            self.prefixes.remember_states(seq, salt, stop)

    def keep(self, seq: Sequence, places: list[int]) -> None:
        """Takes away all of a sequence's blocks but those at some places of its tables, in order.

        Nothing can tell the executor to take blocks away, so the sequence takes another batch slot.
        """
        is_here = seq in self.block_tables
        pool, held = (self.pool, self.block_tables) if is_here else (self.swap_pool, self.swapped_tables)
        dropped = set(range(len(held[seq][0]))).difference(places)
        for table, group in zip(held[seq], self.groups, strict=True):
            if not group.is_cross:
                pool.release_tables([[table[i] for i in sorted(dropped)]])
                table[:] = [table[i] for i in places]
        if is_here:
            self.lost.append(seq)

    def free(self, seq: Sequence) -> None:
        """Takes away a sequence's blocks, on the device or in host memory. The lists stay as they are."""
        self.changed.pop(seq, None)
        self.states.free(seq)
        if seq in self.block_tables:
            self.pool.release_tables(self.block_tables.pop(seq))
            self.lost.append(seq)
        else:
            self.swap_pool.release_tables(self.swapped_tables.pop(seq))

    def swap_out(self, seqs: list[Sequence]) -> Copies | None:
        """Moves the block tables of one group to host memory; what they share stays shared.

        Returns:
            (device block, host block) pairs to copy before the device blocks are written; None, and
            nothing but windows has changed, if host memory lacks.
        """
        # What fell out of a window must not be freed after coming back, in the step of a swap in.
        self._free_out_of_window([(seq, 0) for seq in seqs if seq in self.block_tables])
        if len(
            distinct(self.block_tables[seq] for seq in seqs if seq in self.block_tables)
        ) > self.swap_pool.num_free or not self.states.can_swap_out(seqs):
            return None
        self.states.swap_out(seqs)
        for seq in seqs:
            self.changed.pop(seq, None)
        self.lost.extend(seqs)
        return move_tables(seqs, (self.pool, self.block_tables), (self.swap_pool, self.swapped_tables))

    def swap_in(self, seqs: list[Sequence], *, num_reserved: int) -> Copies | None:
        """Moves the block tables of one group back to the device.

        Returns:
            (host block, device block) pairs to copy before anything is computed; None, and nothing has
            changed, if less than num_reserved blocks would stay free.
        """
        num_free = self.pool.num_free - num_reserved
        if self.num_swapped_blocks(seqs) > num_free or not self.states.can_swap_in(seqs):
            return None
        self.states.swap_in(seqs)
        return move_tables(seqs, (self.swap_pool, self.swapped_tables), (self.pool, self.block_tables))

    def pin(self, name: str, token_ids: list[int], salt: str) -> int:
        """Keeps the cached blocks of a prefix until `unpin`; returns the number of tokens that they hold.

        Raises:
            ValueError: If the name is taken, or prefixes are not cached.
        """
        if name in self.pinned:
            raise ArgumentError("name", name, "a name that no pinned prefix has")
        if not self.enable_prefix_caching:
            raise ArgumentError("enable_prefix_caching", False, "True for pinned prefixes")
        # A token more: the cache leaves the last one out.
        prefix = self.prefixes.longest(Sequence([*token_ids, 0]), salt)
        self.prefixes.forget_walk()
        for block in prefix.blocks:
            self.pool.share(block)
        self.states.pool.share(prefix.slot)
        self.pinned[name] = PinnedPrefix(token_ids, salt, prefix.tables, prefix.slot)
        return prefix.num_blocks * self.block_size

    def unpin(self, name: str) -> None:
        """Lets go of a pinned prefix; its blocks stay cached as long as no one needs them.

        Raises:
            ValueError: If no prefix is pinned by this name.
        """
        if name not in self.pinned:
            names = ", ".join(map(repr, self.pinned)) or "none"
            raise ArgumentError("name", name, f"the name of a pinned prefix ({names})")
        prefix = self.pinned.pop(name)
        self.pool.release_tables(prefix.tables)
        self.states.pool.release(prefix.slot)

    def forget_prefixes(self) -> None:
        """Takes everything out of the cache; whoever holds blocks keeps them."""
        assert not self.pinned, "a pinned prefix would be lost"
        for cache in (self.pool, self.states.pool):
            for block in range(cache.num_blocks):
                cache.forget(block)

    def check_integrity(self) -> None:
        """Asserts every invariant of the class; takes time in proportion to the pools."""
        assert not self.block_tables.keys() & self.swapped_tables.keys(), "a sequence is in both pools"
        on_device = [*self.block_tables.values(), *(prefix.tables for prefix in self.pinned.values())]
        for pool, held in ((self.pool, on_device), (self.swap_pool, list(self.swapped_tables.values()))):
            counts = [0] * pool.num_blocks
            for tables in held:
                assert len(tables) == len(self.groups), f"{len(tables)} tables of {len(self.groups)} groups"
                blocks = [block for table in tables for block in table if block != NULL_BLOCK]
                assert len(set(blocks)) == len(blocks), f"block tables repeat a block: {tables}"
                assert all(0 < block < pool.num_blocks for block in blocks), f"no such block: {tables}"
                for group, table in zip(self.groups, tables, strict=True):
                    assert group.window or NULL_BLOCK not in table, f"a block is missing in {table}"
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
        """Returns how many new blocks a sequence gets at once, per cache group."""
        num_own = self.num_blocks_of(len(seq)) - num_shared
        num_cross = self.num_blocks_of(num_encoder_tokens)
        return [num_cross if g.is_cross else num_own if g.window is None else 0 for g in self.groups]

    def _num_taken(self, num_new: list[int], shared: list[int]) -> int:
        """Returns how many free blocks new ones and shared ones take, with one for each window."""
        # Shared blocks that nobody references are free, and would be no more.
        counts = list(map(self.pool.ref_counts.__getitem__, shared))
        return sum(num_new) + len(self._windows) + counts.count(0)

    def _note_replaced(self, seq: Sequence, g: int, i: int) -> None:
        self.changed.setdefault(seq, []).append((g, i, self.block_tables[seq][g][i]))

    def _free_out_of_window(self, rows: list[tuple[Sequence, int]]) -> None:
        for seq, _ in rows:
            tables = self.block_tables[seq]
            for i, window in self._windows:
                table = tables[i]
                # From the last one back: before it all are given back already.
                j = min(self.prefixes.first_in_window(window, seq.next_position), len(table)) - 1
                while j >= 0 and table[j] != NULL_BLOCK:
                    self.pool.release(table[j])
                    table[j] = NULL_BLOCK
                    self._note_replaced(seq, i, j)
                    j -= 1

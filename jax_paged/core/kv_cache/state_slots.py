"""StateSlots: slots for the recurrent states of sequences. Each sequence has one slot, whatever its length.

A slot holds the states of all recurrent layers for one sequence. Forked sequences share a slot, and the
states are copied before one of them writes to it. A checkpoint is a copy of the states after a whole number
of blocks, which the device makes while it computes a sequence. Checkpoints are found by the hash of the
tokens before them, like blocks in the prefix cache, and are evicted when their slots are needed.
"""

from collections import Counter

from jax_paged.core.kv_cache.block_pool import BlockContent, BlockPool, distinct, move_tables
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import NO_CHECKPOINT, BlockTables, StateCheckpoint, StateMoves


class StateSlots:
    """Owner of the state slots of all sequences, on the device and in host memory.

    Args:
        num_slots: Number of slots on the device, including one that is never allocated. 0 if no layer has
            recurrent states; then all methods do nothing.
        num_swap_slots: Number of slots in host memory for sequences that are swapped out.
        block_size: Tokens per block. Checkpoints are made only at multiples of it.
        makes_checkpoints: Whether checkpoints are made.
    """

    def __init__(
        self, num_slots: int, num_swap_slots: int, block_size: int, *, makes_checkpoints: bool
    ) -> None:
        self.has_states = num_slots > 0
        self.pool = BlockPool(max(1, num_slots))
        self.swap_pool = BlockPool(num_swap_slots + 1)
        # Each table contains one slot, so that the functions for block tables can be used.
        self.tables: dict[Sequence, BlockTables] = {}
        self.swapped_tables: dict[Sequence, BlockTables] = {}
        self._block_size, self._makes_checkpoints = block_size, makes_checkpoints
        # Number of tokens that the state in a sequence's slot covers after all scheduled steps have run.
        self._positions: dict[Sequence, int] = {}
        # Checkpoints that steps in flight make: (number of tokens before the checkpoint, slot).
        self._pending: dict[Sequence, list[tuple[int, int]]] = {}
        # The newest checkpoint in the output of a sequence. The next checkpoint reuses its slot.
        self._last: dict[Sequence, tuple[int, BlockContent]] = {}
        self._moves = StateMoves([], [], [])

    @property
    def has_room(self) -> bool:
        """Whether a slot can be allocated for another sequence."""
        return not self.has_states or self.pool.num_free > 0

    def slot_of(self, seq: Sequence) -> int:
        """Returns the slot of a sequence; 0 if no layer has recurrent states."""
        return self.tables[seq][0][0] if self.has_states else 0

    def allocate(self, seq: Sequence, checkpoint: int, num_tokens: int) -> None:
        """Gives a sequence a new slot, or shares the slot of a checkpoint. `has_room` must be True.

        Args:
            seq: A sequence without a slot.
            checkpoint: Slot of the states after the first tokens of the sequence; 0 to begin with new states.
            num_tokens: Number of tokens before the checkpoint.
        """
        if not self.has_states:
            return
        if checkpoint:
            self.pool.share(checkpoint)
        self.tables[seq] = [[checkpoint or self.pool.allocate()]]
        self._positions[seq] = num_tokens

    def prepare(self, rows: list[tuple[Sequence, int]]) -> bool:
        """Makes the slots of sequences writable by copying shared states, for all sequences or for none.

        A sequence that shares its slot with other sequences gets a copy. A sequence that is the only user of
        a cached checkpoint gets a copy while other slots are free, so that the checkpoint stays cached.
        Otherwise the checkpoint is removed from the cache and overwritten.

        Args:
            rows: Pairs of a sequence and the number of tokens that it computes next.

        Returns:
            False if there are not enough free slots; then nothing has changed.
        """
        if not self.has_states:
            return True
        pool, slots = self.pool, [self.slot_of(seq) for seq, _ in rows]
        writers = Counter(slots)
        num_needed = sum(n - (pool.ref_counts[slot] == n) for slot, n in writers.items())
        num_spare, num_left = pool.num_free - num_needed, {slot: pool.ref_counts[slot] for slot in writers}
        if num_spare < 0:
            return False
        for (seq, num_tokens), slot in zip(rows, slots, strict=True):
            self._positions[seq] = seq.next_position + num_tokens
            is_alone = num_left[slot] == 1
            if is_alone and pool.contents[slot] is None:
                continue
            if is_alone and not num_spare:
                pool.remove_from_cache(slot)
                continue
            num_spare -= is_alone
            num_left[slot] -= 1
            own = pool.allocate()
            self._moves.copies.append((slot, own))  # the copy keeps its reference to `slot` until take_moves
            self.tables[seq] = [[own]]
        return True

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Returns whether the state after the first `num_tokens` tokens exists.

        A slot holds only the state after all tokens that have been scheduled for the sequence.
        """
        return not self.has_states or self._positions[parent] == num_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets a sequence that continues from the same tokens share the slot of its parent."""
        if self.has_states:
            self.pool.share(self.slot_of(parent))
            self.tables[child], self._positions[child] = [[self.slot_of(parent)]], self._positions[parent]

    def begin_checkpoint(self, seq: Sequence, start: int, stop: int) -> StateCheckpoint:
        """Reserves a slot for a checkpoint within the tokens [start, stop) that a sequence computes next.

        The checkpoint is made at the last block boundary. If several tokens are computed, at least one of
        them comes after the checkpoint, so that a request with the same prompt can use it.

        Returns:
            The checkpoint, with its number of tokens counted from `start`; NO_CHECKPOINT if none is made.
        """
        position = (stop - (stop - start > 1)) // self._block_size * self._block_size
        if not self.has_states or not self._makes_checkpoints or position <= start:
            return NO_CHECKPOINT
        slot, pool = 0, self.pool
        last = self._last.pop(seq, None)
        if last is not None and not pool.ref_counts[last[0]] and pool.contents[last[0]] is last[1]:
            slot = last[0]
            pool.share(slot)
            pool.remove_from_cache(slot)
        elif pool.num_free:
            slot = pool.allocate()
        if not slot:
            return NO_CHECKPOINT
        self._pending.setdefault(seq, []).append((position, slot))
        return StateCheckpoint(position - start, slot)

    def take_checkpoints(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Removes and returns the pending checkpoints within the first `num_tokens` tokens of a sequence."""
        found = self._pending.pop(seq, [])
        if late := [entry for entry in found if entry[0] > num_tokens]:
            self._pending[seq] = late
        return [entry for entry in found if entry[0] <= num_tokens]

    def cache_checkpoint(self, seq: Sequence, position: int, slot: int, content: BlockContent) -> None:
        """Adds a finished checkpoint to the cache. It stays there until its slot is needed."""
        self.pool.add_to_cache(slot, content)
        self.pool.release(slot)
        if position > len(seq.prompt_token_ids) and self.pool.contents[slot] is content:
            self._last[seq] = slot, content

    def revert_prepare(self, seq: Sequence, start: int) -> None:
        """Reverts `prepare` for a sequence that was removed from the step before its execution.

        Resets the position of the sequence's state, and releases the checkpoints that the step would have
        made. A copy of a shared slot that `prepare` has made stays with the sequence.

        Args:
            seq: The sequence.
            start: Position of the first token that the step would have computed.
        """
        if self.has_states and seq in self.tables:
            self._positions[seq] = start
            pending = self._pending.pop(seq, [])
            if kept := [entry for entry in pending if entry[0] <= start]:
                self._pending[seq] = kept
            for _, slot in pending[len(kept) :]:
                self.pool.release(slot)

    def free(self, seq: Sequence) -> None:
        """Releases the slot of a sequence on the device or in host memory."""
        self._last.pop(seq, None)
        self._positions.pop(seq, None)
        for _, slot in self._pending.pop(seq, []):
            self.pool.release(slot)
        if seq in self.tables:
            self.pool.release_tables(self.tables.pop(seq))
        elif seq in self.swapped_tables:
            self.swap_pool.release_tables(self.swapped_tables.pop(seq))

    def can_swap_out(self, seqs: list[Sequence]) -> bool:
        """Returns whether host memory has enough free slots for the sequences."""
        return len(distinct(self.tables[s] for s in seqs if s in self.tables)) <= self.swap_pool.num_free

    def can_swap_in(self, seqs: list[Sequence]) -> bool:
        """Returns whether the device has enough free slots for the sequences."""
        held = (self.swapped_tables[s] for s in seqs if s in self.swapped_tables)
        return len(distinct(held)) <= self.pool.num_free

    def swap_out(self, seqs: list[Sequence]) -> None:
        """Moves the slots of sequences to host memory. `can_swap_out` must be True for them."""
        device, host = (self.pool, self.tables), (self.swap_pool, self.swapped_tables)
        self._moves.swap_out.extend(move_tables(seqs, device, host))

    def swap_in(self, seqs: list[Sequence]) -> None:
        """Moves the slots of sequences back to the device. `can_swap_in` must be True for them."""
        device, host = (self.pool, self.tables), (self.swap_pool, self.swapped_tables)
        self._moves.swap_in.extend(move_tables(seqs, host, device))

    def take_moves(self) -> StateMoves:
        """Returns the copies for the step that is being built. No slot is both source and destination."""
        moves, self._moves = self._moves, StateMoves([], [], [])
        for source, _ in moves.copies:
            self.pool.release(source)
        return moves

    def check_integrity(self, seqs: set[Sequence], swapped: set[Sequence], pinned: list[int]) -> None:
        """Asserts all invariants of the class.

        Args:
            seqs: Sequences that hold blocks on the device.
            swapped: Sequences that hold blocks in host memory.
            pinned: Slots of pinned prefixes.
        """
        if self.has_states:
            assert self.tables.keys() == seqs, "sequences with blocks and with state slots differ"
            assert self.swapped_tables.keys() == swapped, (
                "swapped sequences with blocks and with slots differ"
            )
            assert self._positions.keys() == seqs | swapped, "a state slot has no position"
        counts = Counter(s for [[s]] in self.tables.values())
        counts.update([*pinned, *(source for source, _ in self._moves.copies)])
        counts.update(slot for entries in self._pending.values() for _, slot in entries)
        for seq, [[slot]] in self.tables.items():
            is_written = self.pool.contents[slot] is not None and self._positions[seq] % self._block_size
            assert not is_written, "a cached checkpoint was overwritten"
        swapped_counts = Counter(s for [[s]] in self.swapped_tables.values())
        for pool, held in ((self.pool, counts), (self.swap_pool, swapped_counts)):
            pool.check_integrity([held[i] for i in range(pool.num_blocks)], self._block_size)

"""Who holds which slot of the states that some layers keep: one slot per sequence, however long it is.

A slot holds one state of every such layer. Sequences write to slots of their own; what they share is copied
before one of them writes. A checkpoint is a copy that the device makes when a row passes a boundary of
blocks: it is found by the hash of the tokens before it, as blocks are, and evicted when its slot is needed.
"""

from collections import Counter

from jax_paged.core.kv_cache.block_pool import BlockContent, BlockPool, distinct, move_tables
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import BlockTables, StateMoves


class StateSlots:
    """Owns the slots of all sequences, on the device and in host memory.

    Args:
        num_slots: Slots on the device, one that is never handed out included; 0 if no layer keeps a state:
            then nothing below does anything.
        num_swap_slots: Slots of host memory for sequences that are swapped out.
        block_size: Tokens between two places where a checkpoint may be.
        keeps_checkpoints: Whether there are any.
    """

    def __init__(
        self, num_slots: int, num_swap_slots: int, block_size: int, *, keeps_checkpoints: bool
    ) -> None:
        self.is_used = num_slots > 0
        self.pool = BlockPool(max(1, num_slots))
        self.swap_pool = BlockPool(num_swap_slots + 1)
        # A table of one slot per sequence, so that slots move as blocks do.
        self.tables: dict[Sequence, BlockTables] = {}
        self.swapped_tables: dict[Sequence, BlockTables] = {}
        self._block_size, self._keeps_checkpoints = block_size, keeps_checkpoints
        # Tokens that the state in a sequence's slot has seen, when all steps that were scheduled are done.
        self._positions: dict[Sequence, int] = {}
        # Checkpoints that steps in flight make: (tokens before it, slot).
        self._pending: dict[Sequence, list[tuple[int, int]]] = {}
        # The last checkpoint of a sequence behind its prompt, whose slot the next one takes.
        self._last: dict[Sequence, tuple[int, BlockContent]] = {}
        self._moves = StateMoves([], [], [])

    @property
    def has_room(self) -> bool:
        """Whether another sequence can have a slot."""
        return not self.is_used or self.pool.num_free > 0

    def slot_of(self, seq: Sequence) -> int:
        """Returns the slot of a sequence; 0 if no layer keeps a state."""
        return self.tables[seq][0][0] if self.is_used else 0

    def allocate(self, seq: Sequence, checkpoint: int, num_tokens: int) -> None:
        """Gives a sequence a slot, as `has_room` says: a new one, or that of a checkpoint, shared.

        Args:
            seq: Has none.
            checkpoint: Slot of the state after its first tokens; 0 to begin without any.
            num_tokens: How many these are.
        """
        if not self.is_used:
            return
        if checkpoint:
            self.pool.share(checkpoint)
        self.tables[seq] = [[checkpoint or self.pool.take()]]
        self._positions[seq] = num_tokens

    def prepare(self, rows: list[tuple[Sequence, int]]) -> bool:
        """Makes sure that sequences can write to their slots: copies what is shared, for all or for none.

        A checkpoint is kept, and its state copied, as long as there are other slots.

        Args:
            rows: Sequences, and how many tokens each computes next.
        """
        if not self.is_used:
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
                pool.forget(slot)
                continue
            num_spare -= is_alone
            num_left[slot] -= 1
            own = pool.take()
            self._moves.copies.append((slot, own))  # which keeps the reference until the step is built
            self.tables[seq] = [[own]]
        return True

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Returns whether the state of a sequence's first tokens is there: that of all that it has seen."""
        return not self.is_used or self._positions[parent] == num_tokens

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Shares a sequence's slot with one that goes on from the same tokens."""
        if self.is_used:
            self.pool.share(self.slot_of(parent))
            self.tables[child], self._positions[child] = [[self.slot_of(parent)]], self._positions[parent]

    def begin_checkpoint(self, seq: Sequence, start: int, stop: int) -> tuple[int, int]:
        """Returns where a row that computes tokens [start, stop) keeps a checkpoint.

        Of several tokens one at least stays behind it, so that the same text finds it again.

        Returns:
            How many tokens of the row are before the checkpoint, and its slot; zeros for none.
        """
        position = (stop - (stop - start > 1)) // self._block_size * self._block_size
        if not self.is_used or not self._keeps_checkpoints or position <= start:
            return 0, 0
        slot, pool = 0, self.pool
        last = self._last.pop(seq, None)
        if last is not None and not pool.ref_counts[last[0]] and pool.contents[last[0]] is last[1]:
            slot = last[0]
            pool.share(slot)
            pool.forget(slot)
        elif pool.num_free:
            slot = pool.take()
        if not slot:
            return 0, 0
        self._pending.setdefault(seq, []).append((position, slot))
        return position - start, slot

    def take_checkpoints(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """Returns the checkpoints of a sequence that lie within its first tokens, which are computed."""
        found = self._pending.pop(seq, [])
        if late := [entry for entry in found if entry[0] > num_tokens]:
            self._pending[seq] = late
        return [entry for entry in found if entry[0] <= num_tokens]

    def note_checkpoint(self, seq: Sequence, position: int, slot: int, content: BlockContent) -> None:
        """Offers a checkpoint that was taken to later sequences, until its slot is needed."""
        self.pool.remember(slot, content)
        self.pool.release(slot)
        if position > len(seq.prompt_token_ids) and self.pool.contents[slot] is content:
            self._last[seq] = slot, content

    def take_back(self, seq: Sequence, start: int) -> None:
        """Undoes that the next row of a sequence, which begins at a position, was to be computed."""
        if self.is_used and seq in self.tables:
            self._positions[seq] = start
            pending = self._pending.pop(seq, [])
            if kept := [entry for entry in pending if entry[0] <= start]:
                self._pending[seq] = kept
            for _, slot in pending[len(kept) :]:
                self.pool.release(slot)

    def free(self, seq: Sequence) -> None:
        """Takes away a sequence's slot, on the device or in host memory."""
        self._last.pop(seq, None)
        self._positions.pop(seq, None)
        for _, slot in self._pending.pop(seq, []):
            self.pool.release(slot)
        if seq in self.tables:
            self.pool.release_tables(self.tables.pop(seq))
        elif seq in self.swapped_tables:
            self.swap_pool.release_tables(self.swapped_tables.pop(seq))

    def can_swap_out(self, seqs: list[Sequence]) -> bool:
        """Returns whether host memory has slots for some sequences."""
        return len(distinct(self.tables[s] for s in seqs if s in self.tables)) <= self.swap_pool.num_free

    def can_swap_in(self, seqs: list[Sequence]) -> bool:
        """Returns whether the device has slots for some sequences."""
        held = (self.swapped_tables[s] for s in seqs if s in self.swapped_tables)
        return len(distinct(held)) <= self.pool.num_free

    def swap_out(self, seqs: list[Sequence]) -> None:
        """Moves the slots of some sequences to host memory, as `can_swap_out` says."""
        device, host = (self.pool, self.tables), (self.swap_pool, self.swapped_tables)
        self._moves.swap_out.extend(move_tables(seqs, device, host))

    def swap_in(self, seqs: list[Sequence]) -> None:
        """Moves the slots of some sequences back to the device, as `can_swap_in` says."""
        device, host = (self.pool, self.tables), (self.swap_pool, self.swapped_tables)
        self._moves.swap_in.extend(move_tables(seqs, host, device))

    def take_moves(self) -> StateMoves:
        """Returns what has to be moved in the step that is built now; no slot is copied from and to."""
        moves, self._moves = self._moves, StateMoves([], [], [])
        for source, _ in moves.copies:
            self.pool.release(source)
        return moves

    def check_integrity(self, seqs: set[Sequence], swapped: set[Sequence], pinned: list[int]) -> None:
        """Asserts every invariant of the class.

        Args:
            seqs: Sequences that hold blocks on the device.
            swapped: Those whose blocks are in host memory.
            pinned: Slots of pinned prefixes.
        """
        if self.is_used:
            assert self.tables.keys() == seqs, (
                "a sequence has blocks without a slot, or a slot without blocks"
            )
            assert self.swapped_tables.keys() == swapped, "blocks and slots lie in different places"
            assert self._positions.keys() == seqs | swapped, "a state without a position"
        counts = Counter(s for [[s]] in self.tables.values())
        counts.update([*pinned, *(source for source, _ in self._moves.copies)])
        counts.update(slot for entries in self._pending.values() for _, slot in entries)
        for seq, [[slot]] in self.tables.items():
            is_written = self.pool.contents[slot] is not None and self._positions[seq] % self._block_size
            assert not is_written, "a checkpoint was written to"
        swapped_counts = Counter(s for [[s]] in self.swapped_tables.values())
        for pool, held in ((self.pool, counts), (self.swap_pool, swapped_counts)):
            pool.check_integrity([held[i] for i in range(pool.num_blocks)], self._block_size)

"""Orca's memory as the paper describes it: contiguous reservations from a buddy allocator.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023, section 6.1.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import Copies

Reserve = Literal["max", "pow2", "oracle"]


class Region(NamedTuple):
    """Contiguous units of a memory: a power of two of them, at a multiple of it."""

    start: int
    size: int


class Buddies:
    """Hands out regions of a memory, splitting and merging them by halves.

    Args:
        num_units: Of the memory; need not be a power of two.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.free: dict[int, set[int]] = {}  # size -> starts
        start = 0
        for power in reversed(range(num_units.bit_length())):
            if num_units & 1 << power:
                self.free[1 << power] = {start}
                start += 1 << power

    def take(self, num_units: int) -> Region | None:
        """Returns the least region that holds so many units, the first of its size; None if there is none."""
        size = wanted = 1 << (num_units - 1).bit_length()
        while not self.free.get(size):
            size *= 2
            if size > self.num_units:
                return None
        start = min(self.free[size])
        self.free[size].remove(start)
        while size > wanted:
            size //= 2
            self.free.setdefault(size, set()).add(start + size)
        return Region(start, size)

    def give_back(self, region: Region) -> None:
        """Frees a region, and merges it with its buddy as long as that is free too."""
        start, size = region
        while start ^ size in self.free.get(size, ()):
            self.free[size].remove(start ^ size)
            start, size = start & ~size, size * 2
        self.free.setdefault(size, set()).add(start)


class Demand(NamedTuple):
    """What a baseline is told of a request when it comes.

    Args:
        output_len: Tokens of each of its outputs; only "oracle" may know.
        num_seqs: Sequences that it will have, each with a region of its own: nothing is shared.
    """

    output_len: int
    num_seqs: int = 1


class Usage(NamedTuple):
    """What the slots of a memory hold, each a number of tokens; figure 2's categories."""

    tokens: int
    reserved: int
    internal: int
    other: int


class BuddyManager(BlockManager):
    """A block manager under which sequences have one contiguous region each, reserved when they are admitted.

    The scheduler, unmodified, sees a manager that never runs out of blocks for a running request. A block
    table names the blocks of a region in order, so an engine can run under this manager too: sequences that
    were forked move to a region of their own before they write, and all their tokens are copied.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block, the least that is reserved.
        reserve: For how long an output: "max" for all that the model can hold, "pow2" for the next power of
            two of the true length, "oracle" for the true length.
        max_model_len: Maximum tokens of a prompt and its output together.
        demand: Tells of the sequence that a request begins with what comes of it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        reserve: Reserve,
        max_model_len: int,
        demand: Callable[[Sequence], Demand],
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching=False)
        self.reserve = reserve
        self.max_model_len = max_model_len
        self.buddies = Buddies(num_blocks - 1)
        self._demand = demand
        self._regions: dict[Sequence, list[Region]] = {}  # of each request, by any of its sequences
        self._final_len: dict[Sequence, int] = {}
        self._left: list[list[Region]] = []  # of requests that ended, until no step may write to them

    def num_reserved_tokens(self, prompt_len: int, output_len: int) -> int:
        """Returns for how many tokens a sequence reserves, before the buddy allocator rounds it up."""
        if self.reserve == "max":
            return self.max_model_len
        if self.reserve == "pow2":
            output_len = 1 << (output_len - 1).bit_length()
        return min(prompt_len + output_len, self.max_model_len)

    def allocate(
        self, seq: Sequence, salt: str, *, use_cache: bool, num_reserved: int, num_encoder_tokens: int = 0
    ) -> bool:
        """Reserves the regions of a request, all or none; see BlockManager.allocate."""
        prompt_len, (output_len, num_seqs) = len(seq.prompt_token_ids), self._demand(seq)
        num_tokens = self.num_reserved_tokens(prompt_len, output_len)
        regions: list[Region] = []
        for _ in range(num_seqs):
            region = self.buddies.take(self.num_blocks_of(num_tokens))
            if region is None:
                for taken in regions:
                    self.buddies.give_back(taken)
                return False
            regions.append(region)
        self._regions[seq] = regions
        self._final_len[seq] = prompt_len + output_len
        self._sit_down(seq, regions[0])
        seq.num_computed_tokens = 0
        return True

    def append_slots(self, rows: list[tuple[Sequence, int]]) -> Copies:
        """Moves sequences that share a region with others to one of their own; see BlockManager."""
        copies: Copies = []
        for seq, _ in rows:
            (table,) = self.block_tables[seq]
            if self.pool.ref_counts[table[0]] == 1:
                continue
            region = next(r for r in self._regions[seq] if not self.pool.ref_counts[r.start + 1])
            num_blocks = self.num_blocks_of(seq.next_position)
            self._sit_down(seq, region)
            for block in table:
                self.pool.release(block)
            copies += zip(table[:num_blocks], self.block_tables[seq][0], strict=False)
            self.table_changes[seq] = [(0, i, block) for i, block in enumerate(self.block_tables[seq][0])]
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Lets a child read its parent's region until it writes; see BlockManager.fork."""
        self._regions[child], self._final_len[child] = self._regions[parent], self._final_len[parent]
        self.block_tables[child] = [list(self.block_tables[parent][0])]
        for block in self.block_tables[child][0]:
            self.pool.share(block)
        return True

    def free(self, seq: Sequence) -> None:
        """Takes away a sequence's region; with its last sequence, a request gives all of them back."""
        super().free(seq)
        regions = self._regions.pop(seq)
        del self._final_len[seq]
        if all(other is not regions for other in self._regions.values()):
            self._left.append(regions)
            self._give_back()

    def end_step(self, step_id: int) -> None:
        """Frees what waited for this step."""
        super().end_step(step_id)
        self._give_back()

    def usage(self) -> Usage:
        """Returns what the slots of the whole memory hold now.

        Reserved are the slots of tokens to come; internal those that were reserved beyond the true length;
        other is the rest: what the buddy allocator rounds up, and what is free.
        """
        tokens = reserved = internal = 0
        for seq in self.block_tables:
            final_len = self._final_len[seq]
            output_len = final_len - len(seq.prompt_token_ids)
            whole = self.num_reserved_tokens(len(seq.prompt_token_ids), output_len)
            tokens += seq.num_computed_tokens
            reserved += final_len - seq.num_computed_tokens
            internal += whole - final_len
        num_slots = self.num_usable_blocks * self.block_size
        return Usage(tokens, reserved, internal, num_slots - tokens - reserved - internal)

    def _sit_down(self, seq: Sequence, region: Region) -> None:
        # The block of unit i is i + 1: the null block is none of them.
        first, size = region.start + 1, min(region.size, self.num_blocks_of(self.max_model_len))
        self.block_tables[seq] = [list(range(first, first + size))]
        for block in self.block_tables[seq][0]:
            self.pool.share(block)

    def _give_back(self) -> None:
        if not self.pool.num_held:
            for regions in self._left:
                for region in regions:
                    self.buddies.give_back(region)
            self._left.clear()

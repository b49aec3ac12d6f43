"""Orca's memory management as the paper describes it: contiguous reservations from a buddy allocator.

Source: Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention, SOSP 2023, section 6.1.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jax_paged.core.block_manager import BlockManager
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import Copies

Reserve = Literal["max", "pow2", "oracle"]


class Region(NamedTuple):
    """Contiguous units of a memory. The size is a power of two, and the start is a multiple of the size."""

    start: int
    size: int


class BuddyAllocator:
    """Buddy allocator: splits free regions into halves and merges free halves again.

    Args:
        num_units: Size of the memory (units); need not be a power of two.

    Attributes:
        free: Starts of the free regions, by size.
    """

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units
        self.free: dict[int, set[int]] = {}
        start = 0
        for power in reversed(range(num_units.bit_length())):
            if num_units & 1 << power:
                self.free[1 << power] = {start}
                start += 1 << power

    def take(self, num_units: int) -> Region | None:
        """Allocates a region of at least `num_units` units; None if no free region is large enough.

        The size is rounded up to a power of two. If all free regions of this size are in use, the smallest
        larger one is split.
        """
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
        """Frees a region, and merges it with its buddy while the buddy is free as well."""
        start, size = region
        while start ^ size in self.free.get(size, ()):
            self.free[size].remove(start ^ size)
            start, size = start & ~size, size * 2
        self.free.setdefault(size, set()).add(start)


class Demand(NamedTuple):
    """Size of a request. Orca systems know it when the request arrives.

    Args:
        output_len: Number of tokens of each output. "oracle" uses it, and "pow2" uses it rounded up.
        num_seqs: Number of sequences. Each gets its own region, because Orca shares no memory.
    """

    output_len: int
    num_seqs: int = 1


class Usage(NamedTuple):
    """Use of the slots of a memory, in the categories of figure 2.

    Args:
        tokens: Slots that hold the keys and values of a token.
        reserved: Slots for tokens that will be computed later.
        internal: Slots that are reserved beyond the true length of a sequence.
        other: The remaining slots: added by the rounding of the buddy allocator, or free.
    """

    tokens: int
    reserved: int
    internal: int
    other: int


class BuddyManager(BlockManager):
    """Block manager that reserves one contiguous region for each sequence when a request is admitted.

    The scheduler needs no changes: it never runs out of blocks for a running request. The block table of a
    sequence contains the blocks of its region in order, so engines can use this manager, too. A forked
    sequence moves to its own region before it writes for the first time, and all its tokens are copied.

    Args:
        num_blocks: Number of blocks of the pool, including the null block.
        block_size: Number of tokens per block. A region has at least one block.
        reserve: The output length for which memory is reserved: "max" for the maximum length of the model,
            "pow2" for the true length rounded up to a power of two, "oracle" for the true length.
        max_model_len: Maximum number of tokens of a prompt and its output together.
        demand: Returns the size of a request from its first sequence.
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
        self.buddies = BuddyAllocator(num_blocks - 1)
        self._demand = demand
        self._regions: dict[Sequence, list[Region]] = {}  # all regions of a request, by each of its sequences
        self._final_len: dict[Sequence, int] = {}
        # Regions of ended requests. They are freed when no step in flight can write to them any more.
        self._regions_to_free: list[list[Region]] = []

    def num_reserved_tokens(self, prompt_len: int, output_len: int) -> int:
        """Returns the number of tokens reserved for a sequence, before the buddy allocator rounds it up."""
        if self.reserve == "max":
            return self.max_model_len
        if self.reserve == "pow2":
            output_len = 1 << (output_len - 1).bit_length()
        return min(prompt_len + output_len, self.max_model_len)

    def allocate(
        self, seq: Sequence, salt: str, *, use_cache: bool, num_reserved: int, num_encoder_tokens: int = 0
    ) -> bool:
        """Reserves all regions of a request, or none if one does not fit; see BlockManager.allocate."""
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
        self._set_block_table(seq, regions[0])
        seq.num_computed_tokens = 0
        return True

    def append_slots(self, rows: list[tuple[Sequence, int]]) -> Copies:
        """Moves sequences that share a region to their own regions; see BlockManager.append_slots."""
        copies: Copies = []
        for seq, _ in rows:
            (table,) = self.block_tables[seq]
            if self.pool.ref_counts[table[0]] == 1:
                continue
            # The first region of the request that no sequence uses yet; unit i is block i + 1.
            region = next(r for r in self._regions[seq] if not self.pool.ref_counts[r.start + 1])
            num_blocks = self.num_blocks_of(seq.next_position)
            self._set_block_table(seq, region)
            for block in table:
                self.pool.release(block)
            copies += zip(table[:num_blocks], self.block_tables[seq][0], strict=False)
            self.table_changes[seq] = [(0, i, block) for i, block in enumerate(self.block_tables[seq][0])]
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> bool:
        """Shares the parent's region with a child until the child writes; see BlockManager.fork."""
        self._regions[child], self._final_len[child] = self._regions[parent], self._final_len[parent]
        self.block_tables[child] = [list(self.block_tables[parent][0])]
        for block in self.block_tables[child][0]:
            self.pool.share(block)
        return True

    def free(self, seq: Sequence) -> None:
        """Frees a sequence. The regions of a request are freed together with its last sequence."""
        super().free(seq)
        regions = self._regions.pop(seq)
        del self._final_len[seq]
        if all(other is not regions for other in self._regions.values()):
            self._regions_to_free.append(regions)
            self._free_regions()

    def end_step(self, step_id: int) -> None:
        """Frees regions of ended requests if no step in flight can write to them any more."""
        super().end_step(step_id)
        self._free_regions()

    def usage(self) -> Usage:
        """Returns the current use of all slots."""
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

    def _set_block_table(self, seq: Sequence, region: Region) -> None:
        # Unit i is block i + 1, because block 0 is the null block. A block table has no more blocks than the
        # maximum length needs, although the region may be larger.
        first, size = region.start + 1, min(region.size, self.num_blocks_of(self.max_model_len))
        self.block_tables[seq] = [list(range(first, first + size))]
        for block in self.block_tables[seq][0]:
            self.pool.share(block)

    def _free_regions(self) -> None:
        if not self.pool.num_held:
            for regions in self._regions_to_free:
                for region in regions:
                    self.buddies.give_back(region)
            self._regions_to_free.clear()

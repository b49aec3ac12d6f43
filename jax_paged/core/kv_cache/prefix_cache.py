"""PrefixCache: finds the cached prefix of a sequence through a chain of hashes over full blocks."""

import dataclasses
from typing import NamedTuple

from jax_paged.core.kv_cache.block_pool import NO_PARENT, NULL_BLOCK, BlockContent, BlockPool, block_hash
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.kv_cache.state_slots import StateSlots
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import BlockTables

STATE_GROUP = -1  # BlockContent.group of a state checkpoint, which is in the pool of state slots


class CachedPrefix(NamedTuple):
    """The longest cached prefix of a sequence.

    Args:
        num_blocks: Length of the prefix in blocks.
        tables: Per cache group, the blocks in order of position. Blocks outside of a window are the null
            block. Read-only.
        blocks: All blocks in these tables, without null blocks. Read-only.
        slot: Slot of the recurrent states after the prefix; 0 if the prefix is empty or no layer has states.
    """

    num_blocks: int
    tables: BlockTables
    blocks: list[int]
    slot: int = 0


@dataclasses.dataclass(frozen=True)
class PinnedPrefix:
    """A prefix whose blocks are kept until it is unpinned.

    Args:
        token_ids: The pinned tokens. The blocks hold all of them except an incomplete block at the end.
        salt: Cache salt of the requests that share the prefix.
        tables: Per cache group, the blocks in order of position. Read-only.
        slot: Slot of the recurrent states after the prefix; 0 if the prefix is empty or no layer has states.
    """

    token_ids: list[int]
    salt: str
    tables: BlockTables
    slot: int = 0


@dataclasses.dataclass
class _Lookup:
    """State of a prefix lookup, which can be continued in a later step.

    Block position i stands for the i-th block of the sequence.

    Args:
        seq: The sequence.
        salt: Cache salt of its request.
        found: Per cache group, the cached block at each block position, or the null block if there is none.
        runs: Per cache group, for each block position, the number of consecutive cached blocks that end
            there.
        usable: For each block position, the length in blocks of the longest prefix up to it that is cached in
            all groups.
        first_positions: For each content key that was looked up, the first block position at which it was
            looked up.
        num_valid: Number of leading block positions whose entries are still correct.
        result: The result of the lookup; None if the cache has changed since.
    """

    seq: Sequence
    salt: str
    found: BlockTables
    runs: list[list[int]]
    usable: list[int] = dataclasses.field(default_factory=list)
    first_positions: dict[tuple[bytes, int], int] = dataclasses.field(default_factory=dict)
    num_valid: int = 0
    result: CachedPrefix | None = None


class PrefixCache:
    """Lookup and registration of full blocks in the prefix cache.

    Each full block is identified by a hash of its tokens, the salt and the hash of the previous block. A
    prefix is cached if all of its blocks are found. For a group with a window, only the blocks in the window
    of the next token are needed. For layers with recurrent states, the prefix must end at a checkpoint.

    A long prompt that waits for blocks is looked up in every step. Therefore, the state of the last lookup is
    kept, and a lookup of the same sequence repeats only the part after the first position at which the cache
    has changed.

    Args:
        pool: The blocks on the device.
        groups: Cache groups of the model's layers.
        block_size: Tokens per block.
        states: Owner of the checkpoints of recurrent states.
    """

    def __init__(
        self, pool: BlockPool, groups: tuple[CacheGroup, ...], block_size: int, states: StateSlots
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = block_size
        self._states = states
        # Groups that hold the tokens of the sequence itself, not the input of an encoder.
        self._own = [g for g, group in enumerate(groups) if not group.is_cross]
        self._windows = [(g, group.window) for g, group in enumerate(groups) if group.window is not None]
        self._lookup: _Lookup | None = None
        pool.on_cache_change = states.pool.on_cache_change = self._invalidate

    def longest(self, seq: Sequence, salt: str) -> CachedPrefix:
        """Returns the longest cached prefix of a sequence, which never includes its last token.

        For a cache group with a window, only the blocks that the token after the prefix attends to are
        required.

        Args:
            seq: The sequence. Its `block_hashes` are extended.
            salt: Sequences share blocks only if their salts are equal.
        """
        lookup = self._lookup
        if lookup is None or lookup.seq is not seq or lookup.salt != salt:
            lookup = self._lookup = _Lookup(seq, salt, [[] for _ in self.groups], [[] for _ in self.groups])
        if lookup.result is None:
            self._extend(lookup)
            lookup.result = self._result(lookup)
        return lookup.result

    def discard_lookup(self) -> None:
        """Drops the kept lookup, after its sequence has received its blocks or no longer needs them."""
        self._lookup = None

    def add_full_blocks(self, seq: Sequence, salt: str, tables: BlockTables, start: int, stop: int) -> None:
        """Adds to the cache the blocks that became full when tokens [start, stop) were computed."""
        for i in range(start // self.block_size, stop // self.block_size):
            content = self._content(seq, i, salt)
            for g in self._own:
                if tables[g][i] != NULL_BLOCK:
                    self.pool.add_to_cache(tables[g][i], content._replace(group=g))

    def add_checkpoints(self, seq: Sequence, salt: str, num_tokens: int) -> None:
        """Adds the state checkpoints within the first `num_tokens` tokens of a sequence to the cache."""
        for position, slot in self._states.take_checkpoints(seq, num_tokens):
            content = self._content(seq, position // self.block_size - 1, salt)._replace(group=STATE_GROUP)
            self._states.cache_checkpoint(seq, position, slot, content)

    def first_in_window(self, window: int, position: int) -> int:
        """Returns the index of the first block that the token at a position attends to."""
        return max(0, position - window + 1) // self.block_size

    def _invalidate(self, key: tuple[bytes, int]) -> None:
        """Marks the kept lookup as invalid from the position of a content that was added or removed."""
        lookup = self._lookup
        position = None if lookup is None else lookup.first_positions.get(key)
        # Positions from num_valid on are looked up anyway when the lookup continues.
        if lookup is not None and position is not None and position < lookup.num_valid:
            lookup.num_valid, lookup.result = position, None

    def _extend(self, lookup: _Lookup) -> None:
        """Looks up blocks from the first invalid position.

        Stops at the first position at which a cache group without a window has no cached block.
        """
        for column in (*lookup.found, *lookup.runs, lookup.usable):
            del column[lookup.num_valid :]
        for i in range(lookup.num_valid, (len(lookup.seq) - 1) // self.block_size):
            content = self._content(lookup.seq, i, lookup.salt)
            for g in self._own:
                lookup.first_positions.setdefault((content.hash, g), i)
                block = self.pool.find_cached(content if g == 0 else content._replace(group=g))
                lookup.found[g].append(NULL_BLOCK if block is None else block)
                run = lookup.runs[g]
                run.append(0 if block is None else (run[-1] if run else 0) + 1)
            position = (i + 1) * self.block_size
            misses = any(not lookup.runs[g][i] for g in self._own if self.groups[g].window is None)
            is_usable = not misses and all(
                lookup.runs[g][i] >= i + 1 - self.first_in_window(window, position)
                for g, window in self._windows
            )
            if self._states.has_states:
                lookup.first_positions.setdefault((content.hash, STATE_GROUP), i)
                is_usable &= self._states.pool.find_cached(content._replace(group=STATE_GROUP)) is not None
            lookup.usable.append(i + 1 if is_usable else lookup.usable[-1] if lookup.usable else 0)
            lookup.num_valid = i + 1
            if misses:
                break

    def _result(self, lookup: _Lookup) -> CachedPrefix:
        longest = lookup.usable[-1] if lookup.usable else 0
        tables = [table[:longest] for table in lookup.found]
        for g, window in self._windows:
            dead = min(self.first_in_window(window, longest * self.block_size), longest)
            tables[g][:dead] = [NULL_BLOCK] * dead
        slot = 0
        if longest and self._states.has_states:
            content = self._content(lookup.seq, longest - 1, lookup.salt)
            slot = self._states.pool.find_cached(content._replace(group=STATE_GROUP)) or 0
        return CachedPrefix(longest, tables, [b for table in tables for b in table if b != NULL_BLOCK], slot)

    def _content(self, seq: Sequence, i: int, salt: str) -> BlockContent:
        """Returns the content of a sequence's i-th block. Extends its `block_hashes` up to this block."""
        hashes, size = seq.block_hashes, self.block_size
        for j in range(len(hashes), i + 1):
            parent = hashes[j - 1] if j else NO_PARENT
            hashes.append(block_hash(parent, seq.tokens(j * size, (j + 1) * size), self._salt(seq, j, salt)))
        parent = hashes[i - 1] if i else NO_PARENT
        tokens = seq.tokens(i * size, (i + 1) * size)
        return BlockContent(hashes[i], parent, tokens, self._salt(seq, i, salt), 0)

    def _salt(self, seq: Sequence, i: int, salt: str) -> str:
        """Returns the salt of a sequence's i-th block, including digests of multimodal data in the block.

        Placeholder tokens are the same for all data, so tokens alone would not distinguish the blocks.
        """
        if not seq.placeholder_data:
            return salt
        return _salt_with_digests(seq, i * self.block_size, self.block_size, salt)


def _salt_with_digests(seq: Sequence, start: int, block_size: int, salt: str) -> str:
    in_block = (p for p in seq.placeholder_data if p.start < start + block_size and start < p.stop)
    return "\0".join([salt, *(f"{p.start - start} {p.digest}" for p in in_block)])

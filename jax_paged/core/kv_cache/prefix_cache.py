"""Which blocks hold the prefix of a sequence: found by a chain of hashes over full blocks."""

import dataclasses
from typing import NamedTuple

from jax_paged.core.kv_cache.block_pool import NO_PARENT, NULL_BLOCK, BlockContent, BlockPool, block_hash
from jax_paged.core.kv_cache.cache_group import CacheGroup
from jax_paged.core.kv_cache.state_slots import StateSlots
from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import BlockTables

STATE = -1  # BlockContent.group of a checkpoint: its slot is of another pool than blocks are


class CachedPrefix(NamedTuple):
    """The longest prefix of a sequence that the cache holds.

    Args:
        num_blocks: Its length in blocks.
        tables: Per cache group, its blocks in order of position; the null block where none is needed.
            Read-only.
        blocks: All of these blocks. Read-only.
        slot: Where the state after it is kept; 0 if it is empty, or no layer keeps a state.
    """

    num_blocks: int
    tables: BlockTables
    blocks: list[int]
    slot: int = 0


@dataclasses.dataclass(frozen=True)
class PinnedPrefix:
    """A prefix whose blocks stay until it is unpinned.

    Args:
        token_ids: What was asked for; its blocks hold all of it but what does not fill a block.
        salt: Of the requests that share it.
        tables: Per cache group, its blocks in order of position. Read-only.
        slot: Where the state after it is kept; 0 if it is empty, or no layer keeps a state.
    """

    token_ids: list[int]
    salt: str
    tables: BlockTables
    slot: int = 0


@dataclasses.dataclass
class _Walk:
    """How far a sequence's prefix was found in the cache.

    Args:
        seq: The sequence.
        salt: Of its request.
        found: Per cache group, the cached block of each position, the null block where there is none.
        runs: Per cache group, how many positions in a row, up to each, have a block.
        usable: Up to each position, the blocks of the longest prefix that every cache group can go on from.
        places: First position at which each content was looked up, by its key in the pool.
        num_valid: Positions at which nothing has changed since.
        result: What came of it, if nothing has changed since.
    """

    seq: Sequence
    salt: str
    found: BlockTables
    runs: list[list[int]]
    usable: list[int] = dataclasses.field(default_factory=list)
    places: dict[tuple[bytes, int], int] = dataclasses.field(default_factory=dict)
    num_valid: int = 0
    result: CachedPrefix | None = None


class PrefixCache:
    """Looks prefixes up in a pool, and notes there what full blocks hold.

    The last walk along a prefix is kept, and walked again only from where the cache has changed: a long
    prompt that waits for room is looked up at every step.

    Args:
        pool: The blocks on the device.
        groups: What the model's layers need.
        block_size: Tokens per block.
        states: Where checkpoints of states are kept: a prefix that is used ends at one.
    """

    def __init__(
        self, pool: BlockPool, groups: tuple[CacheGroup, ...], block_size: int, states: StateSlots
    ) -> None:
        self.pool = pool
        self.groups = groups
        self.block_size = block_size
        self._states = states
        self._own = [g for g, group in enumerate(groups) if not group.is_cross]
        self._windows = [(g, group.window) for g, group in enumerate(groups) if group.window is not None]
        self._walk: _Walk | None = None
        pool.on_cache_change = states.pool.on_cache_change = self._invalidate

    def longest(self, seq: Sequence, salt: str) -> CachedPrefix:
        """Returns the longest cached prefix of a sequence, without the block of its last token.

        Of a cache group with a window, the blocks that the token after the prefix attends to are enough.

        Args:
            seq: The sequence; extends its `block_hashes`.
            salt: Only sequences of equal salt share blocks.
        """
        walk = self._walk
        if walk is None or walk.seq is not seq or walk.salt != salt:
            walk = self._walk = _Walk(seq, salt, [[] for _ in self.groups], [[] for _ in self.groups])
        if walk.result is None:
            self._extend(walk)
            walk.result = self._result(walk)
        return walk.result

    def forget_walk(self) -> None:
        """Drops the walk that is kept, once its sequence has its blocks or will never have them."""
        self._walk = None

    def remember(self, seq: Sequence, salt: str, tables: BlockTables, start: int, stop: int) -> None:
        """Notes what the blocks hold that became full when tokens [start, stop) were computed."""
        for i in range(start // self.block_size, stop // self.block_size):
            content = self._content(seq, i, salt)
            for g in self._own:
                if tables[g][i] != NULL_BLOCK:
                    self.pool.remember(tables[g][i], content._replace(group=g))

    def remember_states(self, seq: Sequence, salt: str, num_tokens: int) -> None:
        """Notes the checkpoints of a sequence's state that lie within its first tokens."""
        for position, slot in self._states.take_checkpoints(seq, num_tokens):
            content = self._content(seq, position // self.block_size - 1, salt)._replace(group=STATE)
            self._states.note_checkpoint(seq, position, slot, content)

    def first_in_window(self, window: int, position: int) -> int:
        """Returns the first block that the token at a position attends to."""
        return max(0, position - window + 1) // self.block_size

    def _invalidate(self, key: tuple[bytes, int]) -> None:
        walk = self._walk
        place = None if walk is None else walk.places.get(key)
        # What lies behind a block that was missing is looked up when the walk comes there.
        if walk is not None and place is not None and place < walk.num_valid:
            walk.num_valid, walk.result = place, None

    def _extend(self, walk: _Walk) -> None:
        """Looks blocks up from the first position that is not valid, until a full cache group misses one."""
        for column in (*walk.found, *walk.runs, walk.usable):
            del column[walk.num_valid :]
        for i in range(walk.num_valid, (len(walk.seq) - 1) // self.block_size):
            content = self._content(walk.seq, i, walk.salt)
            for g in self._own:
                walk.places.setdefault((content.hash, g), i)
                block = self.pool.find(content if g == 0 else content._replace(group=g))
                walk.found[g].append(NULL_BLOCK if block is None else block)
                run = walk.runs[g]
                run.append(0 if block is None else (run[-1] if run else 0) + 1)
            position = (i + 1) * self.block_size
            misses = any(not walk.runs[g][i] for g in self._own if self.groups[g].window is None)
            is_usable = not misses and all(
                walk.runs[g][i] >= i + 1 - self.first_in_window(window, position)
                for g, window in self._windows
            )
            if self._states.is_used:
                walk.places.setdefault((content.hash, STATE), i)
                is_usable &= self._states.pool.find(content._replace(group=STATE)) is not None
            walk.usable.append(i + 1 if is_usable else walk.usable[-1] if walk.usable else 0)
            walk.num_valid = i + 1
            if misses:
                break

    def _result(self, walk: _Walk) -> CachedPrefix:
        longest = walk.usable[-1] if walk.usable else 0
        tables = [table[:longest] for table in walk.found]
        for g, window in self._windows:
            dead = min(self.first_in_window(window, longest * self.block_size), longest)
            tables[g][:dead] = [NULL_BLOCK] * dead
        slot = 0
        if longest and self._states.is_used:
            content = self._content(walk.seq, longest - 1, walk.salt)
            slot = self._states.pool.find(content._replace(group=STATE)) or 0
        return CachedPrefix(longest, tables, [b for table in tables for b in table if b != NULL_BLOCK], slot)

    def _content(self, seq: Sequence, i: int, salt: str) -> BlockContent:
        """Returns the content of a sequence's i-th block; extends its `block_hashes` up to it."""
        hashes, size = seq.block_hashes, self.block_size
        for j in range(len(hashes), i + 1):
            parent = hashes[j - 1] if j else NO_PARENT
            hashes.append(block_hash(parent, seq.tokens(j * size, (j + 1) * size), self._salt(seq, j, salt)))
        parent = hashes[i - 1] if i else NO_PARENT
        tokens = seq.tokens(i * size, (i + 1) * size)
        return BlockContent(hashes[i], parent, tokens, self._salt(seq, i, salt), 0)

    def _salt(self, seq: Sequence, i: int, salt: str) -> str:
        """Returns the salt of a sequence's i-th block: placeholders are equal, whatever they stand for."""
        return _salt_of_stand_ins(seq, i * self.block_size, self.block_size, salt) if seq.stand_ins else salt


def _salt_of_stand_ins(seq: Sequence, start: int, block_size: int, salt: str) -> str:
    own = (s for s in seq.stand_ins if s.start < start + block_size and start < s.stop)
    return "\0".join([salt, *(f"{s.start - start} {s.digest}" for s in own)])

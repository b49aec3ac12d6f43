"""Who holds which block of the KV pool: block tables, reference counts, prefix cache. No arrays."""

import enum
import hashlib
from array import array
from collections import OrderedDict
from typing import NamedTuple

from jax_paged.config import check_int
from jax_paged.sequence import Sequence

NULL_BLOCK = 0  # pads block tables on the device; never handed out
NO_PARENT = bytes(hashlib.sha256().digest_size)


class AllocStatus(enum.Enum):
    """Answer to a sequence that asks for blocks: it has them, may have them later, or can't ever."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockContent(NamedTuple):
    """What a full block holds. Two blocks of equal content hold equal keys and values."""

    hash: bytes
    parent: bytes
    tokens: list[int]
    salt: str


def block_hash(parent: bytes, tokens: list[int], salt: str) -> bytes:
    """Returns the SHA-256 of a full block: of the hash of the block before it, its tokens and the salt.

    Parent and tokens have a fixed length, so no two inputs are written as the same bytes. Salts come from
    users and may hold lone surrogates.
    """
    return hashlib.sha256(
        parent + array("q", tokens).tobytes() + salt.encode("utf-8", "surrogatepass")
    ).digest()


class BlockManager:
    """Owns the block tables of all sequences and the state of every block.

    Each block is exactly one of: the null block, free, or referenced by one or more block tables. A free
    block that is still cached keeps its content until it is handed out again: the free list is in the order
    of eviction, blocks without cached content first, then the least recently freed. A sequence's blocks
    are freed last block first, so that the tail of a prefix is evicted before its head.

    Only full blocks whose keys and values are in the pool are cached and shared, and these are never
    written again.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens a block.
        enable_prefix_caching: Whether sequences share the full blocks of equal prefixes.

    Raises:
        ValueError: If there is no block besides the null block, or a block holds no token.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        check_int("num_blocks", num_blocks, 2)
        check_int("block_size", block_size, 1)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_tables: dict[int, list[int]] = {}
        self.ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._contents: list[BlockContent | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can have: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no block table references, cached ones included."""
        return len(self._free)

    def num_blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def allocate(self, seq: Sequence, salt: str, *, use_cache: bool, num_reserved: int) -> AllocStatus:
        """Gives a sequence without a block table the blocks of all its tokens.

        Cached blocks of its prefix are shared, up to the last full block before the last token: one token
        at least is left to compute. Sets `seq.num_computed_tokens` to the tokens of the shared blocks.

        Args:
            seq: The sequence; extends its `block_hashes`.
            salt: Only sequences of equal salt share blocks.
            use_cache: Whether it may share blocks.
            num_reserved: Blocks that must stay free.

        Returns:
            OK; or LATER or NEVER, and then no block has changed hands.
        """
        num_needed = self.num_blocks_of(len(seq))
        if num_needed > self.num_usable_blocks:
            return AllocStatus.NEVER
        num_available = len(self._free) - num_reserved
        if num_available < 1:
            return AllocStatus.LATER  # at least one block is new; saves the walk along a long prefix
        shared = self._cached_prefix(seq, salt) if use_cache and self.enable_prefix_caching else []
        if num_needed - sum(self.ref_counts[b] > 0 for b in shared) > num_available:
            return AllocStatus.LATER
        for block in shared:  # before any new block is taken, which could evict them
            if not self.ref_counts[block]:
                del self._free[block]
            self.ref_counts[block] += 1
        new = [self._take() for _ in range(num_needed - len(shared))]
        self.block_tables[seq.seq_id] = shared + new
        seq.num_computed_tokens = len(shared) * self.block_size
        return AllocStatus.OK

    def append_slots(self, seq: Sequence) -> bool:
        """Extends a block table in place to hold all tokens; if blocks lack, changes nothing: False."""
        table = self.block_tables[seq.seq_id]
        if len(seq) <= len(table) * self.block_size:
            return True
        num_new = self.num_blocks_of(len(seq)) - len(table)
        if num_new > len(self._free):
            return False
        table.extend(self._take() for _ in range(num_new))
        return True

    def cache_full_blocks(self, seq: Sequence, salt: str, start: int, stop: int) -> None:
        """Offers the blocks that became full when tokens [start, stop) were computed to later sequences."""
        if not self.enable_prefix_caching:
            return
        table = self.block_tables[seq.seq_id]
        for i in range(start // self.block_size, stop // self.block_size):
            content = self._content(seq, i, salt)
            if content.hash not in self._cached:  # else an equal block (or a collision) was there first
                self._cached[content.hash] = table[i]
                self._contents[table[i]] = content

    def free(self, seq: Sequence) -> None:
        """Takes away a sequence's block table and gives back its blocks. The list itself stays as it is."""
        for block in reversed(self.block_tables.pop(seq.seq_id)):
            self.ref_counts[block] -= 1
            if not self.ref_counts[block]:
                self._free[block] = None
                if self._contents[block] is None:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self) -> None:
        """Asserts every invariant of the class; takes time in proportion to the pool."""
        counts = [0] * self.num_blocks
        for seq_id, table in self.block_tables.items():
            assert len(set(table)) == len(table), f"block table of sequence {seq_id} repeats a block: {table}"
            for block in table:
                assert 0 < block < self.num_blocks, f"block {block} in the table of sequence {seq_id}"
                counts[block] += 1
        assert counts == self.ref_counts, f"counted {counts}, kept {self.ref_counts}"
        assert NULL_BLOCK not in self._free, "the null block is in the free list"
        assert self._contents[NULL_BLOCK] is None, "the null block is cached"
        unreferenced = {b for b in range(1, self.num_blocks) if not counts[b]}
        assert set(self._free) == unreferenced, f"free {set(self._free)}, unreferenced {unreferenced}"
        by_hash = {c.hash: block for block, c in enumerate(self._contents) if c is not None}
        assert by_hash == self._cached, "prefix cache and contents of the blocks disagree"
        assert len(by_hash) == sum(c is not None for c in self._contents), "two blocks of one hash"
        for content in self._contents:
            if content is not None:
                assert len(content.tokens) == self.block_size, "a block that is not full is cached"
                assert content.hash == block_hash(*content[1:]), "a cached block changed"
        is_cached = [self._contents[block] is not None for block in self._free]
        assert is_cached == sorted(is_cached), "a cached block is evicted before one without content"

    def _take(self) -> int:
        """Hands out the first free block in the order of eviction, and forgets what it held."""
        block, _ = self._free.popitem(last=False)
        content = self._contents[block]
        if content is not None:
            del self._cached[content.hash]
            self._contents[block] = None
        self.ref_counts[block] = 1
        return block

    def _cached_prefix(self, seq: Sequence, salt: str) -> list[int]:
        """Returns the cached blocks of a sequence's longest prefix, without the block of its last token."""
        blocks = []
        for i in range((len(seq) - 1) // self.block_size):
            content = self._content(seq, i, salt)
            block = self._cached.get(content.hash)
            if block is None or self._contents[block] != content:  # equal hash alone is not trusted
                break
            blocks.append(block)
        return blocks

    def _content(self, seq: Sequence, i: int, salt: str) -> BlockContent:
        """Returns the content of a sequence's i-th block; i is at most the number of its `block_hashes`."""
        hashes = seq.block_hashes
        parent = hashes[i - 1] if i else NO_PARENT
        tokens = seq.tokens(i * self.block_size, (i + 1) * self.block_size)
        if i == len(hashes):
            hashes.append(block_hash(parent, tokens, salt))
        return BlockContent(hashes[i], parent, tokens, salt)

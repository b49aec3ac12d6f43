"""BlockPool: free list, reference counts and cached contents of the blocks of one memory."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import BlockTables, Copies

NULL_BLOCK = 0  # pads block tables on the device; never allocated
NO_PARENT = bytes(hashlib.sha256().digest_size)


class BlockContent(NamedTuple):
    """Content of a full block. Blocks with equal content have equal keys and values.

    Args:
        hash: Hash of the block, see block_hash.
        parent: Hash of the previous block.
        tokens: The tokens of the block.
        salt: Cache salt.
        group: Index of the cache group.
    """

    hash: bytes
    parent: bytes
    tokens: list[int]
    salt: str
    group: int


def block_hash(parent: bytes, tokens: list[int], salt: str) -> bytes:
    """Returns the SHA-256 hash of the previous block's hash, the tokens of a full block and the salt.

    The previous hash and the tokens have a fixed length, so different inputs never give the same bytes. Salts
    come from users and may contain lone surrogates.
    """
    return hashlib.sha256(
        parent + array("q", tokens).tobytes() + salt.encode("utf-8", "surrogatepass")
    ).digest()


def distinct(tables_of: Iterable[list[list[int]]]) -> list[int]:
    """Returns the blocks of several sequences without duplicates or null blocks."""
    every = (b for tables in tables_of for table in tables for b in table if b != NULL_BLOCK)
    return list(dict.fromkeys(every))


class BlockPool:
    """State of every block of one memory.

    Each block is exactly one of these:

    - The null block: it pads block tables and is never allocated.
    - Referenced: at least one block table or pinned prefix contains it.
    - Held back: it has no references, but a step in flight may still write to it.
    - Free: it can be allocated. It may still be cached, and keeps its content until it is allocated.

    The free list is in the order of eviction: first blocks without cached content, then cached blocks, least
    recently freed first.

    Args:
        num_blocks: Number of blocks, including the null block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.contents: list[BlockContent | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached: dict[tuple[bytes, int], int] = {}
        self._held: OrderedDict[int, int] = OrderedDict()  # block -> latest step that may write to it
        self._last_step: int | None = None  # the latest step in flight
        # Called with the key (hash, group) of each content that is added to or removed from the cache.
        self.on_cache_change: Callable[[tuple[bytes, int]], None] = lambda key: None

    @property
    def num_usable(self) -> int:
        """The number of blocks except the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """The number of free blocks, including cached ones."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """The number of blocks without references that a step in flight may still write to."""
        return len(self._held)

    def begin_step(self, step_id: int) -> None:
        """Holds back all blocks that are released from now on, until the step has returned."""
        self._last_step = step_id

    def end_step(self, step_id: int) -> None:
        """Frees the blocks that only this step or earlier ones may write to. Steps must end in order."""
        if self._last_step == step_id:
            self._last_step = None
        while self._held and next(iter(self._held.values())) <= step_id:
            block, _ = self._held.popitem(last=False)
            self._add_free(block)

    def allocate(self) -> int:
        """Allocates the first free block in the order of eviction, and removes its content from the cache."""
        block, _ = self._free.popitem(last=False)
        self.remove_from_cache(block)
        self.ref_counts[block] = 1
        return block

    def remove_from_cache(self, block: int) -> None:
        """Removes the content of a block from the cache."""
        content = self.contents[block]
        if content is not None:
            key = content.hash, content.group
            del self._cached[key]
            self.contents[block] = None
            self.on_cache_change(key)

    def share(self, block: int) -> None:
        """Adds a reference to a block. The block may be cached and free, or held back."""
        if block == NULL_BLOCK:
            return
        if not self.ref_counts[block]:
            if block in self._held:
                del self._held[block]
            else:
                del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Removes a reference. Without references, the block is free, or held back if steps are in flight."""
        if block == NULL_BLOCK:
            return
        self.ref_counts[block] -= 1
        if self.ref_counts[block]:
            return
        if self._last_step is None:
            self._add_free(block)
        else:
            self._held[block] = self._last_step

    def release_tables(self, tables: list[list[int]]) -> None:
        """Releases all blocks of a sequence's block tables, the last block of each table first."""
        for table in tables:
            for block in reversed(table):
                self.release(block)

    def _add_free(self, block: int) -> None:
        self._free[block] = None
        if self.contents[block] is None:
            self._free.move_to_end(block, last=False)

    def add_to_cache(self, block: int, content: BlockContent) -> None:
        """Adds a full block to the cache, unless it already contains a block with the same hash."""
        key = content.hash, content.group
        if key not in self._cached:
            self._cached[key] = block
            self.contents[block] = content
            self.on_cache_change(key)

    def find_cached(self, content: BlockContent) -> int | None:
        """Returns the cached block with this content, or None. Compares the content, not only the hash."""
        block = self._cached.get((content.hash, content.group))
        return block if block is not None and self.contents[block] == content else None

    def to_json(self) -> dict[str, Any]:
        """Returns the state that `restore` needs, except reference counts, as JSON-compatible values."""
        assert not self._held, "blocks are held back for a step in flight"
        cached = [(block, content) for block, content in enumerate(self.contents) if content is not None]
        contents = [[block, c.hash.hex(), c.parent.hex(), *c[2:]] for block, c in cached]
        return {"free": list(self._free), "contents": contents}

    def restore(self, values: dict[str, Any], counts: list[int]) -> None:
        """Restores the state of another pool in this new pool.

        Args:
            values: The result of `to_json` of the other pool.
            counts: Reference count of each block.
        """
        self._free = OrderedDict.fromkeys(values["free"])
        self.ref_counts = counts
        for block, digest, parent, *rest in values["contents"]:
            self.add_to_cache(block, BlockContent(bytes.fromhex(digest), bytes.fromhex(parent), *rest))

    def check_integrity(self, counts: list[int], block_size: int) -> None:
        """Asserts all invariants of the class.

        Args:
            counts: Expected reference count of each block, counted from the block tables.
            block_size: Tokens per block.
        """
        assert counts == self.ref_counts, f"reference counts are {self.ref_counts}, expected {counts}"
        assert not counts[NULL_BLOCK], "the null block is referenced"
        assert NULL_BLOCK not in self._free, "the null block is in the free list"
        assert self.contents[NULL_BLOCK] is None, "the null block is cached"
        assert not self._held.keys() & self._free.keys(), "a block is both free and held back"
        unreferenced = {b for b in range(1, self.num_blocks) if not counts[b]}
        not_used = self._free.keys() | self._held.keys()
        assert not_used == unreferenced, f"free or held-back blocks are {not_used}, expected {unreferenced}"
        assert list(self._held.values()) == sorted(self._held.values()), "held-back blocks are out of order"
        assert self._last_step is not None or not self._held, "blocks are held back without a step in flight"
        by_key = {(c.hash, c.group): block for block, c in enumerate(self.contents) if c is not None}
        assert by_key == self._cached, "the cache index differs from the contents of the blocks"
        assert len(by_key) == sum(c is not None for c in self.contents), "two cached blocks have one hash"
        for content in self.contents:
            if content is not None:
                assert len(content.tokens) == block_size, "a block that is not full is cached"
                assert content.hash == block_hash(*content[1:4]), "the hash of a cached block is wrong"
        is_cached = [self.contents[block] is not None for block in self._free]
        assert is_cached == sorted(is_cached), "a cached block precedes an uncached block in the free list"


def move_tables(
    seqs: list[Sequence],
    source: tuple[BlockPool, dict[Sequence, BlockTables]],
    target: tuple[BlockPool, dict[Sequence, BlockTables]],
) -> Copies:
    """Moves the tables of some sequences to another memory with enough room. Shared blocks stay shared.

    Args:
        seqs: The sequences. Sequences without a table in the source are ignored.
        source: The pool that the blocks are in, and the tables of the sequences in it.
        target: The pool that the blocks are moved to, and the tables of the sequences in it.

    Returns:
        (old block, new block) of every block.
    """
    (pool, tables_of), (new_pool, new_tables_of) = source, target
    held = {seq: tables_of[seq] for seq in seqs if seq in tables_of}
    blocks = distinct(held.values())
    moved = {block: new_pool.allocate() for block in blocks} | {NULL_BLOCK: NULL_BLOCK}
    for seq, tables in held.items():
        new_tables_of[seq] = [[moved[block] for block in table] for table in tables]
        for table in new_tables_of[seq]:
            for block in table:
                new_pool.share(block)
        pool.release_tables(tables_of.pop(seq))
    for block in blocks:  # each table has its own reference now
        new_pool.release(moved[block])
    return [(block, moved[block]) for block in blocks]

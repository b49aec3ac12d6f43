"""The blocks of one memory: which are free, how often each is referenced, and what full ones hold."""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jax_paged.core.request import Sequence
from jax_paged.core.scheduler_output import BlockTables, Copies

NULL_BLOCK = 0  # pads block tables on the device; never handed out
NO_PARENT = bytes(hashlib.sha256().digest_size)


class BlockContent(NamedTuple):
    """What a full block holds. Two blocks of equal content hold equal keys and values."""

    hash: bytes
    parent: bytes
    tokens: list[int]
    salt: str
    group: int


def block_hash(parent: bytes, tokens: list[int], salt: str) -> bytes:
    """Returns the SHA-256 of a full block: of the hash of the block before it, its tokens and the salt.

    Parent and tokens have a fixed length, so no two inputs are written as the same bytes. Salts come from
    users and may hold lone surrogates.
    """
    return hashlib.sha256(
        parent + array("q", tokens).tobytes() + salt.encode("utf-8", "surrogatepass")
    ).digest()


def distinct(tables_of: Iterable[list[list[int]]]) -> list[int]:
    """Returns the blocks of several sequences, each once."""
    every = (b for tables in tables_of for table in tables for b in table if b != NULL_BLOCK)
    return list(dict.fromkeys(every))


class BlockPool:
    """Owns the state of every block of a memory.

    Each block is exactly one of: the null block, referenced, held back, or free. A block that nobody
    references any more is held back while a step that may write to it is in flight; then it is free. A free
    block that is still cached keeps its content until it is handed out again: the free list is in the order
    of eviction, blocks without cached content first, then the least recently freed.

    Args:
        num_blocks: The null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.contents: list[BlockContent | None] = [None] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._cached: dict[tuple[bytes, int], int] = {}
        self._held: OrderedDict[int, int] = OrderedDict()  # block -> the step that it waits for
        self._last_step: int | None = None  # the latest step in flight
        # Called with the key of a content that enters or leaves the cache.
        self.on_cache_change: Callable[[tuple[bytes, int]], None] = lambda key: None

    @property
    def num_usable(self) -> int:
        """All but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that nobody references, but that a step in flight may still write to."""
        return len(self._held)

    def begin_step(self, step_id: int) -> None:
        """Holds back all blocks that are released from now on, until the step has returned."""
        self._last_step = step_id

    def end_step(self, step_id: int) -> None:
        """Frees the blocks that only this step and earlier ones may have written to. Steps end in order."""
        if self._last_step == step_id:
            self._last_step = None
        while self._held and next(iter(self._held.values())) <= step_id:
            block, _ = self._held.popitem(last=False)
            self._add_free(block)

    def take(self) -> int:
        """Hands out the first free block in the order of eviction, and forgets what it held."""
        block, _ = self._free.popitem(last=False)
        self.forget(block)
        self.ref_counts[block] = 1
        return block

    def forget(self, block: int) -> None:
        """Takes what a block holds out of the cache."""
        content = self.contents[block]
        if content is not None:
            key = content.hash, content.group
            del self._cached[key]
            self.contents[block] = None
            self.on_cache_change(key)

    def share(self, block: int) -> None:
        """Adds a reference to a block, which may be free (or held back) and cached."""
        if block == NULL_BLOCK:
            return
        if not self.ref_counts[block]:
            if block in self._held:
                del self._held[block]
            else:
                del self._free[block]
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Takes back a reference; a block without any is free, or held back while a step is in flight."""
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
        """Takes back the references of a sequence's block tables, the last block of each first."""
        for table in tables:
            for block in reversed(table):
                self.release(block)

    def _add_free(self, block: int) -> None:
        self._free[block] = None
        if self.contents[block] is None:
            self._free.move_to_end(block, last=False)

    def remember(self, block: int, content: BlockContent) -> None:
        """Notes what a full block holds, unless an equal block (or a collision) was there first."""
        key = content.hash, content.group
        if key not in self._cached:
            self._cached[key] = block
            self.contents[block] = content
            self.on_cache_change(key)

    def find(self, content: BlockContent) -> int | None:
        """Returns the block of a content, if one is cached; an equal hash alone is not trusted."""
        block = self._cached.get((content.hash, content.group))
        return block if block is not None and self.contents[block] == content else None

    def values(self) -> dict[str, Any]:
        """Returns what `restore` needs beside the references to blocks, as values that JSON can hold."""
        assert not self._held, "blocks wait for a step"
        cached = [(block, content) for block, content in enumerate(self.contents) if content is not None]
        contents = [[block, c.hash.hex(), c.parent.hex(), *c[2:]] for block, c in cached]
        return {"free": list(self._free), "contents": contents}

    def restore(self, values: dict[str, Any], counts: list[int]) -> None:
        """Gives a new pool the state of another, of which `values` were taken, and counts of references."""
        self._free = OrderedDict.fromkeys(values["free"])
        self.ref_counts = counts
        for block, digest, parent, *rest in values["contents"]:
            self.remember(block, BlockContent(bytes.fromhex(digest), bytes.fromhex(parent), *rest))

    def check_integrity(self, counts: list[int], block_size: int) -> None:
        """Asserts every invariant of the class.

        Args:
            counts: References to each block, counted by whoever holds them.
            block_size: Tokens per block.
        """
        assert counts == self.ref_counts, f"counted {counts}, kept {self.ref_counts}"
        assert not counts[NULL_BLOCK], "the null block is referenced"
        assert NULL_BLOCK not in self._free, "the null block is in the free list"
        assert self.contents[NULL_BLOCK] is None, "the null block is cached"
        assert not self._held.keys() & self._free.keys(), "a block is free and held back"
        unreferenced = {b for b in range(1, self.num_blocks) if not counts[b]}
        not_used = self._free.keys() | self._held.keys()
        assert not_used == unreferenced, f"free or held {not_used}, unreferenced {unreferenced}"
        assert list(self._held.values()) == sorted(self._held.values()), "steps end out of order"
        assert self._last_step is not None or not self._held, "blocks wait for no step"
        by_key = {(c.hash, c.group): block for block, c in enumerate(self.contents) if c is not None}
        assert by_key == self._cached, "prefix cache and contents of the blocks disagree"
        assert len(by_key) == sum(c is not None for c in self.contents), "two blocks of one hash"
        for content in self.contents:
            if content is not None:
                assert len(content.tokens) == block_size, "a block that is not full is cached"
                assert content.hash == block_hash(*content[1:4]), "a cached block changed"
        is_cached = [self.contents[block] is not None for block in self._free]
        assert is_cached == sorted(is_cached), "a cached block is evicted before one without content"


def move_tables(
    seqs: list[Sequence],
    source: tuple[BlockPool, dict[Sequence, BlockTables]],
    target: tuple[BlockPool, dict[Sequence, BlockTables]],
) -> Copies:
    """Moves the tables of some sequences to another memory that has room; what they share stays shared.

    Args:
        seqs: Those without a table in the source are left out.
        source: A pool, and the tables of sequences in it.
        target: Those that the tables go to.

    Returns:
        (from, to) of every block.
    """
    (pool, tables_of), (new_pool, new_tables_of) = source, target
    held = {seq: tables_of[seq] for seq in seqs if seq in tables_of}
    blocks = distinct(held.values())
    moved = {block: new_pool.take() for block in blocks} | {NULL_BLOCK: NULL_BLOCK}
    for seq, tables in held.items():
        new_tables_of[seq] = [[moved[block] for block in table] for table in tables]
        for table in new_tables_of[seq]:
            for block in table:
                new_pool.share(block)
        pool.release_tables(tables_of.pop(seq))
    for block in blocks:  # each table has its own reference now
        new_pool.release(moved[block])
    return [(block, moved[block]) for block in blocks]

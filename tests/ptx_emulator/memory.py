"""Global memory with bounds; shared memory with bounds, race detection and the proxy fence."""

import dataclasses
import enum

import numpy as np

POISON = 0xFF  # every byte: NaN in all floating-point types
SMEM_BASE = 1024  # where dynamic shared memory starts on an H100; swizzles depend on the address
NUM_LOADERS = 128  # agents for TMA loads in flight
NOBODY, SEVERAL = -1, -2
NEVER = np.iinfo(np.int64).max


class KernelError(Exception):
    """What the kernel did that a GPU would not forgive, or would not notice."""


class GlobalMemory:
    """Arrays at made-up addresses far apart, so that an access out of bounds hits nothing.

    An element that one block writes must not be touched by another. The warps of a block are not told apart.
    """

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays = arrays
        self.block = 0
        self._elements: dict[int, np.ndarray] = {}
        self._bytes = [array.reshape(-1).view(np.uint8) for array in arrays]
        # The block that wrote or read an element; of several readers, SEVERAL.
        self._writer = [np.full(array.size, NOBODY, np.int32) for array in arrays]
        self._reader = [np.full(array.size, NOBODY, np.int32) for array in arrays]

    def address(self, index: int) -> int:
        return (index + 1) << 40

    def _find(self, addresses: np.ndarray, size: int, *, is_write: bool) -> tuple[np.ndarray, np.ndarray]:
        index = int(addresses[0] >> 40) - 1
        if not 0 <= index < len(self.arrays):
            raise KernelError(f"no array is at address {int(addresses[0]):#x}")
        offsets = addresses.astype(np.int64) - self.address(index)
        data = self._bytes[index]
        if offsets.min() < 0 or offsets.max() + size > len(data):
            raise KernelError(
                f"access to bytes {offsets.min()} to {offsets.max() + size} of array {index}, "
                f"which has {len(data)}"
            )
        if (offsets % size).any():
            raise KernelError(f"misaligned access of {size} bytes at {offsets[offsets % size != 0][0]}")
        itemsize = self.arrays[index].itemsize
        elements = (offsets // itemsize)[:, None] + np.arange(max(1, size // itemsize))
        self.note(index, elements.reshape(-1), is_write=is_write)
        return data, offsets

    def elements(self, index: int) -> np.ndarray:
        """Returns the numbers of an array's elements."""
        if index not in self._elements:
            self._elements[index] = np.arange(self.arrays[index].size)
        return self._elements[index]

    def note(self, index: int, elements: np.ndarray, *, is_write: bool) -> None:
        """Raises KernelError if another block touched the elements, and one of both writes."""
        writer, reader = self._writer[index], self._reader[index]
        for others in (writer[elements], reader[elements]) if is_write else (writer[elements],):
            found = (others != NOBODY) & (others != self.block)
            if found.any():
                raise KernelError(f"element {elements[found][0]} of array {index} is used by another block")
        if is_write:
            writer[elements] = self.block
        else:
            found = reader[elements]
            reader[elements] = np.where((found == NOBODY) | (found == self.block), self.block, SEVERAL)

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns uint8 [lanes, size]."""
        data, offsets = self._find(addresses, size, is_write=False)
        return data[offsets[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        data, offsets = self._find(addresses, values.shape[1], is_write=True)
        where = offsets[:, None] + np.arange(values.shape[1])
        data[where] = values
        if (data[where] != values).any():
            raise KernelError("the lanes of a warp write different values to one address")


class Kind(enum.IntEnum):
    """Who acts for a warp: itself, or what it has in flight; the last two are of the async proxy."""

    THREADS = 0
    COPY = 1
    WGMMA = 2
    STORE = 3


@dataclasses.dataclass(frozen=True)
class Access:
    """Who reads or writes shared memory.

    Args:
        agent: Its number.
        tick: Of the agent's own clock.
        clock: What has happened before, as the one knows who issued it.
        what: For messages.
    """

    agent: int
    tick: int
    clock: np.ndarray
    what: str


class SharedMemory:
    """Shared memory of one block.

    Who touches it is an agent: a warp, what a warp has in flight (cp.async, wgmma, a TMA store), or a TMA
    load. An access races if the last one that conflicts with it is not in the past of the clock it is made
    with. Words of 4 bytes are told apart.

    What threads or cp.async write has to be fenced before the async proxy (TMA, wgmma) touches it, by the
    warp that wrote, in the past of who touches it. PTX lets the other side fence as well; here it must not.

    Args:
        size: Bytes, barriers included.
        num_warps: Of the block.
    """

    def __init__(self, size: int, num_warps: int):
        self.data = np.full(SMEM_BASE + size, POISON, np.uint8)
        num_words = -(-len(self.data) // 4)
        self.num_warps = num_warps
        self.num_readers = len(Kind) * num_warps
        self.num_agents = self.num_readers + NUM_LOADERS
        self._writer = np.zeros(num_words, np.int32)
        self._written = np.zeros(num_words, np.int64)
        self._read = np.zeros((self.num_readers, num_words), np.int64)
        # Tick of the writing warp at its fence.
        self._fenced = np.zeros(num_words, np.int64)

    def _words(self, addresses: np.ndarray, size: int) -> np.ndarray:
        if addresses.min() < SMEM_BASE or addresses.max() + size > len(self.data):
            raise KernelError(
                f"access to shared memory at {addresses.min()} to {addresses.max() + size}; there are "
                f"{SMEM_BASE} to {len(self.data)}"
            )
        if (addresses % size).any():
            raise KernelError(f"misaligned access of {size} bytes to shared memory")
        if size <= 4:
            return addresses // 4
        return ((addresses // 4)[:, None] + np.arange(size // 4)).reshape(-1)

    def _check_writers(self, words: np.ndarray, access: Access, does: str) -> None:
        writers = self._writer[words]
        late = self._written[words] > access.clock[writers]
        if late.any():
            word, writer = int(words[late][0]), int(writers[late][0])
            raise KernelError(
                f"race: {access.what} {does} {word * 4:#x}, which {self._name(writer)} wrote "
                "and nothing waited for"
            )
        is_async = access.agent >= Kind.WGMMA * self.num_warps
        if is_async and (self._fenced[words] > access.clock[writers % self.num_warps]).any():
            raise KernelError(f"{access.what} {does} what threads wrote, without fence.proxy.async after it")

    def check_read(self, addresses: np.ndarray, size: int, access: Access) -> None:
        """Notes a read and raises KernelError if it races, or lacks a fence."""
        words = self._words(addresses, size)
        self._check_writers(words, access, "reads")
        self._read[access.agent, words] = access.tick

    def check_write(self, addresses: np.ndarray, size: int, access: Access) -> None:
        """Notes a write and raises KernelError if it races, or lacks a fence."""
        words = self._words(addresses, size)
        self._check_writers(words, access, "writes")
        late = self._read[:, words] > access.clock[: self.num_readers, None]
        if late.any():
            reader = int(np.flatnonzero(late.any(1))[0])
            raise KernelError(f"race: {access.what} writes what {self._name(reader)} may still read")
        self._writer[words], self._written[words] = access.agent, access.tick
        self._fenced[words] = NEVER if access.agent < Kind.WGMMA * self.num_warps else 0

    def fence_proxy(self, warp: int, clock: np.ndarray) -> None:
        """Orders what a warp wrote, and what of its cp.async it has waited for, before the async proxy."""
        mine = (self._fenced == NEVER) & (self._writer % self.num_warps == warp)
        mine &= self._written <= clock[self._writer]
        self._fenced[mine] = clock[warp]

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns uint8 [lanes, size]."""
        return self.data[addresses[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        where = addresses[:, None] + np.arange(values.shape[1])
        self.data[where] = values
        if (self.data[where] != values).any():
            raise KernelError("the lanes of a warp write different values to one address")

    def poison(self, addresses: np.ndarray, size: int) -> None:
        self.data[addresses[:, None] + np.arange(size)] = POISON

    def _name(self, agent: int) -> str:
        if agent >= self.num_readers:
            return "a TMA load"
        kind = ("", "cp.async of ", "wgmma of ", "a TMA store of ")[agent // self.num_warps]
        return f"{kind}warp {agent % self.num_warps}"


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Returns where the bytes of a swizzled tile lie: bits 4-6 of the address are flipped by bits 7-9."""
    mask = {0: 0, 16: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return addresses ^ (((addresses >> 7) & mask) << 4)

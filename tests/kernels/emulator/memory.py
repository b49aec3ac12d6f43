"""Global memory with bounds; shared memory with bounds, race detection and the proxy fence."""

import numpy as np

POISON = 0xFF  # every byte: NaN in all floating-point types
SMEM_BASE = 1024  # where dynamic shared memory starts on an H100; swizzles depend on the address
NUM_LOADERS = 128  # agents for TMA loads in flight


class KernelError(Exception):
    """What the kernel did that a GPU would not forgive, or would not notice."""


class GlobalMemory:
    """Arrays at made-up addresses far apart, so that an access out of bounds hits nothing."""

    def __init__(self, arrays: list[np.ndarray]):
        self.arrays = arrays
        self._bytes = [array.reshape(-1).view(np.uint8) for array in arrays]

    def address(self, index: int) -> int:
        return (index + 1) << 40

    def _find(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        index = int(addresses[0] >> 40) - 1
        if not 0 <= index < len(self.arrays):
            raise KernelError(f"no array is at address {int(addresses[0]):#x}")
        offsets = addresses.astype(np.int64) - self.address(index)
        data = self._bytes[index]
        if offsets.min() < 0 or offsets.max() + size > len(data):
            raise KernelError(
                f"access to bytes {offsets.min()} to {offsets.max() + size} of array {index}, which has {len(data)}"
            )
        if (offsets % size).any():
            raise KernelError(f"misaligned access of {size} bytes at {offsets[offsets % size != 0][0]}")
        return data, offsets

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns uint8 [lanes, size]."""
        data, offsets = self._find(addresses, size)
        return data[offsets[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        data, offsets = self._find(addresses, values.shape[1])
        data[offsets[:, None] + np.arange(values.shape[1])] = values


class SharedMemory:
    """Shared memory of one block.

    Who touches it is an agent: a warp, what a warp has in flight (cp.async, wgmma, a TMA store: each ends in
    order), or a TMA load. Each has a vector clock; an access races if the last one that conflicts with it is
    not in the past of the clock it is made with. Words of 4 bytes are told apart.

    Args:
        size: Bytes, barriers included.
        num_warps: Of the block.
    """

    def __init__(self, size: int, num_warps: int):
        self.data = np.full(SMEM_BASE + size, POISON, np.uint8)
        num_words = -(-len(self.data) // 4)
        self.num_readers = 4 * num_warps
        self.num_agents = self.num_readers + NUM_LOADERS
        self._writer = np.zeros(num_words, np.int32)
        self._written = np.zeros(num_words, np.int64)
        self._read = np.zeros((self.num_readers, num_words), np.int64)
        self._unfenced = np.zeros(num_words, bool)

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

    def check_read(self, addresses: np.ndarray, size: int, agent: int, clock: np.ndarray, what: str) -> None:
        """Notes a read and raises KernelError if it races; one of the async proxy must have seen a fence."""
        words = self._words(addresses, size)
        writers = self._writer[words]
        late = self._written[words] > clock[writers]
        if late.any():
            word = words[late][0]
            raise KernelError(
                f"race: {what} reads {word * 4:#x}, which {self._name(self._writer[word])} wrote and nothing waited for"
            )
        if what.startswith(("wgmma", "TMA")) and self._unfenced[words].any():
            raise KernelError(f"{what} reads what threads wrote, without fence.proxy.async after it")
        self._read[agent, words] = clock[agent]

    def check_write(self, addresses: np.ndarray, size: int, agent: int, clock: np.ndarray, what: str) -> None:
        """Notes a write and raises KernelError if it races."""
        words = self._words(addresses, size)
        late = self._written[words] > clock[self._writer[words]]
        if late.any():
            word = words[late][0]
            raise KernelError(
                f"race: {what} writes {word * 4:#x}, which {self._name(self._writer[word])} wrote and nothing waited for"
            )
        late = self._read[:, words] > clock[: self.num_readers, None]
        if late.any():
            reader = np.flatnonzero(late.any(1))[0]
            raise KernelError(f"race: {what} writes what {self._name(reader)} may still read")
        self._writer[words], self._written[words] = agent, clock[agent]
        self._unfenced[words] = agent < self.num_readers // 4

    def fence_proxy(self, warp: int) -> None:
        self._unfenced[self._writer == warp] = False

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns uint8 [lanes, size]."""
        return self.data[addresses[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        self.data[addresses[:, None] + np.arange(values.shape[1])] = values

    def poison(self, addresses: np.ndarray, size: int) -> None:
        self.data[addresses[:, None] + np.arange(size)] = POISON

    def _name(self, agent: int) -> str:
        num_warps = self.num_readers // 4
        if agent >= self.num_readers:
            return "a TMA load"
        kind = ("", "cp.async of ", "wgmma of ", "a TMA store of ")[agent // num_warps]
        return f"{kind}warp {agent % num_warps}"


def swizzled(addresses: np.ndarray, swizzle: int) -> np.ndarray:
    """Returns where the bytes of a swizzled tile lie: bits 4-6 of the address are flipped by bits 7-9."""
    mask = {0: 0, 16: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return addresses ^ (((addresses >> 7) & mask) << 4)

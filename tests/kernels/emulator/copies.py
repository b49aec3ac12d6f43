"""Asynchronous copies and the barriers that they arrive at: cp.async, TMA, mbarrier, fences."""

import re
from typing import Any

import numpy as np

from emulator.host import TensorMap
from emulator.machine import Flight, Mbarrier, Run, Warp
from emulator.memory import KernelError, swizzled


def _mbarrier(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    if opcode[1] == "try_wait":
        return _try_wait(a, operands)
    if opcode[1] == "init":
        address, count = a.address(operands[0]), a.source(operands[1], np.uint32)

        def init(warp: Warp, mask: np.ndarray | None) -> None:
            where, n = int(address(warp)[0]), int(count(warp)[0])
            zeros = np.zeros_like(warp.clock)
            warp.block.mbarriers[where] = Mbarrier(n, n, 0, 0, zeros, zeros)

        return init
    assert opcode[1] == "arrive", opcode
    address = a.address(operands[1])
    amount = a.source(operands[2], np.uint32) if len(operands) > 2 else None
    expects = "expect_tx" in opcode

    def arrive(warp: Warp, mask: np.ndarray | None) -> None:
        barrier = warp.block.mbarrier(int(address(warp)[0]))
        num_lanes = 32 if mask is None else int(mask.sum())
        value = 1 if amount is None else int(amount(warp)[0])
        barrier.bytes_missing += value * num_lanes if expects else 0
        barrier.pending -= num_lanes * (1 if expects else value)
        np.maximum(barrier.clock, warp.release(), out=barrier.clock)
        barrier.settle()

    return arrive


def _try_wait(a: Any, operands: tuple[str, ...]) -> Run:
    target, address, parity = a.register(operands[0]), a.address(operands[1]), a.source(operands[2], np.uint32)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        barrier, wanted = warp.block.mbarrier(int(address(warp)[0])), int(parity(warp)[0])
        if barrier.phase == wanted:  # that phase is not over: again when it is
            warp.pc -= 1
            warp.wait = lambda: barrier.phase != wanted
            return
        warp.acquire(barrier.last_clock)
        warp.write(target, np.ones(32, bool), mask)

    return run


def _cp(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    assert opcode[1] == "async", opcode
    is_bulk = opcode[2] == "bulk"
    if opcode[2 + is_bulk] == "commit_group":
        return _commit("stores" if is_bulk else "copies")
    if opcode[2 + is_bulk] == "wait_group":
        return _wait("stores" if is_bulk else "copies", int(operands[0]), kind=3 if is_bulk else 1)
    if not is_bulk:
        return _cp_async(a, operands)
    assert opcode[3] == "tensor", opcode
    return _tma_store(a, operands) if opcode[5] == "global" else _tma_load(a, operands)


def _commit(what: str) -> Run:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        getattr(warp, what).append([])

    return run


def _wait(what: str, num_left: int, kind: int) -> Run:
    """Ends the oldest groups: all but the last `num_left` that were committed."""

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        groups = getattr(warp, what)
        agent = warp.agent(kind)
        while len(groups) - 1 > num_left:
            for finish in groups.pop(0):
                warp.clock[agent] = max(warp.clock[agent], finish())

    return run


def _cp_async(a: Any, operands: tuple[str, ...]) -> Run:
    target, source, size = a.address(operands[0]), a.address(operands[1]), int(operands[2])
    assert len(operands) == 3, operands

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        active = slice(None) if mask is None else mask
        where, data = target(warp)[active], a.memory.load(source(warp)[active], size)
        agent, clock = warp.launch_async(1)
        shared = warp.block.shared
        shared.check_write(where, size, agent, clock, "cp.async")
        shared.poison(where, size)

        def finish() -> int:
            shared.store(where, data)
            return int(clock[agent])

        warp.copies[-1].append(finish)

    return run


def _coordinates(a: Any, operand: str) -> tuple[Any, list[Any]]:
    match = re.fullmatch(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]", operand)
    assert match is not None, operand
    return a.source(match[1], np.uint64), [a.source(c.strip(), np.int32) for c in match[2].split(",")]


def _tile(memory: Any, tensor: TensorMap, start: list[int]) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Returns a view of the part of the box that is in bounds, and where that is in the box."""
    array = memory.arrays[tensor.buffer].reshape(-1)
    strides = tuple(s * array.itemsize for s in tensor.strides)
    last = sum((n - 1) * s for n, s in zip(tensor.sizes, tensor.strides, strict=True))
    if last >= array.size:
        raise KernelError(f"a tensor map reaches element {last} of array {tensor.buffer}, of {array.size}")
    whole = np.lib.stride_tricks.as_strided(array, tensor.sizes, strides)
    inside, within = [], []
    for begin, width, size in zip(start, tensor.box, tensor.sizes, strict=True):
        low, high = max(begin, 0), min(begin + width, size)
        inside.append(slice(low, max(high, low)))
        within.append(slice(low - begin, max(high, low) - begin))
    return whole[tuple(inside)], tuple(within)


def _chunks(tensor: TensorMap, address: int, num_bytes: int) -> np.ndarray:
    if address % max(128, 8 * tensor.swizzle if tensor.swizzle > 16 else 128):
        raise KernelError(f"a tile at {address:#x} is not aligned to its swizzle pattern of {tensor.swizzle}")
    return swizzled(np.arange(address, address + num_bytes, 16), tensor.swizzle)


def _tma_load(a: Any, operands: tuple[str, ...]) -> Run:
    target, barrier_address = a.address(operands[0]), a.address(operands[2])
    descriptor, coordinates = _coordinates(a, operands[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        lane = 0 if mask is None else int(np.flatnonzero(mask)[0])
        if mask is None or mask.sum() != 1:
            raise KernelError("a TMA copy is issued by more than one thread")
        block = warp.block
        tensor = block.tensor_map(int(descriptor(warp)[lane]))
        start = [int(c(warp)[lane]) for c in reversed(coordinates)]
        part, within = _tile(a.memory, tensor, start)
        box = np.zeros(tensor.box, part.dtype)
        box[within] = part
        data = box.reshape(-1).view(np.uint8).reshape(-1, 16)
        where = _chunks(tensor, int(target(warp)[lane]), data.size)
        agent, clock = block.launch_load(warp)
        block.shared.check_write(where, 16, agent, clock, "a TMA load")
        block.shared.poison(where, 16)
        barrier = block.mbarrier(int(barrier_address(warp)[lane]))

        def arrive() -> None:
            block.shared.store(where, data)
            barrier.bytes_missing -= data.size
            np.maximum(barrier.clock, clock, out=barrier.clock)
            barrier.settle()

        block.flights.append(Flight(arrive))

    return run


def _tma_store(a: Any, operands: tuple[str, ...]) -> Run:
    descriptor, coordinates = _coordinates(a, operands[0])
    source = a.address(operands[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        lane = 0 if mask is None else int(np.flatnonzero(mask)[0])
        if mask is None or mask.sum() != 1:
            raise KernelError("a TMA copy is issued by more than one thread")
        block = warp.block
        tensor = block.tensor_map(int(descriptor(warp)[lane]))
        part, within = _tile(a.memory, tensor, [int(c(warp)[lane]) for c in reversed(coordinates)])
        num_bytes = int(np.prod(tensor.box)) * part.itemsize
        where = _chunks(tensor, int(source(warp)[lane]), num_bytes)
        agent, clock = warp.launch_async(3)
        block.shared.check_read(where, 16, agent, clock, "TMA store")

        def finish() -> int:  # reads as late as it may
            part[...] = block.shared.load(where, 16).reshape(-1).view(part.dtype).reshape(tensor.box)[within]
            return int(clock[agent])

        warp.stores[-1].append(finish)

    return run


def _fence(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    if opcode[1] == "proxy":
        return lambda warp, mask: warp.block.shared.fence_proxy(warp.index)
    assert opcode[1] == "mbarrier_init", opcode
    return lambda warp, mask: None


BUILDERS: dict[str, Any] = {"mbarrier": _mbarrier, "cp": _cp, "fence": _fence}

"""Asynchronous copies and the barriers that they arrive at: cp.async, TMA, mbarrier, fences."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.host import TensorMap
from ptx_emulator.machine import Mbarrier, Operation, Run, Warp, uniform
from ptx_emulator.memory import GlobalMemory, KernelError, Kind, swizzled


def _mbarrier(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    modifiers = {part.split("__")[0] for part in opcode[2:]}
    match opcode[1]:
        case "init" if modifiers <= {"shared", "b64"}:
            return _init(a, operands)
        case "try_wait" if (
            modifiers <= {"parity", "acquire", "cta", "shared", "b64"} and "parity" in modifiers
        ):
            return _try_wait(a, operands)
        case "arrive" if modifiers <= {"expect_tx", "noComplete", "release", "cta", "shared", "b64"}:
            completes = "noComplete" not in modifiers
            return _arrive(a, operands, expects="expect_tx" in modifiers, completes=completes)
    raise ValueError(opcode)


def _init(a: Any, operands: tuple[str, ...]) -> Run:
    address, count = a.address(operands[0]), a.source(operands[1], np.uint32)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if mask is None or mask.sum() != 1:
            raise KernelError("a barrier is made by more than one thread")
        where, number = uniform(address(warp), mask), uniform(count(warp), mask)
        warp.block.shared.check_write(np.array([where]), 8, warp.access(Kind.THREADS, "mbarrier.init"))
        clock, last_clock = np.zeros_like(warp.clock), np.zeros_like(warp.clock)
        barrier = Mbarrier(number, number, 0, 0, clock, last_clock, owner=warp.index)
        warp.block.mbarriers[where] = barrier

    return run


def _arrive(a: Any, operands: tuple[str, ...], *, expects: bool, completes: bool) -> Run:
    name, where, *count = operands
    address = a.address(where)
    amount = a.source(count[0] if count else "1", np.uint32)
    state = None if name == "_" else a.register(name)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        barrier = warp.block.mbarrier(warp, uniform(address(warp), mask))
        values = amount(warp) if mask is None else amount(warp)[mask]
        barrier.bytes_missing += int(values.sum()) if expects else 0
        barrier.pending -= len(values) if expects else int(values.sum())
        if barrier.pending == 0 and not completes:
            raise KernelError("an arrival that must not complete a phase does")
        np.maximum(barrier.clock, warp.release(), out=barrier.clock)
        barrier.settle()
        if state is not None:  # what a wait by parity has no use for
            warp.write(state, np.zeros(32, np.uint64), mask)

    return run


def _try_wait(a: Any, operands: tuple[str, ...]) -> Run:
    target, address = a.register(operands[0]), a.address(operands[1])
    parity = a.source(operands[2], np.uint32)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        barrier = warp.block.mbarrier(warp, uniform(address(warp), mask))
        wanted = uniform(parity(warp), mask)
        if barrier.phase == wanted:  # that phase is not over: again when it is
            warp.pc -= 1
            warp.wait = lambda: barrier.phase != wanted
            return
        warp.acquire(barrier.last_clock)
        warp.write(target, np.ones(32, bool), mask)

    return run


def _cp(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    match opcode[1:]:
        case ("async", "commit_group"):
            return _of_all_lanes(lambda warp: warp.commit(Kind.COPY))
        case ("async", "wait_group"):
            return _of_all_lanes(lambda warp: warp.finish(Kind.COPY, int(operands[0])))
        case ("async", "ca" | "cg", "shared" | "shared__cta", "global") if len(operands) == 3:
            return _cp_async(a, operands)
        case ("async", "bulk", "commit_group"):
            return lambda warp, mask: warp.commit(Kind.STORE)
        case ("async", "bulk", "wait_group") | ("async", "bulk", "wait_group", "read"):
            return lambda warp, mask: warp.finish(Kind.STORE, int(operands[0]))
        case ("async", "bulk", "tensor", _, "global", "shared__cta", "bulk_group"):
            return _tma_store(a, operands)
        case ("async", "bulk", "tensor", _, "shared__cta" | "shared__cluster", "global", _) if (
            len(operands) == 3
        ):
            return _tma_load(a, operands)
    raise ValueError(opcode)


def _of_all_lanes(function: Callable[[Warp], None]) -> Run:
    """Each lane has its own groups of cp.async; here they are the warp's."""

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        function(warp)

    return run


def _cp_async(a: Any, operands: tuple[str, ...]) -> Run:
    target, source, size = a.address(operands[0]), a.address(operands[1]), int(operands[2])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        active = slice(None) if mask is None else mask
        where, data = target(warp)[active], a.memory.load(source(warp)[active], size)
        access, shared = warp.access(Kind.COPY, "cp.async"), warp.block.shared
        shared.check_write(where, size, access)
        shared.poison(where, size)
        warp.start(Kind.COPY, Operation(lambda: shared.store(where, data), access))

    return run


def _coordinates(a: Any, operand: str) -> tuple[Any, list[Any]]:
    match = re.fullmatch(r"\[\s*([%\w]+)\s*,\s*\{([^}]*)\}\s*\]", operand)
    assert match is not None, operand
    return a.source(match[1], np.uint64), [a.source(c.strip(), np.int32) for c in match[2].split(",")]


def _check_map(tensor: TensorMap, itemsize: int) -> None:
    """The driver makes no tensor map that this does not let through."""
    line = tensor.box[-1] * itemsize
    is_right = len(tensor.box) <= 5 and max(tensor.box) <= 256 and min(tensor.box) > 0
    is_right &= tensor.strides[-1] == 1 and all(s * itemsize % 16 == 0 for s in tensor.strides[:-1])
    is_right &= line % 16 == 0 if tensor.swizzle == 16 else line == tensor.swizzle
    if not is_right:
        raise KernelError(f"{tensor} of elements of {itemsize} bytes is not a tensor map")


def _tile(
    memory: GlobalMemory, tensor: TensorMap, start: list[int], *, is_write: bool
) -> tuple[np.ndarray, tuple[slice, ...]]:
    """Returns a view of the part of the box that is in bounds, and where that is in the box."""
    array = memory.arrays[tensor.buffer].reshape(-1)
    _check_map(tensor, array.itemsize)
    last = sum((n - 1) * s for n, s in zip(tensor.sizes, tensor.strides, strict=True))
    if last >= array.size:
        raise KernelError(f"a tensor map reaches element {last} of array {tensor.buffer}, of {array.size}")
    whole, elements = (
        np.lib.stride_tricks.as_strided(x, tensor.sizes, [s * x.itemsize for s in tensor.strides])
        for x in (array, memory.elements(tensor.buffer))
    )
    inside, within = [], []
    for begin, width, size in zip(start, tensor.box, tensor.sizes, strict=True):
        low, high = max(begin, 0), min(begin + width, size)
        inside.append(slice(low, max(high, low)))
        within.append(slice(low - begin, max(high, low) - begin))
    memory.note(tensor.buffer, elements[tuple(inside)].reshape(-1), is_write=is_write)
    return whole[tuple(inside)], tuple(within)


def _chunks(tensor: TensorMap, address: int, num_bytes: int) -> np.ndarray:
    # The pattern is one of addresses (CUDA Programming Guide, swizzle modes): a tile may begin within it.
    if address % 128:
        raise KernelError(f"a tile at {address:#x} is not aligned to 128 bytes")
    return swizzled(np.arange(address, address + num_bytes, 16), tensor.swizzle)


def _issuer(mask: np.ndarray | None) -> int:
    if mask is None or mask.sum() != 1:
        raise KernelError("a TMA copy is issued by more than one thread")
    return int(np.flatnonzero(mask)[0])


def _tma_load(a: Any, operands: tuple[str, ...]) -> Run:
    target, barrier_address = a.address(operands[0]), a.address(operands[2])
    descriptor, coordinates = _coordinates(a, operands[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        lane, block = _issuer(mask), warp.block
        tensor = block.tensor_map(int(descriptor(warp)[lane]))
        start = [int(c(warp)[lane]) for c in reversed(coordinates)]
        part, within = _tile(a.memory, tensor, start, is_write=False)
        box = np.zeros(tensor.box, part.dtype)
        box[within] = part
        data = box.reshape(-1).view(np.uint8).reshape(-1, 16)
        where = _chunks(tensor, int(target(warp)[lane]), data.size)
        access = block.load_access(warp)
        block.shared.check_write(where, 16, access)
        block.shared.poison(where, 16)
        barrier = block.mbarrier(warp, int(barrier_address(warp)[lane]))
        if not barrier.is_fenced:
            raise KernelError("TMA uses a barrier without fence.mbarrier_init after it was made")

        def arrive() -> None:
            block.shared.store(where, data)
            barrier.bytes_missing -= data.size
            barrier.clock[access.agent] = max(barrier.clock[access.agent], access.tick)
            barrier.settle()

        block.flights.append(arrive)

    return run


def _tma_store(a: Any, operands: tuple[str, ...]) -> Run:
    descriptor, coordinates = _coordinates(a, operands[0])
    source = a.address(operands[1])

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        lane, shared = _issuer(mask), warp.block.shared
        tensor = warp.block.tensor_map(int(descriptor(warp)[lane]))
        start = [int(c(warp)[lane]) for c in reversed(coordinates)]
        part, within = _tile(a.memory, tensor, start, is_write=True)
        num_bytes = int(np.prod(tensor.box)) * part.itemsize
        where = _chunks(tensor, int(source(warp)[lane]), num_bytes)
        access = warp.access(Kind.STORE, "a TMA store")
        shared.check_read(where, 16, access)

        def finish() -> None:
            part[...] = shared.load(where, 16).reshape(-1).view(part.dtype).reshape(tensor.box)[within]

        warp.start(Kind.STORE, Operation(finish, access))

    return run


def _fence(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    orders_data = opcode[1:] in (("proxy", "async"), ("proxy", "async", "shared__cta"))
    if not orders_data and opcode[1] != "mbarrier_init":
        raise ValueError(opcode)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        for barrier in warp.block.mbarriers.values():
            barrier.is_fenced |= barrier.owner == warp.index
        if orders_data:
            assert mask is None  # it would order the writes of some lanes
            warp.block.shared.fence_proxy(warp.index, warp.clock)

    return run


BUILDERS: dict[str, Any] = {"mbarrier": _mbarrier, "cp": _cp, "fence": _fence}

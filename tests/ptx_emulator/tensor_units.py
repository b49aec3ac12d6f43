"""Matrix instructions: ldmatrix, stmatrix, mma.sync and wgmma.

In a fragment of 8 rows of 16-bit pairs, a lane has row lane // 4 and the pair lane % 4.

Source: PTX ISA, sections on matrix fragments and on the matrix descriptor of wgmma.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ptx_emulator.machine import LANES, Operation, Run, Warp, uniform
from ptx_emulator.memory import KernelError, Kind, swizzled

ROW, PAIR = LANES // 4, LANES % 4 * 2
POISON = np.full(32, 0xFFFFFFFF, np.uint32)
ELEMENTS: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def _halves(registers: np.ndarray, element: Any) -> np.ndarray:
    """uint32 [lanes] -> float32 [lanes, 2]."""
    pairs = np.ascontiguousarray(registers).view(np.uint16).reshape(-1, 2)
    return pairs.view(element).astype(np.float32)


def _matrix_access(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    is_load, is_transposed = opcode[0] == "ldmatrix", "trans" in opcode
    registers, address = a.registers(operands[0 if is_load else 1]), a.address(operands[1 if is_load else 0])
    assert opcode[1:4] == ("sync", "aligned", "m8n8"), opcode
    assert opcode[-1] == "b16", opcode
    count = int(opcode[4][1])
    assert len(registers) == count, operands

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        rows, shared = address(warp)[: 8 * count], warp.block.shared
        check = shared.check_read if is_load else shared.check_write
        check(rows, 16, warp.access(Kind.THREADS, opcode[0]))
        if is_load:
            found = shared.load(rows, 16).view(np.uint16).reshape(count, 8, 8)
            found = found.swapaxes(1, 2) if is_transposed else found
            for i, register in enumerate(registers):
                pairs = np.stack([found[i, ROW, PAIR], found[i, ROW, PAIR + 1]], axis=1)
                warp.write(register, pairs.view(np.uint32)[:, 0], None)
            return
        made = np.zeros((count, 8, 8), np.uint16)
        for i, register in enumerate(registers):
            pairs = warp.registers[register].view(np.uint16).reshape(32, 2)
            made[i, ROW, PAIR], made[i, ROW, PAIR + 1] = pairs[:, 0], pairs[:, 1]
        made = made.swapaxes(1, 2) if is_transposed else made
        shared.store(rows, np.ascontiguousarray(made).reshape(8 * count, 8).view(np.uint8))

    return run


def _left(registers: list[np.ndarray], element: Any) -> np.ndarray:
    """A fragment of four registers -> [16, 16]."""
    out = np.empty((16, 16), np.float32)
    for i, register in enumerate(registers):
        rows, columns = ROW + i % 2 * 8, PAIR + i // 2 * 8
        values = _halves(register, element)
        out[rows, columns], out[rows, columns + 1] = values[:, 0], values[:, 1]
    return out


def _scatter(matrix: np.ndarray, registers: Sequence[Any], *, into: bool) -> list[np.ndarray]:
    """Between float32 [16, N] and the registers of an accumulator, four for every 8 columns."""
    out = []
    for i, register in enumerate(registers):
        rows, columns = ROW + i % 4 // 2 * 8, i // 4 * 8 + PAIR + i % 2
        if into:
            matrix[rows, columns] = register.view(np.float32)
        else:
            out.append(matrix[rows, columns].astype(np.float32).view(np.uint32))
    return out


def _mma(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    assert opcode[:7] == ("mma", "sync", "aligned", "m16n8k16", "row", "col", "f32"), opcode
    assert opcode[7:] == (opcode[7], opcode[7], "f32"), opcode
    element = ELEMENTS[opcode[7]]
    target, left, right = (a.registers(operand) for operand in operands[:3])
    start = [a.source(name.strip(), np.uint32) for name in operands[3].strip("{} ").split(",")]

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        lhs = _left([warp.registers[r] for r in left], element)
        rhs = np.empty((16, 8), np.float32)
        for i, r in enumerate(right):
            values = _halves(warp.registers[r], element)
            rhs[PAIR + 8 * i, ROW], rhs[PAIR + 8 * i + 1, ROW] = values[:, 0], values[:, 1]
        acc = np.empty((16, 8), np.float32)
        _scatter(acc, [source(warp) for source in start], into=True)
        for register, value in zip(target, _scatter(acc + lhs @ rhs, target, into=False), strict=True):
            warp.write(register, value, None)

    return run


def _operand_addresses(descriptor: int, rows: np.ndarray, is_transposed: bool) -> np.ndarray:
    """Returns where elements (row, k) of a wgmma operand of 16 columns lie, int64 [rows, 16].

    Rows are M or N. The descriptor has the start address, the leading and the stride offset, each in units
    of 16 bytes, and the swizzle. An atom is 8 lines of as many bytes as the swizzle pattern has: a line holds
    a row's k where K is contiguous, and a k's rows where the operand is transposed.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) * 16 for shift in (0, 16, 32))
    swizzle = {1: 128, 2: 64, 3: 32}.get(descriptor >> 62)
    if swizzle is None:
        raise KernelError("wgmma without a swizzle is not emulated")
    if descriptor >> 49 & 7 or start % (8 * swizzle) >= swizzle:
        raise KernelError("wgmma on a tile inside of a swizzle pattern is not emulated")
    k, row = np.arange(16)[None], rows[:, None]
    if is_transposed:
        width = swizzle // 2
        plain = row // width * leading + k // 8 * stride + k % 8 * swizzle + row % width * 2
    else:
        plain = row // 8 * stride + row % 8 * swizzle + k * 2
    return swizzled(start + plain, swizzle)


def _wgmma(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    match opcode[1]:
        case "fence":
            return lambda warp, mask: warp.fence_registers()
        case "commit_group":
            return lambda warp, mask: warp.commit(Kind.WGMMA)
        case "wait_group":
            return _wait_group(int(operands[0]))
        case "mma_async":
            return _mma_async(a, opcode, operands)
    raise ValueError(opcode)


def _mma_async(a: Any, opcode: tuple[str, ...], operands: tuple[str, ...]) -> Run:
    shape = re.fullmatch(r"m64n(\d+)k16", opcode[4])
    assert shape is not None, opcode
    assert opcode[5:] == ("f32", opcode[6], opcode[6]), opcode
    num_columns, element = int(shape[1]), ELEMENTS[opcode[6]]
    accumulators = tuple(a.registers(operands[0]))
    in_registers = operands[1].startswith("{")
    left = a.registers(operands[1]) if in_registers else []
    left_descriptor = None if in_registers else a.source(operands[1], np.uint64)
    right_descriptor, adds = a.source(operands[2], np.uint64), a.source(operands[3], np.bool_)
    flags = operands[4:]  # scale a, scale b, (transpose a,) transpose b
    assert flags[:2] == ("1", "1"), operands
    assert len(flags) == 3 + (not in_registers), operands
    left_transposed, right_transposed = (not in_registers and flags[2] == "1"), flags[-1] == "1"
    assert len(accumulators) == num_columns // 2, operands

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        shared, access = warp.block.shared, warp.access(Kind.WGMMA, "wgmma")
        written = (r not in warp.accumulators and warp.is_unfenced(r) for r in (*accumulators, *left))
        if any(written):
            raise KernelError("a register of wgmma was written and not fenced by wgmma.fence")

        def reader(source: Any, rows: np.ndarray, is_transposed: bool) -> Callable[[], np.ndarray]:
            """Checks now; reads as late as it may, or at once."""
            addresses = _operand_addresses(uniform(source(warp), None), rows, is_transposed)
            shared.check_read(addresses.reshape(-1) & ~np.int64(3), 4, access)

            def read() -> np.ndarray:
                return shared.load(addresses.reshape(-1), 2).view(element).reshape(addresses.shape)

            if warp.block.rng.random() < 0.5:
                now = read()
                return lambda: now
            return read

        right = reader(right_descriptor, np.arange(num_columns), right_transposed)
        if left_descriptor is not None:
            lhs = reader(left_descriptor, warp.index % 4 * 16 + np.arange(16), left_transposed)
        else:

            def lhs() -> np.ndarray:
                return _left([warp.registers[r] for r in left], element)

        for r in accumulators:
            if r not in warp.accumulators:
                value = warp.registers[r]
                warp.accumulators[r] = np.zeros(32, np.uint32) if value is None else value
            warp.registers[r] = POISON
        add = uniform(adds(warp), None)

        def finish() -> None:
            acc = np.zeros((16, num_columns), np.float32)
            if add:
                _scatter(acc, [warp.accumulators[r] for r in accumulators], into=True)
            acc += lhs().astype(np.float32) @ right().astype(np.float32).T
            for r, value in zip(accumulators, _scatter(acc, accumulators, into=False), strict=True):
                warp.accumulators[r] = value

        warp.start(Kind.WGMMA, Operation(finish, access, accumulators))

    return run


def _wait_group(num_left: int) -> Run:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        warp.finish(Kind.WGMMA, num_left)
        groups = warp.groups[Kind.WGMMA]
        busy = {r for group in groups for operation in group for r in operation.accumulators}
        for r in [r for r in warp.accumulators if r not in busy]:
            if warp.registers[r] is not POISON:
                raise KernelError("an accumulator was written while wgmma worked on it")
            warp.registers[r] = warp.fenced[r] = warp.accumulators.pop(r)

    return run


BUILDERS: dict[str, Any] = {
    "ldmatrix": _matrix_access, "stmatrix": _matrix_access, "mma": _mma, "wgmma": _wgmma,
}  # fmt: skip

"""What each PTX instruction does to the 32 lanes of a warp.

Registers hold unsigned arrays [32] of their width (bool for predicates); an instruction views them as its
own type. An instruction that is not here is an error: nothing is guessed.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator import arithmetic, copies, tensor_units
from ptx_emulator.arithmetic import TYPES
from ptx_emulator.host import Launch
from ptx_emulator.machine import LANES, Run, Step, Warp, uniform
from ptx_emulator.memory import SMEM_BASE, GlobalMemory, KernelError, Kind
from ptx_emulator.ptx import Instruction, Program

PARAMETER_SPACE = 1 << 56


class Assembler:
    """Turns instructions into steps; operands become functions from a warp to an array [32]."""

    def __init__(self, program: Program, launch: Launch, memory: GlobalMemory):
        self.program, self.launch, self.memory = program, launch, memory
        self.index = {name: i for i, name in enumerate(program.registers)}

    def register(self, name: str) -> int:
        return self.index[name]

    def registers(self, operand: str) -> list[int]:
        """The registers of a vector {%r1, %r2}, or of one."""
        return [self.index[name.strip()] for name in operand.strip("{} ").split(",")]

    def source(self, operand: str, dtype: Any) -> Callable[[Warp], np.ndarray]:
        if operand in self.index:
            index = self.index[operand]
            if dtype is np.bool_:
                return lambda warp: warp.registers[index]
            width, size = np.dtype(self.program.registers[operand]), np.dtype(dtype).itemsize
            if size < width.itemsize:  # its low bits
                return lambda warp: warp.registers[index].astype(f"u{size}").view(dtype)
            assert size == width.itemsize, operand
            return lambda warp: warp.registers[index].view(dtype)
        if operand.startswith("%"):
            return self._special(operand, dtype)
        constant = np.broadcast_to(self._constant(operand, dtype), 32).copy()
        return lambda _: constant

    def _constant(self, operand: str, dtype: Any) -> np.ndarray:
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            bits = np.array(int(match[1], 16), np.uint32)
            return bits.view(dtype) if np.dtype(dtype).itemsize == 4 else bits.astype(dtype)
        if operand in self.program.shared:
            return np.array(SMEM_BASE, dtype)
        if operand in self.program.params:
            return np.array(PARAMETER_SPACE | list(self.program.params).index(operand) << 32, dtype)
        size = np.dtype(dtype).itemsize
        raw = (int(operand, 0) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        return np.frombuffer(raw, dtype)[0]

    def _special(self, operand: str, dtype: Any) -> Callable[[Warp], np.ndarray]:
        axis = "xyz".find(operand[-1])
        threads = (self.launch.threads, 1, 1)

        grid = self.launch.grid
        values: dict[str, Callable[[Warp], Any]] = {
            "%tid": lambda warp: warp.index * 32 + LANES if axis == 0 else 0,
            "%ctaid": lambda warp: warp.block.index[axis],
            "%nctaid": lambda warp: grid[axis],
            "%ntid": lambda warp: threads[axis],
        }
        value = values[operand[:-2]]
        return lambda warp: np.broadcast_to(np.asarray(value(warp), np.uint32), 32).view(dtype)

    def address(self, operand: str) -> Callable[[Warp], np.ndarray]:
        """[%rd1+16], as int64."""
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise ValueError(f"address {operand!r} is not understood")
        offset = int(match[2] or 0)
        if match[1] in self.index:
            index = self.index[match[1]]
            return lambda warp: warp.registers[index].astype(np.int64) + offset
        base = self.source(match[1], np.uint64)
        return lambda warp: base(warp).astype(np.int64) + offset


def assemble(program: Program, launch: Launch, memory: GlobalMemory) -> tuple[list[Step], int]:
    """Returns the steps of a program and its number of registers.

    Raises:
        ValueError: If an instruction is not known.
    """
    assembler, steps = Assembler(program, launch, memory), []
    for instruction in program.instructions:
        run = _build(assembler, instruction)
        guard, wanted = (None, True)
        if instruction.guard is not None:
            guard, wanted = assembler.register(instruction.guard[0]), instruction.guard[1]
        steps.append(Step(run, guard, wanted, instruction.location, _text(instruction)))
    return steps, len(program.registers)


def _build(a: Assembler, instruction: Instruction) -> Run:
    opcode, operands = instruction.opcode, instruction.operands
    function = arithmetic.function(opcode)
    try:
        if function is not None:
            return _alu(a, function, [opcode[-1]] * (len(operands) - 1), opcode[-1], operands)
        for table in (copies.BUILDERS, tensor_units.BUILDERS, BUILDERS):
            if opcode[0] in table:
                return table[opcode[0]](a, opcode, operands)
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{_text(instruction)} is not known: {error}") from error
    raise ValueError(f"{_text(instruction)} is not known")


def _text(instruction: Instruction) -> str:
    return f"{'.'.join(instruction.opcode)} {', '.join(instruction.operands)}"[:120]


def _alu(a: Assembler, function: Any, source_types: Any, target_type: str, operands: Any) -> Run:
    sources = [
        a.source(operand, TYPES[kind]) for operand, kind in zip(operands[1:], source_types, strict=True)
    ]
    target, width = a.register(operands[0]), a.program.registers[operands[0]]
    dtype = TYPES[target_type]
    assert np.dtype(dtype).itemsize == np.dtype(width).itemsize, operands

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        result = np.asarray(function(*(source(warp) for source in sources)), dtype)
        warp.write(target, result if width is np.bool_ else result.view(width), mask)

    return run


def _mov(a: Assembler, opcode: Any, operands: Any) -> Run:
    """Between registers, or between one and the halves of a vector, the low one first."""
    whole = TYPES[opcode[-1]]
    half: Any = {"b32": np.uint16, "b64": np.uint32}.get(opcode[-1])
    if operands[0].startswith("{"):
        targets, source = a.registers(operands[0]), a.source(operands[1], whole)

        def unpack(warp: Warp, mask: np.ndarray | None) -> None:
            halves = np.ascontiguousarray(source(warp)).view(half).reshape(32, 2)
            for i, target in enumerate(targets):
                warp.write(target, np.ascontiguousarray(halves[:, i]), mask)

        return unpack
    if operands[1].startswith("{"):
        target = a.register(operands[0])
        sources = [a.source(name.strip(), half) for name in operands[1].strip("{} ").split(",")]

        def pack(warp: Warp, mask: np.ndarray | None) -> None:
            halves = np.stack([source(warp) for source in sources], axis=1)
            warp.write(target, halves.view(whole)[:, 0], mask)

        return pack
    return _alu(a, lambda x: x, opcode[-1:], opcode[-1], operands)


def _shift(a: Assembler, opcode: Any, operands: Any) -> Run:
    function = arithmetic.shift_left if opcode[0] == "shl" else arithmetic.shift_right
    return _alu(a, function, [opcode[-1], "u32"], opcode[-1], operands)


def _mul(a: Assembler, opcode: Any, operands: Any) -> Run:
    _, part, kind = opcode
    if part == "wide":
        wide = {"s32": "s64", "u32": "u64", "s16": "s32", "u16": "u32"}[kind]
        dtype = TYPES[wide]
        return _alu(a, lambda x, y: x.astype(dtype) * y.astype(dtype), [kind, kind], wide, operands)
    function = {"hi": arithmetic.multiply_high, "lo": np.multiply}[part]
    return _alu(a, function, [kind, kind], kind, operands)


def _mad(a: Assembler, opcode: Any, operands: Any) -> Run:
    _, part, kind = opcode
    assert part == "lo", opcode
    return _alu(a, lambda x, y, z: x * y + z, [kind] * 3, kind, operands)


def _bfe(a: Assembler, opcode: Any, operands: Any) -> Run:
    kind, first, count = opcode[-1], int(operands[2]), int(operands[3])
    bits = int(kind[1:])
    assert 0 < count <= bits - first, operands
    # A shift to the right of a signed number brings its sign.
    return _alu(a, lambda x: x << bits - first - count >> bits - count, [kind], kind, operands[:2])


def _prmt(a: Assembler, opcode: Any, operands: Any) -> Run:
    """Picks bytes of two words; a selector's digit of 8 and more asks for a byte's sign in its place."""
    assert opcode == ("prmt", "b32"), opcode
    digits = [int(operands[3].rstrip("U"), 0) >> 4 * i & 15 for i in range(4)]

    def permute(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        both = np.stack([low, high], axis=1).view(np.uint8)
        signs = (both.view(np.int8) >> 7).view(np.uint8)
        picked = [(signs if digit & 8 else both)[:, digit & 7] for digit in digits]
        return np.ascontiguousarray(np.stack(picked, axis=1)).view(np.uint32)[:, 0]

    return _alu(a, permute, ["b32", "b32"], "b32", operands[:3])


def _cvt(a: Assembler, opcode: Any, operands: Any) -> Run:
    *modifiers, target, source = opcode[1:]
    if target in ("bf16x2", "f16x2"):
        assert modifiers == ["rn"], opcode
        half = TYPES[target[:-2]]

        def pack(high: np.ndarray, low: np.ndarray) -> np.ndarray:
            bits = (x.astype(half).view(np.uint16).astype(np.uint32) for x in (high, low))
            return next(bits) << 16 | next(bits)

        return _alu(a, pack, [source, source], "b32", operands)
    is_exact = (target[0] in "su" and source[0] in "su") or (source, target) == ("f16", "f32")
    assert modifiers == ([] if is_exact else ["rn"]), opcode
    if target == "s8":  # which no register is: it is extended
        return _alu(a, lambda x: x.astype(np.int8).astype(np.int16), [source], "s16", operands)
    return _alu(a, lambda x: x.astype(TYPES[target]), [source], target, operands)


def _cvta(a: Assembler, opcode: Any, operands: Any) -> Run:
    return _alu(a, lambda x: x, ["u64"], "u64", operands)


def _setp(a: Assembler, opcode: Any, operands: Any) -> Run:
    kind = opcode[-1]
    compare = arithmetic.comparison(opcode[1], kind)
    target = a.register(operands[0])
    x, y = (a.source(operand, TYPES[kind]) for operand in operands[1:3])
    if len(opcode) == 3:
        return lambda warp, mask: warp.write(target, compare(x(warp), y(warp)), mask)
    join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[opcode[2]]
    other = a.source(operands[3], np.bool_)
    return lambda warp, mask: warp.write(target, join(compare(x(warp), y(warp)), other(warp)), mask)


def _selp(a: Assembler, opcode: Any, operands: Any) -> Run:
    kind = TYPES[opcode[-1].replace("f", "b")]
    x, y = (a.source(operand, kind) for operand in operands[1:3])
    where, target = a.source(operands[3], np.bool_), a.register(operands[0])
    return lambda warp, mask: warp.write(target, np.where(where(warp), x(warp), y(warp)), mask)


def _elect(a: Assembler, opcode: Any, operands: Any) -> Run:
    leader, is_leader = (a.register(name) for name in operands[0].split("|"))

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        warp.write(leader, np.zeros(32, np.uint32), None)
        warp.write(is_leader, LANES == 0, None)

    return run


def _shfl(a: Assembler, opcode: Any, operands: Any) -> Run:
    assert operands[3:] == ("31", "-1"), operands
    target, source = a.register(operands[0]), a.source(operands[1], np.uint32)
    other = int(operands[2])
    lane = LANES ^ other if opcode[2] == "bfly" else np.full(32, other)
    assert opcode[2] in ("bfly", "idx"), opcode

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        warp.write(target, source(warp)[lane], None)

    return run


def _bra(a: Assembler, opcode: Any, operands: Any) -> Run:
    target = a.program.labels[operands[0]]

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if mask is not None:
            raise KernelError("the lanes of a warp take different branches")
        warp.pc = target

    return run


def _ret(a: Assembler, opcode: Any, operands: Any) -> Run:
    def run(warp: Warp, mask: np.ndarray | None) -> None:
        if mask is not None:
            raise KernelError("some lanes of a warp end before the others")
        warp.is_done = True

    return run


def _nothing(a: Assembler, opcode: Any, operands: Any) -> Run:
    return lambda warp, mask: None


def _bar(a: Assembler, opcode: Any, operands: Any) -> Run:
    assert opcode[1] == "sync", opcode
    number = a.source(operands[0], np.uint32)
    threads = a.source(operands[1] if len(operands) > 1 else str(a.launch.threads), np.uint32)

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        assert mask is None
        warp.block.arrive_named(warp, uniform(number(warp), None), uniform(threads(warp), None))

    return run


def _load_param(a: Assembler, operands: Any) -> Run:
    index = list(a.program.params).index(operands[1].strip("[]"))
    array = a.launch.args[index]
    assert isinstance(array, int)
    address = np.full(32, a.memory.address(array), np.uint64)
    target = a.register(operands[0])
    return lambda warp, mask: warp.write(target, address, mask)


def _access(a: Assembler, opcode: Any, operands: Any) -> Run:
    """ld and st: .global, .shared, or generic, which is either."""
    is_load = opcode[0] == "ld"
    if opcode[1].startswith("param"):
        return _load_param(a, operands)
    count = next((int(part[1]) for part in opcode if re.fullmatch(r"v\d", part)), 1)
    element = np.dtype(TYPES[opcode[-1]]).itemsize
    address = a.address(operands[1 if is_load else 0])
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[element]
    vector = [name.strip() for name in operands[0 if is_load else 1].strip("{} ").split(",")]
    targets = [a.register(name) for name in vector] if is_load else []
    sources = [] if is_load else [a.source(name, dtype) for name in vector]
    assert len(vector) == count, operands
    widths = [np.dtype(a.program.registers[name]) for name in vector] if is_load else []
    kind = "i" if opcode[-1][0] == "s" else "u"

    def run(warp: Warp, mask: np.ndarray | None) -> None:
        where = address(warp)
        active = slice(None) if mask is None else mask
        lanes = where[active]
        is_shared = lanes[0] < 1 << 32
        if opcode[1] == ("global" if is_shared else "shared"):
            raise KernelError(f"{opcode[1]} memory has no address {lanes[0]:#x}")
        memory: Any = warp.block.shared if is_shared else a.memory
        if is_shared:
            check = warp.block.shared.check_read if is_load else warp.block.shared.check_write
            access = warp.access(Kind.THREADS, "a load" if is_load else "a store")
            check(lanes, element * count, access)
        if is_load:
            found = memory.load(lanes, element * count).view(f"{kind}{element}")
            for k, register in enumerate(targets):
                wide = widths[k]  # a wider register takes the value extended, by its sign if it has one
                out = np.zeros(32, wide)
                out[active] = found[:, k].astype(wide.str.replace("u", kind)).view(wide)
                warp.write(register, out, mask)
        else:
            data = np.stack([source(warp)[active] for source in sources], axis=1)
            memory.store(lanes, np.ascontiguousarray(data).view(np.uint8))

    return run


BUILDERS: dict[str, Callable[[Assembler, tuple[str, ...], tuple[str, ...]], Run]] = {
    "mov": _mov, "shl": _shift, "shr": _shift, "mul": _mul, "mad": _mad, "bfe": _bfe, "prmt": _prmt,
    "cvt": _cvt, "cvta": _cvta, "setp": _setp, "selp": _selp, "elect": _elect, "shfl": _shfl, "bra": _bra,
    "ret": _ret, "prefetch": _nothing, "setmaxnreg": _nothing, "bar": _bar, "ld": _access, "st": _access,
}  # fmt: skip

"""Instruction counts and model cycles of a kernel's inner loops, from the machine code that ptxas wrote.

The input is the listing that Mosaic dumps if nvdisasm is installed (`*.sass_ctrl`). Each line has an
instruction and the compiler's scheduling: the scoreboards that the instruction waits for, the scoreboards
that it sets, and the number of cycles for which it stalls the next instruction.

    wait:read:write:yield:stall        address                instruction
       3:-:-:Y:05                      /*2620*/               @P1 BRA `(.L_x_2)

The counts belong to the longest path through one iteration of a loop. The model cycles assume that one warp
runs this path alone and in order, with the latencies of LATENCY, and never waits for another warp or for a
copy. They rank variants of a kernel, but they do not predict its speed: on a GPU, other warps fill the gaps,
and the memory has its own limits.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

# Cycles until the result of an instruction with variable latency is available. These are round numbers.
LATENCY = {
    **dict.fromkeys(("LDS", "LDSM", "SHFL", "SYNCS", "ATOMS"), 30),
    **dict.fromkeys(("MUFU", "S2R", "S2UR", "R2UR", "STS", "STSM", "UTMALDG", "LDGSTS", "STG", "ST"), 20),
    **dict.fromkeys(("BAR", "MEMBAR", "FENCE", "LDC", "ULDC", "UTMASTG"), 40),
    **dict.fromkeys(("LDG", "LD", "ATOMG", "ATOM", "RED"), 250),
}
OTHER_LATENCY = 15
# Minimum number of cycles of a barrier, if no other warp is late.
BARRIER = 20
# Multiply-adds of 16-bit numbers per cycle of a multiprocessor with wgmma, in this model.
WGMMA_PER_CYCLE = 4096
TENSOR = {"HMMA", "HGMMA", "IMMA", "QGMMA", "IGMMA", "QMMA"}
MEMORY = {
    *("LDS", "LDSM", "STS", "STSM", "LDG", "LD", "STG", "ST", "LDGSTS", "ATOMS", "ATOM", "ATOMG", "RED"),
    *("UTMALDG", "UTMASTG", "UBLKCP"),
}
# A loop with fewer instructions than this, without memory or tensor instructions, only polls a barrier. It
# counts as a wait, not as a loop.
MAX_WAIT = 24

LINE = re.compile(
    r"\s*(?P<wait>[^:\s]+):(?P<read>[^:]):(?P<write>[^:]):[^:]:(?P<stall>\d+)\s+/\*[0-9a-f]+\*/\s+"
    r"(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>.*)"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of the listing.

    Args:
        opcode: The opcode with its modifiers.
        target: Label to which the instruction may jump; None if it is not a jump.
        is_conditional: Whether a jump or exit depends on a predicate.
        is_live: False if the predicate is always false. Fences contain such loads.
        waits: Scoreboards that must be clear before the instruction is issued.
        sets: Scoreboards that are set until the instruction has read its operands or written its result.
        stall: Cycles until the next instruction can be issued.
    """

    opcode: str
    target: str | None
    is_conditional: bool
    is_live: bool
    waits: tuple[int, ...]
    sets: tuple[int, ...]
    stall: int

    @property
    def name(self) -> str:
        """The opcode without modifiers; NOP if the instruction is never executed."""
        return self.opcode.partition(".")[0] if self.is_live else "NOP"

    @property
    def latency(self) -> int:
        """The number of cycles until the result is available."""
        return LATENCY.get(self.name, OTHER_LATENCY)

    @property
    def tensor_cycles(self) -> int:
        """The number of cycles for which a wgmma occupies the tensor cores.

        It is 0 for other instructions: the stall of an mma.sync already includes its time.
        """
        shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)", self.opcode)
        return 0 if shape is None else int(shape[1]) * int(shape[2]) * int(shape[3]) // WGMMA_PER_CYCLE


@dataclasses.dataclass(frozen=True)
class Loop:
    """Counts for the longest path through one iteration of an inner loop.

    Args:
        instructions: Number of all instructions.
        barriers: Number of barriers (BAR).
        waits: Number of waits for an mbarrier (TRYWAIT).
        memory: Number of memory instructions.
        tensor: Number of tensor core instructions.
        cycles: Model cycles.
    """

    instructions: int
    barriers: int
    waits: int
    memory: int
    tensor: int
    cycles: int


def read_loops(listing: Path) -> list[Loop]:
    """Returns the inner loops of all functions in a listing, in program order."""
    functions = re.split(r"^\.text\.\S+:$", listing.read_text(), flags=re.MULTILINE)
    return [loop for text in functions[1:] for loop in _loops(*parse(text))]


def _loops(instructions: list[Instruction], labels: dict[str, int]) -> list[Loop]:
    successors = _successors(instructions, labels)
    bodies = _natural_loops(successors)
    is_wait = {head: _is_wait(instructions, body) for head, body in bodies.items()}
    waits = {head: body for head, body in bodies.items() if is_wait[head]}
    loops = {head: body for head, body in bodies.items() if not is_wait[head]}
    inner = [
        head
        for head, body in sorted(loops.items())
        if not any(other in body for other in loops if other != head)
    ]
    paths = (_longest_path(head, loops[head], successors, waits) for head in inner)
    return [_measure([instructions[i] for i in path]) for path in paths]


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Returns the instructions of one function, and for each label the index of the instruction after it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"(\.\w+):", line):
            labels[match[1]] = len(instructions)
        elif match := LINE.match(line):
            target = re.search(r"`\((\.\w+)\)", match["operands"])
            is_jump = match["opcode"].startswith("BRA") and target is not None
            conditions = re.findall(r"\bU?P\d\b", match["operands"])
            instructions.append(
                Instruction(
                    opcode=match["opcode"],
                    target=target[1] if is_jump and target is not None else None,
                    is_conditional=match["guard"] is not None or bool(conditions),
                    is_live=match["guard"] != "!PT",
                    waits=_scoreboards(match["wait"]),
                    sets=tuple(int(x) for x in (match["read"], match["write"]) if x != "-"),
                    stall=max(1, int(match["stall"])),
                )
            )
    return instructions, labels


def _scoreboards(text: str) -> tuple[int, ...]:
    if text.startswith("0x"):
        return tuple(i for i in range(6) if int(text, 16) >> i & 1)
    return () if text == "-" else tuple(map(int, text.split("&")))


def _successors(instructions: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Returns the indices of the possible next instructions of each instruction.

    The threads of a warp are assumed not to diverge, so BRA.DIV never jumps.
    """
    out = []
    for i, instruction in enumerate(instructions):
        jumps = instruction.target is not None and ".DIV" not in instruction.opcode
        ends = instruction.name in ("EXIT", "RET") or jumps
        after = [labels[instruction.target]] if jumps and instruction.target is not None else []
        if (not ends or instruction.is_conditional) and i + 1 < len(instructions):
            after.append(i + 1)
        out.append(after)
    return out


def _natural_loops(successors: list[list[int]]) -> dict[int, set[int]]:
    """Returns the instructions of each natural loop, by the head of the loop (all as indices).

    A loop exists if an instruction can jump to a head that dominates it: every path to the instruction passes
    the head.
    """
    reachable, stack = {0}, [0]
    while stack:
        new = [s for s in successors[stack.pop()] if s not in reachable]
        reachable.update(new)
        stack += new
    predecessors: dict[int, list[int]] = {i: [] for i in reachable}
    for i in reachable:
        for after in successors[i]:
            predecessors[after].append(i)
    order = sorted(reachable)
    everything = (1 << len(successors)) - 1
    dominators = dict.fromkeys(order, everything) | {0: 1}
    changed = True
    while changed:
        changed = False
        for i in order[1:]:
            mask = everything
            for before in predecessors[i]:
                mask &= dominators[before]
            mask |= 1 << i
            changed |= mask != dominators[i]
            dominators[i] = mask
    loops: dict[int, set[int]] = {}
    for i in order:
        for head in successors[i]:
            if dominators[i] >> head & 1:
                body = loops.setdefault(head, {head})
                stack = [i]
                while stack:
                    at = stack.pop()
                    if at not in body:
                        body.add(at)
                        stack += predecessors[at]
    return loops


def _is_wait(instructions: list[Instruction], body: set[int]) -> bool:
    names = {instructions[i].name for i in body}
    return len(body) < MAX_WAIT and not names & (TENSOR | MEMORY)


def _longest_path(
    head: int, body: set[int], successors: list[list[int]], waits: dict[int, set[int]]
) -> list[int]:
    """Returns the longest path through one iteration, without polling loops that the path can avoid."""
    inside = set(body)
    for wait, polling in waits.items():
        if wait in body and _path(head, inside - polling, successors):
            inside -= polling
    return _path(head, inside, successors)


def _path(head: int, inside: set[int], successors: list[list[int]]) -> list[int]:
    """Returns the longest path from `head` back to `head` within `inside`; empty if there is none."""
    state: dict[int, int] = {}
    order: list[int] = []
    stack = [(head, False)]
    while stack:  # depth-first search; `order` has every instruction after the instructions that follow it
        at, is_done = stack.pop()
        if is_done:
            state[at] = 2
            order.append(at)
        elif at not in state:
            state[at] = 1
            stack.append((at, True))
            stack += [(s, False) for s in successors[at] if s in inside and s != head and s not in state]
    best: dict[int, tuple[int, int | None]] = {}
    rank = {at: i for i, at in enumerate(order)}
    for at in order:
        ahead = [s for s in successors[at] if s in best and s != head and rank[s] < rank[at]]
        options = [(best[s][0] + 1, s) for s in ahead]
        if head in successors[at]:
            options.append((1, None))
        if options:
            best[at] = max(options, key=lambda option: option[0])
    if head not in best:
        return []
    path, at = [], head
    while at is not None:
        path.append(at)
        at = best[at][1]
    return path


def _measure(path: list[Instruction]) -> Loop:
    def count(names: Iterable[str]) -> int:
        return sum(instruction.name in names for instruction in path)

    polls = sum("TRYWAIT" in instruction.opcode for instruction in path)
    # The second iteration is measured, because it waits for the results of the first one.
    once, twice = _cycles(path), _cycles(path * 2)
    return Loop(len(path), count({"BAR"}), polls, count(MEMORY), count(TENSOR), twice - once)


def _cycles(path: list[Instruction]) -> int:
    """Returns the model cycles in which one warp runs a path.

    Instructions are issued in order and wait for their scoreboards and for the tensor cores.
    """
    now = tensor_free = 0
    clear = [0] * 6
    for instruction in path:
        now = max([now, *(clear[i] for i in instruction.waits)])
        if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            now = max(now, tensor_free)
        tensor_free = max(tensor_free, now) + instruction.tensor_cycles
        for i in instruction.sets:
            clear[i] = max(clear[i], now + instruction.latency)
        now += max(instruction.stall, BARRIER * (instruction.name == "BAR"))
    return now

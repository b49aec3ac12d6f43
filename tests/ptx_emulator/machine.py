"""Runs blocks of threads: warps that take turns at random, barriers, and copies that arrive late."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.host import Launch, TensorMap
from ptx_emulator.memory import NUM_LOADERS, Access, GlobalMemory, KernelError, Kind, SharedMemory
from ptx_emulator.ptx import Program

LANES = np.arange(32)
MAX_TURNS = 1_000_000

# Runs an instruction for the lanes of a mask (None for all).
Run = Callable[["Warp", np.ndarray | None], None]


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction that is ready to run: guard register and its value, or None."""

    run: Run
    guard: int | None
    wanted: bool
    location: str
    text: str


@dataclasses.dataclass
class Mbarrier:
    """A barrier in shared memory; it flips its phase when all have arrived and all bytes are there."""

    count: int
    pending: int
    bytes_missing: int
    phase: int
    clock: np.ndarray
    last_clock: np.ndarray
    # Whether TMA may use it: after fence.mbarrier_init or fence.proxy.async of the warp that made it.
    owner: int
    is_fenced: bool = False

    def settle(self) -> None:
        if self.pending < 0 or abs(self.bytes_missing) >= 1 << 20:
            raise KernelError("more arrivals at a barrier than it was made for")
        if self.pending == 0 and self.bytes_missing == 0:
            self.phase ^= 1
            self.pending = self.count
            self.last_clock, self.clock = self.clock, np.zeros_like(self.clock)


@dataclasses.dataclass(frozen=True)
class Operation:
    """What a warp has in flight.

    Args:
        finish: Does what may be done as late as at the wait.
        access: Of shared memory.
        accumulators: Registers that nobody may touch.
    """

    finish: Callable[[], None]
    access: Access
    accumulators: tuple[int, ...] = ()


def uniform(values: np.ndarray, mask: np.ndarray | None) -> int:
    """Returns the one value that the active lanes have."""
    active = values if mask is None else values[mask]
    if (active != active[0]).any():
        raise KernelError("the lanes of a warp differ where they must not")
    return int(active[0])


class Warp:
    """32 threads that run together; a branch that they do not take together is an error."""

    def __init__(self, block: "Block", index: int, num_registers: int):
        self.block = block
        self.index = index
        self.registers: list[Any] = [None] * num_registers
        self.pc = 0
        self.stopped_at: Step | None = None
        self.is_done = False
        # What it waits for: returns whether it may go on.
        self.wait: Callable[[], bool] | None = None
        self.clock = np.zeros(block.shared.num_agents, np.int64)
        self.clock[index] = 1
        # Groups of what is in flight: committed ones, oldest first, and the open one.
        self.groups: dict[Kind, list[list[Operation]]] = {
            kind: [[]] for kind in (Kind.COPY, Kind.WGMMA, Kind.STORE)
        }
        # Accumulators that wgmma works on: out of reach until they are waited for.
        self.accumulators: dict[int, np.ndarray] = {}
        # What the registers held at the last wgmma.fence.
        self.fenced: list[Any] = []

    def fence_registers(self) -> None:
        self.fenced = list(self.registers)

    def is_unfenced(self, register: int) -> bool:
        """Returns whether a register has been written since the last wgmma.fence."""
        return not self.fenced or self.fenced[register] is not self.registers[register]

    def access(self, kind: Kind, what: str) -> Access:
        """Returns who touches shared memory now: the warp, or an asynchronous operation that it starts."""
        agent = kind * self.block.num_warps + self.index
        if kind == Kind.THREADS:
            return Access(agent, int(self.clock[agent]), self.clock, what)
        self.block.ticks[agent] += 1
        return Access(agent, int(self.block.ticks[agent]), self.clock, what)

    def start(self, kind: Kind, operation: Operation) -> None:
        self.groups[kind][-1].append(operation)

    def commit(self, kind: Kind) -> None:
        self.groups[kind].append([])

    def finish(self, kind: Kind, num_left: int) -> None:
        """Ends the oldest groups: all but the last `num_left` that were committed."""
        groups = self.groups[kind]
        while len(groups) - 1 > num_left:
            for operation in groups.pop(0):
                operation.finish()
                agent, tick = operation.access.agent, operation.access.tick
                self.clock[agent] = max(self.clock[agent], tick)

    def release(self) -> np.ndarray:
        """Returns the clock of what this warp has done, and starts the next interval."""
        clock = self.clock.copy()
        self.clock[self.index] += 1
        return clock

    def acquire(self, clock: np.ndarray) -> None:
        np.maximum(self.clock, clock, out=self.clock)

    def write(self, register: int, value: np.ndarray, mask: np.ndarray | None) -> None:
        if mask is not None:
            old = self.registers[register]
            value = value if old is None else np.where(mask, value, old)
        self.registers[register] = value

    def run(self, num_steps: int) -> None:
        steps = self.block.steps
        for _ in range(num_steps):
            step = steps[self.pc]
            mask = None
            if step.guard is not None:
                mask = self.registers[step.guard] == step.wanted
                if mask.all():
                    mask = None
                elif not mask.any():
                    self.pc += 1
                    continue
            self.pc += 1
            try:
                step.run(self, mask)
            except KernelError as error:
                raise KernelError(f"{error} (warp {self.index}, {step.location}: {step.text})") from None
            except Exception as error:
                raise AssertionError(f"the emulator fails at {step.location}: {step.text}") from error
            if self.is_done or self.wait is not None:
                self.stopped_at = step
                return


class Block:
    """A block of threads, and what it has in flight."""

    def __init__(
        self,
        steps: list[Step],
        num_registers: int,
        launch: Launch,
        memory: GlobalMemory,
        index: tuple[int, int, int],
        rng: np.random.Generator,
    ):
        self.steps, self.memory, self.index, self.rng = steps, memory, index, rng
        self.launch = launch
        self.num_warps = launch.threads // 32
        self.shared = SharedMemory(launch.smem_bytes, self.num_warps)
        self.ticks = np.zeros(self.shared.num_agents, np.int64)
        self.warps = [Warp(self, i, num_registers) for i in range(self.num_warps)]
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, tuple[list[Warp], int]] = {}
        # TMA loads: called when they arrive.
        self.flights: list[Callable[[], None]] = []
        self._next_loader = 0

    def tensor_map(self, address: int) -> TensorMap:
        """Returns the map at an address of parameter space: 1 << 56 and the parameter's index << 32."""
        maps = self.launch.args[(address >> 32) & 0xFFFF]
        assert isinstance(maps, tuple)
        return maps[(address & 0xFFFFFFFF) // 128]

    def load_access(self, warp: Warp) -> Access:
        """Returns who writes for a TMA load that starts now."""
        agent = self.shared.num_readers + self._next_loader
        self._next_loader = (self._next_loader + 1) % NUM_LOADERS
        self.ticks[agent] += 1
        return Access(agent, int(self.ticks[agent]), warp.clock, "a TMA load")

    def mbarrier(self, warp: Warp, address: int) -> Mbarrier:
        """Returns a barrier, which another warp may have made."""
        if address not in self.mbarriers:
            raise KernelError(f"no barrier was made at {address:#x}")
        access = warp.access(Kind.THREADS, "a use of a barrier")
        self.shared.check_read(np.array([address]), 8, access)
        return self.mbarriers[address]

    def arrive_named(self, warp: Warp, number: int, num_threads: int) -> None:
        """bar.sync: waits until `num_threads` have come."""
        if not 0 <= number < 16 or num_threads % 32:
            raise KernelError(f"there is no barrier {number} of {num_threads} threads")
        waiting, expected = self.named.setdefault(number, ([], num_threads))
        if expected != num_threads:
            raise KernelError(f"{num_threads} threads at barrier {number}, and {expected} where others wait")
        waiting.append(warp)
        if len(waiting) * 32 < num_threads:
            warp.wait = lambda: False
            return
        del self.named[number]
        clock = np.max([w.release() for w in waiting], axis=0)
        for other in waiting:
            other.acquire(clock)
            other.wait = None

    def run(self) -> None:
        """Runs all warps to their end.

        Raises:
            KernelError: At a race, a deadlock, an access out of bounds, or a copy that nobody waited for.
        """
        eagerness = self.rng.choice([0.0, 0.05, 0.5])
        for _ in range(MAX_TURNS):
            ready = [w for w in self.warps if not w.is_done and (w.wait is None or w.wait())]
            if self.flights and (not ready or self.rng.random() < eagerness):
                self.flights.pop(self.rng.integers(len(self.flights)))()
            elif ready:
                warp = ready[self.rng.integers(len(ready))]
                warp.wait = None
                warp.run(int(self.rng.integers(1, 200)))
            elif all(w.is_done for w in self.warps):
                break
            else:
                waiting = [(w.index, w.stopped_at) for w in self.warps if not w.is_done]
                at = [f"warp {i} at {step.location}: {step.text}" for i, step in waiting if step]
                raise KernelError(f"deadlock: {'; '.join(at)}")
        else:
            raise KernelError("the block does not end")
        for warp in self.warps:
            if any(operation for groups in warp.groups.values() for operation in groups):
                raise KernelError(f"warp {warp.index} ended with work in flight")
        known = np.max([warp.clock for warp in self.warps], axis=0)
        if (known < self.ticks)[self.shared.num_readers :].any():
            raise KernelError("the block ended, and nobody waited for a TMA load")


def launch_kernel(program: Program, launch: Launch, arrays: list[np.ndarray], *, seed: int) -> None:
    """Runs a kernel; writes to `arrays`, inputs first and then outputs, in the order of the host's arguments.

    Args:
        program: The kernel.
        launch: How it is launched.
        arrays: C-contiguous.
        seed: Of the order in which warps run and copies arrive.

    Raises:
        KernelError: If a block does what it must not.
    """
    from ptx_emulator.instructions import assemble

    assert launch.threads % 32 == 0, launch
    memory = GlobalMemory(arrays)
    steps, num_registers = assemble(program, launch, memory)
    x, y, z = map(range, launch.grid)
    for number, index in enumerate(itertools.product(x, y, z)):
        memory.block = number
        block = Block(steps, num_registers, launch, memory, index, np.random.default_rng((seed, number)))
        try:
            with np.errstate(all="ignore"):
                block.run()
        except KernelError as error:
            raise KernelError(f"block {index}: {error}") from None

"""Runs blocks of threads: warps that take turns at random, barriers, and copies that arrive late."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.host import Launch, TensorMap
from emulator.memory import GlobalMemory, KernelError, SharedMemory
from emulator.ptx import Program

LANES = np.arange(32)
MAX_STEPS = 50_000_000

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

    def settle(self) -> None:
        if self.pending < 0 or abs(self.bytes_missing) >= 1 << 20:
            raise KernelError("more arrivals at a barrier than it was made for")
        if self.pending == 0 and self.bytes_missing == 0:
            self.phase ^= 1
            self.pending = self.count
            self.last_clock, self.clock = self.clock, np.zeros_like(self.clock)


@dataclasses.dataclass
class Flight:
    """A TMA load that has been issued and has not arrived."""

    arrive: Callable[[], None]


class Warp:
    """32 threads that run together; a branch that they do not take together is an error."""

    def __init__(self, block: "Block", index: int, num_registers: int):
        self.block = block
        self.index = index
        self.registers: list[Any] = [None] * num_registers
        self.pc = 0
        self.is_done = False
        # What it waits for: returns whether it may go on.
        self.wait: Callable[[], bool] | None = None
        self.clock = np.zeros(block.shared.num_agents, np.int64)
        self.clock[index] = 1
        # cp.async groups and wgmma groups: committed ones, oldest first, and the open one.
        self.copies: list[list[Callable[[], None]]] = [[]]
        self.products: list[list[Callable[[], None]]] = [[]]
        self.stores: list[list[Callable[[], None]]] = [[]]
        # Accumulators that wgmma works on: out of reach until they are waited for.
        self.accumulators: dict[int, np.ndarray] = {}

    def agent(self, kind: int) -> int:
        """Returns who acts for this warp: 0 itself, 1 cp.async, 2 wgmma, 3 TMA stores."""
        return kind * self.block.num_warps + self.index

    def launch_async(self, kind: int) -> tuple[int, np.ndarray]:
        """Returns the agent of an asynchronous operation that starts now, and its clock."""
        agent = self.agent(kind)
        clock = self.clock.copy()
        self.block.ticks[agent] += 1
        clock[agent] = self.block.ticks[agent]
        return agent, clock

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
            except (ValueError, AssertionError) as error:
                raise AssertionError(f"the emulator fails at {step.text}") from error
            if self.is_done or self.wait is not None:
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
        self.named: dict[int, list[Warp]] = {}
        self.flights: list[Flight] = []
        self._next_loader = 0

    def tensor_map(self, address: int) -> TensorMap:
        """Returns the map at an address of parameter space, which is 1 << 56 and the parameter's index << 32."""
        maps = self.launch.args[(address >> 32) & 0xFFFF]
        assert isinstance(maps, tuple)
        return maps[(address & 0xFFFFFFFF) // 128]

    def launch_load(self, warp: Warp) -> tuple[int, np.ndarray]:
        agent = self.shared.num_readers + self._next_loader
        self._next_loader = (self._next_loader + 1) % (self.shared.num_agents - self.shared.num_readers)
        clock = warp.clock.copy()
        self.ticks[agent] += 1
        clock[agent] = self.ticks[agent]
        return agent, clock

    def mbarrier(self, address: int) -> Mbarrier:
        if address not in self.mbarriers:
            raise KernelError(f"no barrier was made at {address:#x}")
        return self.mbarriers[address]

    def arrive_named(self, warp: Warp, number: int, num_threads: int) -> None:
        """bar.sync: waits until `num_threads` have come."""
        waiting = self.named.setdefault(number, [])
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
        for _ in range(MAX_STEPS):
            ready = [w for w in self.warps if not w.is_done and (w.wait is None or w.wait())]
            if self.flights and (not ready or self.rng.random() < eagerness):
                self.flights.pop(self.rng.integers(len(self.flights))).arrive()
            elif ready:
                warp = ready[self.rng.integers(len(ready))]
                warp.wait = None
                warp.run(int(self.rng.integers(1, 200)))
            elif all(w.is_done for w in self.warps):
                break
            else:
                at = {f"warp {w.index}: {self.steps[w.pc].location}" for w in self.warps if not w.is_done}
                raise KernelError(f"deadlock at {', '.join(sorted(at))}")
        for warp in self.warps:
            if any(warp.copies) or any(warp.stores) or any(warp.products):
                raise KernelError(f"warp {warp.index} ended with work in flight")


def launch_kernel(
    program: Program, launch: Launch, arrays: list[np.ndarray], *, seed: int, blocks: Any = None
) -> None:
    """Runs a kernel; writes to `arrays`, inputs first and then outputs, in the order of the host's arguments.

    Args:
        program: The kernel.
        launch: How it is launched.
        arrays: C-contiguous.
        seed: Of the order in which warps run and copies arrive.
        blocks: Indices (x, y, z) of the blocks to run; None for all.

    Raises:
        KernelError: If a block does what it must not.
    """
    from emulator.instructions import assemble

    memory = GlobalMemory(arrays)
    steps, num_registers = assemble(program, launch, memory)
    grid = [tuple(map(int, index)) for index in np.ndindex(*launch.grid)]
    for number, index in enumerate(grid if blocks is None else blocks):
        block = Block(steps, num_registers, launch, memory, index, np.random.default_rng((seed, number)))
        try:
            block.run()
        except KernelError as error:
            raise KernelError(f"block {index}: {error}") from None

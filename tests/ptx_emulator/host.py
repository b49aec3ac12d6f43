"""Reads how Mosaic's host code launches a kernel: its grid, its arguments and its TMA tensor maps."""

import dataclasses
import re
from typing import Any

from ptx_emulator.memory import KernelError


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor, in elements, the outermost dimension first.

    Args:
        buffer: Index of the array, inputs first and then outputs.
        sizes: Of the dimensions.
        strides: Of the dimensions.
        swizzle: Bytes of the swizzle pattern: 16 (none), 32, 64 or 128.
        box: Sizes of what a copy moves.
    """

    buffer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int
    box: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a kernel is launched with.

    Args:
        grid: Blocks in x, y and z.
        threads: Of a block.
        smem_bytes: Dynamic shared memory.
        args: Of each parameter the index of its array, or the tensor maps that it holds, 128 bytes each.
    """

    grid: tuple[int, int, int]
    threads: int
    smem_bytes: int
    args: tuple[int | tuple[TensorMap, ...], ...]


def parse(log: str) -> Launch:
    """Reads the dump of MLIR passes of one kernel, at the pass that lowers the launch.

    A small evaluator: the code has no branches, and each value is a number, the address of an array ("array",
    index), a table on the stack ("stack", name, offset), or something that no launch depends on (None).
    """
    text = log[log.rindex("IR Dump Before GpuLaunchLoweringPass") :]
    text = text[text.index("func.func @") :]
    buffers = re.search(r"@\w+\(%\w+: [^)]*?\), (%\w+): !llvm.ptr|@\w+\(%\w+: [^,]*, (%\w+):", text)
    assert buffers is not None
    array_of_arrays = buffers[1] or buffers[2]
    values: dict[str, Any] = {array_of_arrays: ("arrays", 0)}
    tables: dict[str, dict[int, Any]] = {}
    maps: dict[tuple[str, int], TensorMap] = {}

    def table(name: str) -> tuple[int, ...]:
        kind, alloca, _ = values[name]
        assert kind == "stack"
        return tuple(n for _, n in sorted(tables[alloca].items()))

    for line in text.splitlines():
        names = re.findall(r"%\w+", line)
        if match := re.match(r"\s*(%\w+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", line):
            values[match[1]] = int(match[2])
        elif match := re.match(r"\s*(%\w+) = llvm\.getelementptr (%\w+)\[(\d+)\]", line):
            kind, *rest = values[match[2]]
            offset = int(match[3])
            values[match[1]] = ("arrays", offset) if kind == "arrays" else (kind, rest[0], rest[1] + offset)
        elif re.match(r"\s*%\w+ = llvm\.load", line):
            source = values[names[1]]
            values[names[0]] = ("array", source[1]) if source[0] == "arrays" else source
        elif re.match(r"\s*%\w+ = (llvm|memref)\.alloca", line):
            values[names[0]] = ("stack", names[0], 0)
            tables[names[0]] = {}
        elif re.match(r"\s*llvm\.store", line):  # jax 0.11
            _, alloca, offset = values[names[1]]
            tables[alloca][offset] = values.get(names[0])
        elif re.match(r"\s*memref\.store", line):
            value, target, index = names[:3]
            tables[values[target][1]][values[index]] = values[value]
        elif "llvm.insertvalue" in line:
            value, into = values.get(names[1]), values.get(names[2])
            values[names[0]] = value if isinstance(value, tuple) else into
        elif "llvm.extractvalue" in line:
            index = re.search(r"\[(\d+)\]", line)
            values[names[0]] = values[names[1]] if index is not None and index[1] in "01" else 0
        elif "= memref.reinterpret_cast" in line:
            assert "to offset: [0]" in line, line
            values[names[0]] = values.get(names[1])
        elif "llvm.mul" in line:
            values[names[0]] = values[names[1]] * values[names[2]]
        elif "llvm.add" in line:
            assert values[names[2]] == 0, line
            values[names[0]] = values[names[1]]
        elif "init_tma_desc(%" in line:
            target, base, _, rank, sizes, strides, swizzle, box = names[:8]
            made = TensorMap(values[base][1], table(sizes), table(strides), values[swizzle], table(box))
            assert len(made.sizes) == len(made.strides) == len(made.box) == values[rank], line
            maps[values[target][1:]] = made
        elif "gpu.launch_func" in line:
            blocks, threads = (
                tuple(values[n] for n in re.findall(r"%\w+", part))
                for part in re.findall(r"(?:blocks|threads) in \(([^)]*)\)", line)
            )
            smem = re.search(r"dynamic_shared_memory_size (%\w+)", line)
            args = re.findall(r"%\w+", line[line.index("args(") :])
            assert threads[1:] == (1, 1), line
            found = [_argument(values[name], maps) for name in args]
            return Launch(blocks, threads[0], values[smem[1]] if smem else 0, tuple(found))
        elif match := re.match(r"\s*(%\w+) = \S+ (%\w+)", line):  # casts, transposes
            values[match[1]] = values.get(match[2])
    raise ValueError("the dump has no launch")


def check(launch: Launch, target_config: str) -> None:
    """Raises KernelError if a GPU would not launch the kernel.

    Args:
        launch: How it is launched.
        target_config: XLA's description of the GPU.
    """
    limits = {name: int(n) for name, n in re.findall(r"(\w+): (\d+)\n", target_config)}
    wanted = {"shared_memory_per_block_optin": launch.smem_bytes, "threads_per_block_limit": launch.threads}
    wanted |= {f"block_dim_limit_{axis}": n for axis, n in zip("xyz", launch.grid, strict=True)}
    for name, number in wanted.items():
        if number > limits[name]:
            raise KernelError(f"the launch needs {number} of {name}, which is {limits[name]}")


def _argument(value: Any, maps: dict[tuple[str, int], TensorMap]) -> int | tuple[TensorMap, ...]:
    if value[0] == "array":
        return value[1]
    assert value[0] == "stack", value
    mine = {offset: found for (name, offset), found in maps.items() if name == value[1]}
    assert sorted(mine) == list(range(0, 128 * len(mine), 128)), mine
    return tuple(mine[offset] for offset in sorted(mine))

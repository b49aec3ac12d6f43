"""Environment variables that a launcher such as torchrun sets for each of its processes."""

import dataclasses
import os

from jax_paged.errors import Problems, check, check_int


@dataclasses.dataclass(frozen=True)
class Launch:
    """The place of a process among the processes that a launcher such as torchrun has started.

    Args:
        rank: Rank of this process; the process with rank 0 runs the engine.
        world_size: Number of processes.
        address: Host name or address of the machine of rank 0.
        port: Port at which rank 0 waits for the other processes.
        local_rank: Rank of this process on its machine, which determines the GPUs it uses; None if it uses
            all GPUs of the machine.
    """

    rank: int
    world_size: int
    address: str
    port: int
    local_rank: int | None = None


def launch_of_environment() -> Launch:
    """Reads the variables RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if it is set, LOCAL_RANK.

    Raises:
        ValueError: If one of the first four is missing, or a value is not a number in its range.
    """
    problems = Problems()

    def number(name: str, low: int, high: int | None = None) -> int:
        text = os.environ.get(name)
        value = int(text) if text is not None and text.isascii() and text.isdecimal() else text
        problems.note(check_int, name, value, low, high)
        return value if isinstance(value, int) else low

    size = number("WORLD_SIZE", 1)
    rank, port = number("RANK", 0, size - 1), number("MASTER_PORT", 1, 65_534)
    address = os.environ.get("MASTER_ADDR")
    problems.note(
        check, bool(address), "MASTER_ADDR", address, "the host name or address of the machine with RANK 0"
    )
    local_rank = number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else None
    problems.raise_if_any()
    # torchrun usually listens at MASTER_PORT itself, and then sets TORCHELASTIC_USE_AGENT_STORE. The next
    # port is used in that case.
    is_taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, size, address or "", port + is_taken, local_rank)

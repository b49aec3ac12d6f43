"""What a launcher of processes, such as torchrun, says in the environment."""

import dataclasses
import os

from jax_paged.errors import Problems, check, check_int


@dataclasses.dataclass(frozen=True)
class Launch:
    """What a launcher such as torchrun says of the processes that it has started.

    Args:
        rank: Which of them this one is; the first serves.
        world_size: How many there are.
        address: Of the machine of the first.
        port: Where the first waits for the others.
        local_rank: Which of its machine's processes this one is, and which of its GPUs it takes; None if it
            takes all.
    """

    rank: int
    world_size: int
    address: str
    port: int
    local_rank: int | None = None


def launch_of_environment() -> Launch:
    """Returns what RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and, if it is set, LOCAL_RANK say.

    Raises:
        ValueError: If one of the others is missing, or no number of its range.
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
    # torchrun listens at MASTER_PORT itself, unless it is told not to.
    is_taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, size, address or "", port + is_taken, local_rank)

"""What a worker is started for."""

import dataclasses

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import Launch


@dataclasses.dataclass(frozen=True)
class Task:
    """What the process that starts a worker tells it.

    Args:
        args: Model and limits.
        launch: Which of the workers it is, how many there are, and where the first is.
        peers: Sockets that it has got: the first worker's to each other, another's to the first. None if the
            first is to listen, and the others to connect.
        log_level: Of its messages.
    """

    args: EngineArgs
    launch: Launch
    peers: tuple[int, ...] | None
    log_level: int

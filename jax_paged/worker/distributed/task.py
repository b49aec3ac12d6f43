"""The task of a worker, sent by the process that starts it."""

import dataclasses

from jax_paged.config.engine_args import EngineArgs
from jax_paged.config.launch import Launch


@dataclasses.dataclass(frozen=True)
class Task:
    """Arguments of a worker process.

    Args:
        args: Arguments of the engine.
        launch: Rank of the worker, number of workers, and address of the first worker.
        peers: File descriptors of connected sockets to other workers: for the first worker, one for each
            other worker; for another worker, one for the first worker. None if the workers have to connect to
            each other, with the first worker listening.
        log_level: Log level of the worker.
    """

    args: EngineArgs
    launch: Launch
    peers: tuple[int, ...] | None
    log_level: int

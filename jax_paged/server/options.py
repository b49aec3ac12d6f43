"""The server's own settings, each an option of the command line; the engine's are in config.py."""

import argparse
import dataclasses
from typing import Literal, Self, get_args

from jax_paged.checks import check_choice, check_int
from jax_paged.cli_args import values_of

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How the server listens, and what it lets clients do.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        served_model_name: The model's name for clients; None takes the value of --model.
        log_level: The least severe level that is logged; "warning" leaves out the line per request.
        log_format: "text", or "json" for an object per line.

    Raises:
        ValueError: If a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_choice("log_level", self.log_level, get_args(LogLevel))
        check_choice("log_format", self.log_format, get_args(LogFormat))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If a value is out of range.
        """
        return cls(**values_of(args, ServerOptions))

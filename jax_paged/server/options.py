"""The server's own settings, each an option of the command line; the engine's are in config.py."""

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Literal, Self, get_args

from jax_paged.checks import check, check_choice, check_int, check_number
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
        max_num_waiting: Requests that may wait for the engine; more are answered with status 429.
        shutdown_timeout: Seconds that running requests have to end after SIGTERM or Ctrl-C, before they are
            cut off; a second signal cuts them off at once.
        step_timeout: Seconds after which a step of the engine counts as hung: all requests are ended with an
            error, and so is the server.
        stay_on_engine_failure: Whether a server whose engine has failed stays, and answers that it has,
            instead of exiting with status 4.
        log_level: The least severe level that is logged; "warning" leaves out the line per request.
        log_format: "text", or "json" for an object per line.
        ui: Whether there is a page at / that shows what runs here, and chats.

    Raises:
        ValueError: If a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_num_waiting: int = 512
    shutdown_timeout: float = 30
    step_timeout: float = 120
    stay_on_engine_failure: bool = False
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    ui: bool = True

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_num_waiting", self.max_num_waiting, 0)
        check_number("shutdown_timeout", self.shutdown_timeout, 0, math.inf)
        check_number("step_timeout", self.step_timeout, 0, math.inf, low_open=True)
        check_choice("log_level", self.log_level, get_args(LogLevel))
        check_choice("log_format", self.log_format, get_args(LogFormat))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If a value is out of range.
        """
        return cls(**values_of(args, ServerOptions))


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Which file of requests is run, and where the answers go.

    Args:
        input_file: Requests, one per line, in the format of OpenAI's Batch API.
        output_file: Takes the answers, one per line; what it names already is not run again.
        served_model_name: The model's name in the requests; None takes the value of --model.
        log_level: The least severe level that is logged.
        log_format: "text", or "json" for an object per line.

    Raises:
        ValueError: If both files are the same.
    """

    input_file: Path
    output_file: Path
    served_model_name: str | None = None
    log_level: LogLevel = "warning"
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        is_other = self.input_file.resolve() != self.output_file.resolve()
        check(is_other, "output_file", str(self.output_file), "another file than input_file")

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If both files are the same.
        """
        return cls(**values_of(args, BatchOptions))

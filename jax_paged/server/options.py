"""The server's own settings, each an option of the command line; the engine's are in config.py."""

import argparse
import dataclasses
import math
from typing import Self

from jax_paged.checks import check_int, check_number
from jax_paged.cli_args import values_of


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """How the server listens, and what it lets clients do.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        served_model_name: The model's name for clients; None takes the value of --model.
        chat_template: A Jinja template in place of the tokenizer's own, or the file that holds it.
        strict: Whether fields that the server does not know are errors; else they are ignored, and the header
            X-Ignored-Fields of the answer names them.
        max_num_waiting: Requests that may wait for the engine; more are answered with status 429.
        shutdown_timeout: Seconds that running requests have to end after SIGTERM or Ctrl-C, before they are
            cut off; a second signal cuts them off at once.
        step_timeout: Seconds after which a step of the engine counts as hung: all requests are ended with an
            error, and so is the server.
        stay_on_engine_failure: Whether a server whose engine has failed stays, and answers that it has,
            instead of exiting with status 4.

    Raises:
        ValueError: If a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    chat_template: str | None = None
    strict: bool = False
    max_num_waiting: int = 512
    shutdown_timeout: float = 30
    step_timeout: float = 120
    stay_on_engine_failure: bool = False

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)
        check_int("max_num_waiting", self.max_num_waiting, 0)
        check_number("shutdown_timeout", self.shutdown_timeout, 0, math.inf)
        check_number("step_timeout", self.step_timeout, 0, math.inf, low_open=True)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If a value is out of range.
        """
        return cls(**values_of(args, ServerOptions))

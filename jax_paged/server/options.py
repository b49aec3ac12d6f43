"""The server's own settings, each an option of the command line; the engine's are in config.py."""

import argparse
import dataclasses
from typing import Self

from jax_paged.checks import check_int
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

    Raises:
        ValueError: If a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    chat_template: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        check_int("port", self.port, 0, 65535)

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Makes the options from those that a command line gave; others in `args` are left alone.

        Raises:
            ValueError: If a value is out of range.
        """
        return cls(**values_of(args, ServerOptions))

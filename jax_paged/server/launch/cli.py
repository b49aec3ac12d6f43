"""Command line: `jax-paged serve MODEL` and the other commands.

The options of each command are the fields of dataclasses such as `ServerOptions` and `EngineArgs`. Importing
this module does not import JAX, transformers or the HTTP server, so that `--help` and errors about arguments
appear immediately.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from jax_paged.arguments.command_line import Parser, add_options
from jax_paged.config.engine_args import EngineArgs
from jax_paged.server.launch.options import BatchOptions, ServerOptions

_USAGE = (
    "jax-paged serve [MODEL] [options]\n       jax-paged [--model MODEL] [options]\n"
    "       jax-paged download MODEL\n"
    "       jax-paged run-batch -i FILE -o FILE [options]\n"
    "       jax-paged check-kernels [--model MODEL] [options]\n"
    "       jax-paged health [--pid N | server options] [--timeout SECONDS]"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command: serves or downloads a model, runs a batch, checks the kernels or a server's health.

    The server runs until SIGINT or SIGTERM.

    Args:
        argv: Command line without the program's name. None takes the arguments of the process.

    Raises:
        SystemExit: With a message if an argument is invalid or the model cannot be served. With status 0
            after SIGTERM during start-up, 130 if Ctrl-C is pressed before the server listens, 1 if the check
            of the kernels or of a server fails, and the statuses of `run_batch` for run-batch.
    """
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == ["run-batch"]:
        # Handles SIGTERM like Ctrl-C, which ends with a nonzero status because the batch is not complete.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _run_batch(argv[1:])
    if list(argv[:1]) == ["check-kernels"]:
        _check_kernels(argv[1:])
    if list(argv[:1]) == ["health"]:
        _check_health(argv[1:])
    signal.signal(signal.SIGTERM, _exit)
    if list(argv[:1]) == ["download"]:
        _download(argv[1:])
    args = parse_args(argv)
    try:
        options, settings = ServerOptions.from_cli_args(args), EngineArgs.from_cli_args(args)
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    try:
        # Imported late because JAX, Ray and the HTTP server take seconds to import.
        if options.ray is not None:
            from jax_paged.server.ray_serve.launch import serve_with_ray

            serve_with_ray(settings, options)
        else:
            from jax_paged.server.launch.server import serve

            serve(settings, options)
    except KeyboardInterrupt:
        sys.exit(130)


def make_parser() -> Parser:
    """Returns a parser with an option for every field of ServerOptions and EngineArgs."""
    parser = Parser(prog="jax-paged", usage=_USAGE, description="Serve a model with the OpenAI API.")
    parser.add_argument(
        "model_after_serve", metavar="MODEL", nargs="?", help="model to serve, same as --model MODEL"
    )
    add_options(parser.add_argument_group("server"), ServerOptions)
    add_options(parser.add_argument_group("engine"), EngineArgs)
    return parser


def make_batch_parser() -> Parser:
    """Returns a parser with an option for every field of BatchOptions and EngineArgs."""
    parser = Parser(
        prog="jax-paged run-batch",
        description="Run a file of requests in the format of OpenAI's Batch API.",
    )
    group = parser.add_argument_group("batch")
    text = "file with one request per line"
    group.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help=text)
    text = "file to which one result per line is appended; requests with a result in it are skipped"
    group.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help=text)
    add_options(group, BatchOptions)
    add_options(parser.add_argument_group("engine"), EngineArgs)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line of the server, without the program's name.

    Returns:
        A namespace with only the options that are on the command line.

    Raises:
        SystemExit: If the command line is invalid or asks for help.
    """
    parser = make_parser()
    has_command = list(argv[:1]) == ["serve"]
    args, unrecognized = parser.parse_known_args(argv[1:] if has_command else argv)
    model = vars(args).pop("model_after_serve")
    if model == "serve" and not has_command:
        parser.error("serve must be the first argument, before all options")
    if unrecognized:
        parser.refuse(unrecognized)
    if model is None:
        return args
    if not has_command:
        parser.error(f"the first argument must be serve, run-batch, check-kernels or health, got {model!r}")
    if getattr(args, "model", model) != model:
        parser.error(f"MODEL must be omitted or equal to --model ({args.model!r}), got {model!r}")
    args.model = model
    return args


def _download(argv: Sequence[str]) -> NoReturn:
    parser = Parser(
        "jax-paged download", description="Download a model, and print the folder that contains it."
    )
    parser.add_argument("model", metavar="MODEL", help="smollm2, or a model id on the Hugging Face Hub")
    model = parser.parse_args(argv).model
    try:
        from jax_paged.models.checkpoint import resolve_model_dir

        print(resolve_model_dir(model))
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _run_batch(argv: Sequence[str]) -> NoReturn:
    args = make_batch_parser().parse_args(argv)
    try:
        from jax_paged.llm import (
            DEFAULT_NUM_SCHEDULER_STEPS,
        )  # Imported late because the import takes seconds.
        from jax_paged.server.run_batch import run_batch

        # The same default as in LLM: the output is written as a whole, so multi-step decoding delays nothing.
        vars(args).setdefault("num_scheduler_steps", DEFAULT_NUM_SCHEDULER_STEPS)
        try:
            options, settings = BatchOptions.from_cli_args(args), EngineArgs.from_cli_args(args)
        except ValueError as error:
            sys.exit(f"jax-paged: {error}")
        run_batch(settings, options)
    except KeyboardInterrupt:
        sys.exit(130)


def _check_kernels(argv: Sequence[str]) -> NoReturn:
    text = "Check the kernels of --attention-backend (auto: pallas) on this machine, with a model's shapes."
    parser = Parser("jax-paged check-kernels", description=text)
    add_options(parser, EngineArgs)
    args = parser.parse_args(argv)
    try:
        # Imported late because the import takes seconds.
        from jax_paged.engine.executors import check_kernels

        table, has_passed = check_kernels(EngineArgs.from_cli_args(args))
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(table)
    sys.exit(not has_passed)


def _check_health(argv: Sequence[str]) -> NoReturn:
    from jax_paged.server.launch.health import check_health, options_of_process

    text = "Check that a server on this machine responds at the address in its options."
    usage = "jax-paged health [--pid N | server options] [--timeout SECONDS]"
    parser = Parser("jax-paged health", usage=usage, description=text)
    parser.add_argument("--pid", type=int, help="process id of the server, whose options are used")
    parser.add_argument("--timeout", type=float, default=4.0, help="timeout in seconds (default: 4)")
    own, words = parser.parse_known_args(argv)
    try:
        args = parse_args(words if own.pid is None else options_of_process(own.pid))
        check_health(ServerOptions.from_cli_args(args), own.timeout)
    except (OSError, ValueError) as error:
        sys.exit(f"jax-paged: {error}")
    print("healthy")
    sys.exit(0)


def _exit(_: int, __: FrameType | None) -> None:
    sys.exit(0)

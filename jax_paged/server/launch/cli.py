"""The command line: `jax-paged serve MODEL` and other commands; options are fields of dataclasses.

Nothing here imports JAX, transformers or the HTTP server: help and complaints about arguments are immediate.
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
    "       jax-paged run-batch -i FILE -o FILE [options]\n"
    "       jax-paged check-kernels [--model MODEL] [options]\n"
    "       jax-paged health [--pid N | options of the server]"
)


def main(argv: Sequence[str] | None = None) -> None:
    """Serves a model until SIGINT or SIGTERM, runs a batch, checks the kernels, or checks a server's health.

    Args:
        argv: The command line without the program's name; None takes the process's.

    Raises:
        SystemExit: If an argument is wrong or the model can't be served, after SIGTERM (0), if Ctrl-C is
            pressed before the server listens (130), as run_batch says, or with 1 if kernels or a server fail
            their check.
    """
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:1]) == ["run-batch"]:
        # As Ctrl-C: the work is not done.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _run_batch(argv[1:])
    if list(argv[:1]) == ["check-kernels"]:
        _check_kernels(argv[1:])
    if list(argv[:1]) == ["health"]:
        _check_health(argv[1:])
    signal.signal(signal.SIGTERM, _exit)
    args = parse_args(argv)
    try:
        options, settings = ServerOptions.from_cli_args(args), EngineArgs.from_cli_args(args)
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    try:
        # Only now: JAX, Ray and the HTTP server take seconds to import.
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
    parser = Parser(prog="jax-paged", usage=_USAGE, description="Serves a model with the OpenAI API.")
    parser.add_argument(
        "model_after_serve", metavar="MODEL", nargs="?", help="the model to serve, as --model MODEL"
    )
    add_options(parser.add_argument_group("server"), ServerOptions)
    add_options(parser.add_argument_group("engine"), EngineArgs)
    return parser


def make_batch_parser() -> Parser:
    """Returns a parser with an option for every field of BatchOptions and EngineArgs."""
    parser = Parser(
        prog="jax-paged run-batch",
        description="Answers a file of requests in the format of OpenAI's Batch API.",
    )
    group = parser.add_argument_group("batch")
    text = "requests, one per line"
    group.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help=text)
    text = "takes the answers, one per line; what it names already is not run again"
    group.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help=text)
    add_options(group, BatchOptions)
    add_options(parser.add_argument_group("engine"), EngineArgs)
    return parser


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line, without the program's name.

    Returns:
        The options that were given.

    Raises:
        SystemExit: If the command line is wrong, or asks for help.
    """
    parser = make_parser()
    has_command = list(argv[:1]) == ["serve"]
    args, unrecognized = parser.parse_known_args(argv[1:] if has_command else argv)
    model = vars(args).pop("model_after_serve")
    if model == "serve" and not has_command:
        parser.error("serve follows an option; allowed: serve as the first argument, before all options")
    if unrecognized:
        parser.refuse(unrecognized)
    if model is None:
        return args
    if not has_command:
        parser.error(f"the command is {model!r}; allowed: serve, or no command and --model MODEL")
    if getattr(args, "model", model) != model:
        parser.error(
            f"MODEL is {model!r} and --model is {args.model!r}; allowed: one of them, or equal values"
        )
    args.model = model
    return args


def _run_batch(argv: Sequence[str]) -> NoReturn:
    args = make_batch_parser().parse_args(argv)
    try:
        from jax_paged.llm import NUM_SCHEDULER_STEPS  # only now, as it imports much
        from jax_paged.server.run_batch import run_batch

        # As in LLM: nobody waits for a single token.
        vars(args).setdefault("num_scheduler_steps", NUM_SCHEDULER_STEPS)
        try:
            options, settings = BatchOptions.from_cli_args(args), EngineArgs.from_cli_args(args)
        except ValueError as error:
            sys.exit(f"jax-paged: {error}")
        run_batch(settings, options)
    except KeyboardInterrupt:
        sys.exit(130)


def _check_kernels(argv: Sequence[str]) -> NoReturn:
    text = "Checks the kernels of --attention-backend (auto: pallas) on this machine, with a model's shapes."
    parser = Parser("jax-paged check-kernels", description=text)
    add_options(parser, EngineArgs)
    args = parser.parse_args(argv)
    try:
        from jax_paged.engine.executors import check_kernels  # only now, as it imports much

        table, has_passed = check_kernels(EngineArgs.from_cli_args(args))
    except ValueError as error:
        sys.exit(f"jax-paged: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    print(table)
    sys.exit(not has_passed)


def _check_health(argv: Sequence[str]) -> NoReturn:
    from jax_paged.server.launch.health import check_health, options_of_process

    text = "Checks that a server on this machine answers at the address that its options name."
    usage = "jax-paged health [--pid N | options of the server] [--timeout SECONDS]"
    parser = Parser("jax-paged health", usage=usage, description=text)
    parser.add_argument("--pid", type=int, help="the process of the server, whose options are used")
    parser.add_argument("--timeout", type=float, default=4.0, help="maximum time (seconds; default: 4)")
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

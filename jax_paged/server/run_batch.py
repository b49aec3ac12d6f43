"""Batch processing of a file of requests in the format of OpenAI's Batch API: `jax-paged run-batch`.

Each line of the input is a request, which is passed to the ASGI application of the server without a network.
It is therefore validated, limited, run and answered like a request to the server. The results are appended to
the output file in order of completion, as complete lines. If a run is interrupted, the next run skips the
requests whose results are already in the output file.
"""

import asyncio
import contextlib
import dataclasses
import signal
import stat
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import orjson
from starlette.types import ASGIApp, Message
from tqdm import tqdm

from jax_paged.arguments.shown_values import one_of
from jax_paged.config.engine_args import EngineArgs
from jax_paged.engine.errors import EngineDeadError
from jax_paged.engine.replicas.replicated_engine import ServingEngine, serving_engine
from jax_paged.errors import ArgumentError
from jax_paged.server.app import OpenAIServer
from jax_paged.server.http.paths import local_scope
from jax_paged.server.launch.options import BatchOptions, ReasoningParser, ServerOptions, ToolCallParser
from jax_paged.server.observability.logs import configure

_URLS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/v1/rerank")
_FAILED, _INTERRUPTED = 1, 130


@dataclasses.dataclass
class Summary:
    """Number of lines of a run by result.

    Args:
        num_answered: Lines with a successful response.
        num_failed: Lines whose request was rejected or failed, or that are not valid requests.
        num_skipped: Lines that were skipped because the output file already has their results.
        num_skipped_failed: Skipped lines whose result is a failure.
        num_tokens: Number of generated tokens.
    """

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_skipped_failed: int = 0
    num_tokens: int = 0


class _BadLineError(Exception):
    """Error for a line that is not a valid request."""


def run_batch(args: EngineArgs, options: BatchOptions) -> NoReturn:
    """Runs the requests of a file, shows the progress, and ends the process.

    Args:
        args: Model and limits of the engine.
        options: Files, output formats of the model, and logging.

    Raises:
        SystemExit: With status 0 if every line has a successful response, 1 if some have failed, and 130
            after Ctrl-C or SIGTERM. With a message if a file or the model cannot be used, or the engine has
            failed.
    """
    configure(options.log_level, options.log_format)
    summary = Summary()
    with contextlib.ExitStack() as stack:
        try:
            num_lines = _num_lines(options.input_file)
            done = FinishedLines.read(options.output_file)
            output = stack.enter_context(options.output_file.open("ab"))
            engine = stack.enter_context(contextlib.closing(serving_engine(args)))
        except (OSError, ValueError) as error:
            sys.exit(f"jax-paged: {error}")
        bar = stack.enter_context(tqdm(total=num_lines, unit="request", dynamic_ncols=True))
        parsers = options.tool_call_parser, options.reasoning_parser
        batch = Batch(engine, options.served_model_name or args.model, done, summary, output, bar, parsers)
        try:
            asyncio.run(batch.run(options.input_file))
            status = _FAILED if summary.num_failed or summary.num_skipped_failed else 0
        except asyncio.CancelledError:
            status = _INTERRUPTED
        except EngineDeadError as error:
            sys.exit(f"jax-paged: {error}; run the same command again to continue")
    parts = f"{summary.num_answered} succeeded, {summary.num_failed} failed, {summary.num_skipped} skipped"
    failed = f" ({summary.num_skipped_failed} of them failed)" if summary.num_skipped_failed else ""
    rest = "; interrupted: run the same command again to continue" if status == _INTERRUPTED else ""
    print(f"{parts}{failed}; {summary.num_tokens} tokens{rest}", file=sys.stderr)
    sys.exit(status)


@dataclasses.dataclass(frozen=True)
class FinishedLines:
    """Lines whose results are in the output file of an earlier run.

    Args:
        custom_ids: The custom_id of each result.
        failed_ids: The custom_id of each result that is a failure.
        bad_lines: Numbers of input lines that had no valid custom_id.
    """

    custom_ids: frozenset[str]
    failed_ids: frozenset[str]
    bad_lines: frozenset[int]

    @classmethod
    def read(cls, output: Path) -> "FinishedLines":
        """Reads the results in an output file, if it exists, and removes an incomplete last line.

        Raises:
            OSError: If the file cannot be read or written.
            ValueError: If the file is not a regular file or not the output of a batch.
        """
        ids: set[str] = set()
        failed: set[str] = set()
        bad: set[int] = set()
        size = 0
        if output.exists():
            allowed = "a new file or the output file of an earlier run-batch"
            if not output.is_file():
                raise ArgumentError("output_file", str(output), allowed, remedy=", not a regular file")
            with output.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    match _entry(line):
                        case {"custom_id": str(name), "response": {"status_code": 200}, "error": None}:
                            ids.add(name)
                        case {"custom_id": str(name), "response": {"status_code": int()}, "error": None}:
                            ids.add(name)
                            failed.add(name)
                        case {"custom_id": str(name), "response": None, "error": {"line": int()}}:
                            ids.add(name)
                            failed.add(name)
                        case {"custom_id": None, "response": None, "error": {"line": int(bad_line)}}:
                            bad.add(bad_line)
                        case _:
                            remedy = f", whose line {number} is not a result of run-batch"
                            raise ArgumentError("output_file", str(output), allowed, remedy=remedy)
                    size += len(line)
            with output.open("rb+") as file:
                file.truncate(size)
        return cls(frozenset(ids), frozenset(failed), frozenset(bad))


class Batch:
    """Runner for the requests of a file, a limited number at a time.

    Args:
        engine: The engine.
        model_name: Name of the model in the requests.
        done: Lines to skip.
        summary: Summary of the run, which is updated.
        output: File to which the results are appended.
        bar: Progress bar.
        parsers: Values of tool_call_parser and reasoning_parser, as in ServerOptions.
    """

    def __init__(
        self,
        engine: ServingEngine,
        model_name: str,
        done: FinishedLines,
        summary: Summary,
        output: BinaryIO,
        bar: "tqdm[Any]",
        parsers: tuple[ToolCallParser | None, ReasoningParser | None] = (None, None),
    ) -> None:
        self._engine = engine
        self._done = done
        self._summary = summary
        self._output = output
        self._bar = bar
        # Enough requests to keep the engine busy while the next ones are tokenized.
        self._num_at_a_time = len(engine.replicas) * 2 * engine.engine.config.max_num_seqs + 16
        options = ServerOptions(
            ui=False,
            max_num_waiting=self._num_at_a_time,
            tool_call_parser=parsers[0],
            reasoning_parser=parsers[1],
        )
        self._app: ASGIApp = OpenAIServer(engine, model_name, options).app()

    async def run(self, file: Path) -> None:
        """Runs all lines that have no result yet.

        Raises:
            EngineDeadError: If the engine fails.
            asyncio.CancelledError: After SIGINT or SIGTERM.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "run() was not called in an asyncio task"
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, task.cancel)
        slots = asyncio.Semaphore(self._num_at_a_time)
        seen: set[str] = set()
        try:
            async with asyncio.TaskGroup() as group:
                for number, line in _lines(file):
                    await slots.acquire()
                    answering = group.create_task(self._line(number, line, seen))
                    answering.add_done_callback(lambda _: slots.release())
        except* EngineDeadError as errors:
            raise errors.exceptions[0] from None

    async def _line(self, number: int, line: bytes, seen: set[str]) -> None:
        custom_id: str | None = None
        response: dict[str, Any] | None = None
        error: dict[str, Any] | None = None
        try:
            request = _parsed(line)
            custom_id = _new_id(request, seen)
            if custom_id in self._done.custom_ids:
                self._count_skipped(custom_id in self._done.failed_ids)
                return
            body = _checked_body(request)
            response = await self._answer(request["url"], body)
        except _BadLineError as problem:
            if custom_id is None and number in self._done.bad_lines:
                self._count_skipped(has_failed=True)
                return
            error = {"code": "invalid_request", "message": f"line {number}: {problem}", "line": number}
            self._bar.write(f"line {number}: {problem}", file=sys.stderr)
        entry_id = f"batch_req_{uuid.uuid4().hex}"
        self._write({"id": entry_id, "custom_id": custom_id, "response": response, "error": error})

    async def _answer(self, url: str, body: bytes) -> dict[str, Any]:
        status, answer = await post(self._app, url, body)
        if self._engine.error is not None:
            raise EngineDeadError(str(self._engine.error) or repr(self._engine.error))
        return {"status_code": status, "request_id": uuid.uuid4().hex, "body": orjson.loads(answer)}

    def _count_skipped(self, has_failed: bool) -> None:
        self._summary.num_skipped += 1
        self._summary.num_skipped_failed += has_failed
        self._bar.update()

    def _write(self, entry: dict[str, Any]) -> None:
        self._output.write(orjson.dumps(entry) + b"\n")
        self._output.flush()
        response = entry["response"]
        if response is not None and response["status_code"] == 200:
            self._summary.num_answered += 1
            self._summary.num_tokens += response["body"]["usage"].get("completion_tokens", 0)
        else:
            self._summary.num_failed += 1
        rate = self._summary.num_tokens / max(self._bar.format_dict["elapsed"], 0.1)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update()


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Sends a POST request with a JSON body to an application.

    Returns:
        Status and body of the response.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = local_scope("POST", path, headers)
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, parts = 0, []

    async def receive() -> Message:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()  # the client never disconnects
        assert message is not None, "a disconnect message was received from a client that never disconnects"
        return message

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the content of each line that is not empty."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _num_lines(file: Path) -> int:
    """Returns the number of lines of a file that are not empty.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not a regular file. A pipe could not be read a second time.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ArgumentError("input_file", str(file), "a regular file because it is read twice")
    return sum(1 for _ in _lines(file))


def _entry(line: bytes) -> object:
    """Returns the JSON value of a line of an output file; None if the line is not valid JSON."""
    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(line)
    return None


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise _BadLineError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise _BadLineError("not a JSON object")
    return request


def _new_id(request: dict[str, Any], seen: set[str]) -> str:
    """Returns the custom_id of a request, and adds it to `seen`.

    Raises:
        _BadLineError: If the custom_id is missing, or an earlier line has the same one. The result is then
            written without it, so that it does not hide the result of the earlier line.
    """
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str):
        raise _BadLineError(str(ArgumentError("custom_id", custom_id, "a string")))
    if custom_id in seen:
        raise _BadLineError(str(ArgumentError("custom_id", custom_id, "unique in the file")))
    seen.add(custom_id)
    return custom_id


def _checked_body(request: dict[str, Any]) -> bytes:
    """Returns the encoded body of a request, after checking that a batch supports the request.

    Raises:
        _BadLineError: If the method, the URL or the body is not supported.
    """
    method, url, body = (request.get(name) for name in ("method", "url", "body"))
    if method != "POST":
        raise _BadLineError(str(ArgumentError("method", method, "'POST'")))
    if url not in _URLS:
        raise _BadLineError(str(ArgumentError("url", url, one_of(_URLS))))
    if not isinstance(body, dict):
        raise _BadLineError(str(ArgumentError("body", body, "an object")))
    if body.get("stream"):
        raise _BadLineError(str(ArgumentError("stream", body["stream"], "False")))
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:  # orjson parses deeper nesting than it can encode.
        raise _BadLineError(f"body is nested too deeply: {error}") from None

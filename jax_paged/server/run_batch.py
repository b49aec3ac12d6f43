"""A file of requests to a file of answers, in the format of OpenAI's Batch API: `jax-paged run-batch`.

Each line is given to the server's application as a request would be, without a socket in between: so it is
checked, limited, run and answered in the same way. The output grows by whole lines, in the order in which
answers come. A run that was interrupted goes on where it stopped: what the output names is not run again.
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
    """What came of the lines of a run.

    Args:
        num_answered: Lines with an answer.
        num_failed: Lines whose request was refused or failed, or that hold no request.
        num_skipped: Lines that the output named before.
        num_skipped_failed: Those of them that had failed.
        num_tokens: Generated tokens.
    """

    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    num_skipped_failed: int = 0
    num_tokens: int = 0


class _BadLineError(Exception):
    """A line that is no request."""


def run_batch(args: EngineArgs, options: BatchOptions) -> NoReturn:
    """Runs the requests of a file, shows how far it is, and ends the process.

    Args:
        args: Model and limits of the engine.
        options: The files, and what is logged.

    Raises:
        SystemExit: With 0 if every line has an answer, 1 if some have not, 130 after Ctrl-C or SIGTERM; with
            a message if a file or the model can't be used, or the engine has failed.
    """
    configure(options.log_level, options.log_format)
    summary = Summary()
    with contextlib.ExitStack() as stack:
        try:
            num_lines = _num_lines(options.input_file)
            done = Done.read(options.output_file)
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
            sys.exit(f"jax-paged: {error}; run it again to go on")
    parts = f"{summary.num_answered} answered, {summary.num_failed} failed, {summary.num_skipped} done before"
    failed = f" ({summary.num_skipped_failed} of them failed)" if summary.num_skipped_failed else ""
    rest = "; interrupted: run it again to go on" if status == _INTERRUPTED else ""
    print(f"{parts}{failed}; {summary.num_tokens} tokens{rest}", file=sys.stderr)
    sys.exit(status)


@dataclasses.dataclass(frozen=True)
class Done:
    """The lines that an output file names.

    Args:
        custom_ids: Of its requests.
        failed_ids: Those of them whose request failed.
        bad_lines: Numbers of input lines that had no custom_id of their own.
    """

    custom_ids: frozenset[str]
    failed_ids: frozenset[str]
    bad_lines: frozenset[int]

    @classmethod
    def read(cls, output: Path) -> "Done":
        """Reads what an output file names, if there is one; cuts off a last line that is not whole.

        Raises:
            OSError: If the file can't be read or written.
            ValueError: If it was written by something else, or is no regular file.
        """
        ids: set[str] = set()
        failed: set[str] = set()
        bad: set[int] = set()
        size = 0
        if output.exists():
            allowed = "a new file or one that run-batch has begun"
            if not output.is_file():
                raise ArgumentError("output_file", str(output), allowed, remedy=", which is no regular file")
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
                            remedy = f", whose line {number} is no answer of a batch"
                            raise ArgumentError("output_file", str(output), allowed, remedy=remedy)
                    size += len(line)
            with output.open("rb+") as file:
                file.truncate(size)
        return cls(frozenset(ids), frozenset(failed), frozenset(bad))


class Batch:
    """Runs the lines of a file, some at a time.

    Args:
        engine: Runs the requests.
        model_name: What requests may name as their model.
        done: What is not run again.
        summary: Filled in.
        output: Takes the answers.
        bar: Shows how far it is.
        parsers: Names of the formats in which the model calls tools and thinks, as in ServerOptions.
    """

    def __init__(
        self,
        engine: ServingEngine,
        model_name: str,
        done: Done,
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
        # Enough that the engine never lacks any, while the next ones are tokenized.
        self._num_at_a_time = len(engine.replicas) * 2 * engine.engine.config.max_num_seqs + 16
        options = ServerOptions(
            ui=False,
            max_num_waiting=self._num_at_a_time,
            tool_call_parser=parsers[0],
            reasoning_parser=parsers[1],
        )
        self._app: ASGIApp = OpenAIServer(engine, model_name, options).app()

    async def run(self, file: Path) -> None:
        """Runs all lines that are not done.

        Raises:
            EngineDeadError: If the engine fails.
            asyncio.CancelledError: After SIGINT or SIGTERM.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
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
        status, answer = await call(self._app, url, body)
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


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Gives an application one POST request with a JSON body.

    Returns:
        Status and body of the answer.
    """
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = local_scope("POST", path, headers)
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    status, parts = 0, []

    async def receive() -> Message:
        message = next(messages, None)
        if message is None:
            await asyncio.Event().wait()  # the client never leaves
        assert message is not None, "nothing follows"
        return message

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not empty, with their numbers."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line


def _num_lines(file: Path) -> int:
    """Returns how many lines a file has that are not empty.

    Raises:
        OSError: If it can't be read.
        ValueError: If it is no regular file: what a pipe holds could not be read again.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ArgumentError("input_file", str(file), "a regular file because it is read twice")
    return sum(1 for _ in _lines(file))


def _entry(line: bytes) -> object:
    """Returns what a line of an output file holds, or None if that is no JSON."""
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
    """Returns the custom_id of a request, and adds it to those that were seen.

    Raises:
        _BadLineError: If it has none, or that of an earlier line: an error under it would hide that request.
    """
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str):
        raise _BadLineError(str(ArgumentError("custom_id", custom_id, "a string")))
    if custom_id in seen:
        raise _BadLineError(str(ArgumentError("custom_id", custom_id, "that of no earlier line")))
    seen.add(custom_id)
    return custom_id


def _checked_body(request: dict[str, Any]) -> bytes:
    """Returns the body of a request, which must be one that the server can answer as a whole."""
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
    except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
        raise _BadLineError(f"body is nested too deeply: {error}") from None

"""The OpenAI API over HTTP."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from types import FrameType
from typing import Any

import orjson
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from jax_paged.engine.async_engine import AsyncLLMEngine, RequestStream
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.inputs import Prompt, as_prompts
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.sampling_params import BeamSearchParams, SamplingParams
from jax_paged.server.cli import engine_args, make_parser
from jax_paged.server.metrics import Metrics
from jax_paged.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    shortened,
    usage,
    validation_error,
)

_SHUTDOWN_S = 5
_DONE = b"data: [DONE]\n\n"


class OpenAIServer:
    """The handlers of one model's routes.

    Args:
        engine: Runs the requests; stays the caller's.
        model_name: The model as clients call it.
    """

    def __init__(self, engine: AsyncLLMEngine, model_name: str) -> None:
        self.engine = engine
        self.model_name = model_name
        self.metrics = Metrics(engine.engine)
        self.created = int(time.time())

    def app(self) -> FastAPI:
        """Returns the application."""
        app = FastAPI(title="jax-paged")
        app.post("/v1/completions")(self.completions)
        app.post("/v1/chat/completions")(self.chat_completions)
        app.get("/v1/models")(self.models)
        app.get("/health")(self.health)
        app.get("/metrics")(self.prometheus)
        app.exception_handler(ApiError)(_on_api_error)
        app.exception_handler(RequestValidationError)(_on_validation_error)
        app.exception_handler(HTTPException)(_on_http_error)
        app.exception_handler(Exception)(_on_any_error)
        return app

    async def models(self) -> Response:
        """GET /v1/models."""
        card = {"id": self.model_name, "object": "model", "created": self.created, "owned_by": "jax-paged"}
        limit = self.engine.engine.runner.config.max_model_len
        return _json({"object": "list", "data": [{**card, "max_model_len": limit}]})

    async def health(self) -> Response:
        """GET /health: 200 while the engine runs."""
        self._check_ready(None)
        return _json({"status": "ok"})

    async def prometheus(self) -> Response:
        """GET /metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions."""
        self._check_ready(body.model)
        head = self._head("cmpl", "text_completion")
        with _bad_input(body):
            params = body.sampling_params(self.engine.engine.runner.config.sampling_defaults)
            prompts = as_prompts(body.prompt)
            if not prompts:
                raise ValueError("prompt is []; allowed: at least one prompt")
            checked = await asyncio.to_thread(self._check_all, prompts, params, body)
        offsets = [0] * len(checked) * body.num_outputs

        def choice(index: int, completion: CompletionOutput) -> dict[str, Any]:
            logprobs = completion_logprobs(completion, offsets[index])
            if logprobs is not None:
                offsets[index] += sum(map(len, logprobs["tokens"]))
            return {
                "index": index,
                "text": completion.text,
                "logprobs": logprobs,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }

        if not body.stream:
            return await _unless_gone(request, self._answer(checked, body.num_outputs, head, choice))
        return _event_stream(self._chunks(checked, body.num_outputs, head, choice, body.include_usage))

    async def chat_completions(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions."""
        self._check_ready(body.model)
        tokenizer = self.engine.engine.tokenizer
        with _bad_input(body):
            if tokenizer is None:
                raise ValueError("chat needs a tokenizer, and the server runs without one")
            params = body.sampling_params(self.engine.engine.runner.config.sampling_defaults)
            prompt = await asyncio.to_thread(tokenizer.encode_chat, body.messages)
            checked = self._check_all([prompt], params, body)
        num_top = body.top_logprobs or 0

        def end(completion: CompletionOutput) -> dict[str, Any]:
            return {
                "logprobs": chat_logprobs(completion, num_top),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }

        def message(index: int, completion: CompletionOutput) -> dict[str, Any]:
            content = {"role": "assistant", "content": completion.text}
            return {"index": index, "message": content, **end(completion)}

        def delta(index: int, completion: CompletionOutput) -> dict[str, Any]:
            content = {"content": completion.text} if completion.text else {}
            return {"index": index, "delta": content, **end(completion)}

        if not body.stream:
            head = self._head("chatcmpl", "chat.completion")
            return await _unless_gone(request, self._answer(checked, body.num_outputs, head, message))
        head = self._head("chatcmpl", "chat.completion.chunk")
        role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        first = [{"index": i, **role} for i in range(body.num_outputs)]
        return _event_stream(self._chunks(checked, body.num_outputs, head, delta, body.include_usage, first))

    async def _answer(
        self,
        requests: list[CheckedRequest],
        n: int,
        head: dict[str, Any],
        choice: Callable[[int, CompletionOutput], dict[str, Any]],
    ) -> Response:
        """Runs requests to their end; returns the whole answer, of the first n outputs of each."""
        async with self._running(requests, head["id"], whole=True) as streams:
            outputs = [await anext(stream) for stream in streams]
        choices, counts = [], []
        for i, output in enumerate(outputs):
            completions = output.outputs[:n]
            counts += (own_counts := [len(completion.token_ids) for completion in completions])
            self.metrics.observe(output, own_counts)
            _check_ended_well(output)
            own = [choice(i * n + completion.index, completion) for completion in completions]
            if output.prompt_logprobs is not None:
                own = [{**c, "prompt_logprobs": prompt_logprobs(output)} for c in own]
            choices += own
        return _json({**head, "choices": choices, "usage": _usage_of(outputs, counts)})

    async def _chunks(
        self,
        requests: list[CheckedRequest],
        n: int,
        head: dict[str, Any],
        choice: Callable[[int, CompletionOutput], dict[str, Any]],
        include_usage: bool,
        first: Sequence[dict[str, Any]] = (),
    ) -> AsyncGenerator[bytes]:
        """Yields server-sent events: a chunk for each part of an output, usage if asked for, and the end."""
        last: dict[int, RequestOutput] = {}
        counts = [0] * len(requests) * n
        ended: set[int] = set()
        no_usage = {"usage": None} if include_usage else {}
        try:
            for start in first:
                yield _event({**head, "choices": [start], **no_usage})
            async with self._running(requests, head["id"]) as streams:
                async for i, part in _merged(streams):
                    last[i] = part
                    for completion in part.outputs:
                        counts[i * n + completion.index] += len(completion.token_ids)
                    if part.finished:
                        self.metrics.observe(part, counts[i * n : i * n + n])
                        _check_ended_well(part)
                    for completion in part.outputs:
                        index = i * n + completion.index
                        if index not in ended and (completion.token_ids or completion.finish_reason):
                            yield _event({**head, "choices": [choice(index, completion)], **no_usage})
                        if completion.finish_reason:
                            ended.add(index)
            if include_usage:
                outputs = [last[i] for i in range(len(requests))]
                yield _event({**head, "choices": [], "usage": _usage_of(outputs, counts)})
        except ApiError as error:  # the answer has begun: its status is sent already
            yield _event(error.body())
        yield _DONE

    @contextlib.asynccontextmanager
    async def _running(
        self, requests: list[CheckedRequest], request_id: str, *, whole: bool = False
    ) -> AsyncIterator[list[RequestStream]]:
        """Starts requests, and aborts at the end those that still run."""
        streams: list[RequestStream] = []
        try:
            for i, checked in enumerate(requests):
                streams.append(await self.engine.submit(checked, None, f"{request_id}-{i}", whole=whole))
            yield streams
        except RuntimeError as error:
            raise ApiError(str(error), status=500) from error
        finally:
            for stream in streams:
                stream.abort()

    def _check_all(
        self,
        prompts: list[Prompt],
        params: SamplingParams | BeamSearchParams,
        body: CompletionRequest | ChatRequest,
    ) -> list[CheckedRequest]:
        salt, priority = body.cache_salt or "", body.priority or 0
        check = self.engine.engine.check_request
        return [check(prompt, params, cache_salt=salt, priority=priority) for prompt in prompts]

    def _check_ready(self, model: str | None) -> None:
        if self.engine.error is not None:
            raise ApiError(f"the engine has stopped: {self.engine.error}", status=503)
        if model not in (None, self.model_name):
            raise ApiError(
                f"model is {model!r}; allowed: {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
        }


@contextlib.contextmanager
def _bad_input(body: CompletionRequest | ChatRequest) -> Iterator[None]:
    """Makes a ValueError of what a client sent the client's error; its first word may name a field."""
    try:
        yield
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        raise ApiError(
            shortened(str(error), 600), param=name if name in type(body).model_fields else None
        ) from error


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yields (index, part) of several streams as the parts come."""
    if len(streams) == 1:
        async for part in streams[0]:
            yield 0, part
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                part = task.result()
                if not part.finished:
                    waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield i, part
    finally:
        for task in waiting:
            task.cancel()


async def _unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Awaits an answer, and cancels it when the client leaves."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.create_task(answer), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else Response(status_code=499)
    finally:
        for task in tasks:
            task.cancel()


def _check_ended_well(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "abort":
            raise ApiError(f"the request was aborted: {completion.stop_reason}", status=500)


def _usage_of(outputs: list[RequestOutput], num_output_tokens: list[int]) -> dict[str, Any]:
    # Of an encoder-decoder model, the encoder's: the decoder's is one token that nobody sent.
    num_prompt_tokens = sum(len(o.encoder_prompt_token_ids or o.prompt_token_ids) for o in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    return usage(num_prompt_tokens, sum(num_output_tokens), num_cached_tokens)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _event_stream(chunks: AsyncGenerator[bytes]) -> Response:
    return StreamingResponse(chunks, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _on_api_error(_: Request, error: Any) -> Response:
    return _json(error.body(), error.status)


async def _on_validation_error(_: Request, error: Any) -> Response:
    return _json(validation_error(error.errors()).body(), 400)


async def _on_http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(ApiError(message, status=error.status_code).body(), error.status_code)


async def _on_any_error(_: Request, error: Exception) -> Response:
    return _json(ApiError(str(error), status=500).body(), 500)


def main(argv: Sequence[str] | None = None) -> None:
    """Serves a model until SIGINT or SIGTERM; the command line is `--help`'s.

    Raises:
        SystemExit: If an argument is wrong, or if Ctrl-C is pressed before the server listens (130).
    """
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _exit)
    # uvicorn's own logging would close the handlers that others have made.
    config = uvicorn.Config(
        "",
        args.host,
        args.port,
        log_config=None,
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    name = args.served_model_name or args.model
    with config.bind_socket() as listener:  # a port that is taken is found before the model is loaded
        try:
            engine = AsyncLLMEngine(engine_args(args))
            if engine.engine.tokenizer is not None:
                _ = engine.engine.tokenizer.hf  # chat needs it: loaded now, not in the first request
        except ValueError as error:
            sys.exit(f"jax-paged: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        config.app = OpenAIServer(engine, name).app()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                _Server(config, engine, name).run([listener])
        finally:
            engine.close()


class _Server(uvicorn.Server):
    """Says that it is ready once it listens."""

    def __init__(self, config: uvicorn.Config, engine: AsyncLLMEngine, model_name: str) -> None:
        super().__init__(config)
        self._engine = engine
        self._model_name = model_name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        question = {"role": "user", "content": "What is a block table?"}
        body = {"model": self._model_name, "messages": [question], "temperature": 0}
        print(
            f"{self._engine.engine!r}\n"
            f"Serving the OpenAI API at {url}/v1. Ctrl-C ends it. Try:\n\n"
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
            f"    -d '{orjson.dumps(body).decode()}'\n",
            flush=True,
        )


def _exit(_: int, __: FrameType | None) -> None:
    sys.exit(0)

"""Execution of the engine requests of an HTTP request, with whole or streamed responses."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Self

import orjson

from jax_paged.core.request import RequestMetrics
from jax_paged.engine.async_engine.request_stream import RequestStream
from jax_paged.engine.errors import NOT_RUNNING, EngineAsleepError, EngineDeadError
from jax_paged.engine.input_processor import CheckedRequest
from jax_paged.engine.new_request import resumed_output
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.sampling_params import SamplingParams
from jax_paged.server.generation_call import GenerationCall
from jax_paged.server.http.http_protocol import BodyWriter
from jax_paged.server.observability.metrics import Metrics
from jax_paged.server.protocol.logprobs import prompt_logprobs
from jax_paged.server.protocol.responses import ApiError, asleep_error, request_error, usage
from jax_paged.server.waiting_queue import WaitingQueue

_DONE = b"data: [DONE]\n\n"


class RequestRunner:
    """Runner of generation calls, which aborts their requests if the client disconnects.

    Args:
        engine: The engine.
        waiting_queue: Queue in which requests wait until the engine has room for them.
        metrics: Counts every request that ends, including aborted ones.
    """

    def __init__(self, engine: ServingEngine, waiting_queue: WaitingQueue, metrics: Metrics) -> None:
        self._engine = engine
        self._waiting_queue = waiting_queue
        self._metrics = metrics
        self._aborting: set[asyncio.Task[None]] = set()  # references that keep the tasks alive

    async def answer(self, call: GenerationCall) -> dict[str, Any]:
        """Runs all requests of a call to their end, and returns the body of the response.

        Raises:
            ApiError: If a request fails.
        """
        n = call.num_outputs
        async with (
            self._running(call, whole=True) as requests,
            contextlib.aclosing(_merged(requests)) as parts,
        ):
            async for _ in parts:  # Each request has a single part, its whole output.
                pass
        choices = []
        for i, request in enumerate(requests):
            output = request.output
            own = [call.choice(i * n + x.index, x, output) for x in output.outputs]
            if call.token_ids_in is not None:
                ids = [call.prompt_ids("choice", output) | call.output_ids(x) for x in output.outputs]
                own = [choice | more for choice, more in zip(own, ids, strict=True)]
            if call.with_prompt_logprobs:
                own = [{**choice, "prompt_logprobs": prompt_logprobs(output)} for choice in own]
            choices += own
        prompt_ids = call.prompt_ids("answer", requests[0].output)
        return {**call.head, "choices": choices, "usage": _usage(call, requests), **prompt_ids}

    async def events(
        self,
        call: GenerationCall,
        *,
        first: Sequence[dict[str, Any]] = (),
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> AsyncGenerator[bytes, BodyWriter | None]:
        """Runs all requests of a call, and yields a server-sent event for each part of an output.

        No event is yielded before the first part of an output is available, so that a failure before it can
        still become an error response. If the caller sends a BodyWriter to the generator and the call has a
        single request, the further chunks are written to the BodyWriter directly, and only the end of the
        stream is yielded.

        Args:
            call: The call to run.
            first: Choices that are sent before all others, each in its own chunk.
            include_usage: Whether the last chunk has the token counts.
            continuous_usage: Whether, with include_usage, every chunk has the token counts of its choice so
                far.

        Raises:
            ApiError: If a request fails before the first event, or if another replica will continue the
                response. Any other failure becomes an event.
        """
        encoder = _ChunkEncoder(
            call, self.split_end_token, include_usage=include_usage, continuous_usage=continuous_usage
        )
        journal, has_begun = call.journal, call.has_begun
        try:
            async with self._running(call) as requests, contextlib.aclosing(_merged(requests)) as parts:
                async for i, part in parts:
                    event = encoder.chunks(i, part, requests[i].num_tokens)
                    # The client already has this part. It was encoded only to update the encoder's state.
                    if part is requests[i].prior:
                        continue
                    if journal is not None:
                        journal.note(i * call.num_outputs, part)
                    if not has_begun:
                        has_begun = True
                        event = encoder.first_chunks(first, part) + event
                    writer = (yield event) if event else None
                    if writer is not None and len(requests) == 1 and not part.finished:
                        await requests[0].write_rest(
                            writer, lambda part: encoder.chunks(0, part, requests[0].num_tokens)
                        )
                        break
            end = _DONE
            if include_usage:
                end = _event({**call.head, "choices": [], "usage": _usage(call, requests)}) + end
        except ApiError as error:
            if not has_begun or call.continues_elsewhere(error):
                raise
            end = _event(error.body())  # There is no [DONE] event, because the response is incomplete.
        if journal is not None:
            journal.end()
        yield end

    async def parts(self, call: GenerationCall, *, whole: bool = False) -> AsyncGenerator[RequestOutput]:
        """Runs a call with a single request, and yields its output in parts or, if `whole`, once at its end.

        If another replica has begun the response, the first part is the output that the client already has.

        Raises:
            ApiError: If the request fails.
        """
        async with self._running(call, whole=whole) as (request,):
            async for part in request:
                if call.journal is not None and part is not request.prior:
                    call.journal.note(0, part)
                yield part

    @contextlib.asynccontextmanager
    async def _running(
        self, call: GenerationCall, *, whole: bool = False
    ) -> AsyncIterator[list["_RunningRequest"]]:
        """Waits for admission and starts the requests of a call; aborts the unfinished ones at the end.

        Args:
            call: The call to run.
            whole: Whether each request delivers its whole output as one part, at its end.

        Raises:
            ApiError: If too many requests are waiting, or the engine has stopped or stops within the context.
        """
        running: list[_RunningRequest] = []
        num_seqs = sum(request.request.max_num_seqs for request in call.requests)
        start = time.monotonic()
        turn = call.client, call.requests[0].request.priority
        async with self._waiting_queue.admission(num_seqs, *turn, has_begun=call.has_begun):
            waited_s = time.monotonic() - start
            try:
                for i, checked in enumerate(call.requests):
                    request_id, prior, stream = f"{call.head['id']}-{i}", None, None
                    if call.journal is not None:
                        checked = call.journal.with_prior_output(i, call.num_outputs, checked)
                    if checked.prior_outputs:
                        prior = resumed_output(checked, request_id, self._engine.engine.tokenizer)
                    if prior is None or not prior.finished:
                        stream = await self._engine.submit(checked, None, request_id, final_only=whole)
                    new = _RunningRequest(request_id, stream, prior, checked, call, waited_s, self._metrics)
                    running.append(new)
                yield running
            except EngineDeadError as error:
                raise ApiError(str(error), status=503) from error
            except EngineAsleepError as error:
                raise asleep_error(error) from error
            finally:
                for request in running:
                    if not request.is_finished:
                        self._abort(request)

    def split_end_token(
        self, completion: CompletionOutput, params: SamplingParams
    ) -> Sequence[CompletionOutput]:
        """Returns a part of an output as two parts if its last token is an end token, which adds no text.

        Clients assume that the tokens of a chunk's log-probabilities make up the text of the chunk. Therefore
        the end token is sent in its own chunk.

        Args:
            completion: A part of an output.
            params: Sampling parameters of the request.
        """
        logprobs, token_ids, reason = completion.logprobs, completion.token_ids, completion.stop_reason
        if not logprobs or not completion.text or completion.finish_reason != "stop":
            return (completion,)
        is_end = isinstance(reason, int) or (
            reason is None
            and not params.ignore_eos
            and token_ids[-1] in self._engine.engine.config.eos_token_ids
        )
        if not is_end or params.include_stop_str_in_output:
            return (completion,)
        text = dataclasses.replace(
            completion,
            token_ids=token_ids[:-1],
            logprobs=logprobs[:-1],
            finish_reason=None,
            stop_reason=None,
        )
        end = dataclasses.replace(completion, text="", token_ids=token_ids[-1:], logprobs=logprobs[-1:])
        return text, end

    def _abort(self, request: "_RunningRequest") -> None:
        self._engine.abort(request.request_id)
        # The final part must be counted too. The caller may have been cancelled and cannot wait for it.
        task = asyncio.create_task(_exhaust(request))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


class _ChunkEncoder:
    """Encoder of a call's outputs as chunks: server-sent events with one choice each.

    Args:
        call: The call.
        split_end_token: RequestRunner.split_end_token.
        include_usage: Whether the response ends with the token counts; the other chunks then have the field
            too.
        continuous_usage: Whether, with include_usage, every chunk has the token counts of its choice so far.
    """

    def __init__(
        self,
        call: GenerationCall,
        split_end_token: Callable[[CompletionOutput, SamplingParams], Sequence[CompletionOutput]],
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._call = call
        self._split_end_token = split_end_token
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._head = b"data: " + orjson.dumps(call.head)[:-1]
        self._begun: set[int] = set()  # indices of choices
        self._ended: set[int] = set()

    def first_chunks(self, choices: Sequence[dict[str, Any]], part: RequestOutput) -> bytes:
        """Returns the chunks of choices that are sent before the first part of an output."""
        ids = self._call.prompt_ids("answer", part)
        return b"".join(self._chunk(choice, part, 0, ids) for choice in choices)

    def chunks(self, i: int, part: RequestOutput, num_tokens: Sequence[int]) -> bytes:
        """Returns the chunks for a part. Outputs to which the part adds nothing have none.

        Args:
            i: Index of the request in the call.
            part: The part.
            num_tokens: Number of generated tokens of each output of the request so far.
        """
        encoded = b""
        for completion in part.outputs:
            index = i * self._call.num_outputs + completion.index
            if index not in self._ended and (completion.token_ids or completion.finish_reason):
                encoded += self._of_completion(i, index, completion, part, num_tokens[completion.index])
            if completion.finish_reason:
                self._ended.add(index)
        return encoded

    def _of_completion(
        self, i: int, index: int, completion: CompletionOutput, part: RequestOutput, num_tokens: int
    ) -> bytes:
        call, encoded = self._call, b""
        for one in self._split_end_token(completion, call.requests[i].params):
            choice = call.choice(index, one, part) | call.output_ids(one)
            if index not in self._begun:
                choice |= call.prompt_ids("choice", part)
                self._begun.add(index)
            # The end token, which is in its own chunk, does not count yet.
            is_before_end = one.finish_reason != completion.finish_reason
            encoded += self._chunk(choice, part, num_tokens - is_before_end, {})
        return encoded

    def _chunk(
        self, choice: dict[str, Any], part: RequestOutput, num_tokens: int, more: dict[str, Any]
    ) -> bytes:
        event = b'%b,"choices":[%b]' % (self._head, orjson.dumps(choice))
        if more:
            event += b"," + orjson.dumps(more)[1:-1]
        if self._include_usage:
            counts = None
            if self._continuous_usage:
                counts = usage([part], num_tokens * self._call.counts_output)
            event += b',"usage":' + orjson.dumps(counts)
        return event + b"}\n\n"


class _RunningRequest:
    """The output of one request, part by part. The metrics are updated when the request ends.

    Args:
        request_id: Id of the request.
        stream: Stream of the output from the engine; None if the request is already finished.
        prior: Output that the client already has from another replica, which is yielded first; None if there
            is none.
        checked: The request.
        call: The call to which the request belongs. Its record counts the start and the end of the request.
        waited_s: Time (seconds) that the request has waited for admission.
        metrics: Counts the request when it ends.
    """

    def __init__(
        self,
        request_id: str,
        stream: RequestStream | None,
        prior: RequestOutput | None,
        checked: CheckedRequest,
        call: GenerationCall,
        waited_s: float,
        metrics: Metrics,
    ) -> None:
        self.request_id = request_id
        self.prior = prior
        self.num_tokens = [0] * call.num_outputs  # number of generated tokens so far, per output
        self._stream = stream
        self._checked = checked
        self._waited_s = waited_s
        self._metrics = metrics
        self._record = call.record
        self._last: RequestOutput | None = None
        self._start = time.monotonic()
        call.record.begin()

    @property
    def output(self) -> RequestOutput:
        """The newest part."""
        assert self._last is not None, "the output was read before its first part arrived"
        return self._last

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finished

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.prior is not None and self._last is None:
            self.num_tokens = [len(completion.token_ids) for completion in self.prior.outputs]
            self._last = self.prior
            if self.prior.finished:
                self._record.end()
            return self.prior
        # This is the only await, so that a cancelled task cannot lose a part between taking and counting it.
        if self._stream is None or not await self._stream.wait():
            raise StopAsyncIteration
        return self._take(self._stream)

    async def write_rest(self, writer: BodyWriter, encode: Callable[[RequestOutput], bytes]) -> None:
        """Writes all further parts as they arrive. While the client does not read, parts are merged.

        Args:
            writer: Writer of the response body.
            encode: Encodes a part.

        Raises:
            ApiError: If the request has ended with an error.
            EngineDeadError: If the engine has stopped.
            EngineAsleepError: If the engine has gone to sleep.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = self._stream
        assert stream is not None, "a finished request has no stream"

        def write() -> None:
            # The loop is needed because an error of the engine may be waiting after an output.
            while stream.is_ready and not (writer.is_paused or ended.done()):
                try:
                    part = self._take(stream)
                    if event := encode(part):
                        writer.write(event)
                    if part.finished:
                        ended.set_result(None)
                # Catches everything, because an exception here would stop the event-loop callback that serves
                # all streams.
                except Exception as error:
                    ended.set_exception(error)

        stream.on_ready = writer.on_resume = write
        # The BodyWriter queues its writes until the event loop runs other callbacks. A direct call of write()
        # could complete `ended` before it is awaited. The await would then return without running the event
        # loop, and the caller would send the final event before the queued last part.
        ended.get_loop().call_soon(write)
        try:
            await ended
        finally:
            stream.on_ready = writer.on_resume = None

    def _take(self, stream: RequestStream) -> RequestOutput:
        try:
            part = stream.take()
        except NOT_RUNNING as error:
            self._count_end(self._aborted_output(str(error)))
            raise
        # A beam search may return more hypotheses than requested.
        part.outputs = part.outputs[: len(self.num_tokens)]
        for completion in part.outputs:
            self.num_tokens[completion.index] += len(completion.token_ids)
        self._last = part
        if part.finished:
            self._count_end(part)
            if (error := request_error(part)) is not None:
                raise error
        return part

    def _count_end(self, part: RequestOutput) -> None:
        # The engine's arrival time is when the engine received the request. For the client, it is when the
        # server did.
        part.metrics.arrival_time -= self._waited_s
        replica = 0 if self._stream is None else self._stream.replica
        self._metrics.observe(part, self.num_tokens, replica)
        self._record.record_result(part, self.num_tokens)
        self._record.end()

    def _aborted_output(self, reason: str) -> RequestOutput:
        """Returns a final part for the metrics, because an engine that has stopped does not deliver one."""
        checked, last = self._checked, self._last
        times = RequestMetrics(self._start) if last is None else last.metrics.copy()
        times.finished_time = time.monotonic()
        return RequestOutput(
            self.request_id,
            checked.prompt,
            checked.prompt_token_ids,
            None,
            [CompletionOutput(0, "", [], 0.0, None, "error", reason)],
            True,
            times,
            times.num_cached_tokens,
            checked.encoder_prompt,
            checked.request.encoder_token_ids or None,
        )


async def _merged(requests: Sequence[_RunningRequest]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yields (index of the request, part) for the parts of all requests, in order of arrival."""
    if len(requests) == 1:  # A single request needs no task for each part.
        async for part in requests[0]:
            yield 0, part
        return
    waiting = {_next_part(request): i for i, request in enumerate(requests)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = waiting.pop(task)
                part = task.result()
                if not part.finished:
                    waiting[_next_part(requests[i])] = i
                yield i, part
    finally:
        for task in waiting:
            task.cancel()


def _next_part(request: _RunningRequest) -> asyncio.Task[RequestOutput]:
    task = asyncio.ensure_future(anext(request))
    # If several requests fail at once, only the first error is raised. Reading the exception here prevents a
    # warning of asyncio about the others.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _exhaust(request: _RunningRequest) -> None:
    with contextlib.suppress(ApiError, *NOT_RUNNING):  # The request was aborted, or the engine has stopped.
        async for _ in request:
            pass


def _usage(call: GenerationCall, requests: Sequence[_RunningRequest]) -> dict[str, Any]:
    num_output_tokens = sum(sum(request.num_tokens) for request in requests) * call.counts_output
    return usage([request.output for request in requests], num_output_tokens)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"

"""Runs requests for a client: their output as it comes, as a whole or as server-sent events."""

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
from jax_paged.engine.new_request import prior_output
from jax_paged.engine.replicas.replicated_engine import ServingEngine
from jax_paged.outputs import CompletionOutput, RequestOutput
from jax_paged.sampling_params import SamplingParams
from jax_paged.server.generation_call import GenerationCall
from jax_paged.server.http.http_protocol import BodyWriter
from jax_paged.server.observability.access import RequestRecord
from jax_paged.server.observability.metrics import Metrics
from jax_paged.server.protocol.logprobs import prompt_logprobs
from jax_paged.server.protocol.responses import ApiError, asleep_error, request_error, usage
from jax_paged.server.waiting_queue import WaitingQueue

_DONE = b"data: [DONE]\n\n"


class RequestRunner:
    """Runs the requests of clients, and aborts those whose client has left.

    Args:
        engine: Computes the outputs.
        waiting_queue: Where requests wait until the engine takes them.
        metrics: Counts every request that ends, aborted ones included.
    """

    def __init__(self, engine: ServingEngine, waiting_queue: WaitingQueue, metrics: Metrics) -> None:
        self._engine = engine
        self._waiting_queue = waiting_queue
        self._metrics = metrics
        self._leaving: set[asyncio.Task[None]] = set()  # an event loop does not keep its tasks alive

    async def answer(self, call: GenerationCall) -> dict[str, Any]:
        """Runs all requests of a call to their end, and returns the body of the answer.

        Raises:
            ApiError: If a request fails.
        """
        n = call.num_outputs
        async with (
            self._running(call, whole=True) as requests,
            contextlib.aclosing(_merged(requests)) as parts,
        ):
            async for _ in parts:  # each request has one part, its whole output
                pass
        choices = []
        for i, request in enumerate(requests):
            output = request.output
            own = [call.choice(i * n + x.index, x, output) for x in output.outputs]
            if call.token_ids is not None:
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
        """Runs all requests of a call; yields server-sent events: a chunk per part of an output, and the end.

        The first event comes with the first part of an output: until then the response has no status yet. If
        the caller sends a writer, the rest of a call with a single request goes to the writer.

        Args:
            call: What to run.
            first: Choices that come before all others, each in a chunk of its own.
            include_usage: Whether a chunk of token counts comes last.
            continuous_usage: Whether, with include_usage, the other chunks have those of their choice so far.

        Raises:
            ApiError: If a request fails before the first event; a later failure becomes an event.
        """
        encoder = _ChunkEncoder(
            call, self.with_end_apart, include_usage=include_usage, continuous_usage=continuous_usage
        )
        journal, has_begun = call.journal, call.has_begun
        try:
            async with self._running(call) as requests, contextlib.aclosing(_merged(requests)) as parts:
                async for i, part in parts:
                    event = encoder.chunks(i, part, requests[i].num_tokens)
                    if part is requests[i].given:
                        continue  # the client has it
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
            if not has_begun or call.moves_on(error):
                raise
            end = _event(error.body())  # without _DONE: the answer is not whole
        if journal is not None:
            journal.end()
        yield end

    async def parts(self, call: GenerationCall, *, whole: bool = False) -> AsyncGenerator[RequestOutput]:
        """Runs a call of one request; yields its output part by part, or at its end as a `whole`.

        The first part of a request that another replica has begun is what the client has of it.

        Raises:
            ApiError: If the request fails.
        """
        async with self._running(call, whole=whole) as (request,):
            async for part in request:
                if call.journal is not None and part is not request.given:
                    call.journal.note(0, part)
                yield part

    @contextlib.asynccontextmanager
    async def _running(
        self, call: GenerationCall, *, whole: bool = False
    ) -> AsyncIterator[list["_RunningRequest"]]:
        """Starts the requests of a call when their turn has come; at the end, aborts those that still run.

        Args:
            call: What to run.
            whole: Whether each request gives its whole output as one part, at its end.

        Raises:
            ApiError: If too many wait, or the engine has stopped, or stops before they have ended.
        """
        running: list[_RunningRequest] = []
        num_seqs = sum(request.request.max_num_seqs for request in call.requests)
        start = time.monotonic()
        turn = call.client, call.requests[0].request.priority
        async with self._waiting_queue.admission(num_seqs, *turn, has_begun=call.has_begun):
            waited_s = time.monotonic() - start
            try:
                for i, checked in enumerate(call.requests):
                    request_id, given, stream = f"{call.head['id']}-{i}", None, None
                    if call.journal is not None:
                        checked = call.journal.begun(i, call.num_outputs, checked)
                    if checked.prior_outputs:
                        given = prior_output(checked, request_id, self._engine.engine.tokenizer)
                    if given is None or not given.finished:
                        stream = await self._engine.submit(checked, None, request_id, whole=whole)
                    facts = checked, call.num_outputs, waited_s, self._metrics, call.record
                    running.append(_RunningRequest(request_id, stream, given, *facts))
                yield running
            except EngineDeadError as error:
                raise ApiError(str(error), status=503) from error
            except EngineAsleepError as error:
                raise asleep_error(error) from error
            finally:
                for request in running:
                    if not request.is_finished:
                        self._abort(request)

    def with_end_apart(
        self, completion: CompletionOutput, params: SamplingParams
    ) -> Sequence[CompletionOutput]:
        """Returns a part of an output whose last token has no text as two parts, the second with that token.

        Clients take the tokens of a chunk's log-probabilities for the text of the chunk.

        Args:
            completion: A part of an output.
            params: Of its request.
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
        # Its last part is counted too. The caller can't wait for it: it may have been cancelled.
        task = asyncio.create_task(_exhaust(request))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)


class _ChunkEncoder:
    """Encodes the parts of a call's outputs as chunks: server-sent events with one choice each.

    Args:
        call: The call.
        with_end_apart: See RequestRunner.with_end_apart.
        include_usage: See RequestRunner.events.
        continuous_usage: See RequestRunner.events.
    """

    def __init__(
        self,
        call: GenerationCall,
        with_end_apart: Callable[[CompletionOutput, SamplingParams], Sequence[CompletionOutput]],
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._call = call
        self._with_end_apart = with_end_apart
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._head = b"data: " + orjson.dumps(call.head)[:-1]
        self._begun: set[int] = set()  # indices of choices
        self._ended: set[int] = set()

    def first_chunks(self, choices: Sequence[dict[str, Any]], part: RequestOutput) -> bytes:
        """Returns chunks of choices that come before the first part of an output."""
        ids = self._call.prompt_ids("answer", part)
        return b"".join(self._chunk(choice, part, 0, ids) for choice in choices)

    def chunks(self, i: int, part: RequestOutput, num_tokens: Sequence[int]) -> bytes:
        """Returns the chunks of a part; none for outputs that it adds nothing to.

        Args:
            i: Index of the request.
            part: The part.
            num_tokens: Tokens of each output of the request so far.
        """
        found = b""
        for completion in part.outputs:
            index = i * self._call.num_outputs + completion.index
            if index not in self._ended and (completion.token_ids or completion.finish_reason):
                found += self._of_completion(i, index, completion, part, num_tokens[completion.index])
            if completion.finish_reason:
                self._ended.add(index)
        return found

    def _of_completion(
        self, i: int, index: int, completion: CompletionOutput, part: RequestOutput, num_tokens: int
    ) -> bytes:
        call, found = self._call, b""
        for one in self._with_end_apart(completion, call.requests[i].params):
            choice = call.choice(index, one, part) | call.output_ids(one)
            if index not in self._begun:
                choice |= call.prompt_ids("choice", part)
                self._begun.add(index)
            # The end, which is apart, has one token.
            is_before_end = one.finish_reason != completion.finish_reason
            found += self._chunk(choice, part, num_tokens - is_before_end, {})
        return found

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
    """The output of one request, part by part; the metrics count it when it ends.

    Args:
        request_id: Its id.
        stream: The request's output, as the engine delivers it; None if all of it is given.
        given: What the client has of it already, which comes first; None for nothing.
        checked: The request.
        num_outputs: Outputs that the client gets.
        waited_s: Seconds that it has waited for the engine.
        metrics: Told once, when the request ends.
        record: Told so too, and that the request has begun.
    """

    def __init__(
        self,
        request_id: str,
        stream: RequestStream | None,
        given: RequestOutput | None,
        checked: CheckedRequest,
        num_outputs: int,
        waited_s: float,
        metrics: Metrics,
        record: RequestRecord,
    ) -> None:
        self.request_id = request_id
        self.given = given
        self.num_tokens = [0] * num_outputs  # generated so far, per output
        self._stream = stream
        self._checked = checked
        self._waited_s = waited_s
        self._metrics = metrics
        self._record = record
        self._last: RequestOutput | None = None
        self._start = time.monotonic()
        record.begin()

    @property
    def output(self) -> RequestOutput:
        """The newest part."""
        assert self._last is not None, "asked for before the first part"
        return self._last

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finished

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.given is not None and self._last is None:
            self.num_tokens = [len(completion.token_ids) for completion in self.given.outputs]
            self._last = self.given
            if self.given.finished:
                self._record.end()
            return self.given
        # The only await: what is taken from the stream is counted, even if nobody waits for it any more.
        if self._stream is None or not await self._stream.wait():
            raise StopAsyncIteration
        return self._take(self._stream)

    async def write_rest(self, writer: BodyWriter, written: Callable[[RequestOutput], bytes]) -> None:
        """Writes all further parts as they come; while the client does not read, they are joined.

        Args:
            writer: Of the client's answer.
            written: Makes bytes of a part.

        Raises:
            ApiError: If the request has ended with an error.
            EngineDeadError: If the engine has stopped.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = self._stream
        assert stream is not None, "it has not ended"

        def write() -> None:
            # Until nothing is left: behind an output that has waited, the engine's error may wait, too.
            while stream.is_ready and not (writer.is_paused or ended.done()):
                try:
                    part = self._take(stream)
                    if event := written(part):
                        writer.write(event)
                    if part.finished:
                        ended.set_result(None)
                except Exception as error:  # else it would end the event loop's call for all streams
                    ended.set_exception(error)

        stream.on_ready = writer.on_resume = write
        # Not at once: if `ended` did not have to be waited for, the end would overtake the last part.
        ended.get_loop().call_soon(write)
        try:
            await ended
        finally:
            stream.on_ready = writer.on_resume = None

    def _take(self, stream: RequestStream) -> RequestOutput:
        try:
            part = stream.take()
        except NOT_RUNNING as error:
            self._count_end(self._cut_off(str(error)))
            raise
        part.outputs = part.outputs[: len(self.num_tokens)]  # a beam search may find more than were asked for
        for completion in part.outputs:
            self.num_tokens[completion.index] += len(completion.token_ids)
        self._last = part
        if part.finished:
            self._count_end(part)
            if (error := request_error(part)) is not None:
                raise error
        return part

    def _count_end(self, part: RequestOutput) -> None:
        # The engine's clock begins when it gets the request, the client's when the server does.
        part.metrics.arrival_time -= self._waited_s
        replica = 0 if self._stream is None else self._stream.replica
        self._metrics.observe(part, self.num_tokens, replica)
        self._record.observe(part, self.num_tokens)
        self._record.end()

    def _cut_off(self, reason: str) -> RequestOutput:
        """Returns the last part, which an engine that has stopped does not give any more."""
        checked, last = self._checked, self._last
        times = RequestMetrics(self._start) if last is None else last.metrics.snapshot()
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
    """Yields (index of the request, part) for the parts of all requests, in the order in which they come."""
    if len(requests) == 1:  # needs no task per part
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
    # If several requests fail at once, the first error ends the answer: nobody asks for the others.
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _exhaust(request: _RunningRequest) -> None:
    with contextlib.suppress(ApiError, *NOT_RUNNING):  # it was aborted, or the engine has stopped
        async for _ in request:
            pass


def _usage(call: GenerationCall, requests: Sequence[_RunningRequest]) -> dict[str, Any]:
    num_output_tokens = sum(sum(request.num_tokens) for request in requests) * call.counts_output
    return usage([request.output for request in requests], num_output_tokens)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
